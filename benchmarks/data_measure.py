"""Measurements for benchmarks.data: wall and CPU time of a piece of work with all its processes, peers in
interpreters of their own, and the lines of the table. Linux only: it reads /proc."""

import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PEERS = Path(__file__).parent / "data_peers"
ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Cost:
    wall: float
    cpu: float


@dataclass(frozen=True)
class Line:
    """One line of the table. If it has a `target`, that is met or missed."""

    item: str
    what: str
    ours: str
    peer: str = ""
    ratio: float | None = None  # by CPU time, if that was measured
    ratio_wall: float | None = None
    target: str = ""
    met: bool | None = None
    note: str = ""


@dataclass
class Rate:
    """Work per second, by CPU time and by wall time, over several rounds, of which the median counts."""

    unit: str
    amounts: list[float] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)

    def add(self, amount: float, cost: Cost) -> None:
        self.amounts.append(amount)
        self.costs.append(cost)

    @property
    def wall(self) -> float:
        return statistics.median(a / cost.wall for a, cost in zip(self.amounts, self.costs, strict=True))

    @property
    def core(self) -> float:
        # A round may be too short for the clock of other processes, which ticks every 10 ms.
        return statistics.median(
            a / max(cost.cpu, 1 / TICKS) for a, cost in zip(self.amounts, self.costs, strict=True)
        )

    def __str__(self) -> str:
        return f"{number(self.core)} per core, {number(self.wall)} {self.unit}"


def compare(item: str, what: str, ours: Rate, peer: Rate, *, least: float = 0.0, note: str = "") -> Line:
    """`least` is the required ratio. It is checked by CPU time, because the machine may have other work."""
    assert ours.unit == peer.unit
    ratio = ours.core / peer.core
    target, met = (f"≥ {least:g}x", ratio >= least) if least else ("", None)
    return Line(item, what, str(ours), str(peer), ratio, ours.wall / peer.wall, target, met, note)


def demand(item: str, what: str, found: float, limit: float, *, unit: str = "", most: bool = False) -> Line:
    """A figure that must reach a limit or, with `most`, stay below it."""
    sign, met = ("<", found < limit) if most else ("≥", found >= limit)
    shown = f"{found:.4%}" if unit == "%" else f"{number(found)} {unit}".strip()
    wanted = f"{limit:.2%}" if unit == "%" else f"{limit:g} {unit}".strip()
    return Line(item, what, shown, target=f"{sign} {wanted}", met=met)


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def adopt_orphans() -> None:
    """Make processes whose parent ends children of this one, so that their CPU time is not lost."""
    ctypes.CDLL(None, use_errno=True).prctl(ADOPT_ORPHANS, 1, 0, 0, 0)


def measured(work: Callable[[], Any]) -> tuple[Any, Cost]:
    """The result of the work, and its cost in this process and all processes under it."""
    wall, cpu = time.perf_counter(), spent()
    result = work()
    return result, Cost(time.perf_counter() - wall, spent() - cpu)


def spent() -> float:
    """CPU seconds of this process and all its descendants, finished ones included."""
    ended = os.times()
    seconds = time.process_time() + ended.children_user + ended.children_system
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            # After the name, which may contain blanks. Four of the others are times: its own, its children's.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            seconds += sum(map(int, fields[11:15])) / TICKS
    return seconds


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def children() -> set[int]:
    """The children of this process, including adopted ones."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}


def wait_for_orphans(before: set[int]) -> None:
    """Wait until no process of a finished command is left except the children that were there before it. A
    server of processes takes a moment to notice that it is alone."""
    for pid in children() - before:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


class Peak(threading.Thread):
    """The largest memory of a process and all its descendants, sampled 20 times per second. Pages are counted
    for each process that has them in memory (RSS), or once for all (PSS)."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.rss, self.pss, self.ended = pid, 0, 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.05):
            rss = pss = 0
            for pid in [self.pid, *descendants(self.pid)]:
                with contextlib.suppress(OSError):
                    rss += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
                    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                    pss += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10
            self.rss, self.pss = max(self.rss, rss), max(self.pss, pss)


class Missing(Exception):
    """A peer that is not installed, or that failed."""


class Peer:
    """A command in a process of its own. It gets ready, then does a round of work for each line of JSON it
    receives, and answers with one. Only the rounds are measured."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> None:
        self.name = name
        self.said = tempfile.TemporaryFile()  # noqa: SIM115  peers log one line per file
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
            text=True,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"} | (environment or {}),
        )
        try:
            self.answer()
        except Missing:
            self.close()
            raise

    @classmethod
    def script(cls, name: str, python: str, environment: dict[str, str] | None = None) -> "Peer":
        """A peer in data_peers/."""
        return cls(name, [python, str(PEERS / f"{name}.py")], environment)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):  # libraries print things too
                answer = json.loads(line.removeprefix("ANSWER "))
                if "missing" in answer:
                    raise Missing(f"{self.name}: {answer['missing']}")
                return answer
        code = self.process.wait()
        self.said.seek(0)
        last = self.said.read().decode(errors="replace").strip().rpartition("\n")[2]
        raise Missing(f"{self.name} exited with code {code}: {last}")

    def ask(self, **options: Any) -> tuple[dict[str, Any], Cost]:
        def work() -> dict[str, Any]:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(options) + "\n")
            self.process.stdin.flush()
            return self.answer()

        return measured(work)

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.process.kill()
        self.process.wait()
