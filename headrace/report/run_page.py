"""The page about a run: first how it is, how far and what was lost, then curves, then what happened to it."""

import time
from collections.abc import Callable
from pathlib import Path, PurePath

from headrace.storage import files as store
from headrace.runtime.goodput import LOST, PRODUCTIVE, Life
from headrace.html_page import escape, lines, page, percent, section, table, tiles
from headrace.hardware.chips import PRICES_DATE
from headrace.report import charts
from headrace.report.charts import Curve, Mark, chart
from headrace.report.facts import Facts, Status, cost, status
from headrace.trackers.terminal import duration, number, scientific, short, size

WARNINGS = 40  # the newest that are listed
LIVES = 60  # and of the processes
COLOURS = {  # of the categories, on light and on dark
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
    + "".join(f".{name} {{ background: {light} }} " for name, (light, _) in COLOURS.items())
    + "@media (prefers-color-scheme: dark) { "
    + "".join(f".{name} {{ background: {dark} }} " for name, (_, dark) in COLOURS.items())
    + "}\n"
)


def made(facts: Facts) -> bytes:
    """The page."""
    how = status(facts)
    wide = [_status(facts, how), _tiles(facts), _goodput(facts), _loss(facts)]
    halves = [
        _curve(facts, "Tokens a second", "tokens_per_second", short, from_zero=True),
        _curve(facts, "Gradient norm", "grad_norm", short),
        _curve(facts, "Learning rate", "learning_rate", scientific, from_zero=True),
        _curve(facts, "Model FLOPs utilisation", "mfu", percent, from_zero=True),
        _curve(facts, "Memory, at the peak", "memory", _gibibytes, unit=2**30, from_zero=True),
        _curve(facts, "Bits a byte, held out", "evaluate/bits_per_byte", number),
    ]
    rest = [_lives(facts), _bad_steps(facts), _warnings(facts), _samples(facts), _recipe(facts)]
    body = lines(wide) + f'<div class="halves">\n{lines(halves)}</div>' + lines(rest)
    body += f"<script>{charts.SCRIPT}</script>"
    name = PurePath(facts.run).name if store.is_url(facts.run) else Path(facts.run).resolve().name
    return page(name, _subtitle(facts), body, STYLE)


def _subtitle(facts: Facts) -> str:
    parts = [facts.run]
    if facts.cfg is not None:
        cfg = facts.cfg
        parts = [f"{cfg.model.use}, {cfg.batch.sequences:,} x {cfg.data.sequence_length:,} tokens a step"]
        parts.append(f"data {cfg.data.path}")
    if facts.account.lives:
        life = facts.account.lives[-1]
        hosts = f" of {life.hosts} hosts" if life.hosts > 1 else ""
        parts.append(f"{life.devices} {life.kind}{hosts}")
    return "; ".join([*parts, f"as of {time.strftime('%Y-%m-%d %H:%M', time.localtime(facts.now))}"])


def _status(facts: Facts, how: Status) -> str:
    share = facts.step / facts.steps if facts.steps else 0.0
    bar = f'<div class="done"><i style="width: {min(share, 1):.2%}"></i></div>' if facts.steps else ""
    lost = next(iter(facts.account.lost().items()), None)
    said = ""
    if lost is not None and facts.account.total:
        name, seconds = lost
        most = f"{percent(seconds / facts.account.total)} of its time, {duration(seconds)}"
        said = f"<p>What took most beside training: {LOST[name]} ({most}).</p>"
    whole = cost(facts, whole=True)
    if whole is not None:
        ways = {"on demand": whole.on_demand, "spot": whole.spot}
        told = " or ".join(f"{_dollars(ends)} {name}" for name, ends in ways.items() if ends is not None)
        chips = f"{whole.chips} x {whole.chip}, prices of {PRICES_DATE}"
        said += f"<p>Cost to the end: {told} ({escape(chips)}).</p>"
    return (
        f'<section><div class="status {how.mood}"><b>{escape(how.word)}</b> '
        f"<span>{escape(how.said)}</span></div>{bar}{said}</section>"
    )


def _tiles(facts: Facts) -> str:
    found: dict[str, str] = {}

    def put(name: str, value: str | None, small: str = "") -> None:
        if value is not None:
            found[f"{name}<small>{small}</small>"] = value

    last, account = facts.last, facts.account
    show = lambda value, how: None if value is None else how(value)
    put("training loss", show(last("loss"), number))
    if facts.evaluations:
        row = facts.evaluations[-1]
        put("held-out loss", show(row["evaluate/loss"], number), f"at step {row['step']:,}")
    if account.total:
        put("goodput", percent(account.share), f"of {duration(account.total)}")
    put("tokens", show(last("tokens"), short))
    put(
        "tokens a second",
        show(last("tokens_per_second"), short),
        f"{show(last('step_seconds'), short)} s a step",
    )
    put("MFU", show(last("mfu"), percent))
    put("memory", show(last("memory"), size), "at the peak")
    spent = cost(facts)
    if spent is not None:
        put(
            "spent so far", _dollars(spent.on_demand), f"{_dollars(spent.spot)} if spot" if spent.spot else ""
        )
    if facts.checkpoints:
        kept = f"{len(facts.checkpoints)} checkpoint{'s' * (len(facts.checkpoints) != 1)}"
        put("newest checkpoint", f"{facts.checkpoints[-1]:,}", kept)
    return tiles(found)


def _dollars(ends: tuple[float, float] | None) -> str:
    if ends is None:
        return ""
    show = lambda value: f"{value:,.0f}" if value >= 100 else f"{value:,.2f}"
    low, high = map(show, ends)
    return f"${low}" if low == high else f"${low} to {high}"


