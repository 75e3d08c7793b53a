"""A job on the workers of a slice, as the launcher sees it: start, query, follow, stop.

The job does not depend on the connection: one that breaks is opened again, and the log continues where it
was."""

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
from typing import Literal

from headrace.tpu import timeouts
from headrace.tpu.worker import KILLED, LINK_BROKEN
from headrace.tpu.workers import UNREACHABLE, WorkerFailed, Workers, was_reached

# Ends the script with an empty answer where Headrace is not installed: nothing of it can run there.
EXIT_IF_NEW = (
    'if [ ! -x "$HOME/.headrace/env/bin/python" ] || [ ! -d "$HOME/.headrace/tree" ]; '
    "then echo '{}'; exit; fi"
)
# Lists trainings of other users and names by their command lines, which any user may read: a TPU can be used
# by one process only.
LIST_OTHERS = r"""
paths="^(${{HEADRACE_TIMER_HOMES:-/home}}/[^/]+|/root)/\.headrace/jobs/[^/]+/recipe\.yaml$"
grep -hszoE "$paths" /proc/[0-9]*/cmdline | tr '\0' '\n' |
  grep -vxF "$HOME/.headrace/jobs/{name}/recipe.yaml" | sort -u | sed 's/^/elsewhere /'
"""
RUN_WORKER = (
    'cd -P "$HOME/.headrace/tree" && '
    'PYTHONPATH="$PWD" exec "$HOME/.headrace/env/bin/python" -m headrace.tpu.worker'
)
# Prints the exit code of a trainer, and nothing while it runs. Needs neither tree nor environment.
PRINT_EXIT_CODE = """
job="$HOME/.headrace/jobs/{name}"
cat "$job/exit" && exit
pid=$(cat "$job/pid")
(cat "/proc/$pid/cmdline" || ps -ww -o args= -p "$pid") | grep -qaF "$job/recipe.yaml" || echo {killed}
"""


@dataclass(frozen=True)
class StartResult:
    """The answer of one worker to the request to start a job."""

    status: str  # started, running (this job ran already) or other (another job runs)
    offset: int  # in its log, where the lines of interest begin


@dataclass(frozen=True)
class Job:
    """A recipe to train, and the secrets that only its processes may see."""

    name: str
    recipe: str  # YAML with every key
    secrets: dict[str, str] = field(default_factory=dict, repr=False)  # variables of the environment

    @property
    def identity(self) -> str:
        """Checksum of the recipe. Two jobs with the same one are the same."""
        return hashlib.sha256(self.recipe.encode()).hexdigest()[:16]

    def start_trainers(self, workers: Workers, *, retry_seconds: float) -> list[StartResult]:
        """Start the trainers on all workers where none runs."""
        stdin = "\0".join([*(f"{name}={value}" for name, value in self.secrets.items()), self.recipe])
        script = f"{RUN_WORKER} start {self.name} {self.identity}"
        answers = workers.run_on_all(script, stdin.encode(), retry_seconds=retry_seconds)
        return [
            StartResult(status, int(offset)) for status, offset in (text.split()[-2:] for text in answers)
        ]


