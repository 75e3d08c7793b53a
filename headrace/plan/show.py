"""Plans as lines for a terminal: memory and what fills it, speed and where the time goes, and cost.

Lines are in the markup of `rich`."""

import math
from collections.abc import Iterator

from headrace.config import sections
from headrace.config.sections import TrainRecipe
from headrace.hardware.chips import PRICES_DATE, TPUS, Chip
from headrace.hardware.slices import SliceShape
from headrace.plan.device_memory import min_state_bytes
from headrace.plan.outcome import Outcome, count_tokens
from headrace.plan.recommend import MFU, SliceOffer, find_optimal_model, find_smallest_slice
from headrace.plan.search import iter_microbatch_counts
from headrace.plan.units import (
    SECONDS_PER_DAY,
    format_costs,
    format_count,
    format_days,
    format_seconds,
    format_size,
)

SHOWN_OFFERS = 12
DEFAULT_DAYS = 30.0


def format_offers(
    offers: list[SliceOffer], any_offers: list[SliceOffer], recipe: TrainRecipe, limits: str
) -> Iterator[str]:
    """Iterate over lines about the offers within the user's limits, in rich's markup.

    If there are none, the lines are about the nearest of `any_offers`."""
    tokens, _ = count_tokens(recipe)
    yield f"{format_count(tokens)} tokens{limits}, by arithmetic; the cheapest first:"
    if not offers:
        yield "  no slice does it: allow more days or dollars, fewer tokens, or a smaller model"
        if any_offers:
            fastest = min(any_offers, key=lambda offer: offer.days)
            for name, offer in {"cheapest": any_offers[0], "fastest": fastest}.items():
                cost = f"{format_days(offer.days)}, {format_costs(offer.dollars)}"
                yield f"  the {name} is {offer.slice_shape.name}: {cost}"
    for offer in offers[:SHOWN_OFFERS]:
        time, cost = format_days(offer.days), format_costs(offer.dollars)
        yield f"  {offer.slice_shape.name:<12} {time:>12}   MFU {offer.mfu:.0%}   {cost}"
        yield f"[dim]  {'':<12} with {offer.settings or 'the settings of the recipe'}[/dim]"
    if len(offers) > SHOWN_OFFERS:
        yield f"  and {len(offers) - SHOWN_OFFERS} more"


def format_outcome(
    outcome: Outcome, recipe: TrainRecipe, days: float | None, *, own_prices: bool = False
) -> Iterator[str]:
    """Iterate over the lines of a plan. `days` are those that the user has, if given."""
    yield _title_line(outcome, recipe)
    yield from _memory_lines(outcome, recipe)
    if outcome.step_seconds is None:
        yield from (f"  {line}" for line in _misfit_lines(outcome, recipe, days or DEFAULT_DAYS))
    else:
        yield from _time_lines(outcome, recipe, outcome.step_seconds)
        yield from _cost_lines(outcome, days, own_prices=own_prices)
    yield ""


def _title_line(outcome: Outcome, recipe: TrainRecipe) -> str:
    slice_shape, chip = outcome.slice_shape, outcome.slice_shape.chip
    mesh = " x ".join(f"{axis} {size}" for axis, size in outcome.mesh.items() if size > 1) or "one device"
    chips = f"{slice_shape.chips} {chip.name} chip{'s' * (slice_shape.chips > 1)}"
    chips += ", two devices each" if chip.devices == 2 else ""
    microbatches = recipe.batch.microbatches
    rows = f"{recipe.batch.sequences // microbatches} rows of {recipe.data.sequence_length} at a time"
    rows += f", {microbatches} times per step" if microbatches > 1 else ""
    return f"[bold]{slice_shape.name}[/bold]: {chips}, {mesh}; {rows}"


