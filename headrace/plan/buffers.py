"""What fills the memory of a chip, from the compiler's own report: the largest buffers, what they are by the
sizes of the model that they show, and the key of the recipe that shrinks each."""

import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.config import sections
from headrace.nn.experts import even_share

BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s16": 2, "s8": 1, "u8": 1, "pred": 1}
LINE = re.compile(r"^\s*[\d.]+\w+\(\s*\d+%\);\s*[\d.]+\w+;\s*\d+;\s*\d+; (.*)$")
SHAPE = re.compile(r"(?:(\d+)×)?(\w+)\[([\d,]*)\]")


@dataclass(frozen=True)
class Buffer:
    """Some of equal size and meaning. They need not be there at the same time: buffers take turns in the same
    memory."""

    bytes: int  # each
    count: int
    shape: str  # of the largest value that lies in it
    what: str
    key: str  # of the recipe, that shrinks it; empty where none does


def largest(dump: Path, cfg: sections.Run, mesh: dict[str, int], count: int = 6) -> list[Buffer]:
    """The largest buffers of a compiled step."""
    # The first paragraph is the heap in HBM; arguments, and what lies beside the matrix units, come after it.
    heaps = [file.read_text().partition("\n\n")[0] for file in reports(dump)]
    lines = [line for heap in heaps for line in heap.splitlines()]
    found = [describe(match[1], cfg, mesh) for line in lines if (match := LINE.match(line))]
    groups = Counter((one.bytes, one.what) for one in found)
    first = {(one.bytes, one.what): one for one in reversed(found)}
    return [
        replace(first[group], count=groups[group])
        for group in sorted(groups, key=lambda one: -one[0])[:count]
    ]


def reports(dump: Path) -> list[Path]:
    return sorted(dump.glob("*memory-usage-report.txt"))


def describe(shapes: str, cfg: sections.Run, mesh: dict[str, int]) -> Buffer:
    """A buffer by the largest of the values that share it."""
    values = []
    for _, dtype, sides in SHAPE.findall(shapes):
        shape = tuple(int(side) for side in sides.split(",") if side)
        values.append((math.prod(shape) * BYTES.get(dtype, 4), dtype, shape))
    size, dtype, shape = max(values, default=(0, "", ()))
    what, key = meaning(dtype, shape, cfg, mesh)
    return Buffer(size, 1, f"{dtype}[{','.join(map(str, shape))}]", what, key)


def meaning(dtype: str, shape: tuple[int, ...], cfg: sections.Run, mesh: dict[str, int]) -> tuple[str, str]:
    """What a value of this shape is in a step, and the key that shrinks it."""
    model, tensor = cfg.model, mesh["tensor"]
    over = math.prod(mesh[axis] for axis in sections.SPLIT_ROWS)
    rows = cfg.batch.sequences // cfg.batch.accumulate // over
    length = cfg.data.sequence_length // mesh["context"]
    sides, tokens, size = set(shape), rows * length, math.prod(shape)
    head_widths = [heads * model.head_dim // tensor for heads in (model.heads, model.kv_heads)]
    of_tokens = (
        length in sides or tokens in sides or size in [tokens * n for n in (model.embed, *head_widths)]
    )
    whole = model.vocab * model.embed
    parts = {whole // n for n in (1, tensor, mesh["fsdp"], tensor * mesh["fsdp"])}
    # Layers that differ by turns are looped over by whole periods (execution.scan_in_turn).
    period = getattr(model, "global_every", 1)
    in_periods = shape[:2] in [(model.layers // period, rows), (model.layers // period, period)]
    layered = len(shape) > 2 and (shape[0] == model.layers or period > 1 and in_periods)
    if getattr(model, "experts", 0):
        pairs = tokens * model.top_k
        if {pairs, even_share(pairs), tokens * mesh["expert"]} & sides - {tokens, model.embed}:
            return "tokens on their way through experts", "batch.accumulate"
    vocab = {model.vocab, model.vocab // tensor} & sides
    if shape and shape[-1] in vocab:
        return "logits", "loss.chunk"
    hidden = {model.mlp, model.mlp // tensor} & sides
    if vocab or size in parts and not {length, tokens} & sides:
        kind = "gradient and copies of" if dtype == "f32" else "copies of"
        return f"{kind} the vocabulary's matrix", "mesh.tensor"
    if layered and length in sides:
        least = cfg.memory.remat in ("full", "offload")
        keys = "batch.accumulate or mesh.context" if least else "memory.remat"
        return "kept of all layers for the backward pass", keys
    if layered:
        return "weights or gradients of all layers", "mesh.fsdp or mesh.tensor"
    if length in sides or of_tokens and not hidden:
        if hidden:
            return "hidden units of one layer's MLP", "batch.accumulate, mesh.tensor or mesh.context"
        return "queries, keys, values and states of one layer", "batch.accumulate or mesh.context"
    if hidden or model.embed in sides:
        return "gathered weights of one layer", "mesh.tensor"
    return "other", ""