def stop_trainers(workers: Workers, job_name: str, method: Literal["save", "kill"] = "save") -> None:
    """Ask the trainers on all workers to save and end, or kill them. Workers that do not answer are
    skipped."""

    def stop_one(worker: int) -> None:
        with contextlib.suppress(WorkerFailed):
            script = f"{RUN_WORKER} stop {job_name} {method}"
            workers.run_on(worker, script, timeout=timeouts.COMMAND_TIMEOUT)

    threads = [
        threading.Thread(target=stop_one, args=(worker,), daemon=True) for worker in range(len(workers))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@dataclass(frozen=True)
class WorkerState:
    """A worker's report about a job."""

    identity: str = ""  # of the recipe; empty if there never was a job
    running: bool = False
    exit: int | None = None
    recent: int = 0  # where the last lines of its log begin
    last: str = ""  # the last line of its log
    error: str = ""  # why the worker could not be asked; then nothing else is known
    elsewhere: str = ""  # the recipe of another training on this machine

    @classmethod
    def parse(cls, output: str) -> "WorkerState":
        """The state from the output of `make_query_script`."""
        lines = output.strip().splitlines()
        recipes = [line.partition(" ")[2] for line in lines if line.startswith("elsewhere ")]
        state, names = json.loads(lines[-1]), ("identity", "running", "exit", "recent", "last")
        return cls(elsewhere=", ".join(recipes), **{name: state[name] for name in names if state})


def query_workers(workers: Workers, job_name: str, *, retry_seconds: float) -> list[WorkerState]:
    """The state of a job on every worker. Raises WorkerFailed if one of them does not answer."""
    outputs = workers.run_on_all(
        make_query_script(job_name), retry_seconds=retry_seconds, timeout=timeouts.COMMAND_TIMEOUT
    )
    return list(map(WorkerState.parse, outputs))


def try_query_workers(workers: Workers, job_name: str) -> list[WorkerState]:
    """The state of a job on every worker; one that does not answer has the reason in `error`."""

    def query(worker: int) -> WorkerState:
        try:
            script = make_query_script(job_name)
            return WorkerState.parse(workers.run_on(worker, script, timeout=timeouts.COMMAND_TIMEOUT))
        except WorkerFailed as error:
            return WorkerState(error=error.output or "cannot be reached")
        except (ValueError, KeyError, IndexError):
            return WorkerState(error="its answer has an unknown format")

    with ThreadPoolExecutor(min(64, len(workers))) as pool:
        return list(pool.map(query, range(len(workers))))


def first_error(states: Sequence[WorkerState]) -> str:
    """The first worker that could not be asked, with the reason; the empty string if all answered."""
    return next((f"[w{worker}] {state.error}" for worker, state in enumerate(states) if state.error), "")


def has_other_training(states: Sequence[WorkerState], identity: str) -> bool:
    """Whether a training other than that of the recipe `identity` runs on one of the workers."""
    return any(state.elsewhere or (state.running and state.identity != identity) for state in states)


def make_query_script(job_name: str) -> str:
    """Script that prints other trainings on a worker, and then the state of this job as JSON."""
    return f"{LIST_OTHERS.format(name=job_name)}{EXIT_IF_NEW}; {RUN_WORKER} state {job_name}"


def reset_idle_timer(workers: Workers, job_name: str, *, retry_seconds: float) -> None:
    """Make the timer of the slice count its idle time from now on: a job is about to start."""
    path = f'"$HOME/.headrace/jobs/{job_name}"'
    script = f"mkdir -p {path} && touch {path} && touch -c {path}/exit"
    workers.run_on_all(script, retry_seconds=retry_seconds)


class LogFollower:
    """Follows the log of one worker in a thread, and records the exit code of its trainer."""

    exit_code: int | None

    def __init__(
        self,
        workers: Workers,
        job_name: str,
        worker: int,
        *,
        offset: int,
        on_line: Callable[[int, str], None],
    ) -> None:
        self.workers, self.job_name, self.worker, self.on_line = workers, job_name, worker, on_line
        self.offset, self.exit_code, self.closed = offset, None, threading.Event()
        self.process: subprocess.Popen[bytes] | None = None
        self.disconnected_at = 0.0  # 0: connected
        self.connecting_at = 0.0  # start of the last attempt to connect
        self.thread = threading.Thread(target=self.follow_until_exit, daemon=True)

    def follow_until_exit(self) -> None:
        """Read the log until the trainer ends or the follower is closed; reconnect with growing pauses."""
        delay = 0.5
        while not self.closed.is_set():
            offset_before = self.offset
            exit_code = self.follow_connection()
            if was_reached(exit_code):
                self.exit_code = exit_code
                return
            self.disconnected_at = self.disconnected_at or time.monotonic()
            if self.offset > offset_before:
                delay = 0.5
            if self.closed.wait(delay):
                return
            delay = min(2 * delay, 15)

    def follow_connection(self) -> int:
        """Read the log over one connection. Returns the exit code of the trainer, or `UNREACHABLE`."""
        self.connecting_at = time.monotonic()
        script = f"{RUN_WORKER} follow {self.job_name} {self.offset}"
        try:
            self.process = self.workers.start_script(self.worker, script, stderr=subprocess.DEVNULL)
            assert self.process.stdin is not None
            self.process.stdin.close()
            return self.confirm_exit_code(self.read_lines(self.process))
        except WorkerFailed:  # no process could be started on this machine
            return UNREACHABLE

    def read_lines(self, process: subprocess.Popen[bytes]) -> int:
        """Pass on complete lines until the connection ends, and return its exit code."""
        assert process.stdout is not None
        for line in process.stdout:
            if not line.endswith(b"\n") and not was_reached(process.wait()):
                break  # the connection broke inside this line: the next one sends it again
            self.disconnected_at = 0.0
            self.offset += len(line)
            self.on_line(self.worker, line.decode(errors="replace").rstrip())
        process.stdout.close()
        return process.wait()

    def confirm_exit_code(self, exit_code: int) -> int:
        """The exit code that the trainer itself left behind, if `exit_code` may be that of `follow` only,
        which can fail to start or be killed while the trainer runs. `UNREACHABLE` if it still runs."""
        if exit_code == 0 or not was_reached(exit_code):
            return exit_code
        script, output = PRINT_EXIT_CODE.format(name=self.job_name, killed=KILLED), b""
        self.process = self.workers.start_script(self.worker, script, stderr=subprocess.DEVNULL)
        with self.process as process:
            try:
                output = process.communicate(timeout=timeouts.COMMAND_TIMEOUT)[0].strip()
            except subprocess.TimeoutExpired:
                process.kill()
        return min(int(output), LINK_BROKEN - 1) if output.isdigit() else UNREACHABLE

    @property
    def seconds_disconnected(self) -> float:
        """Seconds since the connection broke; 0 if it works. An attempt that takes longer than ssh allows for
        a connection counts as connected, to a trainer that prints nothing."""
        if not self.disconnected_at or self.exit_code is not None:
            return 0.0
        now, is_alive = time.monotonic(), self.process is not None and self.process.poll() is None
        is_connected = is_alive and now - self.connecting_at > timeouts.SSH_CONNECT + 5
        return 0.0 if is_connected else now - self.disconnected_at

    def close(self) -> None:
        """Stop following. The trainer is not affected."""
        self.closed.set()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()


class JobMonitor:
    """Follows the logs of all workers of a job, and collects the exit codes."""

    def __init__(
        self,
        workers: Workers,
        job_name: str,
        offsets: Sequence[int],
        print_line: Callable[[str], None],
        log_dir: Path | None = None,
    ) -> None:
        """Begin to follow at one offset per worker. With `log_dir`, lines are also appended to files
        there."""
        self.print_line, self.log_dir, self.has_warned = print_line, log_dir, False
        self.lines: queue.Queue[tuple[int, str]] = queue.Queue()
        self.followers = [
            LogFollower(workers, job_name, worker, offset=offset, on_line=self.add_line)
            for worker, offset in enumerate(offsets)
        ]
        for follower in self.followers:
            follower.thread.start()

    def add_line(self, worker: int, line: str) -> None:
        """Queue a line from the thread of a follower."""
        self.lines.put((worker, line))

    def print_lines_for(self, seconds: float) -> None:
        """Print the lines that arrive within so many seconds. Returns early when all trainers have ended."""
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                worker, line = self.lines.get(timeout=min(remaining, 0.2))
            except queue.Empty:
                if self.all_ended:
                    break
                continue
            self.show(worker, line)
        while not self.lines.empty():
            self.show(*self.lines.get())

    def show(self, worker: int, line: str) -> None:
        """Print one line after the number of its worker, and store it."""
        self.print_line(f"[w{worker}] {line}")
        if self.log_dir is not None:
            self.store_line(self.log_dir / f"w{worker}.log", line)

    def store_line(self, log: Path, line: str) -> None:
        """Append a line to a file. On failure warn once: a full disk here must not end the training there."""
        try:
            with open(log, "a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:
            if not self.has_warned:
                self.print_line(f"warning: {log}: {error.strerror}; output is printed, but not stored there")
            self.has_warned = True

    @property
    def exit_codes(self) -> list[int | None]:
        """The exit code of each worker's trainer; None while it runs."""
        return [follower.exit_code for follower in self.followers]

    @property
    def any_ended(self) -> bool:
        """Whether at least one trainer has ended."""
        return any(code is not None for code in self.exit_codes)

    @property
    def all_ended(self) -> bool:
        """Whether all trainers have ended."""
        return all(code is not None for code in self.exit_codes)

    @property
    def any_disconnected(self) -> bool:
        """Whether the connection to at least one worker is broken."""
        return any(follower.seconds_disconnected for follower in self.followers)

    def disconnected_workers(self, seconds: float) -> list[int]:
        """The workers whose connection has been broken for longer than this."""
        return [follower.worker for follower in self.followers if follower.seconds_disconnected > seconds]

    def close(self) -> None:
        """Stop following. The job is not affected."""
        for follower in self.followers:
            follower.close()
