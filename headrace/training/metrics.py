"""What a run measures about itself: loss, tokens a second, model FLOPs utilisation (MFU as in arXiv
2204.02311, appendix B) and memory. The one place where the loop waits for device values."""

import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from headrace.hardware import chips


def peak_flops(device: Any) -> float | None:
    """Dense bf16 FLOP/s of one device; None where it is not known, as on a CPU."""
    chip = chips.find_chip(device.device_kind)
    return None if chip is None else chip.flops / chip.devices


def memory(devices: Sequence[Any] | None = None) -> int | None:
    """Bytes in use at the peak, on the fullest of this process' devices; on a CPU those of the process."""
    devices = jax.local_devices() if devices is None else devices
    if devices[0].platform == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    stats = [device.memory_stats() or {} for device in devices]
    return max((one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one), default=None)


def memory_limit(devices: Sequence[Any]) -> int | None:
    """Bytes that a run can have on each of these devices; on a CPU on all of them together."""
    if devices[0].platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    return min((limit for limit in limits if limit), default=None)


def read_scalars(pending: dict[str, Any]) -> dict[str, Any]:
    """Waits for one dict of device scalars, and of arrays where evaluation counts more than one thing."""
    return {name: float(x) if np.ndim(x) == 0 else x for name, x in jax.device_get(pending).items()}


class DeferredMetrics:
    """Reads the metrics of a step only after the next one has been dispatched, so that the device
    always has work queued while the host waits."""

    def __init__(self) -> None:
        self._held: tuple[int, dict[str, Any]] | None = None

    def push(self, step: int, metrics: dict[str, Any]) -> list[tuple[int, dict[str, float]]]:
        """Takes the metrics of `step`; gives those of the step before, if there was one."""
        before, self._held = self._held, (step, metrics)
        for value in metrics.values():
            if isinstance(value, jax.Array):
                value.copy_to_host_async()
        return [(before[0], read_scalars(before[1]))] if before else []

    def flush(self) -> list[tuple[int, dict[str, float]]]:
        """The last step pushed: before a pause and at the end."""
        before, self._held = self._held, None
        return [(before[0], read_scalars(before[1]))] if before else []


@dataclass(kw_only=True)
class Meter:
    """Turns the metrics of a step into the row that is logged. `begin` when the loop starts, `pause`
    around all that is not a step, `row` as soon as a step's metrics are read."""

    tokens_per_step: int
    flops_per_token: float
    total_steps: int
    num_devices: int
    peak_flops: float | None
    clock: Callable[[], float] = time.perf_counter
    tokens_until: Callable[[int], int] | None = None  # of all steps up to one, where they are not alike

    def __post_init__(self) -> None:
        self._pausing = False
        self.begin(0)

    def begin(self, step: int) -> None:
        """The loop goes on from `step` finished steps."""
        self._first = self._step = step
        self._since = self.clock()
        self._stepping = self._overhead = self._paused = 0.0

    @contextlib.contextmanager
    def pause(self, pending: Any = None) -> Iterator[None]:
        """Counts the time inside as no step's. `pending` is awaited first: steps still queued on the
        device are work of the loop, not of the pause. A pause in a pause counts once."""
        if self._pausing:
            yield
            return
        jax.block_until_ready(pending)
        begun, self._pausing = self.clock(), True
        try:
            yield
        finally:
            seconds, self._pausing = self.clock() - begun, False
            self._paused += seconds
            self._overhead += seconds

    def row(self, step: int, values: dict[str, float]) -> dict[str, Any]:
        """The row of `step`."""
        now, steps = self.clock(), step - self._step
        until = self.tokens_until or (lambda step: step * self.tokens_per_step)
        read = until(step) - until(self._step)
        assert steps > 0, f"step {step} was logged already, the last was {self._step}"
        seconds = max(now - self._since - self._paused, 1e-9)
        self._stepping += seconds
        self._since, self._paused, self._step = now, 0.0, step
        rate = read / seconds
        pace = (self._stepping + self._overhead) / (step - self._first)
        measured = {
            "tokens": until(step),
            "tokens_per_second": rate,
            "step_seconds": seconds / steps,
            "mfu": self.flops_per_token * rate / (self.num_devices * self.peak_flops)
            if self.peak_flops
            else None,
            "memory": memory(),
            "eta_seconds": max(self.total_steps - step, 0) * pace,
        }
        return {"step": step} | values | measured
