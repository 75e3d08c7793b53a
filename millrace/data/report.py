"""One HTML page about a dataset: what went in and what was left out, what the rows hold, how well they are
mixed, how long it took. It needs no network and no script, and follows the reader's light or dark setting.

What `stats` may hold; a part of the page whose key is missing is left out:
    stages      {name: {"seconds": float, "bytes": int, "tokens": int}}, the last two if there are any
    sources     {name: {"documents", "bytes", "tokens", "rows": int, "weight": float}}, as packed, once each
    dropped     {reason: documents left out}
    problems    {"counts": {kind: int}, "samples": [str]}, see documents.Problems
    lengths     {"edges": [n + 1], "counts": [n]}, documents by tokens: edges[i] <= length < edges[i + 1]
    fill        {"edges": [n + 1], "counts": [n]}, rows by the share of them that is not padding, from 0 to 1
    vocabulary  how often each id occurs: a list, an array, or the path of an .npy file
    shuffle     {"rank_correlation", "displacement", "mixing": float or None}"""

import html
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from millrace.data import tokenise
from millrace.data.shards import Index, atomic
from millrace.data.show import visible

WIDTH, HEIGHT = 460, 206  # of a chart
LEFT, RIGHT, TOP, BOTTOM = 46, WIDTH - 16, 8, HEIGHT - 44  # the edges of what is drawn between its labels
COMMONEST = 20  # tokens listed
TICKS = 4
# What the measures of a shuffle are for a uniform permutation.
UNIFORM = {"rank_correlation": "0", "displacement": "1", "mixing": "1"}
MEANING = {
    "rank_correlation": "between a row's place before and after",
    "displacement": "how far rows moved on average, as a share of what a uniform shuffle moves them",
    "mixing": "of the sources within a batch",
}
STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --card: #fff; --ink: #1c1e21; --soft: #5f6670;
  --line: #e3e5e8; --bar: #2f6fb2; --bar-soft: #d9e5f2 }
@media (prefers-color-scheme: dark) { :root { --page: #14161a; --card: #1c1f24; --ink: #e4e6ea;
  --soft: #9aa3ae; --line: #30353c; --bar: #6aa5e0; --bar-soft: #263648 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1060px; margin: 0 auto; padding: 32px 20px 60px }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 16px; margin: 0 0 10px }
p { margin: 4px 0 0; color: var(--soft) } h1 + p { margin-bottom: 16px }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 16px 20px;
  overflow-x: auto; break-inside: avoid; margin: 0 0 14px }
.tiles { display: grid; gap: 0 14px; grid-template-columns: repeat(auto-fit, minmax(145px, 1fr)) }
.halves { columns: 2 440px; column-gap: 14px }
.tile b { display: block; font-size: 24px; font-weight: 600; line-height: 1.25 }
.tile span { color: var(--soft) }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th { color: var(--soft); font-weight: 500; text-align: right; border-bottom: 1px solid var(--line) }
th, td { padding: 4px 0 4px 14px; vertical-align: top }
td { text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal;
  min-width: 100px; max-width: 260px; overflow-wrap: break-word }
td.share { width: 22%; min-width: 90px; vertical-align: middle }
.meter { display: block; background: var(--bar-soft); height: 10px; border-radius: 2px }
.meter i { display: block; background: var(--bar); height: 10px; border-radius: 2px }
code, pre { font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere }
td code { background: var(--bar-soft); border-radius: 3px; padding: 1px 4px; white-space: nowrap }
ul { margin: 8px 0 0; padding-left: 18px; overflow-wrap: anywhere; color: var(--soft) }
svg { display: block; width: 100%; height: auto }
svg text { fill: var(--soft); font-size: 12px }
svg .bar { fill: var(--bar) } svg .bar:hover { fill: var(--ink) }
svg .grid-line { stroke: var(--line) } svg .curve { fill: none; stroke: var(--bar); stroke-width: 2 }
"""


def write(index: Index, stats: dict[str, Any], path: str | Path) -> None:
    """Writes the page. Tokens are spelt out if the dataset's tokenizer lies beside it."""
    path = Path(path)
    name = str(index.recipe.get("path", path.parent))
    wide = [_splits(index), _sources(stats.get("sources"))]
    halves = [
        _histogram("Length of documents", stats.get("lengths"), axis="tokens", show=_whole),
        _histogram("Fill of rows", stats.get("fill"), axis="share that is not padding", show=_hundredths),
        _vocabulary(index, stats.get("vocabulary"), path.parent),
        _left_out(stats.get("dropped"), stats.get("problems")),
        _shuffle(stats.get("shuffle")),
        _stages(stats.get("stages")),
        _section("Recipe", f"<pre>{_escape(_yaml(index.recipe))}</pre>"),
    ]
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_escape(name)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body><main><h1>{_escape(name)}</h1><p>{_escape(_subtitle(index))}</p>\n"
        f"{_lines([_tiles(index), *wide])}"
        f'<div class="halves">\n{_lines(halves)}</div></main></body></html>\n'
    )
    with atomic(path) as file:
        file.write(page.encode("utf-8", "replace"))


