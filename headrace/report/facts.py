"""Facts about a run from the files of its folder, also while it is in progress. Does not need JAX."""

import contextlib
import json
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.checkpoint import inventory
from headrace.config import run_length
from headrace.config.recipe import load_run
from headrace.config.sections import TrainRecipe
from headrace.errors import ExitCode, UserError
from headrace.hardware import chips
from headrace.hardware.chips import Range
from headrace.runtime import goodput
from headrace.runtime.goodput import Attempt, GoodputTotals
from headrace.storage import files
from headrace.trackers.terminal import Row, format_duration

MAX_SILENCE = 300.0  # seconds without output after which a run is assumed to hang or to be dead


@dataclass(frozen=True)
class Status:
    """State of a run in a word and in a sentence."""

    color_class: Literal["good", "bad", "still"]  # in the page's style
    word: str
    text: str


@dataclass(frozen=True)
class LoggedWarning:
    logged_at: str
    level: Literal["warning", "error"]
    message: str


@dataclass(frozen=True)
class Cost:
    """Dollars, low and high, of the chips while a process trained. None: not known."""

    chips: int
    chip: str
    on_demand: Range | None
    spot: Range | None


@dataclass(frozen=True)
class Facts:
    run: str  # folder or URL
    now: float
    recipe: TrainRecipe | None  # None if this version cannot read it
    recipe_text: str
    steps: int | None  # of the whole run
    rows: list[Row]
    evaluations: list[Row]
    totals: GoodputTotals
    rollbacks: list[Row]
    bad_step_reports: list[str]  # paths
    warnings: list[LoggedWarning]
    checkpoints: list[int]  # steps of intact ones
    samples: list[Row]

    @property
    def step(self) -> int:
        return self.rows[-1]["step"] if self.rows else 0

    def latest(self, name: str) -> float | None:
        """Return the newest value of a metric."""
        return next((row[name] for row in reversed(self.rows) if row.get(name) is not None), None)


FILES = ("metrics.jsonl", "recipe.yaml", "goodput.jsonl", "log.txt", "samples.jsonl")


def read_facts(run: str, now: float | None = None) -> Facts:
    """Read the facts of a run folder on a disk or at a URL. `now` defaults to the current time."""
    reports = [f"bad-steps/{name}" for name in files.list_names(files.join(run, "bad-steps"))]
    with files.local_copy(run, [*FILES, *reports]) as folder:
        return _read_folder(run, folder, time.time() if now is None else now)


def _read_folder(run: str, folder: Path, now: float) -> Facts:
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"{run}: found no metrics.jsonl in it, expected a run folder")
    recipe: TrainRecipe | None = None
    with contextlib.suppress(UserError):  # it may be of another version
        recipe = load_run(folder)
    rows = [row for row in _read_jsonl(folder / "metrics.jsonl") if type(row.get("step")) is int]
    reports = sorted((folder / "bad-steps").glob("*.txt"))
    return Facts(
        run=run,
        now=now,
        recipe=recipe,
        recipe_text=_read_text(folder / "recipe.yaml"),
        steps=run_length.durations(recipe)["steps"] if recipe is not None else None,
        rows=[row for row in rows if "loss" in row],
        evaluations=[row for row in rows if "evaluate/loss" in row],
        totals=goodput.read_totals(folder / "goodput.jsonl"),
        rollbacks=list(_read_jsonl(folder / "bad-steps" / "rollbacks.jsonl")),
        bad_step_reports=[files.join(run, "bad-steps", path.name) for path in reports],
        warnings=list(_parse_warnings(_read_text(folder / "log.txt"))),
        checkpoints=[step.step for step in inventory.list_steps(run) if step.problem is None],
        samples=[row for row in _read_jsonl(folder / "samples.jsonl") if "step" in row],
    )


