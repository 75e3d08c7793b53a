"""A plan on the terminal: what a reader asks, in that order. Does it fit, what fills the memory, how fast is
it, where does the time go, what does it cost."""

import math
from collections.abc import Iterator

from rich.console import Console

from headrace.config import sections
from headrace.plan import recommend as advise, estimate as arithmetic, search
from headrace.plan import outcome as outcomes
from headrace.hardware.chips import PRICES_DATE, TPUS, Chip, Range
from headrace.plan.outcome import Outcome, tokens_of
from headrace.hardware.slices import Slice

GIB = 2**30
SHOWN = 12  # offers
MONTH = 30.0  # days, where nobody has said how many there are


def outcome(one: Outcome, cfg: sections.Run, days: float | None, *, own_prices: bool = False) -> None:
    """`days` are those that there are, if that was said."""
    console = Console(highlight=False, soft_wrap=True)
    for line in lines(one, cfg, days, own_prices=own_prices):
        console.print(line)


def say(line: str) -> None:
    Console(highlight=False, soft_wrap=True).print(line, markup=False)


def offers(found: list[advise.Offer], every: list[advise.Offer], cfg: sections.Run, wish: str) -> None:
    """`every` offer, whatever it takes, is for a wish that none fulfils."""
    console = Console(highlight=False, soft_wrap=True)
    tokens, _ = tokens_of(cfg)
    console.print(f"{count(tokens)} tokens{wish}, by arithmetic; the cheapest first:")
    if not found:
        console.print("  no slice does it: allow more days or dollars, fewer tokens, or a smaller model")
        least = {"cheapest": every[0], "fastest": min(every, key=lambda one: one.days)} if every else {}
        for what, one in least.items():
            console.print(f"  the {what} is {one.where.name}: {time(one.days)}, {costs(one.dollars)}")
    for one in found[:SHOWN]:
        told = costs(one.dollars)
        console.print(f"  {one.where.name:<12} {time(one.days):>12}   MFU {one.mfu:.0%}   {told}")
        console.print(f"  {'':<12} with {one.settings or 'the settings of the recipe'}", style="dim")
    if len(found) > SHOWN:
        console.print(f"  and {len(found) - SHOWN} more")


def optimal(where: Slice, days: float) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(best(where, days))


def lines(one: Outcome, cfg: sections.Run, days: float | None, *, own_prices: bool = False) -> Iterator[str]:
    where, chip = one.where, one.where.chip
    split = " x ".join(f"{axis} {size}" for axis, size in one.mesh.items() if size > 1) or "one device"
    chips = f"{where.chips} chip{'s' * (where.chips > 1)} of {chip.name}"
    chips += ", each two devices" if chip.devices == 2 else ""
    rows, parts = cfg.batch.sequences // cfg.batch.accumulate, cfg.batch.accumulate
    often = f", {parts} times a step" if parts > 1 else ""
    rows_at_a_time = f"{rows} rows of {cfg.data.sequence_length} at a time{often}"
    yield f"[bold]{where.name}[/bold]: {chips}, {split}; {rows_at_a_time}"
    verdict = "[green]fits[/green]" if one.fits else "[red]does not fit[/red]"
    about = "" if one.by == "compiler" else "about "
    yield f"  {verdict}: {about}{gib(one.hbm_bytes)} of {gib(chip.usable)} a chip, by {by(one)}"
    yield f"    {gib(one.weight_bytes):>10}  weights, {one.parameters / 1e9:,.2f}B parameters in float32"
    yield f"    {gib(one.optimizer_bytes):>10}  optimizer ({cfg.optimizer.use})"
    rest = one.hbm_bytes - one.argument_bytes
    summed = cfg.batch.accumulate > 1
    gradients = min(rest, (one.weight_bytes - one.frozen_bytes) * (2 if summed else 1))
    sums = ", and their sums over parts" if summed else ""
    still = f"; {gib(one.frozen_bytes)} of the weights are frozen" if one.frozen_bytes else ""
    yield f"    {gib(gradients):>10}  gradients in float32{sums}{still}"
    yield f"    {gib(rest - gradients):>10}  activations and all else a step needs"
    if one.host_bytes:
        host = f"{gib(one.host_bytes * chip.host)} for its {chip.host} chips"
        yield f"    {gib(one.host_bytes):>10}  in the host's memory, {host}"
    if one.buffers:
        yield "    the largest of these, which take turns in the same memory:"
        for buffer in one.buffers:
            each = f"{buffer.count} x " if buffer.count > 1 else ""
            less = f"; less with {buffer.key}" if buffer.key else ""
            yield f"    {each + gib(buffer.bytes):>14}  {buffer.what}, {escape(buffer.shape)}{less}"
    if one.step_seconds is None:
        yield from (f"  {line}" for line in refusal(one, cfg, days or MONTH))
        yield ""
        return
    assert one.tokens_per_second_per_chip is not None and one.mfu is not None and one.days is not None
    rate = one.tokens_per_second_per_chip
    yield (
        f"  a step of {one.tokens_per_step:,} tokens: {one.step_seconds:.3g} s, "
        f"{rate * where.chips:,.0f} tokens/s, {rate:,.0f} a chip, MFU {one.mfu:.1%}"
    )
    for what, seconds in one.parts.items():
        if seconds >= max(0.0005 * one.step_seconds, 0.0005):
            yield f"    {seconds:>8.3f} s  {what}"
    if beside := [f"{kind} {seconds:.3f} s" for kind, seconds in one.hidden.items() if seconds > 0.0005]:
        yield f"    hidden behind these: {', '.join(beside)}"
    if one.cycle_seconds:
        cycles = f"{one.cycle_seconds:.3g} s by the compiler's own cycles"
        yield f"    for comparison: {cycles}, without kernels and traffic"
    products = cfg.memory.products
    if products != "compute":
        gains = f"MFU is relative to the {chip.flops / 1e12:,.0f} TFLOP/s of bf16, in {products} as well"
        yield f"    {gains if chip.rate(products) else useless(chip, products)}"
    for doubt in one.doubts:
        yield f"    not certain: {escape(doubt)}"
    when = f"prices of {PRICES_DATE}" + (", but for yours" if own_prices else "")
    known = any(cost is not None for cost in one.dollars.values())
    told = f"{costs(one.dollars)} ({when})" if known else "prices of this chip are not known (--prices FILE)"
    yield f"  {count(one.tokens)} tokens: {time(one.days)}, {told}"
    if days is not None and one.days > days:
        yield f"  that is {one.days / days:,.1f} times the {days:g} days there are"
    yield ""


