"""`headrace plan`: memory, time and cost of a recipe on slices, before they are rented."""

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.config import reader
from headrace.config.sections import TrainRecipe
from headrace.errors import ExitCode, UserError
from headrace.hardware import chips
from headrace.hardware.slices import SliceShape, parse_slice
from headrace.plan import aot, buffers, recommend, search, show
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
    from headrace.training.evaluate import fill_model_sizes

    dataset = Dataset.open(recipe.data.path, sequence_length=recipe.data.sequence_length)
    return fill_model_sizes(recipe, dataset)


def plan_slices(
    recipe: TrainRecipe,
    names: Sequence[str],
    *,
    fast: bool = False,
    out: Path | None = None,
    prices: Path | None = None,
    save: Path | None = None,
    days: float | None = None,
) -> int:
    """Plan a recipe for each slice, print the plans, and return the exit code."""
    slice_shapes, price_table = [parse_slice(name) for name in names], chips.load_prices(prices)
    for slice_shape in slice_shapes:
        estimate_step(recipe, slice_shape)  # reports mistakes before the first slice is compiled
    outcomes = []
    for slice_shape in slice_shapes:
        price = price_table[slice_shape.chip.name]
        outcomes.append(plan_slice(recipe, slice_shape, price, fast=fast, save=save))
        show.print_outcome(outcomes[-1], recipe, days, own_prices=prices is not None)
    if out is not None:
        write_json(outcomes, out)
    return ExitCode.DONE if all(outcome.fits for outcome in outcomes) else ExitCode.DOES_NOT_FIT


def search_settings(
    recipe: TrainRecipe,
    name: str,
    *,
    fast: bool,
    write: Path | None,
    out: Path | None,
    prices: Path | None,
    save: Path | None,
) -> int:
    """Search the fastest settings on a slice, print them, and write the recipe with them to `write`.

    Returns the exit code."""
    slice_shape = parse_slice(name)
    price = chips.load_prices(prices)[slice_shape.chip.name]
    outcomes: dict[TrainRecipe, Outcome] = {}

    def compile_candidate(candidate: TrainRecipe, folder: Path) -> float | None:
        settings = " ".join(search.list_overrides(recipe, candidate)) or "unchanged"
        try:
            outcomes[candidate] = plan_slice(candidate, slice_shape, price, fast=fast, save=folder)
            seconds = outcomes[candidate].step_seconds
            verdict = f"{seconds:.3g} s per step" if seconds else "does not fit"
        except UserError as error:
            if candidate.attention == recipe.attention:
                raise
            seconds, verdict = None, str(error)
        show.print_line(f"  {settings}: {verdict}")
        return seconds

    with tempfile.TemporaryDirectory(prefix="headrace-plan-") as scratch:
        try:
            best, _ = search.search_settings(
                recipe, slice_shape, compile_candidate, save or Path(scratch), exact=fast
            )
        except search.NothingFits as error:
            show.print_line(str(error))
            return ExitCode.DOES_NOT_FIT
    show.print_outcome(outcomes[best], best, None, own_prices=prices is not None)
    if out is not None:
        write_json([outcomes[best]], out)
    overrides = " ".join(search.list_overrides(recipe, best))
    show.print_line(f"the best settings: {overrides or 'those of the recipe'}")
    if write is not None:
        write.write_text(reader.to_yaml(best))
        show.print_line(f"{write} is the recipe with them: `headrace train {write}`")
    return ExitCode.DONE


def recommend_slices(
    recipe: TrainRecipe,
    names: Sequence[str],
    *,
    tokens: str | None,
    days: float | None,
    budget: float | None,
    prices: Path | None = None,
) -> int:
    """Print which slices to rent for a recipe; for given slices, which model and tokens they train best.

    Returns the exit code."""
    if names:
        for name in names:
            show.print_optimal(parse_slice(name), days or show.DEFAULT_DAYS)
        return ExitCode.DONE
    if tokens is not None:
        schedule = dataclasses.replace(recipe.schedule, steps=f"{tokens} tokens")
        recipe = dataclasses.replace(recipe, schedule=schedule)
    limits = "" if days is None else f" in {days:g} days"
    limits += "" if budget is None else f" for ${budget:,.0f}"
    price_table = chips.load_prices(prices)
    offers = recommend.find_offers(recipe, price_table, days=days, budget=budget)
    any_offers = offers or recommend.find_offers(recipe, price_table, days=None, budget=None)
    show.print_offers(offers, any_offers, recipe, limits)
    return ExitCode.DONE if offers else ExitCode.DOES_NOT_FIT


