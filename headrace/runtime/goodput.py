"""Goodput: the share of a run's time in which it got further, over all its lives, and what the rest went to.

Categories are those of Google's ml-goodput-measurement, which needs its cloud. RUN/goodput.jsonl has a line
for each logged row, with the seconds since the line before it, and one for each beginning and end of a
process. A kill loses what came after the last line, and nothing is ever rewritten. What was wasted follows
from reading: a life that begins at step 600 makes waste of all steps beyond it. Needs no JAX."""

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

from headrace.storage import redact

PRODUCTIVE = "productive"
# What the rest goes to, in words.
LOST = {
    "initialization": "finding devices and hosts",
    "preparation": "opening data, making the model",
    "compilation": "compiling",
    "data_loading": "waiting for data",
    "checkpoint_save": "saving checkpoints",
    "checkpoint_restore": "restoring checkpoints",
    "evaluation": "evaluating",
    "wasted_progress": "steps that were lost or left out",
    "restart": "between the end of a process and the next",
    "other": "anything else",
}
WHOLE = ("begin", "step", "saved", "back", "exit", "end", "devices", "hosts", "pid")  # what lines count
LARGEST = 1e15  # seconds or steps: more is no number of ours
OVER = (0, 1, 2, 3, 130)  # exit codes after which nobody waits for the run to be there again


@dataclass
class Attempt:
    """One process of a run."""

    started_at: float  # seconds since 1970, as all times here
    step: int
    devices: int = 0
    kind: str = ""
    hosts: int = 1
    host: str = ""
    pid: int = 0
    ended_at: float = 0.0  # when it was last heard of
    last: int = 0  # step
    code: int | None = None
    why: str = ""

    @property
    def over(self) -> bool:
        """Whether nobody waited for the next: it was done, failed by itself, or somebody stopped it."""
        return self.code in OVER or self.why == "SIGINT"


