"""Goodput: the share of a run's time that made progress, over all its attempts, and what the rest was spent
on.

The categories are those of Google's ml-goodput-measurement, which needs its cloud. RUN/goodput.jsonl has a
line for each logged row, with the seconds since the line before it, and one for each start and end of a
process. A kill loses the time after the last line, and no line is ever rewritten. Wasted time follows from
reading: an attempt that starts at step 600 makes waste of all steps beyond it. Needs no JAX."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from headrace.errors import ExitCode
from headrace.storage import redact

Line = dict[str, Any]  # of goodput.jsonl: JSON values

PRODUCTIVE = "productive"
# The other categories, with descriptions for the user.
BADPUT = {
    "initialization": "finding devices and hosts",
    "preparation": "opening data, making the model",
    "compilation": "compiling",
    "data_loading": "waiting for data",
    "checkpoint_save": "saving checkpoints",
    "checkpoint_restore": "restoring checkpoints",
    "evaluation": "evaluating",
    "wasted_progress": "steps that were lost or skipped",
    "restart": "between the end of a process and the next",
    "other": "anything else",
}

# Keys of the lines, by the type of their values.
INT_KEYS = ("begin", "step", "saved", "back", "exit", "end", "devices", "hosts", "pid")
TEXT_KEYS = ("kind", "host", "why")
MAX_VALUE = 1e15  # seconds or steps; a line with more is damaged

# Exit codes after which a run is not restarted: time until its next attempt is not lost.
FINAL_EXIT_CODES = (
    ExitCode.DONE,
    ExitCode.FAILED,
    ExitCode.USER_ERROR,
    ExitCode.DOES_NOT_FIT,
    ExitCode.INTERRUPTED,
)


@dataclass
class Attempt:
    """One process of a run."""

    started_at: float  # seconds since 1970, as all times here
    first_step: int  # it resumed from this step
    last_step: int  # it reached this step
    devices: int = 0
    kind: str = ""  # of the devices
    hosts: int = 1
    host: str = ""  # name of the first host
    pid: int = 0  # of the process there
    ended_at: float = 0.0  # time of its last line
    exit_code: int | None = None
    reason: str = ""  # why it ended

    @property
    def is_final(self) -> bool:
        """Whether no restart was due: the run was done, had failed, or was stopped by the user."""
        return self.exit_code in FINAL_EXIT_CODES or self.reason == "SIGINT"


@dataclass
class ProductiveSpan:
    """Productive time between two lines of an attempt."""

    first_step: int
    last_step: int
    seconds: float


@dataclass
class GoodputTotals:
    """The sums over the lines of goodput.jsonl."""

    seconds: dict[str, float] = field(default_factory=dict)  # by category
    attempts: list[Attempt] = field(default_factory=list)
    lost_steps: int = 0  # steps that were done, and then done again
    last_saved: int = 0  # the newest checkpoint step there has been
    spans: list[ProductiveSpan] = field(default_factory=list)  # in order, of steps that are not lost

    @property
    def total(self) -> float:
        """Seconds of all categories."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """The goodput: productive seconds as a share of all."""
        return self.seconds.get(PRODUCTIVE, 0.0) / self.total if self.total else 0.0

    def badput(self) -> dict[str, float]:
        """Seconds of the other categories, the largest first."""
        seconds = {name: self.seconds.get(name, 0.0) for name in BADPUT}
        return dict(sorted(((n, s) for n, s in seconds.items() if s > 0), key=lambda pair: -pair[1]))

    def add(self, line: Line) -> None:
        """Add a line."""
        seconds = line.get("seconds", {})
        if "begin" in line:
            self._begin_attempt(line)
        if not self.attempts:
            return  # the beginning of the file is missing
        attempt = self.attempts[-1]
        for category, value in seconds.items():
            self._add_seconds(category, value)
        if "step" in line:
            self.spans.append(ProductiveSpan(attempt.last_step, line["step"], seconds.get(PRODUCTIVE, 0.0)))
            attempt.last_step = line["step"]
        self.last_saved = max(self.last_saved, line.get("saved", 0), line.get("begin", 0))
        if "back" in line:
            self._discard_progress(line["back"])
        if "exit" in line:
            if attempt.exit_code is None:  # it was killed, and had worked since its last line
                self._add_seconds("wasted_progress", max(line["time"] - attempt.ended_at, 0.0))
            attempt.exit_code, attempt.reason = line["exit"], attempt.reason or line.get("why", "")
        if "end" in line:
            attempt.exit_code, attempt.reason = line["end"], line.get("why", "")
        attempt.ended_at = max(line["time"], attempt.ended_at)

    def _begin_attempt(self, line: Line) -> None:
        started_at = line["time"] - sum(line.get("seconds", {}).values())
        if self.attempts and not self.attempts[-1].is_final:
            self._add_seconds("restart", max(started_at - self.attempts[-1].ended_at, 0.0))
        about = {name: line[name] for name in ("devices", "kind", "hosts", "host", "pid") if name in line}
        self.attempts.append(Attempt(started_at, line["begin"], line["begin"], **about))
        self._discard_progress(line["begin"])

    def _discard_progress(self, step: int) -> None:
        """Move productive time beyond `step`, from which the run resumes, to wasted time."""
        reached = max((span.last_step for span in self.spans), default=step)
        self.lost_steps += max(reached - step, 0)
        while self.spans and self.spans[-1].last_step > step:
            span = self.spans.pop()
            steps_left = max(step - span.first_step, 0)
            seconds_left = span.seconds * steps_left / max(span.last_step - span.first_step, 1)
            self._add_seconds(PRODUCTIVE, seconds_left - span.seconds)
            self._add_seconds("wasted_progress", span.seconds - seconds_left)
            if step > span.first_step:
                self.spans.append(ProductiveSpan(span.first_step, step, seconds_left))
                break
        self.attempts[-1].last_step = step

    def _add_seconds(self, category: str, seconds: float) -> None:
        self.seconds[category] = self.seconds.get(category, 0.0) + seconds


def read_totals(path: Path) -> GoodputTotals:
    """Sum up a goodput.jsonl. Damaged lines are skipped."""
    totals = GoodputTotals()
    for line in _read_lines(path):
        totals.add(line)
    return totals


class GoodputClock:
    """Counts the time of a process by category. At any time one category counts, so that no second is counted
    twice or not at all."""

    def __init__(
        self,
        path: Path | None,
        *,
        started_at: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Continue the goodput.jsonl at `path`. With None, as on all hosts but the first, nothing is
        written."""
        self.path, self.clock, self.wall_clock = path, clock, wall_clock
        self.totals = read_totals(path) if path is not None else GoodputTotals()
        self.has_begun = False  # whether the attempt has a first line
        self.end_reason = ""  # why the process ends, if that is known
        self._counted_until = clock() if started_at is None else started_at
        self._category = "initialization"
        self._seconds: dict[str, float] = {}  # since the last line, by category
        self._reclassified: dict[str, float] = {}  # of productive seconds since the last line
        self._unwritten = "\n" if path is not None and _is_torn(path) else ""
        self._step = self._skipped = 0  # at the last line

    def enter(self, category: str) -> None:
        """Count the time from now on for a category."""
        now = self.clock()
        self._seconds[self._category] = self._seconds.get(self._category, 0.0) + now - self._counted_until
        self._counted_until, self._category = now, category

    @contextlib.contextmanager
    def category(self, category: str) -> Iterator[None]:
        """Count the time inside for a category."""
        previous = self._category
        self.enter(category)
        try:
            yield
        finally:
            self.enter(previous)

    def reclassify(self, category: str, seconds: float) -> None:
        """Move productive seconds to another category."""
        self._reclassified[category] = self._reclassified.get(category, 0.0) + seconds

    def begin(self, step: int, *, devices: int, kind: str, hosts: int) -> None:
        """Record that the process is about to train from `step` on, on devices of this kind."""
        process = {"host": socket.gethostname(), "pid": os.getpid()}
        self._write({"begin": step, "devices": devices, "kind": kind, "hosts": hosts} | process)
        self.has_begun = True

    def train(self, step: int, skipped: int = 0) -> None:
        """Count time as productive from here on. The run is at `step`, and has skipped that many updates."""
        self.enter(PRODUCTIVE)
        self._step, self._skipped = step, skipped

    def record_progress(self, step: int, skipped: int = 0, saved: int = 0) -> None:
        """Record that the run is at `step`, and that its newest checkpoint is at `saved`.

        The time of skipped updates is wasted. `skipped` counts those of the whole run."""
        self.enter(self._category)
        share = (skipped - self._skipped) / max(step - self._step, 1)
        wasted = self._seconds.get(PRODUCTIVE, 0.0) * min(max(share, 0.0), 1.0)
        self.reclassify("wasted_progress", wasted)
        self._step, self._skipped = step, skipped
        self._write({"step": step} | ({"saved": saved} if saved else {}))

    def rewind(self, step: int) -> None:
        """Record that the run rolls back to `step`. Steps after it are wasted, also those not recorded
        yet."""
        self.enter("other")
        self.reclassify("wasted_progress", self._seconds.get(PRODUCTIVE, 0.0))
        self._write({"back": step})

    def end(self, exit_code: int, saved: int = 0) -> None:
        """Record that the process is about to end, if it had begun to train."""
        if self.has_begun:
            reason = {"why": redact.redact(self.end_reason)} if self.end_reason else {}
            self._write({"end": int(exit_code)} | reason | ({"saved": saved} if saved else {}))
        self.has_begun = False

    def metrics(self) -> dict[str, float]:
        """The goodput, and the seconds of each other category, for a row of metrics."""
        seconds = {f"badput/{name}": round(value, 3) for name, value in self.totals.badput().items()}
        return {"goodput": self.totals.share} | seconds

    def __enter__(self) -> "GoodputClock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.end_reason = " ".join(f"{kind.__name__}: {error}".split())[:300]
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            self.end(error.code)
        else:
            self.end(ExitCode.FAILED)

    def _write(self, event: Line) -> None:
        """Append a line with an event and the seconds since the last line."""
        self.enter(self._category)
        self._apply_reclassified()
        seconds = {name: round(value, 6) for name, value in self._seconds.items() if value > 0}
        line = {"time": round(self.wall_clock(), 3)} | event | ({"seconds": seconds} if seconds else {})
        self._seconds = {}
        self.totals.add(line)
        if self.path is None:
            return
        self._unwritten += json.dumps(line) + "\n"
        # If the disk is full, the next line tries again.
        with contextlib.suppress(OSError), self.path.open("a", encoding="utf-8") as file:
            file.write(self._unwritten)
            self._unwritten = ""

    def _apply_reclassified(self) -> None:
        productive = self._seconds.get(PRODUCTIVE, 0.0)
        for category, seconds in self._reclassified.items():
            moved = min(seconds, productive)
            productive -= moved
            self._seconds[category] = self._seconds.get(category, 0.0) + moved
        if PRODUCTIVE in self._seconds:
            self._seconds[PRODUCTIVE] = productive
        self._reclassified = {}


