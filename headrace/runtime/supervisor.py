"""Runs the trainer as a worker process, and restarts it after failures that a restart can fix.

A user's mistake is none of them. Does not import JAX, which may end a process that lost another host in a way
that nothing inside the process can catch."""

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from headrace.errors import ExitCode, UserError
from headrace.runtime import goodput
from headrace.storage import files, redact

SUPERVISOR = "HEADRACE_SUPERVISOR"  # process id of the supervisor, for its worker
STACKS = "HEADRACE_STACKS"  # file for the stacks of a worker that can do nothing but dump them
MAX_RESTARTS = 8  # without a new checkpoint
MAX_DELAY = 60.0  # seconds before a restart
PROGRESS_SECONDS = 600.0  # of running that count as progress if checkpoints cannot be listed
DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG

# Parts of the messages of runtimes when this machine fails, and when another host does.
MACHINE_ERRORS = (
    "Couldn't open iommu group",
    "open(/dev/vfio",
    "Failed to initialize TPU system",
    "TPU initialization failed",
    "No accelerator found",
    "already in use by process",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_LAUNCH_FAILED",
    "uncorrectable",
    "DATA_LOSS",
)
PEER_ERRORS = (
    "heartbeat",
    "oordination service",
    "different incarnation",
    "Gloo",
    "NCCL",
    "onnection reset",
    "onnection closed",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "Barrier",
)

EXIT_REASONS: dict[int, str] = {
    ExitCode.UNREACHABLE: "got no answer from a server",
    ExitCode.HUNG: "took too long for a step",
    ExitCode.MACHINE_FAULT: "met a fault of this machine",
    ExitCode.LOST_HOST: "lost another host",
}
# What signals to the process can mean.
SIGNAL_CAUSES = {
    signal.SIGKILL: " (by the system, if memory ran out)",
    signal.SIGABRT: " (as when another host is lost)",
}
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)  # sent on purpose


@dataclass(frozen=True)
class WorkerExit:
    """The end of a worker."""

    code: int  # as a shell reports it
    reason: str  # a sentence without its subject
    can_restart: bool


def classify(returncode: int) -> WorkerExit:
    """Tell from the return code of `subprocess` why a worker ended, and whether a restart can help."""
    if returncode < 0:
        number = signal.Signals(-returncode)
        reason = f"was ended by {number.name}{SIGNAL_CAUSES.get(number, '')}"
        return WorkerExit(128 + number, reason, number not in STOP_SIGNALS)
    reason = EXIT_REASONS.get(returncode, f"ended with {returncode}")
    return WorkerExit(returncode, reason, returncode in EXIT_REASONS)


def exit_code_of(error: BaseException, *, multi_host: bool) -> ExitCode:
    """The exit code for an unexpected error: FAILED, unless its message shows that a machine failed."""
    text = str(error)
    if any(part in text for part in MACHINE_ERRORS):
        return ExitCode.MACHINE_FAULT
    if multi_host and any(part in text for part in PEER_ERRORS):
        return ExitCode.LOST_HOST
    return ExitCode.FAILED


