"""The plan of a recipe for a slice: by the chip's compiler where there is one, else by arithmetic."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Literal

from headrace.config.sections import TrainRecipe
from headrace.errors import UserError
from headrace.hardware.chips import Price, load_prices
from headrace.hardware.slices import SliceShape, parse_slice
from headrace.plan import aot, buffers
from headrace.plan.device_memory import min_state_bytes
from headrace.plan.estimate import Estimate, estimate_step
from headrace.plan.outcome import Outcome, count_tokens


def fill_data_sizes(recipe: TrainRecipe) -> TrainRecipe:
    """Return the recipe with the vocabulary and labels of its data, if it does not set them.

    Raises UserError if they are needed and the data is missing."""
    if not hasattr(recipe.model, "heads") or recipe.model.heads is None:
        raise UserError(
            f"model.use: found {recipe.model.use}, but plan needs a family whose sizes are in the recipe"
        )
    missing = "model.vocab: expected the size of the vocabulary"
    if recipe.model.vocab:
        if recipe.model.labels or recipe.objective.use != "classify":
            return recipe
        missing = "classifier.labels: expected the number of labels"
    if not (Path(recipe.data.path) / "index.json").is_file():
        raise UserError(f"{missing}, since there is no data in {recipe.data.path}")
    # Imported here, since most recipes have the size and should not wait for it.
    from headrace.data.dataset import Dataset
    from headrace.training.batch import fill_model_sizes

    dataset = Dataset.open(recipe.data.path, sequence_length=recipe.data.sequence_length)
    return fill_model_sizes(recipe, dataset)


def plan_recipe(
    recipe: TrainRecipe,
    slice_name: str,
    *,
    fast: bool = False,
    prices: str | Path | None = None,
    save_dir: str | Path | None = None,
) -> Outcome:
    """Plan a recipe for the slice of this name, with its price in the catalog or in the YAML file `prices`.

    Raises UserError if there is no such slice, or the batch does not suit it."""
    slice_shape = parse_slice(slice_name)
    price = load_prices(Path(prices) if prices else None)[slice_shape.chip.name]
    folder = Path(save_dir) if save_dir else None
    return plan_slice(fill_data_sizes(recipe), slice_shape, price, fast=fast, save_dir=folder)


def plan_slice(
    recipe: TrainRecipe,
    slice_shape: SliceShape,
    price: Price,
    *,
    fast: bool = False,
    save_dir: Path | None = None,
) -> Outcome:
    """Plan a recipe for a slice.

    By the compiler, if there is one for the chip and the state fits; with `fast`, or else, by arithmetic. The
    compiler's output, with the program that `train` can load, stays in a folder of `save_dir`."""
    chip = slice_shape.chip
    state_fits = min_state_bytes(recipe, slice_shape) * chip.devices <= chip.usable_bytes
    if fast or not state_fits or not chip.is_tpu:
        return plan_by_arithmetic(recipe, slice_shape, price)
    with tempfile.TemporaryDirectory(prefix="headrace-plan-") as scratch:
        folder = save_dir / slice_shape.name if save_dir else Path(scratch)
        return plan_by_compiler(recipe, slice_shape, price, folder)


def plan_by_arithmetic(recipe: TrainRecipe, slice_shape: SliceShape, price: Price) -> Outcome:
    """Plan a recipe for a slice by arithmetic, within a second."""
    estimate = estimate_step(recipe, slice_shape)
    fits = estimate.hbm_bytes * slice_shape.chip.devices <= slice_shape.chip.usable_bytes
    outcome = make_outcome(estimate, recipe, slice_shape, price, fits=fits, method="arithmetic")
    if not fits:
        return outcome
    seconds_by_part = {
        "matrix units": estimate.matrix_seconds,
        "attention": estimate.attention_seconds,
        "memory": estimate.memory_seconds,
        "between chips, not hidden": estimate.exposed_seconds,
        "to the host and back, not hidden": estimate.host_seconds,
    }
    return dataclasses.replace(
        outcome,
        step_seconds=estimate.step_seconds,
        seconds_by_part={part: seconds for part, seconds in seconds_by_part.items() if seconds},
    )


def plan_by_compiler(recipe: TrainRecipe, slice_shape: SliceShape, price: Price, folder: Path) -> Outcome:
    """Compile the step for a slice, which takes a minute or two. The compiler's output stays in `folder`."""
    compiled = aot.compile_step(recipe, slice_shape, folder)
    outcome = make_outcome(compiled, recipe, slice_shape, price, fits=compiled.fits, method="compiler")
    return dataclasses.replace(
        outcome,
        step_seconds=compiled.step_seconds,
        seconds_by_part=compiled.seconds_by_part,
        hidden_seconds=compiled.hidden_seconds,
        caveats=compiled.caveats,
        cycle_seconds=compiled.cycle_seconds,
        buffers=tuple(buffers.find_largest_buffers(folder / "dump", recipe, compiled.mesh)),
        compile_seconds=compiled.compile_seconds,
    )


def make_outcome(
    result: Estimate | aot.Compiled,
    recipe: TrainRecipe,
    slice_shape: SliceShape,
    price: Price,
    *,
    fits: bool,
    method: Literal["compiler", "arithmetic"],
) -> Outcome:
    """Make an outcome without times. Bytes of `result` are per device, those of the outcome per chip."""
    tokens, tokens_per_step = count_tokens(recipe)
    devices = slice_shape.chip.devices
    return Outcome(
        slice_shape=slice_shape,
        fits=fits,
        mesh=result.mesh,
        parameters=result.parameters,
        tokens=tokens,
        tokens_per_step=tokens_per_step,
        flops_per_token=result.flops_per_token,
        weight_bytes=result.weight_bytes * devices,
        frozen_bytes=result.frozen_bytes * devices,
        optimizer_bytes=result.optimizer_bytes * devices,
        argument_bytes=result.argument_bytes * devices,
        temp_bytes=result.temp_bytes * devices,
        hbm_bytes=result.hbm_bytes * devices,
        host_bytes=result.host_bytes * devices,
        step_seconds=None,
        method=method,
        price=price,
    )
