"""A job on the workers of a slice, from where it is launched: started, found running, followed, stopped.
It does not depend on the connection: one that breaks is made again, and goes on where it was."""

import contextlib
import hashlib
import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.tpu.worker import BROKEN, KILLED
from headrace.tpu.workers import ANSWER, CONNECT, UNREACHABLE, Failed, Workers, reached

# What runs on a worker is asked by what is installed there; where nothing is, nothing runs.
NEW = (
    'if [ ! -x "$HOME/.headrace/env/bin/python" ] || [ ! -d "$HOME/.headrace/tree" ]; '
    "then echo '{}'; exit; fi"
)
# Trainings of whatever user and name but this, by their command lines, which everybody may read: two cannot
# have one TPU.
OTHERS = r"""
paths="^(${{HEADRACE_TIMER_HOMES:-/home}}/[^/]+|/root)/\.headrace/jobs/[^/]+/recipe\.yaml$"
grep -hszoE "$paths" /proc/[0-9]*/cmdline | tr '\0' '\n' |
  grep -vxF "$HOME/.headrace/jobs/{name}/recipe.yaml" | sort -u | sed 's/^/elsewhere /'
"""
HERE = (
    'cd -P "$HOME/.headrace/tree" && '
    'PYTHONPATH="$PWD" exec "$HOME/.headrace/env/bin/python" -m headrace.tpu.worker'
)

# How a trainer ended, as it is written down; nothing where it is at work. Needs neither tree nor environment.
ENDED = """
job="$HOME/.headrace/jobs/{name}"
cat "$job/exit" && exit
pid=$(cat "$job/pid")
(cat "/proc/$pid/cmdline" || ps -ww -o args= -p "$pid") | grep -qaF "$job/recipe.yaml" || echo {killed}
"""


@dataclass(frozen=True)
class Begun:
    """What starting came to on one worker, and where in its log what is new begins."""

    how: str  # started, running (it did already) or other (another job does)
    offset: int


@dataclass(frozen=True)
class Job:
    """What is trained, and what its process may know that nobody else should."""

    name: str
    recipe: str  # with every key in it
    run: str  # its folder
    secrets: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def identity(self) -> str:
        return hashlib.sha256(self.recipe.encode()).hexdigest()[:16]

    def start(self, workers: Workers, patience: float) -> list[Begun]:
        given = "\0".join([*(f"{name}={value}" for name, value in self.secrets.items()), self.recipe])
        said = workers.each(f"{HERE} start {self.name} {self.identity}", given.encode(), patience)
        return [Begun(how, int(offset)) for how, offset in (text.split()[-2:] for text in said)]