class DataWait:
    """Measures how long the devices had nothing to do because a batch was late.

    While `step_output`, an output of the last step, is not computed yet, no time is lost."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.step_output: Any = None  # an array of JAX
        self.idle_since: float | None = None

    def watch(self) -> None:
        """Check whether the devices are idle. Called again and again while the batch is not there."""
        if self.idle_since is None and (self.step_output is None or self.step_output.is_ready()):
            self.idle_since = self.clock()

    def finish(self) -> float:
        """Return the seconds that were lost, now that the batch is there."""
        since, self.idle_since = self.idle_since, None
        return 0.0 if since is None else self.clock() - since


def summary_line(totals: GoodputTotals) -> str:
    """Format the totals for the log: `goodput 91.2 % of 3.4 hours; 4.1 % compiling, 2.0 % ...`"""
    minutes = totals.total / 60
    length = f"{minutes:,.1f} minutes" if minutes < 120 else f"{minutes / 60:,.1f} hours"
    shares = {name: seconds / totals.total for name, seconds in totals.badput().items() if totals.total}
    parts = [f"{100 * share:.1f} % {BADPUT[name]}" for name, share in shares.items() if share >= 0.001]
    return f"goodput {100 * totals.share:.1f} % of {length}" + (f"; {', '.join(parts)}" if parts else "")


def note_exit(run_dir: str, pid: int, exit_code: int, reason: str) -> None:
    """Record how a process ended, for the supervisor. Does nothing unless that process wrote the file."""
    path = Path(run_dir) / "goodput.jsonl"
    if "://" in run_dir or not path.is_file():
        return
    with contextlib.suppress(OSError):
        attempt = [{}, *(line for line in _read_lines(path) if "begin" in line)][-1]
        if (attempt.get("pid"), attempt.get("host")) == (pid, socket.gethostname()):
            line = json.dumps({"time": round(time.time(), 3), "exit": exit_code, "why": reason})
            with path.open("a", encoding="utf-8") as file:
                file.write(("\n" if _is_torn(path) else "") + line + "\n")


def _read_lines(path: Path) -> Iterator[Line]:
    """Yield the lines that are complete and plausible."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict) and _is_plausible(line):
                    yield line


def _is_plausible(line: Line) -> bool:
    """Whether the values have the types and sizes that this module writes. A failing disk, or another
    program, may have written anything."""
    seconds = line.get("seconds", {})
    times = [line.get("time"), *(seconds.values() if isinstance(seconds, dict) else [None])]
    integers = [line[name] for name in INT_KEYS if name in line]
    texts = [line[name] for name in TEXT_KEYS if name in line]
    return (
        all(type(value) in (int, float) and abs(value) < MAX_VALUE for value in times)
        and all(type(value) is int and abs(value) < MAX_VALUE for value in integers)
        and all(isinstance(value, str) for value in texts)
    )


def _is_torn(path: Path) -> bool:
    """Whether the last line was cut off."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
