"""Stopping a run by a signal: SIGTERM, as when a machine is preempted, or Ctrl-C."""

import os
import signal
import time
from types import FrameType, TracebackType

from jax.experimental import multihost_utils

from headrace.runtime.multihost import is_multi_host

REPEAT_SECONDS = 1.0  # within which two Ctrl-C count as one


class Stopper:
    """Turns SIGTERM and Ctrl-C into a request that the loop sees after the current step.

    A second Ctrl-C raises KeyboardInterrupt, unless it comes right after the first: one Ctrl-C may arrive
    twice, from the terminal and from the supervisor that forwards it. With several hosts JAX handles SIGTERM,
    and agrees with the other hosts on the step to stop after; a handler here would disable that."""

    def __init__(self) -> None:
        self.stop_signal: str | None = None  # name of the signal that was received
        self.multi_host = is_multi_host()
        self._received_at = 0.0

    def __enter__(self) -> "Stopper":
        numbers = (signal.SIGINT,) if self.multi_host else (signal.SIGTERM, signal.SIGINT)
        self._previous_handlers = {number: signal.signal(number, self.handle_signal) for number in numbers}
        return self

    def handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Record the signal, or interrupt the process if it is a second Ctrl-C."""
        is_repeated = time.monotonic() - self._received_at <= REPEAT_SECONDS
        self._received_at = time.monotonic()
        if self.stop_signal and number == signal.SIGINT:
            if not is_repeated:
                raise KeyboardInterrupt
            return
        self.stop_signal = signal.Signals(number).name
        if self.multi_host:
            os.kill(os.getpid(), signal.SIGTERM)  # JAX's handler calls the other hosts

    def should_stop(self, step: int) -> bool:
        """Whether the run stops after `step`. Call it after every step: hosts agree on one."""
        if not self.multi_host:
            return self.stop_signal is not None
        stops = multihost_utils.reached_preemption_sync_point(step)
        if stops and self.stop_signal is None:
            self.stop_signal = "SIGTERM"
        return stops

    def can_abort(self) -> bool:
        """Whether to abort work between steps, such as an evaluation. Never with several hosts, since the
        others would wait."""
        return not self.multi_host and self.stop_signal is not None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
