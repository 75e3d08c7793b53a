"""The HTML page about a run: its state and progress, what was lost, curves, and what happened to it."""

import time
from pathlib import Path, PurePath

from headrace.errors import ExitCode
from headrace.hardware.chips import PRICES_DATE, Range
from headrace.html_page import (
    escape,
    format_percent,
    join_lines,
    render_page,
    render_section,
    render_table,
    render_tiles,
)
from headrace.report import charts
from headrace.report.charts import Curve, Format, Mark, render_chart
from headrace.report.facts import Facts, Status, assess_status, compute_cost
from headrace.runtime.goodput import BADPUT, PRODUCTIVE, Attempt
from headrace.storage import files
from headrace.trackers.terminal import (
    format_bytes,
    format_duration,
    format_number,
    format_scientific,
    format_short,
)

MAX_WARNINGS = 40  # listed, the newest
MAX_ATTEMPTS = 60  # listed, the newest
COLORS = {  # of the categories, in light and in dark mode
    PRODUCTIVE: ("#2e8b6f", "#4fb895"),
    "initialization": ("#8d99a8", "#7d8896"),
    "preparation": ("#b3a369", "#bfae72"),
    "compilation": ("#d98e2b", "#e0a04a"),
    "data_loading": ("#4a7fc1", "#6f9fd8"),
    "checkpoint_save": ("#8a63b8", "#a583cf"),
    "checkpoint_restore": ("#b48bd0", "#c4a3dd"),
    "evaluation": ("#45a3b5", "#62bccd"),
    "wasted_progress": ("#c8453b", "#e0675c"),
    "restart": ("#e08079", "#b8514a"),
    "other": ("#bfc5cc", "#4c545e"),
}
STYLE = (
    """
:root { --good: #2e8b6f; --bad: #c8453b; --still: #8a6d1f; --second: #d9722b }
@media (prefers-color-scheme: dark) { :root { --good: #4fb895; --bad: #e0675c; --still: #d3b35a;
  --second: #f0995c } }
.status { display: flex; flex-wrap: wrap; gap: 6px 14px; align-items: center; font-size: 17px }
.status b { color: #fff; border-radius: 20px; padding: 2px 14px; font-weight: 600 }
@media (prefers-color-scheme: dark) { .status b { color: #14161a } }
.good b { background: var(--good) } .bad b { background: var(--bad) } .still b { background: var(--still) }
.done { height: 10px; border-radius: 5px; background: var(--bar-soft); margin: 14px 0 2px; overflow: hidden }
.done i { display: block; height: 100%; background: var(--good) }
.tile small { color: var(--soft); display: block; min-height: 1.5em; font-size: 13px }
.wide td { text-align: left; white-space: nowrap } .wide th { text-align: left }
.wide td:last-child { white-space: normal; overflow-wrap: anywhere; min-width: 240px }
.halves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 0 14px }
.halves section, .big section { overflow-x: visible; min-width: 0 }
.error { color: var(--bad) }
.sample { border-left: 3px solid var(--bar-soft); padding-left: 12px; margin: 8px 0 }
details summary { cursor: pointer; color: var(--soft) } details[open] summary { margin-bottom: 8px }
.big .chart { height: 320px } .tiles { grid-template-columns: repeat(var(--columns), 1fr) }
.times td:nth-child(2) { text-align: left; color: var(--soft); white-space: normal }
.tile { padding: 12px 16px }
@media (max-width: 560px) { main { padding: 18px 10px 40px } section { padding: 12px 12px }
  .tiles { grid-template-columns: 1fr 1fr } .big .chart { height: 240px }
  .times td:first-child { white-space: nowrap }
  .times td:nth-child(2), .times th:nth-child(2) { display: none } }
"""
    + charts.STYLE
    + "".join(f".{name} {{ background: {light} }} " for name, (light, _) in COLORS.items())
    + "@media (prefers-color-scheme: dark) { "
    + "".join(f".{name} {{ background: {dark} }} " for name, (_, dark) in COLORS.items())
    + "}\n"
)


