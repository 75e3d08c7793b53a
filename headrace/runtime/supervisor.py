"""Watches over a training process: starts it again after what a restart can mend, and not after a user's
mistake. Without JAX, which may end a process that lost another host in a way that nothing in it can catch."""

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
from typing import Any

from headrace.errors import ExitCode, UserError
from headrace.runtime import goodput
from headrace.storage import files, redact

SUPERVISOR = "HEADRACE_SUPERVISOR"
STACKS = "HEADRACE_STACKS"  # a file for the stacks of a process that can do nothing but dump them
RESTARTS = 8  # without a new checkpoint in between
LONGEST = 60.0  # seconds before a restart
LIVED = 600.0  # seconds of a life that count as progress where no checkpoint can be seen
DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG

# What runtimes say when it is this machine that fails, and when it is another.
MACHINE_SAID = (
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
PEER_SAID = (
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


@dataclass(frozen=True)
class Exit:
    """How a process ended, in words, and whether another try makes sense."""

    code: int  # as a shell would have it
    words: str
    again: bool


def classify(returncode: int) -> Exit:
    if returncode < 0:
        number = signal.Signals(-returncode)
        why = {
            signal.SIGKILL: " (by the system, if memory ran out)",
            signal.SIGABRT: " (as when another host is lost)",
        }.get(number, "")
        asked = number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
        return Exit(128 + number, f"was ended by {number.name}{why}", not asked)
    words: dict[int, str] = {
        ExitCode.UNREACHABLE: "got no answer from a server",
        ExitCode.HUNG: "took too long for a step",
        ExitCode.MACHINE_FAULT: "met a fault of this machine",
        ExitCode.LOST_HOST: "lost another host",
    }
    return Exit(returncode, words.get(returncode, f"ended with {returncode}"), returncode in words)


def verdict(error: BaseException, *, several: bool) -> int:
    """The exit code for an error that nobody foresaw: 1, unless it is known to come from a machine."""
    text = str(error)
    if any(said in text for said in MACHINE_SAID):
        return ExitCode.MACHINE_FAULT
    return ExitCode.LOST_HOST if several and any(said in text for said in PEER_SAID) else ExitCode.FAILED


class Supervisor:
    """Starts this very command again as a worker, until it is done or cannot be helped."""

    def __init__(self, run_dir: str, latest_step: Callable[[str], int | None]) -> None:
        """`latest_step(run_dir)` finds the newest complete checkpoint: -1 if there is none, None if
        unknown."""
        self.run_dir, self.latest_step, self.worker, self.stop_requests = run_dir, latest_step, None, 0
        self.command = [sys.executable, *sys.orig_argv[1:], "--once"]

    worker: subprocess.Popen[bytes] | None

    def watch(self) -> int:
        """Returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.forward)
        left, reached = RESTARTS, self.latest_step(self.run_dir)
        while not self.stop_requests:
            begun = time.monotonic()
            how = self.run_once()
            if self.stop_requests == 1 and how.code in (128 + signal.SIGTERM, 128 + signal.SIGINT):
                return ExitCode.PREEMPTED  # it was asked before it could listen
            if self.stop_requests or not how.again:
                return how.code
            now = self.latest_step(self.run_dir)
            lived = time.monotonic() - begun
            if lived > LIVED if now is None else reached is None or now > reached:
                left, reached = RESTARTS, now
            elif now is not None:
                reached = now  # or less, where it went back: from there on, what is further counts
            if not left:
                self.print_line(
                    f"the trainer {how.words}; after {RESTARTS} tries without a new checkpoint it ends"
                )
                return how.code
            delay = min(2.0 ** (RESTARTS - left), LONGEST) * random.uniform(0.5, 1)  # not all hosts at once
            left -= 1
            where = "" if now is None else f" from step {now}" if now >= 0 else " from the beginning"
            self.print_line(
                f"the trainer {how.words}; starts again{where} in {delay:.1f} s ({left} tries left)"
            )
            self.sleep(delay)
        return ExitCode.PREEMPTED

    def run_once(self) -> Exit:
        """Of one worker, and how it ended."""
        with tempfile.NamedTemporaryFile(prefix="headrace-stacks-") as stacks:
            mine = {SUPERVISOR: str(os.getpid()), STACKS: stacks.name}
            worker = subprocess.Popen(self.command, env=os.environ | mine)
            self.worker = worker
            if self.stop_requests:  # while it was being started
                worker.send_signal(signal.SIGTERM)
            code = worker.wait()
            self.worker = None
            left = stacks.read()
        if code == 1 and left:
            code = ExitCode.HUNG
            self.save_stacks(left)
        how = classify(code)
        goodput.note_exit(self.run_dir, worker.pid, how.code, how.words if how.again else "")
        return how

    def save_stacks(self, stacks: bytes) -> None:
        """Of a worker that hung and held Python's lock, so that it could not keep them itself."""
        sys.stderr.write(redact.redact(stacks.decode(errors="replace")))
        path = files.join(
            self.run_dir, "stacks", f"{socket.gethostname()}-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        )
        with contextlib.suppress(OSError, UserError):
            files.write(path, stacks)

    def sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.stop_requests and time.monotonic() < end:
            time.sleep(min(0.1, seconds))

    def forward(self, number: int, frame: Any) -> None:
        """The worker saves and ends, and so does this. A terminal has told the worker already."""
        self.stop_requests += 1
        if self.worker is None:
            return
        if self.stop_requests > 2 and number == signal.SIGINT:  # it does not hear
            self.worker.kill()
        elif number != signal.SIGINT or not foreground():
            self.worker.send_signal(number)

    def print_line(self, words: str) -> None:
        words = redact.redact(words)
        if sys.stdout.isatty():  # a display that could not close has hidden the cursor
            print("\x1b[?25h", flush=True)
        print(f"headrace: {words}", file=sys.stderr, flush=True)
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  warning: {words}\n"
        path = files.join(self.run_dir, "log.txt")
        with contextlib.suppress(OSError, UserError):
            if not files.is_url(path):
                with open(path, "a", encoding="utf-8") as log:
                    log.write(line)
            elif files.exists(path):  # nobody else writes there now
                files.write(path, files.read(path) + line.encode())


def foreground() -> bool:
    """Whether Ctrl-C on a terminal reaches this process and its worker alike."""
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
    """A worker whose supervisor is killed saves and ends: nobody would start it again, nor stop it."""
    supervisor = os.environ.get(SUPERVISOR)
    if supervisor is None or int(supervisor) != os.getppid():
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGTERM)
