"""The largest buffers in a device's memory, from the compiler's report.

Sizes in their shapes show what they hold, and so which key of the recipe shrinks them."""

import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.config import sections
from headrace.config.sections import TrainRecipe
from headrace.nn.experts import balanced_capacity
from headrace.plan.activations import has_experts

BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s16": 2, "s8": 1, "u8": 1, "pred": 1}
LINE = re.compile(r"^\s*[\d.]+\w+\(\s*\d+%\);\s*[\d.]+\w+;\s*\d+;\s*\d+; (.*)$")
SHAPE = re.compile(r"(?:(\d+)×)?(\w+)\[([\d,]*)\]")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Buffer:
    """One or more buffers of equal size and meaning. Buffers share memory: not all exist at the same time."""

    bytes: int  # of each
    count: int
    shape: str  # of the largest value stored in it
    what: str
    key: str  # recipe key that shrinks it; empty: none does


def find_largest_buffers(
    dump: Path, recipe: TrainRecipe, mesh: dict[str, int], count: int = 6
) -> list[Buffer]:
    """Find the largest buffers of a compiled step, in the folder to which XLA dumped its reports."""
    # The first paragraph is the heap in HBM. Arguments and on-chip memory follow.
    heaps = [path.read_text().partition("\n\n")[0] for path in find_memory_reports(dump)]
    lines = [line for heap in heaps for line in heap.splitlines()]
    buffers = [describe_buffer(match[1], recipe, mesh) for line in lines if (match := LINE.match(line))]
    counts = Counter((buffer.bytes, buffer.what) for buffer in buffers)
    first = {(buffer.bytes, buffer.what): buffer for buffer in reversed(buffers)}
    largest = sorted(counts, key=lambda group: -group[0])[:count]
    return [replace(first[group], count=counts[group]) for group in largest]


def find_memory_reports(dump: Path) -> list[Path]:
    return sorted(dump.glob("*memory-usage-report.txt"))


def describe_buffer(shapes: str, recipe: TrainRecipe, mesh: dict[str, int]) -> Buffer:
    """Describe a buffer by the largest of the values that share it, listed in `shapes` as in the report."""
    values = []
    for _, dtype, sides in SHAPE.findall(shapes):
        shape = tuple(int(side) for side in sides.split(",") if side)
        values.append((math.prod(shape) * BYTES.get(dtype, 4), dtype, shape))
    size, dtype, shape = max(values, default=(0, "", ()))
    what, key = classify_shape(dtype, shape, recipe, mesh)
    return Buffer(size, 1, f"{dtype}[{','.join(map(str, shape))}]", what, key)


def classify_shape(dtype: str, shape: Shape, recipe: TrainRecipe, mesh: dict[str, int]) -> tuple[str, str]:
    """Return what a value of this shape is in a step, and the recipe key that shrinks it (or "")."""
    model, tensor = recipe.model, mesh["tensor"]
    rows = recipe.batch.sequences // recipe.batch.microbatches
    rows //= math.prod(mesh[axis] for axis in sections.SPLIT_ROWS)
    length = recipe.data.sequence_length // mesh["context"]
    sides, tokens = set(shape), rows * length
    if has_experts(model):
        pairs = tokens * model.top_k
        if {pairs, balanced_capacity(pairs), tokens * mesh["expert"]} & sides - {tokens, model.embed}:
            return "tokens on their way through experts", "batch.microbatches"
    vocab = {model.vocab, model.vocab // tensor} & sides
    if shape and shape[-1] in vocab:
        return "logits", "loss.chunk_size"
    if vocab or (_is_vocab_matrix(shape, recipe, mesh) and not {length, tokens} & sides):
        kind = "gradient and copies of" if dtype == "f32" else "copies of"
        return f"{kind} the vocabulary's matrix", "mesh.tensor"
    if _has_layer_axis(shape, recipe, rows):
        if length not in sides:
            return "weights or gradients of all layers", "mesh.fsdp or mesh.tensor"
        saves_least = recipe.compute.remat in ("full", "offload")
        key = "batch.microbatches or mesh.context" if saves_least else "compute.remat"
        return "saved by all layers for the backward pass", key
    hidden = {model.mlp, model.mlp // tensor} & sides
    widths = (model.embed, *(n * model.head_dim // tensor for n in (model.heads, model.kv_heads)))
    is_per_token = tokens in sides or math.prod(shape) in [tokens * width for width in widths]
    if length in sides and hidden:
        return "hidden units of one layer's MLP", "batch.microbatches, mesh.tensor or mesh.context"
    if length in sides or (is_per_token and not hidden):
        return "queries, keys, values and states of one layer", "batch.microbatches or mesh.context"
    if hidden or model.embed in sides:
        return "gathered weights of one layer", "mesh.tensor"
    return "other", ""


def _is_vocab_matrix(shape: Shape, recipe: TrainRecipe, mesh: dict[str, int]) -> bool:
    """Whether a shape has as many elements as the matrix of the vocabulary, or a device's shard of it."""
    full, tensor, fsdp = recipe.model.vocab * recipe.model.embed, mesh["tensor"], mesh["fsdp"]
    return math.prod(shape) in {full // shards for shards in (1, tensor, fsdp, tensor * fsdp)}


def _has_layer_axis(shape: Shape, recipe: TrainRecipe, rows: int) -> bool:
    """Whether a value stacks all layers. Layers of alternating kinds are stacked by periods (nn/stack.py)."""
    model = recipe.model
    period = model.global_every if hasattr(model, "global_every") else 1
    periods = model.layers // period
    by_period = period > 1 and shape[:2] in [(periods, rows), (periods, period)]
    return len(shape) > 2 and (shape[0] == model.layers or by_period)