def render(facts: Facts) -> bytes:
    """Render the page."""
    status = assess_status(facts)
    wide = [_status(facts, status), _tiles(facts), _goodput(facts), _loss(facts)]
    halves = [
        _curve(facts, "Tokens per second", "tokens_per_second", format_short, from_zero=True),
        _curve(facts, "Gradient norm", "grad_norm", format_short),
        _curve(facts, "Learning rate", "learning_rate", format_scientific, from_zero=True),
        _curve(facts, "Model FLOPs utilization", "mfu", format_percent, from_zero=True),
        _curve(facts, "Peak memory", "memory", _format_gib, unit=2**30, from_zero=True),
        _curve(facts, "Bits per byte, held out", "evaluate/bits_per_byte", format_number),
    ]
    details = [_attempts(facts), _bad_steps(facts), _warnings(facts), _samples(facts), _recipe(facts)]
    body = join_lines(wide) + f'<div class="halves">\n{join_lines(halves)}</div>' + join_lines(details)
    body += f"<script>{charts.SCRIPT}</script>"
    name = PurePath(facts.run).name if files.is_url(facts.run) else Path(facts.run).resolve().name
    return render_page(name, _subtitle(facts), body, STYLE)


def _subtitle(facts: Facts) -> str:
    parts = [facts.run]
    if facts.recipe is not None:
        recipe = facts.recipe
        batch = f"{recipe.batch.sequences:,} x {recipe.data.sequence_length:,} tokens per step"
        parts = [f"{recipe.model.use}, {batch}", f"data {recipe.data.path}"]
    if facts.totals.attempts:
        attempt = facts.totals.attempts[-1]
        hosts = f" of {attempt.hosts} hosts" if attempt.hosts > 1 else ""
        parts.append(f"{attempt.devices} {attempt.kind}{hosts}")
    return "; ".join([*parts, f"as of {time.strftime('%Y-%m-%d %H:%M', time.localtime(facts.now))}"])


def _status(facts: Facts, status: Status) -> str:
    share = facts.step / facts.steps if facts.steps else 0.0
    bar = f'<div class="done"><i style="width: {min(share, 1):.2%}"></i></div>' if facts.steps else ""
    notes = ""
    largest_loss = next(iter(facts.totals.badput().items()), None)
    if largest_loss is not None and facts.totals.total:
        category, seconds = largest_loss
        time_lost = f"{format_percent(seconds / facts.totals.total)} of its time, {format_duration(seconds)}"
        notes = f"<p>Largest overhead: {BADPUT[category]} ({time_lost}).</p>"
    cost = compute_cost(facts, include_remaining=True)
    if cost is not None:
        terms = {"on demand": cost.on_demand, "spot": cost.spot}
        dollars = " or ".join(
            f"{_format_dollars(ends)} {name}" for name, ends in terms.items() if ends is not None
        )
        source = f"{cost.chips} x {cost.chip}, prices of {PRICES_DATE}"
        notes += f"<p>Cost until the end: {dollars} ({escape(source)}).</p>"
    return (
        f'<section><div class="status {status.color_class}"><b>{escape(status.word)}</b> '
        f"<span>{escape(status.text)}</span></div>{bar}{notes}</section>"
    )


def _tiles(facts: Facts) -> str:
    tiles = _metric_tile(facts, "training loss", "loss", format_number)
    if facts.evaluations and facts.evaluations[-1]["evaluate/loss"] is not None:
        row = facts.evaluations[-1]
        tiles |= _tile("held-out loss", format_number(row["evaluate/loss"]), f"at step {row['step']:,}")
    if facts.totals.total:
        total = format_duration(facts.totals.total)
        tiles |= _tile("goodput", format_percent(facts.totals.share), f"of {total}")
    tiles |= _metric_tile(facts, "tokens", "tokens", format_short)
    seconds = facts.latest("step_seconds")
    note = "" if seconds is None else f"{format_short(seconds)} s per step"
    tiles |= _metric_tile(facts, "tokens per second", "tokens_per_second", format_short, note)
    tiles |= _metric_tile(facts, "MFU", "mfu", format_percent)
    tiles |= _metric_tile(facts, "memory", "memory", format_bytes, "at the peak")
    spent = compute_cost(facts)
    if spent is not None:
        note = f"{_format_dollars(spent.spot)} if spot" if spent.spot else ""
        tiles |= _tile("spent so far", _format_dollars(spent.on_demand), note)
    if facts.checkpoints:
        count = len(facts.checkpoints)
        note = f"{count} checkpoint{'s' * (count != 1)}"
        tiles |= _tile("newest checkpoint", f"{facts.checkpoints[-1]:,}", note)
    return render_tiles(tiles)


