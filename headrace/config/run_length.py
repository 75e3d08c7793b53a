"""Length of a training run, in whole steps and in tokens."""

import dataclasses
import math
import typing

from headrace.config.durations import Ramp, duration
from headrace.config.reader import RecipeReader
from headrace.config.sections import TrainRecipe
from headrace.errors import UserError


def ramp(recipe: TrainRecipe, reader: RecipeReader | None = None) -> Ramp:
    """Make the ramp of `batch.microbatches`; without one in the recipe, every step uses all of them."""
    batch = recipe.batch
    if not batch.ramp_from:
        return Ramp(batch.microbatches, batch.microbatches)
    rows = batch.sequences // batch.microbatches
    first, last = batch.ramp_from // rows, batch.microbatches
    sizes = sum(range(first, last)) if isinstance(batch.ramp, str) else last - first
    try:
        each = duration(batch.ramp, sizes * rows * recipe.data.sequence_length)
    except ValueError as error:
        if reader is None:
            raise UserError(f"batch.ramp: {error}") from None
        reader.error("batch.ramp", "expected a whole number of steps or '3B tokens'")
    return Ramp(first, last, each if isinstance(batch.ramp, str) else math.ceil(each / sizes))


def tokens_until(recipe: TrainRecipe, step: int) -> int:
    """Count the tokens that are read before `step`."""
    rows = recipe.batch.sequences // recipe.batch.microbatches
    return ramp(recipe).microbatches_before(step) * rows * recipe.data.sequence_length


def durations(recipe: TrainRecipe, reader: RecipeReader | None = None) -> dict[str, int]:
    """Convert every duration of the schedule to steps: `steps`, `warmup` and those of its own file."""
    batch_ramp = ramp(recipe, reader)
    tokens = recipe.batch.sequences * recipe.data.sequence_length
    fields = [
        f.name for f in dataclasses.fields(recipe.schedule) if set(typing.get_args(f.type)) == {int, str}
    ]
    lengths: dict[str, int] = {}
    for name in sorted(fields, key=lambda name: name != "steps"):
        try:
            value, total = getattr(recipe.schedule, name), lengths.get("steps")
            # A decay is at the end, where the batch has its full size.
            lengths[name] = duration(value, tokens, total, None if name == "decay" else batch_ramp)
        except ValueError as error:
            if reader is None:
                raise UserError(f"schedule.{name}: {error}") from None
            units = "steps or '3B tokens'" if name == "steps" else "steps, '3B tokens' or '20 %'"
            reader.error(f"schedule.{name}", f"expected a whole number of {units}")
    return lengths
