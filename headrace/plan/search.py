"""The best way to lay a recipe over a slice: meshes, what is computed again, parts of the batch, tiles of
attention. Arithmetic sorts out hundreds, and the compiler is asked about the few best."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from headrace.config import reader as config, sections
from headrace.errors import UserError
from headrace.plan import estimate as arithmetic
from headrace.hardware.slices import Slice

ASKED = 3  # candidates that the compiler is asked about
ROOM = 1.15  # times the memory that a candidate may take by arithmetic, which is not exact
SPLITS = (1, 2, 4, 8, 16, 32, 64)
TILES = (512, 2048)  # sides of tiles of attention that the compiler is asked about beside the usual ones


class NoneFits(UserError):
    """No settings make a recipe fit a slice."""


Remat = Literal["none", "dots", "offload", "attention", "full"]
# The host's memory, which slices say nothing of, is taken only by recipes that ask for it.
REMATS: tuple[Remat, ...] = ("none", "dots", "attention", "full")
Judge = Callable[[sections.Run, Path], float | None]  # seconds of a step, or None if it does not fit


def search(
    cfg: sections.Run, where: Slice, judge: Judge, folder: Path, *, exact: bool
) -> tuple[sections.Run, float]:
    """The recipe with the settings that make a step shortest, and its seconds. `judge` compiles one and keeps
    what the compiler writes down in a folder; with `exact` arithmetic has the last word, not a compiler."""
    found = sorted(candidates(cfg, where, 1.0 if exact else ROOM), key=lambda one: one[0])
    if not found:
        raise NoneFits(
            f"plan: no mesh, remat and batch.accumulate make the recipe fit {where.name}; "
            "take a larger slice, or --slice alone to see what fills it"
        )
    best: tuple[sections.Run, float] | None = None
    asked = tried_all = 0
    while found and asked < ASKED:
        _, tried = found.pop(0)
        seconds = judge(tried, folder / str(tried_all))
        tried_all += 1
        if seconds is None:  # perhaps in more parts
            found += finer(tried, where)
            found.sort(key=lambda one: one[0])
            continue
        asked += 1
        if best is None or seconds < best[1]:
            best = tried, seconds
    if best is None:
        raise NoneFits(f"plan: the compiler refused all {tried_all} settings that arithmetic let pass")
    for number, tried in enumerate([] if exact or not where.chip.is_tpu else tiled(best[0])):
        seconds = judge(tried, folder / f"tiles-{number}")
        if seconds is not None and seconds < best[1]:
            best = tried, seconds
    return best


def finer(cfg: sections.Run, where: Slice) -> list[tuple[float, sections.Run]]:
    """The same settings with the batch in the next larger number of parts, if there is one."""
    over = int(cfg.mesh.data) * int(cfg.mesh.fsdp) * int(cfg.mesh.expert)
    parts = next((parts for parts in parts_of(cfg, over) if parts > cfg.batch.accumulate), None)
    if parts is None:
        return []
    tried = dataclasses.replace(cfg, batch=dataclasses.replace(cfg.batch, accumulate=parts))
    return [(arithmetic.estimate(tried, where).step_seconds, tried)]


def candidates(cfg: sections.Run, where: Slice, room: float = ROOM) -> Iterator[tuple[float, sections.Run]]:
    """Settings that fit by arithmetic, with the seconds of a step, the fewest parts of the batch of each
    mesh and remat."""
    limit = room * where.chip.usable / where.chip.devices
    if arithmetic.state_needs(cfg, where) > limit:
        return
    remats = dict.fromkeys((*REMATS, cfg.memory.remat))
    expert = 1 if cfg.mesh.expert == "auto" else int(cfg.mesh.expert)  # the recipe's own
    for tensor, context, remat in itertools.product(SPLITS, SPLITS, remats):
        over, rest = divmod(where.devices, tensor * context * expert * where.slices)
        if rest or not over or cfg.model.heads % tensor:
            continue
        if context > 1 and cfg.data.sequence_length % (2 * 128 * context):  # two chunks on each device
            continue
        mesh = sections.Mesh(where.slices, over, tensor, context, expert)
        memory = dataclasses.replace(cfg.memory, remat=remat)
        split = dataclasses.replace(cfg, mesh=mesh, memory=memory)
        numbers = list(parts_of(cfg, over * expert * where.slices))
        if not numbers or fits(split, where, numbers[-1], limit) is None:
            continue  # where the most parts do not help, fewer need not be tried
        for parts in numbers:
            if guess := fits(split, where, parts, limit):
                yield guess
                break


def fits(cfg: sections.Run, where: Slice, parts: int, limit: float) -> tuple[float, sections.Run] | None:
    """The recipe with its batch in so many parts, and the seconds of a step; None where that is too large."""
    tried = dataclasses.replace(cfg, batch=dataclasses.replace(cfg.batch, accumulate=parts))
    guess = arithmetic.estimate(tried, where)
    return (guess.step_seconds, tried) if guess.hbm_bytes <= limit else None


def tiled(cfg: sections.Run) -> Iterator[sections.Run]:
    """The recipe with other tiles of attention, where the kernel for TPUs has to do it."""
    splash = config.part_class("attention", "splash")
    for side in TILES if cfg.attention.use in ("auto", "splash") else ():
        attention = splash(block_q=side, block_kv=side)
        context = int(cfg.mesh.context)
        chunk = cfg.data.sequence_length // (2 * context if context > 1 else 1)
        if attention != cfg.attention and chunk % side == 0:
            yield dataclasses.replace(cfg, attention=attention)


def parts_of(cfg: sections.Run, over: int) -> Iterator[int]:
    """Numbers of parts that the batch can be in, each with a whole number of rows a device."""
    each, rest = divmod(cfg.batch.sequences, over)
    for parts in range(1, each + 1):
        if rest == 0 and each % parts == 0:
            yield parts


def overrides(before: sections.Run, after: sections.Run) -> list[str]:
    """What to write on a command line to get from one recipe to the other."""
    found = []
    for section in ("mesh", "memory", "batch", "attention"):
        was, now = (config.to_dict(one)[section] for one in (before, after))
        found += [f"{section}.{key}={value}" for key, value in now.items() if was.get(key) != value]
    return found