def _lines(parts: Iterable[str]) -> str:
    return "".join(f"{part}\n" for part in parts if part)


def _subtitle(index: Index) -> str:
    length = f"rows of {index.sequence_length:,} tokens"
    entropy = f"unigram entropy {index.unigram_entropy:.3f} nats"
    return f"Packed data: {length}, {index.dtype}, vocabulary of {index.vocab:,}, {entropy}"


def _tiles(index: Index) -> str:
    splits = index.splits.values()
    documents, rows = sum(s.documents for s in splits), sum(s.rows for s in splits)
    text, tokens = sum(s.bytes for s in splits), sum(s.tokens for s in splits)
    tiles = {
        "documents": _count(documents),
        "of text": _size(text),
        "tokens": _count(tokens),
        "bytes a token": _ratio(text, tokens),
        "rows": _count(rows),
        "full": _percent(tokens / max(rows * index.sequence_length, 1)),
    }
    shown = "".join(
        f'<section class="tile"><b>{value}</b><span>{name}</span></section>' for name, value in tiles.items()
    )
    return f'<div class="tiles">{shown}</div>'


def _splits(index: Index) -> str:
    rows = [
        [
            _escape(name),
            f"{len(split.epochs)}",
            f"{split.documents:,}",
            _size(split.bytes),
            f"{split.tokens:,}",
            _ratio(split.bytes, split.tokens),
            f"{split.rows:,}",
            _percent(split.tokens / (split.rows * index.sequence_length)) if split.rows else "",
        ]
        for name, split in index.splits.items()
    ]
    heads = [
        "split",
        "epochs",
        "documents",
        "text",
        "tokens an epoch",
        "bytes a token",
        "rows an epoch",
        "full",
    ]
    return _section("Splits", _table(heads, rows))


def _sources(sources: dict[str, dict[str, float]] | None) -> str:
    if not sources:
        return ""
    weighted = {name: one["tokens"] * one.get("weight", 1) for name, one in sources.items()}
    total = max(sum(weighted.values()), 1)
    rows = [
        [
            _escape(name),
            f"{one.get('weight', 1):g}",
            f"{one['documents']:,}",
            _size(one["bytes"]),
            f"{one['tokens']:,}",
            _ratio(one["bytes"], one["tokens"]),
            f"{one['rows']:,}",
            _percent(weighted[name] / total),
            _meter(weighted[name] / total),
        ]
        for name, one in sources.items()
    ]
    heads = [
        "source",
        "weight",
        "documents",
        "text",
        "tokens",
        "bytes a token",
        "rows",
        "share of an epoch",
        "",
    ]
    return _section("Sources", _table(heads, rows))


