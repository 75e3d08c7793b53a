"""What a run folder tells about its run, also while it goes on. Reads its files alone, and needs no JAX."""

import contextlib
import json
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.runtime import goodput
from headrace.config import run_length as lengths, recipe, sections
from headrace.checkpoint import inventory as saved
from headrace.storage import files as store
from headrace.errors import UserError
from headrace.runtime.goodput import Account
from headrace.hardware import chips
from headrace.trackers.terminal import duration

SILENT = 300.0  # seconds without a sign of life after which a run is taken to hang, or to be gone
Row = dict[str, Any]


@dataclass(frozen=True)
class Status:
    """How a run is, in a word, and in a sentence."""

    mood: Literal["good", "bad", "still"]
    word: str
    said: str


@dataclass(frozen=True)
class Warned:
    when: str
    level: Literal["warning", "error"]
    said: str


@dataclass(frozen=True)
class Cost:
    """Dollars, low and high; of chips that were held while a process trained."""

    chips: int
    chip: str
    on_demand: tuple[float, float] | None
    spot: tuple[float, float] | None


@dataclass(frozen=True)
class Facts:
    run: str
    now: float
    cfg: sections.Run | None
    recipe: str
    steps: int | None  # that are to be done
    rows: list[Row]
    evaluations: list[Row]
    account: Account
    rollbacks: list[Row]
    reports: list[str]  # of bad steps: where they lie
    warnings: list[Warned]
    checkpoints: list[int]
    samples: list[Row]

    @property
    def step(self) -> int:
        return self.rows[-1]["step"] if self.rows else 0

    def last(self, name: str) -> float | None:
        """The newest value of a metric."""
        return next((row[name] for row in reversed(self.rows) if row.get(name) is not None), None)


FILES = ("metrics.jsonl", "recipe.yaml", "goodput.jsonl", "log.txt", "samples.jsonl")


def read(run: str, now: float | None = None) -> Facts:
    """Of a run folder on a disk or at a URL."""
    reports = [f"bad-steps/{name}" for name in store.names(store.join(run, "bad-steps"))]
    with store.near(run, [*FILES, *reports]) as folder:
        return _read(run, folder, time.time() if now is None else now)


def _read(run: str, folder: Path, now: float) -> Facts:
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"{run}: found no metrics.jsonl in it, expected a run folder")
    cfg: sections.Run | None = None
    with contextlib.suppress(UserError):  # of another version, perhaps
        cfg = recipe.load_run(folder)
    every = [row for row in _json_lines(folder / "metrics.jsonl") if type(row.get("step")) is int]
    return Facts(
        run=run,
        now=now,
        cfg=cfg,
        recipe=_text(folder / "recipe.yaml"),
        steps=lengths.durations(cfg)["steps"] if cfg is not None else None,
        rows=[row for row in every if "loss" in row],
        evaluations=[row for row in every if "evaluate/loss" in row],
        account=goodput.read(folder / "goodput.jsonl"),
        rollbacks=list(_json_lines(folder / "bad-steps" / "rollbacks.jsonl")),
        reports=[
            store.join(run, "bad-steps", path.name) for path in sorted((folder / "bad-steps").glob("*.txt"))
        ],
        warnings=list(_warnings(_text(folder / "log.txt"))),
        checkpoints=[step.number for step in saved.steps(run) if step.problem is None],
        samples=[row for row in _json_lines(folder / "samples.jsonl") if "step" in row],
    )


def status(facts: Facts) -> Status:
    life = facts.account.lives[-1] if facts.account.lives else None
    done = facts.steps is not None and facts.step >= facts.steps
    at = lambda step: f"step {step:,}" + (f" of {facts.steps:,}" if facts.steps else "")
    far = at(facts.step)
    if done and (life is None or life.code in (0, None)):
        return Status("good", "done", f"All {facts.steps:,} steps are done.")
    if life is None:
        return Status("still", "unknown", f"It is at {far}; there is no account of its time.")
    ago = duration(max(facts.now - life.ended, 0))
    if life.code is None:
        if facts.now - life.ended > max(SILENT, 20 * _usual(facts)):
            return Status("bad", "silent", f"At {far}, nothing was heard for {ago}: it hangs, or is gone.")
        left = facts.last("eta_seconds")
        ends = time.strftime("%a %d %b, %H:%M", time.localtime(life.ended + left)) if left is not None else ""
        until = f", done in about {duration(left)} ({ends})" if left is not None else ""
        return Status("good", "running", f"At {far}{until}; last heard of {ago} ago.")
    if life.code == 0:
        return Status("good", "done", f"It ended at {far}.")
    if life.code == 75:
        why = {"SIGINT": "by a person", "SIGTERM": "by SIGTERM, as when a machine is taken away"}.get(
            life.why, ""
        )
        far = at(max(facts.checkpoints, default=facts.step))  # which may lie between two rows
        return Status(
            "still", "stopped", f"Stopped at {far} {why}, {ago} ago; the same command goes on from there."
        )
    why = f" ({life.why})" if life.why else ""
    return Status("bad", "failed", f"Ended at {far} with exit code {life.code}{why}, {ago} ago.")


def _usual(facts: Facts) -> float:
    """Seconds between two rows."""
    times = [row["step_seconds"] for row in facts.rows[-50:] if row.get("step_seconds")]
    every = facts.cfg.log.every if facts.cfg is not None else 10
    return every * statistics.median(times) if times else 0.0


def cost(facts: Facts, *, whole: bool = False) -> Cost | None:
    """So far, or with what is left; None where no price is known, as for a CPU."""
    if not facts.account.lives:
        return None
    life = facts.account.lives[-1]
    chip = chips.of_device(life.kind)
    price = chips.PRICES.get(chip.name) if chip is not None else None
    if chip is None or price is None:
        return None
    held = facts.account.total - facts.account.seconds.get("restart", 0.0)
    held += (facts.last("eta_seconds") or 0.0) if whole else 0.0
    count = max(life.devices // chip.devices, 1)
    hours = held / 3600 * count
    times = lambda ends: None if ends is None else (ends[0] * hours, ends[1] * hours)
    return Cost(count, chip.name, times(price.on_demand), times(price.spot))


def _warnings(log: str) -> Iterator[Warned]:
    for line in log.splitlines():
        if found := re.match(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)  (warning|error): (.*)", line):
            yield Warned(found[1], "error" if found[2] == "error" else "warning", found[3])


def _json_lines(path: Path) -> Iterator[Row]:
    """Those that are whole: the run may be writing."""
    for text in _text(path).splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(text)
            if isinstance(row, dict):
                yield row


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