def write_json(outcomes: list[Outcome], path: Path) -> None:
    path.write_text(json.dumps([outcome.to_json() for outcome in outcomes], indent=2) + "\n")


def plan_slice(
    recipe: TrainRecipe, slice_shape: SliceShape, price: chips.Price, *, fast: bool, save: Path | None
) -> Outcome:
    """Plan a recipe for a slice.

    By the compiler, if there is one for the chip and the state fits; else by arithmetic."""
    chip = slice_shape.chip
    state_fits = min_state_bytes(recipe, slice_shape) * chip.devices <= chip.usable_bytes
    if fast or not state_fits or not chip.is_tpu:
        return plan_by_arithmetic(recipe, slice_shape, price)
    with tempfile.TemporaryDirectory(prefix="headrace-plan-") as scratch:
        folder = save / slice_shape.name if save else Path(scratch)
        return plan_by_compiler(recipe, slice_shape, price, folder)


def plan_by_arithmetic(recipe: TrainRecipe, slice_shape: SliceShape, price: chips.Price) -> Outcome:
    """Plan a recipe for a slice by arithmetic, within a second."""
    estimate = estimate_step(recipe, slice_shape)
    fits = estimate.hbm_bytes * slice_shape.chip.devices <= slice_shape.chip.usable_bytes
    seconds_by_part = {
        "matrix units": estimate.matrix_seconds,
        "attention": estimate.attention_seconds,
        "memory": estimate.memory_seconds,
        "between chips, not hidden": estimate.exposed_seconds,
        "to the host and back, not hidden": estimate.host_seconds,
    }
    return Outcome(
        slice_shape=slice_shape,
        fits=fits,
        **_common_fields(estimate, recipe, slice_shape),
        step_seconds=estimate.step_seconds if fits else None,
        method="arithmetic",
        seconds_by_part={part: seconds for part, seconds in seconds_by_part.items() if seconds and fits},
        price=price,
    )


def plan_by_compiler(
    recipe: TrainRecipe, slice_shape: SliceShape, price: chips.Price, folder: Path
) -> Outcome:
    """Compile the step for a slice, which takes a minute or two. The compiler's output stays in `folder`."""
    compiled = aot.compile_step(recipe, slice_shape, folder)
    return Outcome(
        slice_shape=slice_shape,
        fits=compiled.fits,
        **_common_fields(compiled, recipe, slice_shape),
        step_seconds=compiled.step_seconds,
        method="compiler",
        seconds_by_part=compiled.seconds_by_part,
        hidden_seconds=compiled.hidden_seconds,
        caveats=compiled.caveats,
        cycle_seconds=compiled.cycle_seconds,
        buffers=tuple(buffers.find_largest_buffers(folder / "dump", recipe, compiled.mesh)),
        price=price,
        compile_seconds=compiled.compile_seconds,
    )


def _common_fields(
    result: Estimate | aot.Compiled, recipe: TrainRecipe, slice_shape: SliceShape
) -> dict[str, Any]:
    """Return the fields of an outcome that both arithmetic and the compiler provide, per chip."""
    tokens, tokens_per_step = count_tokens(recipe)
    devices = slice_shape.chip.devices
    return dict(
        mesh=result.mesh,
        parameters=result.parameters,
        flops_per_token=result.flops_per_token,
        weight_bytes=result.weight_bytes * devices,
        frozen_bytes=result.frozen_bytes * devices,
        optimizer_bytes=result.optimizer_bytes * devices,
        argument_bytes=result.argument_bytes * devices,
        temp_bytes=result.temp_bytes * devices,
        hbm_bytes=result.hbm_bytes * devices,
        host_bytes=result.host_bytes * devices,
        tokens=tokens,
        tokens_per_step=tokens_per_step,
    )