def _tile(name: str, value: str, note: str = "") -> dict[str, str]:
    return {f"{name}<small>{note}</small>": value}


def _metric_tile(
    facts: Facts, name: str, metric: str, format_value: Format, note: str = ""
) -> dict[str, str]:
    """Return the tile of a metric's newest value; empty if there is none."""
    value = facts.latest(metric)
    return {} if value is None else _tile(name, format_value(value), note)


def _format_dollars(cost: Range | None) -> str:
    if cost is None:
        return ""
    low, high = (f"{end:,.0f}" if end >= 100 else f"{end:,.2f}" for end in cost)
    return f"${low}" if low == high else f"${low} to {high}"


def _goodput(facts: Facts) -> str:
    totals = facts.totals
    if not totals.total:
        return ""
    lost = {category: seconds for category, seconds in totals.badput().items() if seconds >= 0.01}
    seconds_by_category = {PRODUCTIVE: totals.seconds.get(PRODUCTIVE, 0.0)} | lost
    rows = [
        [
            f'<i class="swatch {category}"></i>{escape(category.replace("_", " "))}',
            escape(BADPUT.get(category, "steps that count")),
            format_duration(seconds) if seconds >= 1 else f"{seconds:.2f}s",
            format_percent(seconds / totals.total),
        ]
        for category, seconds in seconds_by_category.items()
    ]
    bar = charts.render_shares(
        {category: seconds / totals.total for category, seconds in seconds_by_category.items()}
    )
    table = render_table(["where the time went", "", "time", "share"], rows)
    return render_section(f"Goodput {format_percent(totals.share)}", f'{bar}<div class="times">{table}</div>')


def _marks(facts: Facts) -> list[Mark]:
    restarts = [Mark(attempt.first_step, "restarted", "restart") for attempt in facts.totals.attempts[1:]]
    rollbacks = [
        Mark(row["to"], "rolled back to", "back") for row in facts.rollbacks if row.get("rows", -1) > 0
    ]
    return restarts[-MAX_ATTEMPTS:] + rollbacks


def _loss(facts: Facts) -> str:
    training = Curve("training", [(row["step"], row["loss"]) for row in facts.rows])
    held_out = [(row["step"], row["evaluate/loss"]) for row in facts.evaluations]
    curves = [training, Curve("held out", held_out, dots=len(held_out) < 60)] if held_out else [training]
    chart = render_chart(curves, format_value=format_number, marks=_marks(facts), until=facts.steps or None)
    return f'<div class="big">{render_section("Loss", chart)}</div>'


def _format_gib(value: float) -> str:
    return f"{value:.3g} GiB"


def _curve(
    facts: Facts,
    title: str,
    metric: str,
    format_value: Format,
    *,
    unit: float = 1.0,
    from_zero: bool = False,
) -> str:
    """Render a section with the curve of a metric, in multiples of `unit`. Empty if the run has no values."""
    rows = facts.evaluations if metric.startswith("evaluate/") else facts.rows
    points = [(row["step"], row[metric] / unit) for row in rows if row.get(metric) is not None]
    if not points:
        return ""
    curve = Curve(title.lower(), points)
    chart = render_chart([curve], format_value=format_value, from_zero=from_zero, until=facts.steps)
    return render_section(title, chart)


