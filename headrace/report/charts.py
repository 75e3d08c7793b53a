"""Curves and bars as SVG. A drawing is stretched to whatever room there is, and its labels are HTML beside
it, so that they can be read on a phone and on a wide screen alike."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.html_page import count, escape

POINTS = 400  # of a curve: more are put together, by their mean, lowest and highest
SIDE = 1000  # of a drawing, in its own units
Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    name: str
    points: Sequence[tuple[float, float | None]]  # None where there is no number
    dots: bool = False


@dataclass(frozen=True)
class Mark:
    """A line from top to bottom."""

    x: float
    said: str
    kind: str  # a class of the style


@dataclass(frozen=True)
class Bin:
    x: float
    mean: float
    low: float
    high: float


STYLE = """
.chart { position: relative; height: 230px; margin: 6px 0 26px 54px }
.chart svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: hidden }
.chart svg * { vector-effect: non-scaling-stroke }
.chart .level { stroke: var(--line) } .chart .line { fill: none; stroke-width: 1.8; stroke-linejoin: round }
.chart .band { stroke: none; opacity: .22 } .chart .dot { stroke-width: 7; stroke-linecap: round }
.c0 { stroke: var(--bar); fill: var(--bar) } .c1 { stroke: var(--second); fill: var(--second) }
.chart .restart { stroke: var(--soft); stroke-dasharray: 3 3 } .chart .back { stroke: var(--bad) }
.chart span { position: absolute; color: var(--soft); font-size: 12px; line-height: 1; white-space: nowrap }
.chart .y { right: calc(100% + 8px); transform: translateY(-50%) }
.chart .x { top: calc(100% + 9px); transform: translateX(-50%) } .chart .x.first { transform: none }
.chart .x.last { transform: translateX(-100%) }
.chart .rule { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--ink); opacity: .5;
  display: none; pointer-events: none }
.chart .tip { display: none; top: 4px; padding: 5px 7px; background: var(--card); color: var(--ink);
  border: 1px solid var(--line); border-radius: 4px; pointer-events: none; z-index: 1 }
.key { font-size: 13px; color: var(--soft) } .key span { white-space: nowrap; margin-right: 8px }
.key i { display: inline-block; width: 14px; height: 3px; margin: 0 5px 3px 0; vertical-align: middle;
  background: currentColor }
.key .k0 { color: var(--bar) } .key .k1 { color: var(--second) } .key .back { color: var(--bad) }
.parts { display: flex; height: 26px; border-radius: 4px; overflow: hidden; gap: 1px; margin: 4px 0 12px }
.parts i { display: block; min-width: 2px } td .swatch { display: inline-block; width: 11px; height: 11px;
  border-radius: 2px; margin-right: 8px }
