"""Ends a run that hangs.

If a step takes far too long, the stacks of all threads are written down and the process ends with an exit
code of its own: on every host, since all of them wait for the one that is stuck."""

import contextlib
import faulthandler
import os
import socket
import statistics
import tempfile
import threading
import time
from collections import deque
from types import TracebackType

import jax

from headrace.errors import ExitCode
from headrace.runtime import multihost
from headrace.runtime.supervisor import STACKS
from headrace.storage import files

MAX_STEP_RATIO = 20  # a step may take this many times the median step
SLOW_FACTOR = 6.0  # and work that is not a plain step so many times that: the first step, a save, evaluation
UPLOAD_SECONDS = 5.0  # for writing the stacks, in addition
GRACE_SECONDS = 10.0  # until a watchdog that cannot act is replaced by faulthandler
STDERR = 2  # the file descriptor: sys.stderr of a notebook has none


class Watchdog:
    """A thread that ends the process if the loop makes no progress."""

    def __init__(self, step_timeout: float, run_dir: str) -> None:
        """`step_timeout` is the shortest time that counts as a hang, in seconds; 0 turns the watchdog off."""
        self.step_timeout, self.run_dir = step_timeout, run_dir
        self.step_seconds: deque[float] = deque(maxlen=100)
        self.step, self.progress_at, self.factor = 0, time.monotonic(), SLOW_FACTOR
        self.poll_seconds = min(step_timeout / 4, 5.0)
        self.closed, self.is_killing = threading.Event(), False

    def __enter__(self) -> "Watchdog":
        if self.step_timeout:
            threading.Thread(target=self.watch, name="watchdog", daemon=True).start()
        return self

    def step_done(self, step: int) -> None:
        """Note that `step` is done; the next is expected to be a plain step."""
        now = time.monotonic()
        if self.factor == 1.0:
            self.step_seconds.append(now - self.progress_at)
        self.step, self.progress_at, self.factor = step, now, 1.0

    def reset(self) -> None:
        """Restart the time: the loop turns to work that may take longer than a step."""
        self.progress_at, self.factor = time.monotonic(), SLOW_FACTOR

    def limit(self) -> float:
        """Seconds without progress that count as a hang."""
        median = statistics.median(list(self.step_seconds) or [0.0])
        return max(self.step_timeout, MAX_STEP_RATIO * median) * self.factor

    def watch(self) -> None:
        """Wait for a hang, here or on another host. Runs in a thread.

        A call that never releases Python's lock stops this thread too. Then faulthandler, whose timer is
        restarted here in each round, ends the process with exit code 1; the supervisor learns the reason from
        the stacks that it leaves."""
        with contextlib.ExitStack() as stack:
            path = os.environ.get(STACKS)
            file = stack.enter_context(open(path, "wb")) if path else STDERR
            while not self.closed.wait(self.poll_seconds):
                timeout = 2 * self.limit() + GRACE_SECONDS
                faulthandler.dump_traceback_later(timeout, exit=True, file=file)
                if time.monotonic() - self.progress_at > self.limit() or multihost.flag_is_set("hang"):
                    self.kill()
            faulthandler.cancel_dump_traceback_later()

    def kill(self) -> None:
        """Write the stacks and end the process.

        The end of one host ends the others, and that of the first at once. So each sets a flag, and waits
        until the others must have seen it and written their stacks; the first waits a little longer."""
        self.is_killing = True
        seconds = time.monotonic() - self.progress_at
        message = f"no progress for {seconds:,.0f} s after step {self.step}: the run hangs"
        os.write(STDERR, f"headrace: {message}; the stacks of all threads:\n".encode())
        faulthandler.dump_traceback(STDERR, all_threads=True)
        # In a thread, since it may be the disk or the network that hangs.
        saving = threading.Thread(target=self.save_stacks, args=(message,), daemon=True)
        saving.start()
        time.sleep(2 * self.poll_seconds * multihost.is_multi_host() + (1.0 if jax.process_index() else 2.0))
        saving.join(UPLOAD_SECONDS)
        os._exit(ExitCode.HUNG)

    def save_stacks(self, message: str) -> None:
        """Call the other hosts, and write the stacks to RUN/stacks/HOST-TIME.txt."""
        multihost.broadcast_flag("hang")
        with tempfile.TemporaryFile() as file:
            file.write(f"{message}\n".encode())
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            name = f"{jax.process_index()}-{socket.gethostname()}-{time.strftime('%Y%m%d-%H%M%S')}.txt"
            files.write(files.join(self.run_dir, "stacks", name), file.read())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed.set()
        if self.is_killing:  # the error that ends the loop is that another host has ended
            os._exit(ExitCode.HUNG)