def _memory_lines(outcome: Outcome, recipe: TrainRecipe) -> Iterator[str]:
    chip = outcome.slice_shape.chip
    verdict = "[green]fits[/green]" if outcome.fits else "[red]does not fit[/red]"
    about = "" if outcome.method == "compiler" else "about "
    used = f"{about}{format_size(outcome.hbm_bytes)} of {format_size(chip.usable_bytes)} per chip"
    yield f"  {verdict}: {used}, by {_method_note(outcome)}"

    def item(size: float, text: str) -> str:
        return f"    {format_size(size):>10}  {text}"

    yield item(outcome.weight_bytes, f"weights, {format_count(outcome.parameters)} parameters in float32")
    yield item(outcome.optimizer_bytes, f"optimizer ({recipe.optimizer.use})")
    temporaries = outcome.hbm_bytes - outcome.argument_bytes
    has_sums = recipe.batch.microbatches > 1
    gradients = (outcome.weight_bytes - outcome.frozen_bytes) * (2 if has_sums else 1)
    gradients = min(temporaries, gradients)
    sums = ", and their sums over microbatches" if has_sums else ""
    frozen = ""
    if outcome.frozen_bytes:
        frozen = f"; {format_size(outcome.frozen_bytes)} of the weights are frozen"
    yield item(gradients, f"gradients in float32{sums}{frozen}")
    yield item(temporaries - gradients, "activations and other temporaries of a step")
    if outcome.host_bytes:
        host = f"{format_size(outcome.host_bytes * chip.chips_per_host)} for its {chip.chips_per_host} chips"
        yield item(outcome.host_bytes, f"in the host's memory, {host}")
    if outcome.buffers:
        yield "    the largest buffers of these, which share memory:"
    for buffer in outcome.buffers:
        size = (f"{buffer.count} x " if buffer.count > 1 else "") + format_size(buffer.bytes)
        key = f"; less with {buffer.key}" if buffer.key else ""
        yield f"    {size:>14}  {buffer.what}, {escape(buffer.shape)}{key}"


def _method_note(outcome: Outcome) -> str:
    if outcome.method == "arithmetic":
        return "arithmetic only"
    return f"the chip's compiler, in {outcome.compile_seconds:.0f} s of CPU time"


def _time_lines(outcome: Outcome, recipe: TrainRecipe, step_seconds: float) -> Iterator[str]:
    rate, mfu = outcome.tokens_per_second_per_chip, outcome.mfu
    assert rate is not None and mfu is not None
    chip = outcome.slice_shape.chip
    unit, scale = ("s", 1.0) if step_seconds >= 0.1 else ("ms", 1000.0)
    yield (
        f"  a step of {outcome.tokens_per_step:,} tokens: {format_seconds(step_seconds)}, "
        f"{rate * outcome.slice_shape.chips:,.0f} tokens/s, {rate:,.0f} per chip, MFU {mfu:.1%}"
    )
    for part, seconds in outcome.seconds_by_part.items():
        if seconds >= max(0.0005 * step_seconds, 0.0005 / scale):
            yield f"    {seconds * scale:>8.3f} {unit}  {part}"
    hidden = [
        f"{kind} {seconds * scale:.3f} {unit}"
        for kind, seconds in outcome.hidden_seconds.items()
        if seconds > 0.0005 / scale
    ]
    if hidden:
        yield f"    hidden behind these: {', '.join(hidden)}"
    if outcome.cycle_seconds:
        cycles = f"{outcome.cycle_seconds * scale:.3g} {unit} by the compiler's own cycles"
        yield f"    for comparison: {cycles}, without kernels and traffic"
    matmul = recipe.compute.matmul
    if matmul != "compute" and chip.matmul_flops(matmul):
        yield f"    MFU is relative to the {chip.flops / 1e12:,.0f} TFLOP/s of bf16, in {matmul} as well"
    elif matmul != "compute":
        yield f"    {_no_gain_line(chip, matmul)}"
    for caveat in outcome.caveats:
        yield f"    uncertain: {escape(caveat)}"


def _no_gain_line(chip: Chip, matmul: str) -> str:
    """Say that 8-bit matmuls gain nothing on a chip, and which setting is faster."""
    faster = next((name for name in ("fp8", "int8") if chip.matmul_flops(name)), "compute")
    return (
        f"compute.matmul: {matmul} gains nothing on {chip.name}, whose matmuls in it are no faster; "
        f"compute.matmul={faster} is faster"
    )


