"""Ends a run that hangs: where a step takes far too long, the stacks of all threads are written down and the
process ends with a code of its own, on every host, since all of them wait for the one that is stuck."""

import contextlib
import faulthandler
import os
import socket
import statistics
import tempfile
import threading
import time
from collections import deque
from typing import Any

import jax

from headrace.errors import ExitCode
from headrace.runtime import multihost
from headrace.runtime.supervisor import STACKS
from headrace.storage import files

TIMES = 20  # the median step that a step may take
LONG = 6.0  # times as long for all but plain steps: the first one, saving, a batch of evaluation
UPLOAD = 5.0  # seconds that writing the stacks down may take longer than that
GRACE = 10.0  # seconds more, and all is taken to be stuck
STDERR = 2  # the descriptor: a notebook's sys.stderr has none


class Watchdog:
    """A thread that wants to hear from the loop. `seconds` is the least that it waits, 0 for no watching."""

    def __init__(self, seconds: float, run: str) -> None:
        self.seconds, self.run = seconds, run
        self.steps: deque[float] = deque(maxlen=100)
        self.step, self.since, self.times = 0, time.monotonic(), LONG
        self.round = min(seconds / 4, 5.0)
        self.ended, self.bitten = threading.Event(), False

    def __enter__(self) -> "Watchdog":
        if self.seconds:
            threading.Thread(target=self.watch, name="watchdog", daemon=True).start()
        return self

    def step_done(self, step: int) -> None:
        """A step is done."""
        now = time.monotonic()
        if self.times == 1.0:
            self.steps.append(now - self.since)
        self.step, self.since, self.times = step, now, 1.0

    def reset(self) -> None:
        """The loop is at something else."""
        self.since, self.times = time.monotonic(), LONG

    def limit(self) -> float:
        usual = statistics.median(list(self.steps) or [0.0])
        return max(self.seconds, TIMES * usual) * self.times

    def watch(self) -> None:
        """A call that never gives back Python's lock stops this thread too; then faulthandler's own, which
        is wound up again with each round here, ends the process with 1, and by the stacks that it leaves the
        supervisor knows why."""
        with contextlib.ExitStack() as held:
            where = os.environ.get(STACKS)
            file = held.enter_context(open(where, "wb")) if where else STDERR
            while not self.ended.wait(self.round):
                faulthandler.dump_traceback_later(2 * self.limit() + GRACE, exit=True, file=file)
                if time.monotonic() - self.since > self.limit() or multihost.flag_is_set("hang"):
                    self.kill()
            faulthandler.cancel_dump_traceback_later()

    def kill(self) -> None:
        """The end of one host ends the others, the first one's at once: so each calls the others, and waits
        until they must have heard and written, the first a little longer."""
        self.bitten = True
        waited = time.monotonic() - self.since
        said = f"nothing came for {waited:,.0f} s after step {self.step}: the run hangs"
        os.write(STDERR, f"headrace: {said}; the stacks of all threads:\n".encode())
        faulthandler.dump_traceback(STDERR, all_threads=True)
        # In a thread, since it may be the disk or the network that hangs.
        keeping = threading.Thread(target=self.save_stacks, args=(said,), daemon=True)
        keeping.start()
        time.sleep(2 * self.round * multihost.is_multi_host() + (1.0 if jax.process_index() else 2.0))
        keeping.join(UPLOAD)
        os._exit(ExitCode.HUNG)

    def save_stacks(self, said: str) -> None:
        """In RUN/stacks/HOST-TIME.txt."""
        multihost.broadcast_flag("hang")
        with tempfile.TemporaryFile() as file:
            file.write(f"{said}\n".encode())
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            name = f"{jax.process_index()}-{socket.gethostname()}-{time.strftime('%Y%m%d-%H%M%S')}.txt"
            files.write(files.join(self.run, "stacks", name), file.read())

    def __exit__(self, *exc: Any) -> None:
        self.ended.set()
        if self.bitten:  # what the loop meets now is that another host has ended
            os._exit(ExitCode.HUNG)
