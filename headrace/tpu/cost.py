"""What a slice costs, and how much of it a job may have. Prices are those of plan/chips.py, or the user's."""

import math
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import UserError
from headrace.hardware import chips
from headrace.tpu.request import Request

HOURS = 24.0  # that a job may have, unless it is told
SOON = 1 / 60  # hours that are not worth a new slice, or a fifth of them if that is less


@dataclass(frozen=True)
class Budget:
    """Hours of the slice in all, over every life of the job, and the dollars of an hour where known."""

    hours: float
    rate: float | None
    asked: bool = True  # for by the user, and not just what is usual

    @property
    def dollars(self) -> float | None:
        return None if self.rate is None else self.rate * self.hours


def rate(request: Request, prices: Path | None = None) -> float | None:
    """Dollars an hour, the higher end where a price is a range; None where there is none."""
    price = chips.prices(prices)[request.slice.chip.name]
    found = price.spot if request.terms == "spot" else price.on_demand
    return None if found is None else found[1] * request.slice.chips


def budget(request: Request, max_hours: float | None, max_cost: float | None, prices: Path | None) -> Budget:
    check("--max-hours", max_hours)
    check("--max-cost", max_cost)
    dollars = rate(request, prices)
    if max_cost is None:
        return Budget(max_hours or HOURS, dollars, asked=max_hours is not None)
    if dollars is None:
        raise UserError(
            f"--max-cost: no price is known of {request.terms} {request.slice.chip.name}; give it by --prices"
        )
    for zone in request.zones:
        check_zone(request, zone, prices)
    hours = max_cost / dollars if dollars else math.inf
    hours = min(hours, max_hours or (HOURS if hours == math.inf else math.inf))
    return Budget(hours, dollars)


def check_zone(request: Request, zone: str, prices: Path | None) -> None:
    """Refuses a limit of dollars where an hour may cost more than is known."""
    chip, terms = sold(request)
    if abroad(zone) and not own(request, prices):
        raise UserError(
            f"--max-cost: the prices known here are of the US, and {zone} may cost more; give its own by "
            f"--prices (a file with `{chip}: {{{terms}: DOLLARS}}`, of a chip and hour), or use --max-hours"
        )


def sold(request: Request) -> tuple[str, str]:
    """The chip and the terms, as a file of prices has them."""
    return request.slice.chip.name, "spot" if request.terms == "spot" else "on_demand"


def own(request: Request, prices: Path | None) -> bool:
    """Whether the user's file has the price of just that."""
    return sold(request) in chips.given(prices)


def abroad(zone: str) -> bool:
    return zone != "local" and not zone.startswith("us-")


def check(option: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise UserError(f"{option}: found {value:g}, expected a number above 0")


def spoken(request: Request, allowed: Budget, *, own_prices: bool) -> str:
    """What the user reads before anything is rented."""
    count = f"{request.slice.chips} chips, {request.slice.hosts} worker{'s' * (request.slice.hosts > 1)}"
    words = f"{request.slice.name} {request.terms} ({count})"
    if allowed.rate is None:
        return f"{words}: no price known; deleted after {hours(allowed.hours)} at the latest (--max-hours)"
    dated = "your prices" if own_prices else f"prices of {chips.PRICES_DATE}, the highest of the US"
    if not own_prices and any(map(abroad, request.zones)):
        dated += ", not of every zone asked for"
    most = f"at most {hours(allowed.hours)} and ${allowed.dollars:,.2f}"
    return f"{words}: ${allowed.rate:,.2f} an hour by {dated}; {most} (--max-hours, --max-cost)"


def hours(count: float) -> str:
    return f"{count * 60:.0f} min" if count < 1 else f"{count:.4g} h"
