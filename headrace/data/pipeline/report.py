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
    labels      {split: {label: texts or words that have it}}
    shuffle     {"rank_correlation", "displacement", "mixing": float or None}"""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from headrace.data.tokenizer import tokenizer as tokenise
from headrace.data.shards import Index, atomic
from headrace.data.inspect import visible
from headrace.html_page import count, escape, lines, meter, page, percent, section, size, table, tiles

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
        _labels(stats.get("labels")),
        _shuffle(stats.get("shuffle")),
        _stages(stats.get("stages")),
        section("Recipe", f"<pre>{escape(_yaml(index.recipe))}</pre>"),
    ]
    body = f'{lines([_tiles(index), *wide])}<div class="halves">\n{lines(halves)}</div>'
    with atomic(path) as file:
        file.write(page(name, _subtitle(index), body, STYLE))


def _subtitle(index: Index) -> str:
    length = f"rows of {index.sequence_length:,} tokens"
    entropy = f"unigram entropy {index.unigram_entropy:.3f} nats"
    return f"Packed data: {length}, {index.dtype}, vocabulary of {index.vocab:,}, {entropy}"


def _tiles(index: Index) -> str:
    splits = index.splits.values()
    documents, rows = sum(s.documents for s in splits), sum(s.rows for s in splits)
    text, tokens = sum(s.bytes for s in splits), sum(s.tokens for s in splits)
    named = {
        "documents": count(documents),
        "of text": size(text),
        "tokens": count(tokens),
        "bytes a token": _ratio(text, tokens),
        "rows": count(rows),
        "full": percent(tokens / max(rows * index.sequence_length, 1)),
    }
    return tiles(named)


def _splits(index: Index) -> str:
    rows = [
        [
            escape(name),
            f"{len(split.epochs)}",
            f"{split.documents:,}",
            size(split.bytes),
            f"{split.tokens:,}",
            _ratio(split.bytes, split.tokens),
            f"{split.rows:,}",
            percent(split.tokens / (split.rows * index.sequence_length)) if split.rows else "",
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
    return section("Splits", table(heads, rows))


def _sources(sources: dict[str, dict[str, float]] | None) -> str:
    if not sources:
        return ""
    weighted = {name: one["tokens"] * one.get("weight", 1) for name, one in sources.items()}
    total = max(sum(weighted.values()), 1)
    rows = [
        [
            escape(name),
            f"{one.get('weight', 1):g}",
            f"{one['documents']:,}",
            size(one["bytes"]),
            f"{one['tokens']:,}",
            _ratio(one["bytes"], one["tokens"]),
            f"{one['rows']:,}",
            percent(weighted[name] / total),
            meter(weighted[name] / total),
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
    return section("Sources", table(heads, rows))


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
    for n, many in enumerate(counts):
        height = (BOTTOM - TOP) * many / top
        x, y = LEFT + n * step, BOTTOM - height
        said = f"{show(edges[n])} to {show(edges[n + 1])}: {many:,} ({percent(many / total)})"
        box = f'x="{x + 1:.1f}" y="{y:.1f}" width="{max(step - 2, 1):.1f}" height="{height:.1f}"'
        shapes.append(f'<rect class="bar" {box}><title>{escape(said)}</title></rect>')
    for n in range(0, len(edges), every):
        shapes.append(_label(LEFT + n * step, BOTTOM + 16, show(edges[n]), "middle"))
    return section(title, _chart(shapes, axis))


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
        [f"<code>{escape(text)}</code>", f"{id}", f"{counts[id]:,}", percent(counts[id] / total)]
        for id, text in zip(order.tolist(), spelt, strict=True)
    ]
    never = (index.vocab - used) / index.vocab
    says = f"{used:,} of {index.vocab:,} ids occur; {percent(never)} never do."
    covered = np.cumsum(np.sort(counts)[::-1]) / total
    says += f" The commonest {int(np.searchsorted(covered, 0.9)) + 1:,} make up 90 % of the text."
    curve = section("Vocabulary", f"{_rank_curve(counts)}<p>{says}</p>")
    return curve + "\n" + section("Commonest tokens", table(["token", "id", "times", "share"], rows))


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
        shapes.append(_label(place, BOTTOM + 16, count(10**n), "middle"))
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
    counts = {reason: many for reason, many in counts.items() if many}
    if not counts:
        return section("Left out", "<p>Nothing.</p>")
    largest = max(counts.values())
    rows = [
        [escape(reason), f"{many:,}", meter(many / largest)]
        for reason, many in sorted(counts.items(), key=lambda item: -item[1])
    ]
    samples = "".join(f"<li>{escape(visible(sample))}</li>" for sample in (problems or {}).get("samples", []))
    body = table(["reason", "documents or lines", ""], rows)
    return section("Left out", body + (f"<ul>{samples}</ul>" if samples else ""))


def _labels(labels: dict[str, dict[str, int]] | None) -> str:
    names = next(iter(labels.values()), {}) if labels else {}
    if not labels or not names:
        return ""
    rows = [[escape(visible(name)), *(f"{labels[split][name]:,}" for split in labels)] for name in names]
    return section("Labels", table(["label", *labels], rows))


def _shuffle(shuffle: dict[str, float | None] | None) -> str:
    if not shuffle:
        return ""
    rows = [
        [
            f"{escape(name.replace('_', ' '))}<p>{MEANING.get(name, '')}</p>",
            "not measured" if value is None else f"{value:.4f}",
            UNIFORM.get(name, ""),
        ]
        for name, value in shuffle.items()
    ]
    return section("Shuffle", table(["measure", "measured", "uniform"], rows))


def _stages(stages: dict[str, dict[str, float]] | None) -> str:
    if not stages:
        return ""
    longest = max(max(stage["seconds"] for stage in stages.values()), 1e-9)
    rows = [
        [
            escape(name),
            f"{stage['seconds']:,.1f}",
            f"{stage['bytes'] / 1e6 / max(stage['seconds'], 1e-9):,.1f}" if stage.get("bytes") else "",
            f"{stage['tokens'] / 1e6 / max(stage['seconds'], 1e-9):,.2f}" if stage.get("tokens") else "",
            meter(stage["seconds"] / longest),
        ]
        for name, stage in stages.items()
    ]
    rows.append(["together", f"{sum(stage['seconds'] for stage in stages.values()):,.1f}", "", "", ""])
    return section("Time", table(["stage", "seconds", "MB/s", "M tokens/s", ""], rows))


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
        shapes.append(_label(LEFT - 6, y + 4, count(value), "end"))
    return shapes


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _yaml(recipe: dict[str, Any]) -> str:
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)


def _round_up(value: float) -> float:
    """To a number that four lines divide well."""
    power = 10 ** math.floor(math.log10(value))
    return max(next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value), TICKS)


def _hundredths(share: float) -> str:
    return f"{100 * share:.4g} %"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _ratio(a: float, b: float) -> str:
    return f"{a / b:.2f}" if b else ""