class Supervisor:
    """Runs this process's command as a worker, until it is done or a restart cannot help."""

    def __init__(self, run_dir: str, latest_step: Callable[[str], int | None]) -> None:
        """`latest_step(run_dir)` finds the newest complete checkpoint: -1 if there is none, None if
        unknown."""
        self.run_dir, self.latest_step = run_dir, latest_step
        self.command = [sys.executable, *sys.orig_argv[1:], "--once"]
        self.worker: subprocess.Popen[bytes] | None = None
        self.stop_requests = 0  # signals received

    def watch(self) -> int:
        """Run the worker to its end, with restarts. Returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.forward)
        restarts_left, reached = MAX_RESTARTS, self.latest_step(self.run_dir)
        while not self.stop_requests:
            started_at = time.monotonic()
            end = self.run_once()
            if self.stop_requests == 1 and end.code in (128 + signal.SIGTERM, 128 + signal.SIGINT):
                return ExitCode.PREEMPTED  # the signal came before the worker had a handler
            if self.stop_requests or not end.can_restart:
                return end.code
            newest = self.latest_step(self.run_dir)
            if newest is None:
                has_progress = time.monotonic() - started_at > PROGRESS_SECONDS
            else:
                has_progress = reached is None or newest > reached
            if has_progress:
                restarts_left, reached = MAX_RESTARTS, newest
            elif newest is not None:
                reached = newest  # less than before after a rollback: from there on, progress counts again
            if not restarts_left:
                self.print_line(
                    f"the trainer {end.reason}; no more restarts, after {MAX_RESTARTS} without a new "
                    "checkpoint"
                )
                return end.code
            restarts_left -= 1
            self.wait_before_restart(end, newest, restarts_left)
        return ExitCode.PREEMPTED

    def run_once(self) -> WorkerExit:
        """Run one worker to its end."""
        with tempfile.NamedTemporaryFile(prefix="headrace-stacks-") as stacks_file:
            env = os.environ | {SUPERVISOR: str(os.getpid()), STACKS: stacks_file.name}
            worker = subprocess.Popen(self.command, env=env)
            self.worker = worker
            if self.stop_requests:  # a signal that came while it was being started
                worker.send_signal(signal.SIGTERM)
            code = worker.wait()
            self.worker = None
            stacks = stacks_file.read()
        if code == ExitCode.FAILED and stacks:
            code = ExitCode.HUNG
            self.save_stacks(stacks)
        end = classify(code)
        goodput.note_exit(self.run_dir, worker.pid, end.code, end.reason if end.can_restart else "")
        return end

    def save_stacks(self, stacks: bytes) -> None:
        """Print and store the stacks of a worker that hung while it held Python's lock, so that it could not
        do so itself."""
        sys.stderr.write(redact.redact(stacks.decode(errors="replace")))
        name = f"{socket.gethostname()}-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        with contextlib.suppress(OSError, UserError):
            files.write(files.join(self.run_dir, "stacks", name), stacks)

    def wait_before_restart(self, end: WorkerExit, step: int | None, restarts_left: int) -> None:
        """Print that the trainer is restarted, and wait: twice as long each time, and on each host another
        time, so that not all restart at once."""
        longest = min(2.0 ** (MAX_RESTARTS - 1 - restarts_left), MAX_DELAY)
        delay = longest * random.uniform(0.5, 1)
        start = "" if step is None else f" from step {step}" if step >= 0 else " from the beginning"
        self.print_line(
            f"the trainer {end.reason}; it restarts{start} in {delay:.1f} s ({restarts_left} restarts left)"
        )
        deadline = time.monotonic() + delay
        while not self.stop_requests and time.monotonic() < deadline:
            time.sleep(min(0.1, delay))

    def forward(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal: the worker saves and ends, and then the supervisor ends too.

        Ctrl-C on a terminal has reached the worker already. After two requests without effect it is
        killed."""
        self.stop_requests += 1
        if self.worker is None:
            return
        if self.stop_requests > 2 and number == signal.SIGINT:
            self.worker.kill()
        elif number != signal.SIGINT or not is_foreground():
            self.worker.send_signal(number)

    def print_line(self, text: str) -> None:
        """Print a line, and append it to the log of the run."""
        text = redact.redact(text)
        if sys.stdout.isatty():  # a display that was killed has hidden the cursor
            print("\x1b[?25h", flush=True)
        print(f"headrace: {text}", file=sys.stderr, flush=True)
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  warning: {text}\n"
        path = files.join(self.run_dir, "log.txt")
        with contextlib.suppress(OSError, UserError):
            if not files.is_url(path):
                with open(path, "a", encoding="utf-8") as log:
                    log.write(line)
            elif files.exists(path):  # no worker is running that could write it too
                files.write(path, files.read(path) + line.encode())


def is_foreground() -> bool:
    """Whether Ctrl-C on the terminal reaches both this process and its worker."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def die_with_parent() -> None:
    """Let the system send SIGTERM to this process if its supervisor dies: nothing would restart it, or stop
    it."""
    supervisor = os.environ.get(SUPERVISOR)
    if supervisor is None or int(supervisor) != os.getppid():
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGTERM)