def useless(chip: Chip, products: str) -> str:
    others = [name for name in ("fp8", "int8") if chip.rate(name)] or ["compute"]
    told = f"memory.products: {products} brings nothing on {chip.name}, which does not multiply it faster"
    return f"{told}; memory.products={others[0]} is faster"


def costs(dollars: dict[str, Range | None]) -> str:
    named = ("on demand", dollars["on_demand"]), ("spot", dollars["spot"])
    return " or ".join(f"{money(cost)} {name}" for name, cost in named if cost) or "price not known"


def refusal(one: Outcome, cfg: sections.Run, days: float) -> Iterator[str]:
    """What to change where it does not fit; where nothing helps, the arithmetic of it."""
    where = one.where
    need = arithmetic.state_needs(cfg, where) * where.devices
    have = where.chips * where.chip.usable
    if need <= have:
        yield advice(one, cfg)
        return
    each, chips = need / one.parameters, f"{where.chips} chips have" if where.chips > 1 else "the chip has"
    yield (
        f"memory: {count(one.parameters)} parameters of {each:.0f} bytes (weights, gradients, optimizer) are "
        f"{gib(need)} by themselves, {chips} {gib(have)}: {need / have:,.1f} times too much"
    )
    flops = one.tokens * one.flops_per_token
    takes = flops / (where.chips * where.chip.flops * advise.MFU) / outcomes.DAY
    yield (
        f"compute: {count(one.tokens)} tokens are {flops:.1e} FLOPs, {takes:,.0f} days at "
        f"{advise.MFU:.0%} of the peak: {takes / days:,.1f} times {days:g} days"
    )
    held = [(chip, advise.smallest(cfg, chip)) for chip in TPUS]
    yield "the smallest slices that hold it: " + (", ".join(s.name for _, s in held if s) or "none there is")
    yield best(where, days)


def best(where: Slice, days: float) -> str:
    found = advise.optimal(where, days)
    why = "the largest model its memory holds" if found.by_memory else "the best for that much compute"
    return (
        f"in {days:g} days {where.name} can train {count(found.parameters)} parameters on "
        f"{count(found.tokens)} tokens, {why}"
    )


def advice(one: Outcome, cfg: sections.Run) -> str:
    """What to change where it does not fit."""
    factor = one.hbm_bytes / one.where.chip.usable
    if one.argument_bytes > one.where.chip.usable:
        alone = one.argument_bytes / one.where.chip.usable
        return (
            f"weights and optimizer alone are {alone:.1f} times what there is: take a larger slice, "
            "or split them over more of it with mesh.fsdp or mesh.tensor"
        )
    keys = []
    if cfg.memory.remat != "full":
        keys.append("memory.remat=full")
    parts = search.parts_of(cfg, math.prod(one.mesh[axis] for axis in sections.SPLIT_ROWS))
    if (more := next((count for count in parts if count > cfg.batch.accumulate), None)) is not None:
        keys.append(f"batch.accumulate={more}")
    keys.append("--search, which tries meshes")
    return f"it is {factor:.2f} times what there is: try {', then '.join(keys)}, or take a larger slice"


def by(one: Outcome) -> str:
    if one.by == "arithmetic":
        return "arithmetic alone"
    return f"the compiler of the chip, in {one.compile_seconds:.0f} s of CPU time"


def gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB"


def money(cost: Range) -> str:
    low, high = (f"{round(end, -1 if end >= 1000 else 0):,.0f}" for end in cost)
    return f"${low}" if low == high else f"${low} to {high}"


def time(days: float) -> str:
    return f"{days:.1f} days" if days >= 1.5 else f"{days * 24:.1f} hours"


def count(tokens: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if tokens >= size:
            return f"{tokens / size:.3g}{letter}"
    return f"{tokens:,.0f}"


def escape(text: str) -> str:
    return text.replace("[", r"\[")
