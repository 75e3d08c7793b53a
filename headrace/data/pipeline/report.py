"""Report page of a dataset, in HTML: sources, dropped documents, content of the rows, shuffle quality, run
time.

It needs no network and no script, and follows the light or dark setting of the browser.

Keys of `stats`; each section of the page whose key is missing is omitted: stages      {name: {"seconds":
float, "bytes": int, "tokens": int}}, the last two if there are any sources     {name: {"documents", "bytes",
"tokens", "rows": int, "weight": float}}, as packed, each row once dropped     {reason: documents dropped}
problems    {"counts": {kind: int}, "samples": [str]}, see documents.Problems lengths     {"edges": [n + 1],
"counts": [n]}, documents by tokens: edges[i] <= length < edges[i + 1] fill        {"edges": [n + 1],
"counts": [n]}, rows by the share of them that is not padding, from 0 to 1 vocabulary  how often each id
occurs: a list, an array, or the path of an .npy file labels      {split: {label: texts or words that have
it}} shuffle     {"rank_correlation", "displacement", "mixing": float or None}"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from headrace.data.inspect import escape_control
from headrace.data.shards import Index, open_atomic
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.html_page import (
    escape,
    format_bytes,
    format_count,
    format_percent,
    join_lines,
    render_meter,
    render_page,
    render_section,
    render_table,
    render_tiles,
)

WIDTH, HEIGHT = 460, 206  # of a chart
LEFT, RIGHT, TOP, BOTTOM = 46, WIDTH - 16, 8, HEIGHT - 44  # edges of the plot, between its labels
MOST_COMMON = 20  # tokens listed
TICKS = 4
# Expected measures of a uniform permutation.
UNIFORM = {"rank_correlation": "0", "displacement": "1", "mixing": "1"}
DESCRIPTIONS = {
    "rank_correlation": "between the positions of rows before and after",
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
    """Write the page to `path`. Tokens are spelled out if the tokenizer is in the same folder."""
    path = Path(path)
    name = str(index.recipe.get("path", path.parent))
    wide = [_splits(index), _sources(stats.get("sources"))]
    halves = [
        _histogram("Length of documents", stats.get("lengths"), axis="tokens", format_edge=_format_integer),
        _histogram(
            "Fill of rows", stats.get("fill"), axis="share that is not padding", format_edge=_format_percent
        ),
        _vocabulary(index, stats.get("vocabulary"), path.parent),
        _dropped(stats.get("dropped"), stats.get("problems")),
        _labels(stats.get("labels")),
        _shuffle(stats.get("shuffle")),
        _stages(stats.get("stages")),
        render_section("Recipe", f"<pre>{escape(_yaml(index.recipe))}</pre>"),
    ]
    body = f'{join_lines([_tiles(index), *wide])}<div class="halves">\n{join_lines(halves)}</div>'
    with open_atomic(path) as file:
        file.write(render_page(name, _subtitle(index), body, STYLE))


def _subtitle(index: Index) -> str:
    length = f"rows of {index.sequence_length:,} tokens"
    entropy = f"unigram entropy {index.unigram_entropy:.3f} nats"
    return f"Packed data: {length}, {index.dtype}, vocabulary of {index.vocab:,}, {entropy}"


def _tiles(index: Index) -> str:
    splits = index.splits.values()
    documents, rows = sum(s.documents for s in splits), sum(s.rows for s in splits)
    text, tokens = sum(s.bytes for s in splits), sum(s.tokens for s in splits)
    values = {
        "documents": format_count(documents),
        "of text": format_bytes(text),
        "tokens": format_count(tokens),
        "bytes per token": _ratio(text, tokens),
        "rows": format_count(rows),
        "full": format_percent(tokens / max(rows * index.sequence_length, 1)),
    }
    return render_tiles(values)


def _splits(index: Index) -> str:
    rows = [
        [
            escape(name),
            f"{len(split.epochs)}",
            f"{split.documents:,}",
            format_bytes(split.bytes),
            f"{split.tokens:,}",
            _ratio(split.bytes, split.tokens),
            f"{split.rows:,}",
            format_percent(split.tokens / (split.rows * index.sequence_length)) if split.rows else "",
        ]
        for name, split in index.splits.items()
    ]
    heads = [
        "split",
        "epochs",
        "documents",
        "text",
        "tokens per epoch",
        "bytes per token",
        "rows per epoch",
        "full",
    ]
    return render_section("Splits", render_table(heads, rows))


def _sources(sources: Mapping[str, Mapping[str, float]] | None) -> str:
    if not sources:
        return ""
    weighted = {name: sums["tokens"] * sums.get("weight", 1) for name, sums in sources.items()}
    total = max(sum(weighted.values()), 1)
    rows = [
        [
            escape(name),
            f"{sums.get('weight', 1):g}",
            f"{sums['documents']:,}",
            format_bytes(sums["bytes"]),
            f"{sums['tokens']:,}",
            _ratio(sums["bytes"], sums["tokens"]),
            f"{sums['rows']:,}",
            format_percent(weighted[name] / total),
            render_meter(weighted[name] / total),
        ]
        for name, sums in sources.items()
    ]
    heads = [
        "source",
        "weight",
        "documents",
        "text",
        "tokens",
        "bytes per token",
        "rows",
        "share of an epoch",
        "",
    ]
    return render_section("Sources", render_table(heads, rows))


def _histogram(
    title: str,
    histogram: Mapping[str, Sequence[float]] | None,
    *,
    axis: str,
    format_edge: Callable[[float], str],
) -> str:
    """A bar chart of the counts, without the empty bins at both ends."""
    if not histogram or not sum(histogram["counts"]):
        return ""
    edges, counts = list(histogram["edges"]), list(histogram["counts"])
    first, last = np.flatnonzero(counts)[[0, -1]].tolist()
    edges, counts = edges[first : last + 2], counts[first : last + 1]
    total, top = sum(counts), _round_up(max(counts))
    step = (RIGHT - LEFT) / len(counts)
    shapes = _levels([(top * n / TICKS, n / TICKS) for n in range(TICKS + 1)])
    label_step = math.ceil(len(counts) / 8)  # more labels would overlap
    for n, bin_count in enumerate(counts):
        height = (BOTTOM - TOP) * bin_count / top
        x, y = LEFT + n * step, BOTTOM - height
        bounds = f"{format_edge(edges[n])} to {format_edge(edges[n + 1])}"
        hint = f"{bounds}: {bin_count:,} ({format_percent(bin_count / total)})"
        box = f'x="{x + 1:.1f}" y="{y:.1f}" width="{max(step - 2, 1):.1f}" height="{height:.1f}"'
        shapes.append(f'<rect class="bar" {box}><title>{escape(hint)}</title></rect>')
    for n in range(0, len(edges), label_step):
        shapes.append(_label(LEFT + n * step, BOTTOM + 16, format_edge(edges[n]), "middle"))
    return render_section(title, _chart(shapes, axis))


def _vocabulary(index: Index, counts: Sequence[int] | np.ndarray | str | Path | None, folder: Path) -> str:
    """The curve of token frequencies, and the most common tokens."""
    if counts is None:
        return ""
    counts = np.asarray(np.load(counts) if isinstance(counts, str | Path) else counts)
    total, used = int(counts.sum()), int(np.count_nonzero(counts))
    if not total:
        return ""
    order = np.argsort(-counts, kind="stable")[: min(MOST_COMMON, used)]
    texts = _spell_tokens(order.tolist(), folder)
    rows = [
        [f"<code>{escape(text)}</code>", f"{id}", f"{counts[id]:,}", format_percent(counts[id] / total)]
        for id, text in zip(order.tolist(), texts, strict=True)
    ]
    unused = (index.vocab - used) / index.vocab
    coverage = np.cumsum(np.sort(counts)[::-1]) / total
    text = (
        f"{used:,} of {index.vocab:,} ids occur; {format_percent(unused)} never do. "
        f"The {int(np.searchsorted(coverage, 0.9)) + 1:,} most common ones make up 90 % of the text."
    )
    curve = render_section("Vocabulary", f"{_rank_curve(counts)}<p>{text}</p>")
    common = render_table(["token", "id", "times", "share"], rows)
    return curve + "\n" + render_section("Most common tokens", common)


def _rank_curve(counts: np.ndarray) -> str:
    """Chart of the counts of token ids by rank, with logarithmic axes. 200 points make a smooth line."""
    ranked = np.sort(counts[counts > 0])[::-1]
    ranks = np.unique(np.geomspace(1, len(ranked), 200).round().astype(int))
    decades_x = max(math.ceil(math.log10(len(ranked))), 1)
    decades_y = max(math.ceil(math.log10(int(ranked[0]))), 1)
    x = LEFT + (RIGHT - LEFT) * np.log10(ranks) / decades_x
    y = BOTTOM - (BOTTOM - TOP) * np.log10(ranked[ranks - 1]) / decades_y
    level_step = math.ceil(decades_y / 5)
    shapes = _levels([(10**n, n / decades_y) for n in range(0, decades_y + 1, level_step)])
    for n in range(decades_x + 1):
        tick_x = LEFT + (RIGHT - LEFT) * n / decades_x
        shapes.append(_label(tick_x, BOTTOM + 16, format_count(10**n), "middle"))
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    shapes.append(f'<polyline class="curve" points="{points}"/>')
    return _chart(shapes, "rank of a token id, and how often it occurs")


def _spell_tokens(ids: Sequence[int], folder: Path) -> list[str]:
    """Texts of tokens, with visible white space. A token without text, or of half a letter, gets its name."""
    if not (folder / "tokenizer.json").is_file():
        return [str(id) for id in ids]
    inner = tokenizer_io.load(folder).inner
    texts = []
    for id in ids:
        text = inner.decode([id], skip_special_tokens=False)
        name = inner.id_to_token(id) or f"id {id}"
        if not text or "\ufffd" in text:
            text = name
        elif name.startswith("▁") and not text.startswith(" "):  # decoding drops the space at its start
            text = " " + text
        texts.append(escape_control(text.replace(" ", "␣").replace("\n", "⏎")))
    return texts


def _dropped(dropped: Mapping[str, int] | None, problems: Mapping[str, Any] | None) -> str:
    """Documents dropped by filters and bad input that was skipped, by reason."""
    if dropped is None and problems is None:
        return ""
    counts = {**(dropped or {}), **(problems or {}).get("counts", {})}
    counts = {reason: number for reason, number in counts.items() if number}
    if not counts:
        return render_section("Dropped and skipped", "<p>Nothing.</p>")
    largest = max(counts.values())
    rows = [
        [escape(reason), f"{number:,}", render_meter(number / largest)]
        for reason, number in sorted(counts.items(), key=lambda item: -item[1])
    ]
    samples = "".join(
        f"<li>{escape(escape_control(sample))}</li>" for sample in (problems or {}).get("samples", [])
    )
    body = render_table(["reason", "documents or lines", ""], rows)
    return render_section("Dropped and skipped", body + (f"<ul>{samples}</ul>" if samples else ""))


def _labels(labels: Mapping[str, Mapping[str, int]] | None) -> str:
    names: Mapping[str, int] = next(iter(labels.values()), {}) if labels else {}
    if not labels or not names:
        return ""
    rows = [
        [escape(escape_control(name)), *(f"{labels[split][name]:,}" for split in labels)] for name in names
    ]
    return render_section("Labels", render_table(["label", *labels], rows))


def _shuffle(shuffle: Mapping[str, float | None] | None) -> str:
    if not shuffle:
        return ""
    rows = [
        [
            f"{escape(name.replace('_', ' '))}<p>{DESCRIPTIONS.get(name, '')}</p>",
            "not measured" if value is None else f"{value:.4f}",
            UNIFORM.get(name, ""),
        ]
        for name, value in shuffle.items()
    ]
    return render_section("Shuffle", render_table(["measure", "measured", "uniform"], rows))


def _stages(stages: Mapping[str, Mapping[str, float]] | None) -> str:
    if not stages:
        return ""
    longest = max(max(stage["seconds"] for stage in stages.values()), 1e-9)
    rows = [
        [
            escape(name),
            f"{stage['seconds']:,.1f}",
            f"{stage['bytes'] / 1e6 / max(stage['seconds'], 1e-9):,.1f}" if stage.get("bytes") else "",
            f"{stage['tokens'] / 1e6 / max(stage['seconds'], 1e-9):,.2f}" if stage.get("tokens") else "",
            render_meter(stage["seconds"] / longest),
        ]
        for name, stage in stages.items()
    ]
    rows.append(["total", f"{sum(stage['seconds'] for stage in stages.values()):,.1f}", "", "", ""])
    return render_section("Time", render_table(["stage", "seconds", "MB/s", "M tokens/s", ""], rows))


def _chart(shapes: Sequence[str], axis: str) -> str:
    caption = _label((LEFT + RIGHT) / 2, HEIGHT - 8, axis, "middle")
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{axis}">{"".join(shapes)}{caption}</svg>'
    )


def _levels(levels: Iterable[tuple[float, float]]) -> list[str]:
    """Horizontal grid lines with labels, from pairs of a value and its height from 0 to 1."""
    shapes = []
    for value, share in levels:
        y = BOTTOM - (BOTTOM - TOP) * share
        shapes.append(f'<line class="grid-line" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        shapes.append(_label(LEFT - 6, y + 4, format_count(value), "end"))
    return shapes


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _yaml(recipe: dict[str, Any]) -> str:
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)


def _round_up(value: float) -> float:
    """Round up to a number that is a good end for an axis with TICKS grid lines."""
    power = 10 ** math.floor(math.log10(value))
    return max(next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value), TICKS)


def _format_percent(share: float) -> str:
    return f"{100 * share:.4g} %"


def _format_integer(value: float) -> str:
    return f"{value:,.0f}"


def _ratio(a: float, b: float) -> str:
    return f"{a / b:.2f}" if b else ""
