"""Detection of a host that delays the others.

All hosts take equally long for a step, since each waits for the slowest. So each measures how long it waits
for its own data, and the first host compares. A slow chip or slow Python is not found in this way, since
dispatching a step may wait for the devices; a profile shows them."""

import json
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax

from headrace.runtime import multihost

MIN_ROWS = 3  # consecutive logged rows before a host is named
MIN_SHARE = 0.5  # of a step that a host must wait for its data
MIN_RATIO = 3.0  # to the median of the other hosts


@dataclass(frozen=True)
class HostTime:
    """Seconds per step that a host waited for its own data."""

    name: str
    seconds: float


class StragglerMonitor:
    """Measures how long this host waits for data, and compares that with the other hosts."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock, self.started_at = clock, clock()
        self.waited, self.steps = 0.0, 0  # seconds and steps since the last row
        self.late_rows: dict[int, int] = {}  # by host: consecutive rows in which it was late

    def step_started(self) -> None:
        """Note that this host turns to its next step."""
        self.started_at = self.clock()

    def batch_ready(self) -> None:
        """Note that this host has the data of the step."""
        self.waited, self.steps = self.waited + self.clock() - self.started_at, self.steps + 1

    def compare(self, step_seconds: float) -> list[str]:
        """Publish this host's time since the last row, and on the first host return warnings about others.

        All hosts call it when a row is logged."""
        seconds = self.waited / max(self.steps, 1)
        self.waited, self.steps = 0.0, 0
        if not multihost.is_multi_host():
            return []
        multihost.publish(f"pace/{jax.process_index()}", json.dumps([socket.gethostname(), seconds]))
        if jax.process_index() != 0:
            return []
        published = multihost.read_published("pace")
        times = {int(host): HostTime(*json.loads(record)) for host, record in published.items()}
        return self.find_stragglers(times, step_seconds)

    def find_stragglers(self, times: Mapping[int, HostTime], step_seconds: float) -> list[str]:
        """Return a warning for each host that was late in enough rows. Each is named once until it
        recovers."""
        warnings = []
        for host, measured in times.items():
            other_times = [other.seconds for number, other in times.items() if number != host]
            usual = statistics.median(other_times or [0.0])
            is_late = measured.seconds > MIN_SHARE * step_seconds and measured.seconds > MIN_RATIO * usual
            self.late_rows[host] = self.late_rows.get(host, 0) + 1 if is_late else 0
            if self.late_rows[host] == MIN_ROWS:
                warnings.append(
                    f"host {host} ({measured.name}) delays the others: it waits {measured.seconds:.3g} s of "
                    f"a step of {step_seconds:.3g} s for its data, and they wait {usual:.3g} s"
                )
        return warnings