def stop(workers: Workers, name: str, how: str = "save") -> None:
    """Asks all to save and end (or `kill`s them); those who cannot be reached are left out."""

    def one(worker: int) -> None:
        with contextlib.suppress(Failed):
            workers.one(worker, f"{HERE} stop {name} {how}", limit=ANSWER)

    threads = [threading.Thread(target=one, args=(worker,), daemon=True) for worker in range(len(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@dataclass(frozen=True)
class State:
    """Of a job on one worker."""

    identity: str = ""  # of the recipe; nothing where there never was one
    running: bool = False
    exit: int | None = None
    recent: int = 0  # where the last lines of its log begin
    last: str = ""  # and the last of them
    unknown: str = ""  # why nothing is known
    elsewhere: str = ""  # the recipe of another training on that machine

    @classmethod
    def read(cls, said: str) -> "State":
        lines = said.strip().splitlines()
        others = [line.partition(" ")[2] for line in lines if line.startswith("elsewhere ")]
        told, names = json.loads(lines[-1]), ("identity", "running", "exit", "recent", "last")
        return cls(elsewhere=", ".join(others), **{name: told[name] for name in names if told})


def ask(workers: Workers, name: str, patience: float) -> list[State]:
    """Of each worker; raises Failed where one cannot be asked."""
    return list(map(State.read, workers.each(asking(name), b"", patience, ANSWER)))


def announce(workers: Workers, name: str, patience: float) -> None:
    """The timer of the slice counts from when its last job ended: from now on it is about to have one."""
    place = f'"$HOME/.headrace/jobs/{name}"'
    workers.each(f"mkdir -p {place} && touch {place} && touch -c {place}/exit", b"", patience)


def asking(name: str) -> str:
    return f"{OTHERS.format(name=name)}{NEW}; {HERE} state {name}"


def states(workers: Workers, name: str) -> list[State]:
    """Of each worker, as far as it is known now."""

    def one(worker: int) -> State:
        try:
            return State.read(workers.one(worker, asking(name), limit=ANSWER))
        except Failed as why:
            return State(unknown=why.said or "cannot be reached")
        except (ValueError, KeyError, IndexError):
            return State(unknown="says what nobody understands")

    with ThreadPoolExecutor(min(64, len(workers))) as pool:
        return list(pool.map(one, range(len(workers))))


class Follower:
    """Reads what one worker says, in a thread of its own, and learns how it ends."""

    def __init__(
        self, workers: Workers, name: str, worker: int, *, offset: int, say: Callable[[int, str], None]
    ) -> None:
        self.workers, self.name, self.worker, self.say = workers, name, worker, say
        self.offset, self.code, self.ended = offset, None, threading.Event()
        self.process: Any = None
        self.broken = 0.0  # since when there is no connection, if there is none
        self.tried = 0.0  # when one was last asked for
        self.thread = threading.Thread(target=self.read, daemon=True)

    code: int | None

    def read(self) -> None:
        delay = 0.5
        while not self.ended.is_set():
            before = self.offset
            script = f"{HERE} follow {self.name} {before}"
            code, self.tried = UNREACHABLE, time.monotonic()
            with contextlib.suppress(Failed):  # no process could be started here
                self.process = process = self.workers.start(self.worker, script, stderr=subprocess.DEVNULL)
                assert process.stdin is not None
                process.stdin.close()
                code = self.believed(self.lines(process))
            if reached(code):
                self.code = code
                return
            self.broken = self.broken or time.monotonic()
            if self.offset > before:
                delay = 0.5
            if self.ended.wait(delay):
                return
            delay = min(2 * delay, 15)

    def lines(self, process: Any) -> int:
        for line in process.stdout:
            if not line.endswith(b"\n") and not reached(process.wait()):
                break  # the connection broke within it: it comes again as a whole
            self.broken = 0.0
            self.offset += len(line)
            self.say(self.worker, line.decode(errors="replace").rstrip())
        process.stdout.close()
        return process.wait()

    def believed(self, code: int) -> int:
        """The trainer's own exit code: who followed it may have ended alone, or never begun."""
        if code == 0 or not reached(code):
            return code
        script, said = ENDED.format(name=self.name, killed=KILLED), b""
        self.process = self.workers.start(self.worker, script, stderr=subprocess.DEVNULL)
        with self.process as process:
            try:
                said = process.communicate(timeout=ANSWER)[0].strip()
            except subprocess.TimeoutExpired:
                process.kill()
        return min(int(said), BROKEN - 1) if said.isdigit() else UNREACHABLE

    @property
    def unheard(self) -> float:
        """Seconds since its connection broke. One that is tried for longer than ssh would take is there, and
        who trains has nothing to say."""
        if not self.broken or self.code is not None:
            return 0.0
        now, alive = time.monotonic(), self.process is not None and self.process.poll() is None
        return 0.0 if alive and now - self.tried > CONNECT + 5 else now - self.broken

    def end(self) -> None:
        self.ended.set()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()


class Following:
    """All workers of a job: their lines as they come, and their exit codes."""

    def __init__(
        self,
        workers: Workers,
        name: str,
        offsets: Sequence[int],
        put: Callable[[str], None],
        logs: Path | None = None,
    ) -> None:
        self.put, self.logs, self.unkept = put, logs, False
        self.said: queue.Queue[tuple[int, str]] = queue.Queue()
        self.followers = [
            Follower(workers, name, worker, offset=offset, say=lambda *said: self.said.put(said))
            for worker, offset in enumerate(offsets)
        ]
        for one in self.followers:
            one.thread.start()

    def show(self, seconds: float) -> None:
        """Prints what comes within so many seconds, or less where all have ended."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                worker, line = self.said.get(timeout=min(left, 0.2))
            except queue.Empty:
                if self.done:
                    break
                continue
            self.print(worker, line)
        while not self.said.empty():
            self.print(*self.said.get())

    def print(self, worker: int, line: str) -> None:
        self.put(f"[w{worker}] {line}")
        if self.logs is not None:
            self.keep(self.logs / f"w{worker}.log", line)

    def keep(self, log: Path, line: str) -> None:
        """A disk that is full here is told once, and no reason to end a training elsewhere."""
        try:
            with open(log, "a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as why:
            if not self.unkept:
                self.put(f"warning: {log}: {why.strerror}; what is said is shown, and not kept there")
            self.unkept = True

    @property
    def codes(self) -> list[int | None]:
        return [one.code for one in self.followers]

    @property
    def some(self) -> bool:
        """Whether one of them has ended, however."""
        return any(code is not None for code in self.codes)

    @property
    def broken(self) -> bool:
        """Whether one that has not ended cannot be heard."""
        return any(one.unheard for one in self.followers)

    def unheard(self, seconds: float) -> list[int]:
        """Those whose connection broke so long ago."""
        return [one.worker for one in self.followers if one.unheard > seconds]

    @property
    def done(self) -> bool:
        return all(code is not None for code in self.codes)

    def end(self) -> None:
        for one in self.followers:
            one.end()
