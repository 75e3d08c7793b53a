"""Search for the fastest settings of a recipe on a slice: mesh, remat, microbatches, and tiles of attention.

Arithmetic ranks hundreds of candidates, and the compiler times the few best."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from headrace.config import reader, sections
from headrace.config.sections import TrainRecipe
from headrace.errors import UserError
from headrace.hardware.slices import SliceShape
from headrace.plan.device_memory import min_state_bytes
from headrace.plan.estimate import estimate_step

COMPILED_CANDIDATES = 3
MEMORY_FACTOR = 1.15  # candidates to compile may exceed the memory by this factor: arithmetic is not exact
SPLITS = (1, 2, 4, 8, 16, 32, 64)
TILES = (512, 2048)  # sides of attention tiles to compile, besides the default

Remat = Literal["none", "dots", "offload", "attention", "full"]
# Without offload: it needs memory of the host, whose size is not known. Recipes may ask for it.
REMATS: tuple[Remat, ...] = ("none", "dots", "attention", "full")
Candidate = tuple[float, TrainRecipe]  # seconds of a step, and the settings
# Compiles a recipe, with the compiler's output in a folder; returns seconds of a step, or None if it does not
# fit.
CompileCandidate = Callable[[TrainRecipe, Path], float | None]


class NothingFits(UserError):
    """No settings make a recipe fit a slice."""


def search_settings(
    recipe: TrainRecipe,
    slice_shape: SliceShape,
    compile_candidate: CompileCandidate,
    folder: Path,
    *,
    exact: bool,
) -> tuple[TrainRecipe, float]:
    """Return the recipe with the settings that make a step fastest, and its seconds.

    With `exact` arithmetic is taken as final: candidates must fit by it, and no tiles are tried. Raises
    NothingFits."""
    candidates = sorted(
        iter_candidates(recipe, slice_shape, 1.0 if exact else MEMORY_FACTOR), key=lambda item: item[0]
    )
    if not candidates:
        raise NothingFits(
            f"plan: no mesh, remat and batch.microbatches make the recipe fit {slice_shape.name}; "
            "use a larger slice, or run with --slice alone to see what fills the memory"
        )
    best: tuple[TrainRecipe, float] | None = None
    fitting = compiled = 0
    while candidates and fitting < COMPILED_CANDIDATES:
        _, settings = candidates.pop(0)
        seconds = compile_candidate(settings, folder / str(compiled))
        compiled += 1
        if seconds is None:  # more microbatches may fit
            candidates += raise_microbatches(settings, slice_shape)
            candidates.sort(key=lambda item: item[0])
            continue
        fitting += 1
        if best is None or seconds < best[1]:
            best = settings, seconds
    if best is None:
        raise NothingFits(
            f"plan: none of the {compiled} settings that fit by arithmetic do so by the compiler"
        )
    for number, settings in enumerate(
        [] if exact or not slice_shape.chip.is_tpu else iter_tile_sizes(best[0])
    ):
        seconds = compile_candidate(settings, folder / f"tiles-{number}")
        if seconds is not None and seconds < best[1]:
            best = settings, seconds
    return best


def raise_microbatches(recipe: TrainRecipe, slice_shape: SliceShape) -> list[Candidate]:
    """Return the recipe with the next larger number of microbatches, as a list; empty if there is none."""
    shards = int(recipe.mesh.data) * int(recipe.mesh.fsdp) * int(recipe.mesh.expert)
    for count in iter_microbatch_counts(recipe, shards):
        if count > recipe.batch.microbatches:
            settings = _with_microbatches(recipe, count)
            return [(estimate_step(settings, slice_shape).step_seconds, settings)]
    return []


def iter_candidates(
    recipe: TrainRecipe, slice_shape: SliceShape, memory_factor: float = MEMORY_FACTOR
) -> Iterator[Candidate]:
    """Iterate over settings that fit by arithmetic, with the fewest microbatches for each mesh and remat.

    They may use `memory_factor` times the memory of a device."""
    limit = memory_factor * slice_shape.chip.usable_bytes / slice_shape.chip.devices
    if min_state_bytes(recipe, slice_shape) > limit:
        return
    for split in _iter_meshes(recipe, slice_shape):
        mesh = split.mesh
        counts = list(iter_microbatch_counts(recipe, int(mesh.data) * int(mesh.fsdp) * int(mesh.expert)))
        if not counts or fit_microbatches(split, slice_shape, counts[-1], limit) is None:
            continue  # if the most microbatches do not fit, fewer do not either
        for count in counts:
            if candidate := fit_microbatches(split, slice_shape, count, limit):
                yield candidate
                break


def _iter_meshes(recipe: TrainRecipe, slice_shape: SliceShape) -> Iterator[TrainRecipe]:
    """Iterate over the recipe with every valid mesh and remat.

    The number of expert shards stays that of the recipe."""
    expert = 1 if recipe.mesh.expert == "auto" else int(recipe.mesh.expert)
    remats = dict.fromkeys((*REMATS, recipe.compute.remat))
    for tensor, context, remat in itertools.product(SPLITS, SPLITS, remats):
        fsdp, remainder = divmod(slice_shape.devices, tensor * context * expert * slice_shape.slices)
        if remainder or not fsdp or recipe.model.heads % tensor:
            continue
        if context > 1 and recipe.data.sequence_length % (2 * 128 * context):  # two chunks per device
            continue
        mesh = sections.MeshKeys(slice_shape.slices, fsdp, tensor, context, expert)
        compute = dataclasses.replace(recipe.compute, remat=remat)
        yield dataclasses.replace(recipe, mesh=mesh, compute=compute)


def fit_microbatches(
    recipe: TrainRecipe, slice_shape: SliceShape, count: int, limit: float
) -> Candidate | None:
    """Return the recipe with `count` microbatches; None if a device needs more than `limit` bytes."""
    settings = _with_microbatches(recipe, count)
    estimate = estimate_step(settings, slice_shape)
    return (estimate.step_seconds, settings) if estimate.hbm_bytes <= limit else None


def _with_microbatches(recipe: TrainRecipe, count: int) -> TrainRecipe:
    return dataclasses.replace(recipe, batch=dataclasses.replace(recipe.batch, microbatches=count))


def iter_tile_sizes(recipe: TrainRecipe) -> Iterator[TrainRecipe]:
    """Iterate over the recipe with other tiles of attention, if it uses the splash kernel of TPUs."""
    splash = reader.part_class("attention", "splash")
    for side in TILES if recipe.attention.use in ("auto", "splash") else ():
        attention = splash(block_q=side, block_kv=side)
        context = int(recipe.mesh.context)
        chunk = recipe.data.sequence_length // (2 * context if context > 1 else 1)
        if attention != recipe.attention and chunk % side == 0:
            yield dataclasses.replace(recipe, attention=attention)


def iter_microbatch_counts(recipe: TrainRecipe, shards: int) -> Iterator[int]:
    """Iterate over the numbers of microbatches that give each of `shards` devices a whole number of rows."""
    rows, remainder = divmod(recipe.batch.sequences, shards)
    for count in range(1, rows + 1):
        if remainder == 0 and rows % count == 0:
            yield count


def list_overrides(before: TrainRecipe, after: TrainRecipe) -> list[str]:
    """List the key=value arguments that turn one recipe into the other."""
    overrides = []
    for section in ("mesh", "compute", "batch", "attention"):
        old, new = (reader.to_dict(recipe)[section] for recipe in (before, after))
        overrides += [f"{section}.{key}={value}" for key, value in new.items() if old.get(key) != value]
    return overrides