def assess_status(facts: Facts) -> Status:
    """Decide whether a run is done, running, silent, stopped or failed."""
    attempt = facts.totals.attempts[-1] if facts.totals.attempts else None
    is_complete = facts.steps is not None and facts.step >= facts.steps
    if is_complete and (attempt is None or attempt.exit_code in (ExitCode.DONE, None)):
        return Status("good", "done", f"All {facts.steps:,} steps are done.")
    progress = _format_step(facts, facts.step)
    if attempt is None:
        return Status("still", "unknown", f"It is at {progress}; there is no goodput.jsonl.")
    if attempt.exit_code is None:
        return _running_status(facts, attempt)
    if attempt.exit_code == ExitCode.DONE:
        return Status("good", "done", f"It ended at {progress}.")
    ago = format_duration(max(facts.now - attempt.ended_at, 0))
    if attempt.exit_code == ExitCode.PREEMPTED:
        causes = {"SIGINT": " by Ctrl-C", "SIGTERM": " by SIGTERM, as when a machine is preempted"}
        # The newest checkpoint may be between two rows.
        progress = _format_step(facts, max(facts.checkpoints, default=facts.step))
        stopped = f"Stopped at {progress}{causes.get(attempt.reason, '')}, {ago} ago"
        return Status("still", "stopped", f"{stopped}; the same command resumes from there.")
    reason = f" ({attempt.reason})" if attempt.reason else ""
    return Status(
        "bad", "failed", f"Ended at {progress} with exit code {attempt.exit_code}{reason}, {ago} ago."
    )


def _running_status(facts: Facts, attempt: Attempt) -> Status:
    """Return the status of a run whose process has not ended, by the time since its last output."""
    progress, silence = _format_step(facts, facts.step), facts.now - attempt.ended_at
    ago = format_duration(max(silence, 0))
    if silence > max(MAX_SILENCE, 20 * _seconds_between_rows(facts)):
        return Status("bad", "silent", f"At {progress}, no output for {ago}: it hangs, or was killed.")
    remaining = facts.latest("eta_seconds")
    until = ""
    if remaining is not None:
        ends_at = time.strftime("%a %d %b, %H:%M", time.localtime(attempt.ended_at + remaining))
        until = f", done in about {format_duration(remaining)} ({ends_at})"
    return Status("good", "running", f"At {progress}{until}; last output {ago} ago.")


def _format_step(facts: Facts, step: int) -> str:
    return f"step {step:,}" + (f" of {facts.steps:,}" if facts.steps else "")


def _seconds_between_rows(facts: Facts) -> float:
    seconds = [row["step_seconds"] for row in facts.rows[-50:] if row.get("step_seconds")]
    steps = facts.recipe.log.every if facts.recipe is not None else 10
    return steps * statistics.median(seconds) if seconds else 0.0


def compute_cost(facts: Facts, *, include_remaining: bool = False) -> Cost | None:
    """Return the cost so far, or until the end of the run. None if no price is known, as for a CPU."""
    if not facts.totals.attempts:
        return None
    attempt = facts.totals.attempts[-1]
    chip = chips.find_chip(attempt.kind)
    price = chips.PRICES.get(chip.name) if chip is not None else None
    if chip is None or price is None:
        return None
    seconds = facts.totals.total - facts.totals.seconds.get("restart", 0.0)
    seconds += (facts.latest("eta_seconds") or 0.0) if include_remaining else 0.0
    count = max(attempt.devices // chip.devices, 1)
    chip_hours = seconds / 3600 * count
    return Cost(count, chip.name, _multiply(price.on_demand, chip_hours), _multiply(price.spot, chip_hours))


def _multiply(price: Range | None, chip_hours: float) -> Range | None:
    return None if price is None else (price[0] * chip_hours, price[1] * chip_hours)


def _parse_warnings(log: str) -> Iterator[LoggedWarning]:
    for line in log.splitlines():
        if match := re.match(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)  (warning|error): (.*)", line):
            yield LoggedWarning(match[1], "error" if match[2] == "error" else "warning", match[3])


def _read_jsonl(path: Path) -> Iterator[Row]:
    """Iterate over complete rows: the run may be writing the last one."""
    for line in _read_text(path).splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                yield row


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