def _histogram(
    title: str, histogram: dict[str, Any] | None, *, axis: str, show: Callable[[float], str]
) -> str:
    if not histogram or not sum(histogram["counts"]):
        return ""
    edges, counts = list(histogram["edges"]), list(histogram["counts"])
    first, last = np.flatnonzero(counts)[[0, -1]].tolist()
    edges, counts = edges[first : last + 2], counts[first : last + 1]
    total, top = sum(counts), _round_up(max(counts))
    step = (RIGHT - LEFT) / len(counts)
    shapes = _levels([(top * n / TICKS, n / TICKS) for n in range(TICKS + 1)])
    every = math.ceil(len(counts) / 8)  # more labels would run into one another
    for n, count in enumerate(counts):
        height = (BOTTOM - TOP) * count / top
        x, y = LEFT + n * step, BOTTOM - height
        said = f"{show(edges[n])} to {show(edges[n + 1])}: {count:,} ({_percent(count / total)})"
        box = f'x="{x + 1:.1f}" y="{y:.1f}" width="{max(step - 2, 1):.1f}" height="{height:.1f}"'
        shapes.append(f'<rect class="bar" {box}><title>{_escape(said)}</title></rect>')
    for n in range(0, len(edges), every):
        shapes.append(_label(LEFT + n * step, BOTTOM + 16, show(edges[n]), "middle"))
    return _section(title, _chart(shapes, axis))


def _vocabulary(index: Index, counts: Any, folder: Path) -> str:
    if counts is None:
        return ""
    counts = np.asarray(np.load(counts) if isinstance(counts, str | Path) else counts)
    total, used = int(counts.sum()), int(np.count_nonzero(counts))
    if not total:
        return ""
    order = np.argsort(-counts, kind="stable")[: min(COMMONEST, used)]
    spelt = _spelling(order.tolist(), folder)
    rows = [
        [f"<code>{_escape(text)}</code>", f"{id}", f"{counts[id]:,}", _percent(counts[id] / total)]
        for id, text in zip(order.tolist(), spelt, strict=True)
    ]
    never = (index.vocab - used) / index.vocab
    says = f"{used:,} of {index.vocab:,} ids occur; {_percent(never)} never do."
    covered = np.cumsum(np.sort(counts)[::-1]) / total
    says += f" The commonest {int(np.searchsorted(covered, 0.9)) + 1:,} make up 90 % of the text."
    curve = _section("Vocabulary", f"{_rank_curve(counts)}<p>{says}</p>")
    return curve + "\n" + _section("Commonest tokens", _table(["token", "id", "times", "share"], rows))


def _rank_curve(counts: np.ndarray) -> str:
    """How often the commonest id occurs, the second... on logarithmic axes; 200 points are a smooth line."""
    ranked = np.sort(counts[counts > 0])[::-1]
    ranks = np.unique(np.geomspace(1, len(ranked), 200).round().astype(int))
    decades_x = max(math.ceil(math.log10(len(ranked))), 1)
    decades_y = max(math.ceil(math.log10(int(ranked[0]))), 1)
    x = LEFT + (RIGHT - LEFT) * np.log10(ranks) / decades_x
    y = BOTTOM - (BOTTOM - TOP) * np.log10(ranked[ranks - 1]) / decades_y
    every = math.ceil(decades_y / 5)
    shapes = _levels([(10**n, n / decades_y) for n in range(0, decades_y + 1, every)])
    for n in range(decades_x + 1):
        place = LEFT + (RIGHT - LEFT) * n / decades_x
        shapes.append(_label(place, BOTTOM + 16, _count(10**n), "middle"))
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    shapes.append(f'<polyline class="curve" points="{points}"/>')
    return _chart(shapes, "rank of an id, and how often it occurs")


def _spelling(ids: Sequence[int], folder: Path) -> list[str]:
    """Tokens as text, with their white space to be seen; by name if they hold half a letter or none."""
    if not (folder / "tokenizer.json").is_file():
        return [str(id) for id in ids]
    inner = tokenise.load(folder).inner
    spelt = []
    for id in ids:
        text = inner.decode([id], skip_special_tokens=False)
        name = inner.id_to_token(id) or f"id {id}"
        if not text or "\ufffd" in text:
            text = name
        elif name.startswith("▁") and not text.startswith(" "):  # a lone token loses the space it begins with
            text = " " + text
        spelt.append(visible(text.replace(" ", "␣").replace("\n", "⏎")))
    return spelt


