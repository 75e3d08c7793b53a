"""Wishes answered by arithmetic: the smallest slice that holds a model, what a slice can train in some days,
and which slice to rent for so many tokens, days and dollars."""

import math
from dataclasses import dataclass

from headrace.config import sections
from headrace.plan import estimate as arithmetic, outcome, search
from headrace.hardware.chips import TPUS, Chip, Price, Range
from headrace.hardware.slices import Slice, sizes

TOKENS_PER_PARAMETER = 20  # compute-optimal, about (arXiv 2203.15556)
STATE = 16  # bytes a parameter: float32 weights and gradients, and two moments of Adam
FULL = 0.7  # share of the memory that state may take, for something must be left to compute with
MFU = 0.45  # what large models reach on TPUs (MaxText's tables: 45 to 68 %)


@dataclass(frozen=True)
class Optimal:
    """The model that a budget of compute trains best, and what bounds it."""

    parameters: float
    tokens: float
    by_memory: bool


@dataclass(frozen=True)
class Offer:
    """A recipe on a slice it fits, by arithmetic."""

    where: Slice
    step_seconds: float
    mfu: float
    days: float
    dollars: dict[str, Range | None]
    settings: str  # that it takes, as overrides


def optimal(where: Slice, days: float) -> Optimal:
    """The compute-optimal model for a slice and a time."""
    compute = where.chips * where.chip.flops * MFU * days * outcome.DAY
    best = math.sqrt(compute / (6 * TOKENS_PER_PARAMETER))
    room = FULL * where.chips * where.chip.usable / STATE
    return Optimal(min(best, room), compute / (6 * min(best, room)), best > room)


def offer(cfg: sections.Run, where: Slice, price: Price) -> Offer | None:
    found = min(search.candidates(cfg, where, room=1.0), key=lambda one: one[0], default=None)
    if found is None:
        return None
    tried = found[1]
    guess = arithmetic.estimate(tried, where)
    tokens, each = outcome.tokens_of(tried)
    days = tokens / each * guess.step_seconds / outcome.DAY
    hours = days * 24 * where.chips
    cost = lambda ends: None if ends is None else (ends[0] * hours, ends[1] * hours)
    mfu = each * guess.flops_per_token / guess.step_seconds / where.chips / where.chip.flops
    dollars = {"on_demand": cost(price.on_demand), "spot": cost(price.spot)}
    settings = " ".join(search.overrides(cfg, tried))
    return Offer(where, guess.step_seconds, mfu, days, dollars, settings)


def smallest(cfg: sections.Run, chip: Chip) -> Slice | None:
    """The smallest slice of a generation that holds a recipe, if any does."""
    return next((where for where in sizes(chip) if any(search.candidates(cfg, where, room=1.0))), None)


def offers(
    cfg: sections.Run, prices: dict[str, Price], *, days: float | None, budget: float | None
) -> list[Offer]:
    """Slices that train a recipe in time and for the money, the cheapest first."""
    found = []
    for chip in TPUS:
        for where in sizes(chip):
            one = offer(cfg, where, prices[chip.name])
            if one is None or days is not None and one.days > days:
                continue
            cost = one.dollars["on_demand"]
            if budget is not None and (cost is None or cost[0] > budget):
                spot = one.dollars["spot"]
                if spot is None or spot[1] > budget:
                    continue
            found.append(one)
    return sorted(found, key=lambda one: (one.dollars["on_demand"] or (math.inf,))[0])