def _attempts(facts: Facts) -> str:
    attempts = facts.totals.attempts
    if not attempts:
        return ""
    rows = []
    neighbors = list(zip([None, *attempts], attempts, [*attempts[1:], None], strict=False))
    for previous, attempt, following in neighbors[-MAX_ATTEMPTS:]:
        gap = ""
        if previous is not None:
            gap = format_duration(max(attempt.started_at - previous.ended_at, 0))
        # The last steps before a stop are saved, but may have no row.
        last_step = attempt.last_step if following is None else max(attempt.last_step, following.first_step)
        devices = f"{attempt.devices} {attempt.kind}"
        devices += f", {attempt.hosts} hosts" if attempt.hosts > 1 else ""
        rows.append(
            [
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.started_at)),
                escape(gap),
                f"{attempt.first_step:,} to {last_step:,}",
                format_duration(max(attempt.ended_at - attempt.started_at, 0)),
                escape(devices),
                _end_note(attempt, is_last=following is None),
            ]
        )
    restarts = f"{len(attempts) - 1} restart{'s' * (len(attempts) != 2)}"
    title = f"Processes: {restarts}, {facts.totals.lost_steps:,} steps repeated"
    heads = ["started", "gap before", "steps", "duration", "on", "ended"]
    return render_section(title, f'<div class="wide">{render_table(heads, rows)}</div>')


def _end_note(attempt: Attempt, *, is_last: bool) -> str:
    if attempt.exit_code is None:
        return "" if is_last else '<span class="error">without an exit code</span>'
    names: dict[int, str] = {ExitCode.DONE: "done", ExitCode.PREEMPTED: "stopped by a signal"}
    text = names.get(attempt.exit_code, f"exit code {attempt.exit_code}")
    text = escape(f"{text}: {attempt.reason}" if attempt.reason else text)
    return text if attempt.exit_code in names else f'<span class="error">{text}</span>'


def _bad_steps(facts: Facts) -> str:
    skipped = facts.latest("skipped") or 0
    if not skipped and not facts.rollbacks:
        return ""
    body = f"<p>{skipped:,.0f} update{'s' * (skipped != 1)} skipped.</p>"
    rows = []
    for row in facts.rollbacks:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"]))
        action = "stopped"
        if row["rows"] > 0:
            action = f"rolled back to step {row['to']:,}, {row['rows']:,} rows skipped"
        rows.append([when, f"step {row['step']:,}", action])
    if rows:
        body += f'<div class="wide">{render_table(["when", "at", "action"], rows)}</div>'
    if facts.bad_step_reports:
        body += f"<p>Their documents: {escape(', '.join(facts.bad_step_reports[-5:]))}</p>"
    return render_section("Bad steps", body)


def _warnings(facts: Facts) -> str:
    if not facts.warnings:
        return ""
    rows = [
        [escape(warning.logged_at), f'<span class="{warning.level}">{escape(warning.message)}</span>']
        for warning in reversed(facts.warnings[-MAX_WARNINGS:])
    ]
    newest = f", the newest {MAX_WARNINGS}" if len(facts.warnings) > MAX_WARNINGS else ""
    title = f"Warnings and errors ({len(facts.warnings):,}{newest})"
    return render_section(title, f'<div class="wide">{render_table(["when", "message"], rows)}</div>')


def _samples(facts: Facts) -> str:
    if not facts.samples:
        command = f"<code>headrace report {escape(facts.run)} --samples 3</code>"
        return render_section("Samples", f"<p>None yet; {command} generates some.</p>")
    step = facts.samples[-1]["step"]
    newest = [sample for sample in facts.samples if sample["step"] == step]
    texts = "".join(f'<pre class="sample">{escape(sample["text"])}</pre>' for sample in newest)
    return render_section(f"Samples of step {step:,}", texts)


def _recipe(facts: Facts) -> str:
    if not facts.recipe_text:
        return ""
    body = f"<details><summary>show</summary><pre>{escape(facts.recipe_text)}</pre></details>"
    return render_section("Recipe", body)
