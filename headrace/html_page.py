"""Parts of the HTML pages that Headrace writes.

Each page is one file, needs no network, and follows the reader's light or dark mode."""

import html
from collections.abc import Iterable, Mapping, Sequence

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
"""


def render_page(title: str, subtitle: str, body: str, style: str = "") -> bytes:
    """Render a page as the bytes of a file. Title and subtitle are plain text, the other arguments HTML."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}{style}</style></head>\n"
        f"<body><main><h1>{escape(title)}</h1><p>{escape(subtitle)}</p>\n{body}</main></body></html>\n"
    ).encode("utf-8", "replace")


def render_section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def join_lines(parts: Iterable[str]) -> str:
    """Join all parts that are not empty, each with a newline."""
    return "".join(f"{part}\n" for part in parts if part)


def render_tiles(values: dict[str, str]) -> str:
    """Render values with their names below, both HTML."""
    tiles = "".join(
        f'<section class="tile"><b>{value}</b><span>{name}</span></section>' for name, value in values.items()
    )
    columns = len(values) if len(values) <= 6 else -(-len(values) // 2)
    return f'<div class="tiles" style="--columns: {columns}">{tiles}</div>'


def render_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Render a table. Heads and cells are HTML."""
    top = "".join(f"<th>{head}</th>" for head in heads)
    body = "".join(f"<tr>{''.join(map(_render_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def render_notebook_table(title: str, values: Mapping[str, str]) -> str:
    """Render names and values, both plain text, as a table in a notebook.

    It sets no colors, so that it is readable in the notebook's own theme, light or dark."""
    left, right = 'style="text-align: left"', 'style="text-align: right"'
    rows = "".join(
        f"<tr><th {left}>{escape(name)}</th><td {right}>{escape(value)}</td></tr>"
        for name, value in values.items()
    )
    return f"<table><caption {left}>{escape(title)}</caption>{rows}</table>"


def _render_cell(content: str) -> str:
    return f'<td class="share">{content}</td>' if "meter" in content else f"<td>{content}</td>"


def render_meter(share: float) -> str:
    """Render a bar that is filled to a share from 0 to 1."""
    return f'<span class="meter"><i style="width: {100 * min(max(share, 0), 1):.1f}%"></i></span>'


def escape(text: object) -> str:
    return html.escape(str(text), quote=True)


def format_count(value: float) -> str:
    """Format with three digits and k, M, G or T: 12.3 k."""
    for limit, letter in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def format_bytes(value: float) -> str:
    """Format bytes in decimal units: 12.3 kB."""
    return f"{format_count(value)}B" if value >= 1000 else f"{value:.0f} B"


def format_percent(share: float) -> str:
    """Format a share from 0 to 1, with more digits near 0 and 1."""
    if 0 < share < 1e-4:
        return "under 0.01 %"
    return f"{100 * share:.2f} %" if share < 0.1 or 0.99 < share < 1 else f"{100 * share:.1f} %"
