"""Recommendations by arithmetic: the smallest slice that holds a model, the model that a slice trains best in
some days, and the slices that train a recipe within some days and dollars."""

import math
from dataclasses import dataclass

from headrace.config.sections import TrainRecipe
from headrace.hardware.chips import TPUS, Chip, Price
from headrace.hardware.slices import SliceShape, standard_slices
from headrace.plan.estimate import estimate_step
from headrace.plan.outcome import compute_dollars, count_tokens
from headrace.plan.search import iter_candidates, list_overrides
from headrace.plan.units import SECONDS_PER_DAY, Dollars

TOKENS_PER_PARAMETER = 20  # compute-optimal, about (arXiv 2203.15556)
STATE_BYTES = 16  # per parameter: float32 weights and gradients, and two moments of Adam
MAX_STATE_SHARE = 0.7  # of the memory; the remainder is for activations
MFU = 0.45  # of large models on TPUs (MaxText's tables: 45 to 68 %)


@dataclass(frozen=True)
class OptimalModel:
    """The model that an amount of compute trains best, or the largest that fits."""

    parameters: float
    tokens: float
    limited_by_memory: bool


@dataclass(frozen=True)
class SliceOffer:
    """A recipe on a slice that holds it, with the settings it needs."""

    slice_shape: SliceShape
    step_seconds: float
    mfu: float
    days: float
    dollars: Dollars
    settings: str  # overrides for the command line


def find_optimal_model(slice_shape: SliceShape, days: float) -> OptimalModel:
    """Return the compute-optimal model for a slice and a time."""
    compute = slice_shape.chips * slice_shape.chip.flops * MFU * days * SECONDS_PER_DAY
    optimal = math.sqrt(compute / (6 * TOKENS_PER_PARAMETER))
    max_parameters = MAX_STATE_SHARE * slice_shape.chips * slice_shape.chip.usable_bytes / STATE_BYTES
    parameters = min(optimal, max_parameters)
    return OptimalModel(parameters, compute / (6 * parameters), optimal > max_parameters)


def make_offer(recipe: TrainRecipe, slice_shape: SliceShape, price: Price) -> SliceOffer | None:
    """Return the fastest settings of a recipe on a slice, and their cost. None if it does not fit."""
    candidates = iter_candidates(recipe, slice_shape, memory_factor=1.0)
    fastest = min(candidates, key=lambda candidate: candidate[0], default=None)
    if fastest is None:
        return None
    tuned = fastest[1]
    estimate = estimate_step(tuned, slice_shape)
    tokens, tokens_per_step = count_tokens(tuned)
    days = tokens / tokens_per_step * estimate.step_seconds / SECONDS_PER_DAY
    chips = slice_shape.chips
    mfu = tokens_per_step * estimate.flops_per_token / estimate.step_seconds / chips / slice_shape.chip.flops
    return SliceOffer(
        slice_shape=slice_shape,
        step_seconds=estimate.step_seconds,
        mfu=mfu,
        days=days,
        dollars=compute_dollars(price, days * 24 * chips),
        settings=" ".join(list_overrides(recipe, tuned)),
    )


def find_smallest_slice(recipe: TrainRecipe, chip: Chip) -> SliceShape | None:
    """Find the smallest standard slice of a chip that holds a recipe. None if no slice does."""
    for slice_shape in standard_slices(chip):
        if any(iter_candidates(recipe, slice_shape, memory_factor=1.0)):
            return slice_shape
    return None


def find_offers(
    recipe: TrainRecipe, prices: dict[str, Price], *, days: float | None, budget: float | None
) -> list[SliceOffer]:
    """Find slices that train a recipe within `days` and `budget` dollars, the cheapest first.

    None stands for any number. The budget must cover the lowest price on demand, or the highest spot
    price."""
    offers = []
    for chip in TPUS:
        for slice_shape in standard_slices(chip):
            offer = make_offer(recipe, slice_shape, prices[chip.name])
            if offer is None or (days is not None and offer.days > days):
                continue
            if budget is None or _is_within(offer, budget):
                offers.append(offer)
    return sorted(offers, key=lambda offer: (offer.dollars["on_demand"] or (math.inf,))[0])


def _is_within(offer: SliceOffer, budget: float) -> bool:
    on_demand, spot = offer.dollars["on_demand"], offer.dollars["spot"]
    return (on_demand is not None and on_demand[0] <= budget) or (spot is not None and spot[1] <= budget)