def _cost_lines(outcome: Outcome, days: float | None, *, own_prices: bool) -> Iterator[str]:
    assert outcome.days is not None
    if any(cost is not None for cost in outcome.dollars.values()):
        source = "your prices; others " if own_prices else "prices "
        cost = f"{format_costs(outcome.dollars)} ({source}of {PRICES_DATE})"
    else:
        cost = "price of this chip not known (--prices FILE)"
    yield f"  {format_count(outcome.tokens)} tokens: {format_days(outcome.days)}, {cost}"
    if days is not None and outcome.days > days:
        yield f"  this is {outcome.days / days:,.1f} times the available {days:g} days"


def _misfit_lines(outcome: Outcome, recipe: TrainRecipe, days: float) -> Iterator[str]:
    """Say which settings to change; if none helps, by how much memory and compute are exceeded."""
    slice_shape = outcome.slice_shape
    required = min_state_bytes(recipe, slice_shape) * slice_shape.devices
    available = slice_shape.chips * slice_shape.chip.usable_bytes
    if required <= available:
        yield _advice_line(outcome, recipe)
        return
    chips = f"{slice_shape.chips} chips have" if slice_shape.chips > 1 else "the chip has"
    yield (
        f"memory: {format_count(outcome.parameters)} parameters of {required / outcome.parameters:.0f} bytes "
        f"(weights, gradients, optimizer) take {format_size(required)}, {chips} {format_size(available)}: "
        f"{required / available:,.1f} times too much"
    )
    flops = outcome.tokens * outcome.flops_per_token
    required_days = flops / (slice_shape.chips * slice_shape.chip.flops * MFU) / SECONDS_PER_DAY
    yield (
        f"compute: {format_count(outcome.tokens)} tokens are {flops:.1e} FLOPs, {required_days:,.0f} days at "
        f"{MFU:.0%} of the peak: {required_days / days:,.1f} times {days:g} days"
    )
    smallest = [find_smallest_slice(recipe, chip) for chip in TPUS]
    names = ", ".join(found.name for found in smallest if found)
    yield f"the smallest slices that hold it: {names or 'no slice does'}"
    yield format_optimal_model(slice_shape, days)


def format_optimal_model(slice_shape: SliceShape, days: float) -> str:
    """Describe the model that a slice trains best in some days."""
    optimal = find_optimal_model(slice_shape, days)
    reason = "the best use of that compute"
    if optimal.limited_by_memory:
        reason = "the largest model that its memory holds"
    return (
        f"in {days:g} days {slice_shape.name} can train {format_count(optimal.parameters)} parameters on "
        f"{format_count(optimal.tokens)} tokens, {reason}"
    )


def _advice_line(outcome: Outcome, recipe: TrainRecipe) -> str:
    """Say what to change in a recipe that does not fit."""
    usable = outcome.slice_shape.chip.usable_bytes
    if outcome.argument_bytes > usable:
        return (
            f"weights and optimizer are {outcome.argument_bytes / usable:.1f} times the memory: use a larger "
            "slice, or split them over more of it with mesh.fsdp or mesh.tensor"
        )
    changes = []
    if recipe.compute.remat != "full":
        changes.append("compute.remat=full")
    counts = iter_microbatch_counts(recipe, math.prod(outcome.mesh[axis] for axis in sections.SPLIT_ROWS))
    more = next((count for count in counts if count > recipe.batch.microbatches), None)
    if more is not None:
        changes.append(f"batch.microbatches={more}")
    changes.append("--search, which tries meshes")
    factor = f"{outcome.hbm_bytes / usable:.2f} times the memory"
    return f"it takes {factor}: try {', then '.join(changes)}, or use a larger slice"


def escape(text: str) -> str:
    """Escape brackets, which are markup to rich."""
    return text.replace("[", r"\[")