def _goodput(facts: Facts) -> str:
    account = facts.account
    if not account.total:
        return ""
    lost = {name: spent for name, spent in account.lost().items() if spent >= 0.01}
    seconds = {PRODUCTIVE: account.seconds.get(PRODUCTIVE, 0.0)} | lost
    rows = [
        [
            f'<i class="swatch {name}"></i>{escape(name.replace("_", " "))}',
            escape(LOST.get(name, "steps that count")),
            duration(spent) if spent >= 1 else f"{spent:.2f}s",
            percent(spent / account.total),
        ]
        for name, spent in seconds.items()
    ]
    bar = charts.parts({name: spent / account.total for name, spent in seconds.items()})
    times = table(["where the time went", "", "time", "share"], rows)
    return section(f"Goodput {percent(account.share)}", f'{bar}<div class="times">{times}</div>')


def _marks(facts: Facts) -> list[Mark]:
    begun = [Mark(life.step, "started again", "restart") for life in facts.account.lives[1:]]
    back = [Mark(row["to"], "went back to", "back") for row in facts.rollbacks if row.get("rows", -1) > 0]
    return begun[-LIVES:] + back


def _loss(facts: Facts) -> str:
    train = Curve("training", [(row["step"], row["loss"]) for row in facts.rows])
    held = [(row["step"], row["evaluate/loss"]) for row in facts.evaluations]
    curves = [train, Curve("held out", held, dots=len(held) < 60)] if held else [train]
    drawn = chart(curves, show=number, marks=_marks(facts), until=facts.steps if facts.steps else None)
    return f'<div class="big">{section("Loss", drawn)}</div>'


def _gibibytes(value: float) -> str:
    return f"{value:.3g} GiB"


def _curve(
    facts: Facts,
    title: str,
    name: str,
    show: Callable[[float], str],
    *,
    unit: float = 1.0,
    from_zero: bool = False,
) -> str:
    rows = facts.evaluations if name.startswith("evaluate/") else facts.rows
    points = [(row["step"], row[name] / unit) for row in rows if row.get(name) is not None]
    if not points:
        return ""
    drawn = chart([Curve(title.lower(), points)], show=show, from_zero=from_zero, until=facts.steps)
    return section(title, drawn)


def _lives(facts: Facts) -> str:
    lives = facts.account.lives
    if not lives:
        return ""
    rows = []
    for before, life in list(zip([None, *lives], lives, strict=False))[-LIVES:]:
        gap = duration(max(life.begun - before.ended, 0)) if before is not None else ""
        rows.append(
            [
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(life.begun)),
                escape(gap),
                f"{life.step:,} to {life.last:,}",
                duration(max(life.ended - life.begun, 0)),
                escape(f"{life.devices} {life.kind}" + (f", {life.hosts} hosts" if life.hosts > 1 else "")),
                _ended(life, is_last=life is lives[-1]),
            ]
        )
    again = (
        f"{len(lives) - 1} restart{'s' * (len(lives) != 2)}, {facts.account.lost_steps:,} steps done again"
    )
    heads = ["begun", "gap before", "steps", "lasted", "on", "ended"]
    return section(f"Processes: {again}", f'<div class="wide">{table(heads, rows)}</div>')


def _ended(life: Life, *, is_last: bool) -> str:
    if life.code is None:
        return "" if is_last else '<span class="error">without a word</span>'
    words = {0: "done", 75: "asked to stop"}.get(life.code, f"exit code {life.code}")
    said = escape(f"{words}: {life.why}" if life.why else words)
    return said if life.code in (0, 75) else f'<span class="error">{said}</span>'


def _bad_steps(facts: Facts) -> str:
    skipped = facts.last("skipped") or 0
    if not skipped and not facts.rollbacks:
        return ""
    told = f"<p>{skipped:,.0f} updates left out of those that count.</p>"
    rows = []
    for row in facts.rollbacks:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"]))
        back = (
            f"back to step {row['to']:,}, {row['rows']:,} rows passed over" if row["rows"] > 0 else "stopped"
        )
        rows.append([when, f"step {row['step']:,}", back])
    if rows:
        told += f'<div class="wide">{table(["when", "at", "what was done"], rows)}</div>'
    if facts.reports:
        told += f"<p>Their documents: {escape(', '.join(facts.reports[-5:]))}</p>"
    return section("Bad steps", told)


def _warnings(facts: Facts) -> str:
    if not facts.warnings:
        return ""
    rows = [
        [escape(one.when), f'<span class="{one.level}">{escape(one.said)}</span>']
        for one in reversed(facts.warnings[-WARNINGS:])
    ]
    more = f", the newest {WARNINGS}" if len(facts.warnings) > WARNINGS else ""
    title = f"Warnings and errors ({len(facts.warnings):,}{more})"
    return section(title, f'<div class="wide">{table(["when", "what"], rows)}</div>')


def _samples(facts: Facts) -> str:
    if not facts.samples:
        how = f"<code>headrace report {escape(facts.run)} --samples 3</code>"
        return section("Samples", f"<p>None yet; {how} writes some with the newest checkpoint.</p>")
    step = facts.samples[-1]["step"]
    newest = [one for one in facts.samples if one["step"] == step]
    shown = "".join(f'<pre class="sample">{escape(one["text"])}</pre>' for one in newest)
    return section(f"Samples, of step {step:,}", shown)


def _recipe(facts: Facts) -> str:
    if not facts.recipe:
        return ""
    return section(
        "Recipe", f"<details><summary>all of it</summary><pre>{escape(facts.recipe)}</pre></details>"
    )
