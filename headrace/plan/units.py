"""Numbers of plans with their units, as people read them."""

from headrace.hardware.chips import Range

SECONDS_PER_DAY = 24 * 3600.0
Dollars = dict[str, Range | None]  # of the whole recipe, by terms: on_demand, spot; None: not known


def format_costs(dollars: Dollars) -> str:
    """Format dollars such as `$426 on demand or $43 to 281 spot`."""
    terms = ("on demand", dollars["on_demand"]), ("spot", dollars["spot"])
    return " or ".join(f"{format_dollars(cost)} {name}" for name, cost in terms if cost) or "price not known"


def format_dollars(cost: Range) -> str:
    """Format a range of dollars: in tens from $1,000, in cents below $10."""
    if cost[1] < 0.005:
        return "under $0.01"
    if cost[1] < 10:
        low, high = (f"{end:,.2f}" for end in cost)
    else:
        low, high = (f"{round(end, -1 if end >= 1000 else 0):,.0f}" for end in cost)
    return f"${low}" if low == high else f"${low} to {high}"


def format_days(days: float) -> str:
    """Format a duration in days, hours, minutes or seconds."""
    for limit, per_day, unit in ((1.5, 1, "days"), (1 / 24, 24, "hours"), (1 / 1440, 1440, "minutes")):
        if days >= limit:
            return f"{days * per_day:.1f} {unit}"
    return f"{days * SECONDS_PER_DAY:.1f} seconds"


def format_seconds(seconds: float) -> str:
    """Format the time of a step in seconds, or in milliseconds below 0.1 s."""
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1000:.3g} ms"


def format_size(size: float) -> str:
    """Format bytes in GiB; in MiB or KiB below a tenth of the larger unit."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 0.1 * 2**power:
            return f"{size / 2**power:,.2f} {unit}"
    return f"{size:.0f} B"


def format_count(number: float) -> str:
    """Format a number of tokens or parameters with three digits: 8.03B, 149M."""
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= limit:
            return f"{number / limit:.3g}{letter}"
    return f"{number:,.0f}"
