"""SVG charts: curves over steps, and bars.

Each drawing stretches to the available width. Labels are HTML on top of it, so that they are readable on a
phone and on a wide screen."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.html_page import escape, format_count

MAX_BINS = 400  # of a curve: points are merged into bins, by mean, lowest and highest value
SIDE = 1000  # of a drawing, in its own units
Format = Callable[[float], str]


@dataclass(frozen=True)
class Curve:
    name: str
    points: Sequence[tuple[float, float | None]]  # step and value; None: no value
    dots: bool = False


@dataclass(frozen=True)
class Mark:
    """A vertical line at a step."""

    x: float
    label: str
    kind: str  # CSS class


@dataclass(frozen=True)
class Bin:
    """Merged points of a curve; `x` is the last step."""

    x: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class _Scale:
    """Conversion of steps and values to the units of a drawing."""

    end: float
    bottom: float
    top: float

    def x(self, step: float) -> float:
        return SIDE * step / self.end

    def y(self, value: float) -> float:
        clipped = min(max(value, self.bottom), 2 * self.top - self.bottom)
        return SIDE * (1 - (clipped - self.bottom) / ((self.top - self.bottom) or 1))


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

# Shows the values under the pointer: the only script of the page.
SCRIPT = """
for (const chart of document.querySelectorAll('.chart')) {
  const data = JSON.parse(chart.querySelector('script').textContent)
  const rule = chart.querySelector('.rule'), tip = chart.querySelector('.tip')
  chart.addEventListener('pointermove', event => {
    const box = chart.getBoundingClientRect(), share = (event.clientX - box.left) / box.width
    if (!data.length || share < 0 || share > 1) return
    let best = data[0]
    for (const point of data) if (Math.abs(point[0] - share) < Math.abs(best[0] - share)) best = point
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


def render_chart(
    curves: Sequence[Curve],
    *,
    format_value: Format,
    marks: Sequence[Mark] = (),
    from_zero: bool = False,
    until: float | None = None,
) -> str:
    """Render curves over steps as HTML. `until` is the last step of the axis, if that is not the last
    point."""
    binned = [(curve, bin_points(curve.points)) for curve in curves]
    binned = [(curve, bins) for curve, bins in binned if bins]
    if not binned:
        return "<p>Nothing yet.</p>"
    last = max([until or 0.0, *(bin_.x for _, bins in binned for bin_ in bins)], default=1.0) or 1.0
    bottom, top = value_range([bins for _, bins in binned], from_zero)
    levels = round_ticks(bottom, top)
    # A margin of 1 % leaves room for a dot at the end.
    scale = _Scale(1.01 * last, min(bottom, levels[0]), max(top, levels[-1]))
    shapes = []
    for level in levels:
        y = scale.y(level)
        shapes.append(f'<line class="level" x1="0" x2="{SIDE}" y1="{y:.1f}" y2="{y:.1f}"/>')
    for mark in marks:
        x = scale.x(mark.x)
        shapes.append(f'<line class="{mark.kind}" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{SIDE}"/>')
    for number, (curve, bins) in enumerate(binned):
        shapes += render_curve(curve, bins, number, scale)
    label = '<span class="y" style="top: {:.2%}">{}</span>'
    labels = [
        label.format(scale.y(level) / SIDE, escape(strip_zeros(format_value(level)))) for level in levels
    ]
    labels += render_x_labels(last, scale.end)
    points = json.dumps(hover_points(binned, scale.end, format_value)).replace("<", "\\u003c")
    return (
        f'<div class="chart"><svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(", ".join(curve.name for curve, _ in binned))}">{"".join(shapes)}</svg>'
        f'{"".join(labels)}<i class="rule"></i><span class="tip"></span>'
        f'<script type="application/json">{points}</script></div>'
        + render_legend([curve for curve, _ in binned], marks)
    )


def bin_points(points: Sequence[tuple[float, float | None]]) -> list[Bin]:
    """Merge points into at most MAX_BINS bins. Points without a finite value are skipped."""
    finite = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    size = math.ceil(len(finite) / MAX_BINS)
    groups = [finite[n : n + size] for n in range(0, len(finite), size or 1)]
    bins = []
    for group in groups:
        values = [y for _, y in group]
        bins.append(Bin(group[-1][0], sum(values) / len(values), min(values), max(values)))
    return bins


def render_curve(curve: Curve, bins: Sequence[Bin], number: int, scale: _Scale) -> list[str]:
    """Render a curve as SVG elements: dots, or a line with a band from the lowest to the highest values."""
    line = " ".join(f"{scale.x(bin_.x):.1f},{scale.y(bin_.mean):.1f}" for bin_ in bins)
    if curve.dots or len(bins) == 1:
        dot = '<path class="dot c{}" d="M{} h0"/>'
        return [dot.format(number, point.replace(",", " ")) for point in line.split()]
    shapes = [f'<polyline class="line c{number}" style="fill: none" points="{line}"/>']
    if any(bin_.high > bin_.low for bin_ in bins):
        edge = [f"{scale.x(bin_.x):.1f},{scale.y(bin_.high):.1f}" for bin_ in bins]
        edge += [f"{scale.x(bin_.x):.1f},{scale.y(bin_.low):.1f}" for bin_ in reversed(bins)]
        shapes.insert(0, f'<polygon class="band c{number}" style="stroke: none" points="{" ".join(edge)}"/>')
    return shapes


def value_range(curves: Sequence[Sequence[Bin]], from_zero: bool) -> tuple[float, float]:
    """Return the lowest and the highest value to show.

    The first twentieth of a curve may be cut off at the top, since losses fall steeply there."""
    lows = [bin_.low for bins in curves for bin_ in bins]
    highs = [bin_.high for bins in curves for bin_ in bins[len(bins) // 20 :]]
    low, high = (0.0 if from_zero else min(lows)), max(highs)
    if high <= low:
        return low - (0.0 if from_zero else abs(low) / 2), low + (abs(low) / 2 or 1.0)
    return low, high


def round_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` evenly spaced round numbers that cover a range."""
    rough = (high - low) / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def render_x_labels(last: float, end: float) -> list[str]:
    """Render labels for steps up to `last` on an axis that ends at `end`."""
    ticks = [x for x in round_ticks(0, last) if x <= last * 1.001]
    kinds = ["first", *[""] * (len(ticks) - 2), "last" if ticks[-1] > 0.9 * last else ""]
    labels = []
    for x, kind in zip(ticks, kinds, strict=False):
        text = f"{x:,.0f}" if last < 1e5 else format_count(x)
        unit = " steps" if kind == "first" else ""
        labels.append(f'<span class="x {kind}" style="left: {x / end:.2%}">{text}{unit}</span>')
    return labels


def strip_zeros(text: str) -> str:
    """Remove trailing zeros of decimals: 2.5000 becomes 2.5."""
    return re.sub(r"\.0+(?!\d)|(\.\d*[1-9])0+(?!\d)", lambda match: match[1] or "", text)


def hover_points(
    binned: Sequence[tuple[Curve, Sequence[Bin]]], end: float, format_value: Format
) -> list[tuple[float, str]]:
    """Return positions across the drawing, from 0 to 1, and the text to show there under the pointer."""
    return [
        (round(bin_.x / end, 4), f"step {bin_.x:,.0f}: {curve.name} {format_value(bin_.mean)}")
        for curve, bins in binned
        for bin_ in bins
    ]


def render_legend(curves: Sequence[Curve], marks: Sequence[Mark]) -> str:
    """Render names of curves and marks; empty for a single curve without marks."""
    if len(curves) < 2 and not marks:
        return ""
    labels = {f"k{n}": curve.name for n, curve in enumerate(curves)}
    labels |= {mark.kind: mark.label for mark in marks}
    items = [f'<span><i class="{kind}"></i>{escape(label)}</span> ' for kind, label in labels.items()]
    return f'<div class="key">{"".join(items)}</div>'


def render_shares(shares: dict[str, float]) -> str:
    """Render one bar, divided into shares. The CSS class of each is its name."""
    bars = []
    for name, share in shares.items():
        title = escape(f"{name.replace('_', ' ')} {share:.1%}")
        bars.append(f'<i class="{name}" style="flex: {share:.5f}" title="{title}"></i>')
    return f'<div class="parts">{"".join(bars)}</div>'
