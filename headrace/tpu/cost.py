"""The price of a slice, and the hours that a job may use. Prices come from hardware/chips.py or from the
user."""

import math
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import UserError
from headrace.hardware import chips
from headrace.tpu.request import Request

DEFAULT_HOURS = 24.0  # of a job without a limit
MIN_HOURS = 1 / 60  # fewer are not worth a new slice; for small budgets a fifth of the budget


@dataclass(frozen=True)
class Budget:
    """Hours of slice time over all attempts of a job, and what an hour costs if that is known."""

    hours: float
    dollars_per_hour: float | None
    set_by_user: bool = True  # and not the default

    @property
    def dollars(self) -> float | None:
        """Price of all hours; None if it is not known."""
        return None if self.dollars_per_hour is None else self.dollars_per_hour * self.hours


def find_dollars_per_hour(request: Request, price_file: Path | None = None) -> float | None:
    """Price of the requested slice, the upper end if the price is a range; None if there is no price."""
    price = chips.load_prices(price_file)[request.slice.chip.name]
    price_range = price.spot if request.terms == "spot" else price.on_demand
    return None if price_range is None else price_range[1] * request.slice.chips


def make_budget(
    request: Request, max_hours: float | None, max_cost: float | None, price_file: Path | None
) -> Budget:
    """The budget from --max-hours and --max-cost; the smaller one counts. Raises UserError for a limit in
    dollars where the price is not known."""
    check_positive("--max-hours", max_hours)
    check_positive("--max-cost", max_cost)
    dollars = find_dollars_per_hour(request, price_file)
    if max_cost is None:
        return Budget(max_hours or DEFAULT_HOURS, dollars, set_by_user=max_hours is not None)
    if dollars is None:
        raise UserError(
            f"--max-cost: no price of {request.terms} {request.slice.chip.name} is known; give one with "
            "--prices"
        )
    for zone in request.zones:
        check_zone_price(request, zone, price_file)
    hours = max_cost / dollars if dollars else math.inf
    return Budget(min(hours, max_hours or (DEFAULT_HOURS if hours == math.inf else math.inf)), dollars)


def check_zone_price(request: Request, zone: str, price_file: Path | None) -> None:
    """Raise UserError if an hour in this zone may cost more than the known price, so that a limit in dollars
    would not hold."""
    chip, terms = price_key(request)
    if is_outside_us(zone) and not has_user_price(request, price_file):
        raise UserError(
            f"--max-cost: the known prices are those of the US, and {zone} may cost more; give its price "
            f"with --prices (a file with `{chip}: {{{terms}: DOLLARS}}` per chip and hour), or use "
            "--max-hours"
        )


def price_key(request: Request) -> tuple[str, str]:
    """The keys of its price in a file of prices: chip and terms."""
    return request.slice.chip.name, "spot" if request.terms == "spot" else "on_demand"


def has_user_price(request: Request, price_file: Path | None) -> bool:
    """Whether the user's file has a price for this chip on these terms."""
    return price_key(request) in chips.list_own_prices(price_file)


def is_outside_us(zone: str) -> bool:
    """Whether a zone is outside the US, for which the known prices are valid."""
    return zone != "local" and not zone.startswith("us-")


def check_positive(option: str, value: float | None) -> None:
    """Raise UserError if the value of an option is given and is not a finite number above 0."""
    if value is not None and not 0 < value < math.inf:
        raise UserError(f"{option}: found {value:g}, expected a number above 0")


def format_cost(request: Request, budget: Budget, *, is_user_price: bool) -> str:
    """One line for the user before anything is rented: hardware, price and limits."""
    count = f"{request.slice.chips} chips, {request.slice.hosts} worker{'s' * (request.slice.hosts > 1)}"
    hardware = f"{request.slice.name} {request.terms} ({count})"
    if budget.dollars_per_hour is None:
        limit = format_hours(budget.hours)
        return f"{hardware}: no known price; deleted after {limit} at the latest (--max-hours)"
    source = "your prices" if is_user_price else f"prices of {chips.PRICES_DATE}, the highest in the US"
    if not is_user_price and any(map(is_outside_us, request.zones)):
        source += ", not in every requested zone"
    limits = f"at most {format_hours(budget.hours)} and ${budget.dollars:,.2f}"
    price = f"${budget.dollars_per_hour:,.2f} per hour by {source}"
    return f"{hardware}: {price}; {limits} (--max-hours, --max-cost)"


def format_hours(hours: float) -> str:
    """A duration such as `45 min` or `2.5 h`."""
    return f"{hours * 60:.0f} min" if hours < 1 else f"{hours:.4g} h"