def _left_out(dropped: dict[str, int] | None, problems: dict[str, Any] | None) -> str:
    if dropped is None and problems is None:
        return ""
    counts = {**(dropped or {}), **(problems or {}).get("counts", {})}
    counts = {reason: count for reason, count in counts.items() if count}
    if not counts:
        return _section("Left out", "<p>Nothing.</p>")
    largest = max(counts.values())
    rows = [
        [_escape(reason), f"{count:,}", _meter(count / largest)]
        for reason, count in sorted(counts.items(), key=lambda item: -item[1])
    ]
    samples = "".join(
        f"<li>{_escape(visible(sample))}</li>" for sample in (problems or {}).get("samples", [])
    )
    body = _table(["reason", "documents or lines", ""], rows)
    return _section("Left out", body + (f"<ul>{samples}</ul>" if samples else ""))


def _shuffle(shuffle: dict[str, float | None] | None) -> str:
    if not shuffle:
        return ""
    rows = [
        [
            f"{_escape(name.replace('_', ' '))}<p>{MEANING.get(name, '')}</p>",
            "not measured" if value is None else f"{value:.4f}",
            UNIFORM.get(name, ""),
        ]
        for name, value in shuffle.items()
    ]
    return _section("Shuffle", _table(["measure", "measured", "uniform"], rows))


def _stages(stages: dict[str, dict[str, float]] | None) -> str:
    if not stages:
        return ""
    longest = max(max(stage["seconds"] for stage in stages.values()), 1e-9)
    rows = [
        [
            _escape(name),
            f"{stage['seconds']:,.1f}",
            f"{stage['bytes'] / 1e6 / max(stage['seconds'], 1e-9):,.1f}" if stage.get("bytes") else "",
            f"{stage['tokens'] / 1e6 / max(stage['seconds'], 1e-9):,.2f}" if stage.get("tokens") else "",
            _meter(stage["seconds"] / longest),
        ]
        for name, stage in stages.items()
    ]
    rows.append(["together", f"{sum(stage['seconds'] for stage in stages.values()):,.1f}", "", "", ""])
    return _section("Time", _table(["stage", "seconds", "MB/s", "M tokens/s", ""], rows))


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already."""
    top = "".join(f"<th>{head}</th>" for head in heads)
    cell = lambda html: f'<td class="share">{html}</td>' if "meter" in html else f"<td>{html}</td>"
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _meter(share: float) -> str:
    return f'<span class="meter"><i style="width: {100 * min(max(share, 0), 1):.1f}%"></i></span>'


def _chart(shapes: Sequence[str], axis: str) -> str:
    caption = _label((LEFT + RIGHT) / 2, HEIGHT - 8, axis, "middle")
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{axis}">{"".join(shapes)}{caption}</svg>'
    )


def _levels(levels: Iterable[tuple[float, float]]) -> list[str]:
    """Horizontal lines: each a value and its height, from 0 to 1."""
    shapes = []
    for value, share in levels:
        y = BOTTOM - (BOTTOM - TOP) * share
        shapes.append(f'<line class="grid-line" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        shapes.append(_label(LEFT - 6, y + 4, _count(value), "end"))
    return shapes


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_escape(text)}</text>'


def _escape(text: str) -> str:
    return html.escape(str(text), quote=True)


def _yaml(recipe: dict[str, Any]) -> str:
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)


def _round_up(value: float) -> float:
    """To a number that four lines divide well."""
    power = 10 ** math.floor(math.log10(value))
    return max(next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value), TICKS)


def _count(value: float) -> str:
    for limit, letter in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def _size(value: float) -> str:
    return f"{_count(value)}B" if value >= 1000 else f"{value:.0f} B"


def _percent(share: float) -> str:
    if 0 < share < 1e-4:
        return "under 0.01 %"
    return f"{100 * share:.2f} %" if share < 0.1 or 0.99 < share < 1 else f"{100 * share:.1f} %"


def _hundredths(share: float) -> str:
    return f"{100 * share:.4g} %"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _ratio(a: float, b: float) -> str:
    return f"{a / b:.2f}" if b else ""