"""

# The values under the pointer: a few lines, since nothing else on the page needs a script.
SCRIPT = """
for (const chart of document.querySelectorAll('.chart')) {
  const data = JSON.parse(chart.querySelector('script').textContent)
  const rule = chart.querySelector('.rule'), tip = chart.querySelector('.tip')
  chart.addEventListener('pointermove', event => {
    const box = chart.getBoundingClientRect(), share = (event.clientX - box.left) / box.width
    if (!data.length || share < 0 || share > 1) return
    let best = data[0]
    for (const one of data) if (Math.abs(one[0] - share) < Math.abs(best[0] - share)) best = one
    rule.style.display = tip.style.display = 'block'
    rule.style.left = 100 * best[0] + '%'
    tip.textContent = best[1]
    const right = best[0] > 0.5
    tip.style.left = right ? 'auto' : `calc(${100 * best[0]}% + 8px)`
    tip.style.right = right ? `calc(${100 - 100 * best[0]}% + 8px)` : 'auto'
  })
  chart.addEventListener('pointerleave', () => { rule.style.display = tip.style.display = 'none' })
}
"""


def chart(
    curves: Sequence[Curve],
    *,
    show: Callable[[float], str],
    marks: Sequence[Mark] = (),
    from_zero: bool = False,
    until: float | None = None,
) -> str:
    """Curves over steps. `show` says a value; `until` is the last step of the axis."""
    binned = [(curve, binned_points(curve.points)) for curve in curves]
    binned = [(curve, bins) for curve, bins in binned if bins]
    if not binned:
        return "<p>Nothing yet.</p>"
    last = max([until or 0.0, *(one.x for _, bins in binned for one in bins)], default=1.0) or 1.0
    end = 1.01 * last  # room for a dot there
    bottom, top = span([bins for _, bins in binned], from_zero)
    levels = ticks(bottom, top)
    bottom, top = min(bottom, levels[0]), max(top, levels[-1])
    across = lambda x: SIDE * x / end
    up = lambda y: SIDE * (1 - (min(max(y, bottom), 2 * top - bottom) - bottom) / ((top - bottom) or 1))
    shapes = [f'<line class="level" x1="0" x2="{SIDE}" y1="{up(y):.1f}" y2="{up(y):.1f}"/>' for y in levels]
    for mark in marks:
        x = across(mark.x)
        shapes.append(f'<line class="{mark.kind}" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{SIDE}"/>')
    for number, (curve, bins) in enumerate(binned):
        shapes += drawn(curve, bins, number, across, up)
    label = '<span class="y" style="top: {:.2%}">{}</span>'
    labels = [label.format(up(y) / SIDE, escape(trimmed(show(y)))) for y in levels]
    labels += x_labels(last, end)
    said = json.dumps(told(binned, end, show)).replace("<", "\\u003c")
    return (
        f'<div class="chart"><svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(", ".join(curve.name for curve, _ in binned))}">{"".join(shapes)}</svg>'
        f'{"".join(labels)}<i class="rule"></i><span class="tip"></span>'
        f'<script type="application/json">{said}</script></div>' + key([c for c, _ in binned], marks)
    )


def binned_points(points: Sequence[tuple[float, float | None]]) -> list[Bin]:
    known = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    each = math.ceil(len(known) / POINTS)
    groups = [known[n : n + each] for n in range(0, len(known), each or 1)]
    found = []
    for group in groups:
        values = [y for _, y in group]
        found.append(Bin(group[-1][0], sum(values) / len(values), min(values), max(values)))
    return found


def drawn(
    curve: Curve,
    bins: Sequence[Bin],
    number: int,
    across: Callable[[float], float],
    up: Callable[[float], float],
) -> list[str]:
    line = " ".join(f"{across(one.x):.1f},{up(one.mean):.1f}" for one in bins)
    if curve.dots or len(bins) == 1:
        dot = '<path class="dot c{}" d="M{} h0"/>'
        return [dot.format(number, place.replace(",", " ")) for place in line.split()]
    shapes = [f'<polyline class="line c{number}" style="fill: none" points="{line}"/>']
    if any(one.high > one.low for one in bins):
        edge = [f"{across(one.x):.1f},{up(one.high):.1f}" for one in bins]
        edge += [f"{across(one.x):.1f},{up(one.low):.1f}" for one in reversed(bins)]
        shapes.insert(0, f'<polygon class="band c{number}" style="stroke: none" points="{" ".join(edge)}"/>')
    return shapes


def span(curves: Sequence[Sequence[Bin]], from_zero: bool) -> Point:
    """What is to be seen, from the lowest to the highest: of a curve that falls at first, as a loss does, its
    first twentieth may be cut off at the top."""
    lows = [one.low for bins in curves for one in bins]
    highs = [one.high for bins in curves for one in bins[len(bins) // 20 :]]
    low, high = (0.0 if from_zero else min(lows)), max(highs)
    if high <= low:
        return low - (0.0 if from_zero else abs(low) / 2), low + (abs(low) / 2 or 1.0)
    return low, high


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers that go from one end to the other."""
    rough = (high - low) / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def x_labels(last: float, end: float) -> list[str]:
    marked = [x for x in ticks(0, last) if x <= last * 1.001]
    kinds = ["first", *[""] * (len(marked) - 2), "last" if marked[-1] > 0.9 * last else ""]
    label = '<span class="x {}" style="left: {:.2%}">{}{}</span>'
    show = (lambda x: f"{x:,.0f}") if last < 1e5 else count
    unit = lambda kind: " steps" if kind == "first" else ""
    return [label.format(kind, x / end, show(x), unit(kind)) for x, kind in zip(marked, kinds, strict=False)]


def trimmed(said: str) -> str:
    """A round number without the zeros that end it: 2.5, not 2.5000."""
    return re.sub(r"\.0+(?!\d)|(\.\d*[1-9])0+(?!\d)", lambda found: found[1] or "", said)


def told(
    binned: Sequence[tuple[Curve, Sequence[Bin]]], end: float, show: Callable[[float], str]
) -> list[tuple[float, str]]:
    """Places across the drawing, and what there is to say of them under the pointer."""
    return [
        (round(one.x / end, 4), f"step {one.x:,.0f}: {curve.name} {show(one.mean)}")
        for curve, bins in binned
        for one in bins
    ]


def key(curves: Sequence[Curve], marks: Sequence[Mark]) -> str:
    if len(curves) < 2 and not marks:
        return ""
    named = {f"k{n}": curve.name for n, curve in enumerate(curves)} | {mark.kind: mark.said for mark in marks}
    parts = [f'<span><i class="{kind}"></i>{escape(said)}</span> ' for kind, said in named.items()]
    return f'<div class="key">{"".join(parts)}</div>'


def parts(shares: dict[str, float]) -> str:
    """One bar, divided; the classes of the parts are their names."""
    said = lambda name, share: escape(f"{name.replace('_', ' ')} {share:.1%}")
    one = '<i class="{}" style="flex: {:.5f}" title="{}"></i>'
    made = [one.format(name, share, said(name, share)) for name, share in shares.items()]
    return f'<div class="parts">{"".join(made)}</div>'