@dataclass
class GoodputTotals:
    """What the lines say, one after the other."""

    seconds: dict[str, float] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    lost_steps: int = 0
    last_saved: int = 0  # the newest checkpoint that there ever was
    kept: list[tuple[int, int, float]] = field(
        default_factory=list
    )  # first, last step and productive seconds

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        return self.seconds.get(PRODUCTIVE, 0.0) / self.total if self.total else 0.0

    def lost(self) -> dict[str, float]:
        """Seconds by category, the largest first."""
        found = {name: self.seconds.get(name, 0.0) for name in LOST}
        return dict(sorted(((n, s) for n, s in found.items() if s > 0), key=lambda pair: -pair[1]))

    def add(self, line: dict[str, Any]) -> None:
        spent = line.get("seconds", {})
        if "begin" in line:
            self._begin(line)
        if not self.attempts:
            return  # of a file whose beginning is gone
        life = self.attempts[-1]
        for name, seconds in spent.items():
            self._count(name, seconds)
        if "step" in line:
            self.kept.append((life.last, line["step"], spent.get(PRODUCTIVE, 0.0)))
            life.last = line["step"]
        self.last_saved = max(self.last_saved, line.get("saved", 0), line.get("begin", 0))
        if "back" in line:
            self._back(line["back"])
        if "exit" in line:
            if life.code is None:  # it died without a word, and had worked until then
                self._count("wasted_progress", max(line["time"] - life.ended_at, 0.0))
            life.code, life.why = line["exit"], life.why or line.get("why", "")
        if "end" in line:
            life.code, life.why = line["end"], line.get("why", "")
        life.ended_at = max(line["time"], life.ended_at)

    def _begin(self, line: dict[str, Any]) -> None:
        begun = line["time"] - sum(line.get("seconds", {}).values())
        if self.attempts and not self.attempts[-1].over:
            self._count("restart", max(begun - self.attempts[-1].ended_at, 0.0))
        known = {name: line[name] for name in ("devices", "kind", "hosts", "host", "pid") if name in line}
        self.attempts.append(Attempt(begun, line["begin"], last=line["begin"], **known))
        self._back(line["begin"])

    def _back(self, step: int) -> None:
        """All that was done beyond a step is wasted."""
        reached = max((last for _, last, _ in self.kept), default=step)
        self.lost_steps += max(reached - step, 0)
        while self.kept and self.kept[-1][1] > step:
            first, last, seconds = self.kept.pop()
            rest = seconds * max(step - first, 0) / max(last - first, 1)
            self._count(PRODUCTIVE, rest - seconds)
            self._count("wasted_progress", seconds - rest)
            if step > first:
                self.kept.append((first, step, rest))
                break
        self.attempts[-1].last = step

    def _count(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def read(path: Path) -> GoodputTotals:
    account = GoodputTotals()
    for line in _lines(path):
        account.add(line)
    return account


class GoodputClock:
    """The clock of a process. At any time it counts for one category, so that nothing is counted twice or not
    at all. Without a path (other hosts, a folder at a URL) nothing is written."""

    def __init__(
        self,
        path: Path | None,
        *,
        started_at: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.path, self.clock, self.wall = path, clock, wall
        self.totals = read(path) if path is not None else GoodputTotals()
        self.since = clock() if started_at is None else started_at
        self._category = "initialization"
        self.spent: dict[str, float] = {}
        self.moved: dict[str, float] = {}
        self.pending = "\n" if path is not None and _torn(path) else ""
        self.has_begun, self.end_reason = False, ""  # why it ends, if that is known
        self.done = self.skipped = 0

    def enter(self, category: str) -> None:
        now = self.clock()
        self.spent[self._category] = self.spent.get(self._category, 0.0) + now - self.since
        self.since, self._category = now, category

    @contextlib.contextmanager
    def category(self, category: str) -> Iterator[None]:
        before = self._category
        self.enter(category)
        try:
            yield
        finally:
            self.enter(before)

    def reclassify(self, category: str, seconds: float) -> None:
        """So much of what counts as productive was not."""
        self.moved[category] = self.moved.get(category, 0.0) + seconds

    def begin(self, step: int, *, devices: int, kind: str, hosts: int) -> None:
        """The process is about to train from a step on."""
        where = {"host": socket.gethostname(), "pid": os.getpid()}
        self._put({"begin": step, "devices": devices, "kind": kind, "hosts": hosts} | where)
        self.has_begun = True

    def train(self, step: int, skipped: int = 0) -> None:
        """Time is productive from here on. So many updates of the run left the weights as they were."""
        self.enter(PRODUCTIVE)
        self.done, self.skipped = step, skipped

    def step(self, step: int, skipped: int = 0, saved: int = 0) -> None:
        """All steps up to this one are done, and up to `saved` they are kept; time of those that left the
        weights as they were is wasted."""
        self.enter(self._category)
        share = (skipped - self.skipped) / max(step - self.done, 1)
        self.reclassify("wasted_progress", self.spent.get(PRODUCTIVE, 0.0) * min(max(share, 0.0), 1.0))
        self.done, self.skipped = step, skipped
        self._put({"step": step} | ({"saved": saved} if saved else {}))

    def rewind(self, step: int) -> None:
        """The run gives up what came after a step, and what is not on record yet."""
        self.enter("other")
        self.reclassify("wasted_progress", self.spent.get(PRODUCTIVE, 0.0))
        self._put({"back": step})

    def end(self, code: int, saved: int = 0) -> None:
        """The process is about to end."""
        if self.has_begun:
            known = {"why": redact.redact(self.end_reason)} if self.end_reason else {}
            self._put({"end": code} | known | ({"saved": saved} if saved else {}))
        self.has_begun = False

    def metrics(self) -> dict[str, float]:
        """For a row of metrics: the share, and seconds of what else there was."""
        lost = {f"badput/{name}": round(seconds, 3) for name, seconds in self.totals.lost().items()}
        return {"goodput": self.totals.share} | lost

    def __enter__(self) -> "GoodputClock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.end_reason = " ".join(f"{kind.__name__}: {error}".split())[:300]
        self.end(getattr(error, "code", 1))

    def _put(self, said: dict[str, Any]) -> None:
        self.enter(self._category)
        productive = self.spent.get(PRODUCTIVE, 0.0)
        for name, seconds in self.moved.items():
            seconds = min(seconds, productive)
            productive -= seconds
            self.spent[name] = self.spent.get(name, 0.0) + seconds
        if PRODUCTIVE in self.spent:
            self.spent[PRODUCTIVE] = productive
        spent = {name: round(seconds, 6) for name, seconds in self.spent.items() if seconds > 0}
        line = {"time": round(self.wall(), 3)} | said | ({"seconds": spent} if spent else {})
        self.spent, self.moved = {}, {}
        self.totals.add(line)
        if self.path is None:
            return
        self.pending += json.dumps(line) + "\n"
        with (
            contextlib.suppress(OSError),
            self.path.open("a", encoding="utf-8") as file,
        ):  # a full disk: next time
            file.write(self.pending)
            self.pending = ""


class DataWait:
    """How long the devices had nothing to do because a batch was late. `watch` is called while one waits for
    it: as long as `step_output`, what the last step gives, is not there, nothing is lost."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock, self.step_output, self.since = clock, None, None

    step_output: Any
    since: float | None

    def watch(self) -> None:
        if self.since is None and (self.step_output is None or self.step_output.is_ready()):
            self.since = self.clock()

    def finish(self) -> float:
        """The batch is there: the seconds that were lost."""
        since, self.since = self.since, None
        return 0.0 if since is None else self.clock() - since


def summary_line(account: GoodputTotals) -> str:
    """`goodput 91.2 % of 3.4 h; 4.1 % compiling, 2.0 % ...`"""
    minutes = account.total / 60
    length = f"{minutes:,.1f} minutes" if minutes < 120 else f"{minutes / 60:,.1f} hours"
    lost = (
        {name: seconds / account.total for name, seconds in account.lost().items()} if account.total else {}
    )
    parts = [f"{100 * share:.1f} % {LOST[name]}" for name, share in lost.items() if share >= 0.001]
    return f"goodput {100 * account.share:.1f} % of {length}" + (f"; {', '.join(parts)}" if parts else "")


def note_exit(run: str, pid: int, code: int, why: str) -> None:
    """For who watches a process: how it ended, if it was the one that keeps the account."""
    path = Path(run) / "goodput.jsonl"
    if "://" in run or not path.is_file():
        return
    with contextlib.suppress(OSError):
        last = [{}, *(line for line in _lines(path) if "begin" in line)][-1]
        if (last.get("pid"), last.get("host")) == (pid, socket.gethostname()):
            line = json.dumps({"time": round(time.time(), 3), "exit": code, "why": why})
            with path.open("a", encoding="utf-8") as file:
                file.write(("\n" if _torn(path) else "") + line + "\n")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Those that are whole."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict) and _sound(line):
                    yield line


def _sound(line: dict[str, Any]) -> bool:
    """Whether a line can be of ours: a disk that fails, or somebody else, may have written anything."""
    spent = line.get("seconds", {})
    numbers = [line.get("time"), *(spent.values() if isinstance(spent, dict) else [None])]
    whole = [line[name] for name in WHOLE if name in line]
    texts = [line[name] for name in ("kind", "host", "why") if name in line]
    return (
        all(type(value) in (int, float) and abs(value) < LARGEST for value in numbers)
        and all(type(value) is int and abs(value) < LARGEST for value in whole)
        and all(isinstance(value, str) for value in texts)
    )


def _torn(path: Path) -> bool:
    """Whether the last line was cut off."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
