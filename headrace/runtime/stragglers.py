"""Names a host that holds up the others. All hosts take as long for a step, since each waits for the slowest;
so each measures how long it waits for its own data, and the first compares. Neither a slow chip nor slow
Python is found in this way: handing over a step may wait for the devices. A profile shows them."""

import json
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax

from headrace.runtime import multihost

ROWS = 3  # logged rows in a row before a host is named
SHARE = 0.5  # of a step that a host must take for itself
TIMES = 3.0  # and as much as the others do


@dataclass(frozen=True)
class HostTime:
    """A host's own seconds of a step."""

    name: str
    seconds: float


class StragglerMonitor:
    """`step_started` when a host turns to its next step, `batch_ready` once it has the data for it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock, self.since, self.spent, self.steps = clock, clock(), 0.0, 0
        self.late: dict[int, int] = {}  # by host, the rows for which it was late

    def step_started(self) -> None:
        self.since = self.clock()

    def batch_ready(self) -> None:
        self.spent, self.steps = self.spent + self.clock() - self.since, self.steps + 1

    def compare(self, step_seconds: float) -> list[str]:
        """For all hosts, when a row is logged: tells the first one the time since the last. What it says."""
        own, self.spent, self.steps = self.spent / max(self.steps, 1), 0.0, 0
        if not multihost.is_multi_host():
            return []
        multihost.publish(f"pace/{jax.process_index()}", json.dumps([socket.gethostname(), own]))
        if jax.process_index():
            return []
        every = {
            int(host): HostTime(*json.loads(said)) for host, said in multihost.read_published("pace").items()
        }
        return self.find_stragglers(every, step_seconds)

    def find_stragglers(self, every: dict[int, HostTime], step_seconds: float) -> list[str]:
        said = []
        for host, own in every.items():
            others = statistics.median(
                [other.seconds for one, other in every.items() if one != host] or [0.0]
            )
            slow = own.seconds > SHARE * step_seconds and own.seconds > TIMES * others
            self.late[host] = self.late.get(host, 0) + 1 if slow else 0
            if self.late[host] == ROWS:
                said.append(
                    f"host {host} ({own.name}) holds up the others: it waits {own.seconds:.3g} s of a step "
                    f"of {step_seconds:.3g} s for its data, and they wait {others:.3g} s"
                )
        return said
