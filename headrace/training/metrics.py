"""Measurements of a run: loss, tokens per second, model FLOPs utilization (MFU as in arXiv 2204.02311,
appendix B) and memory. The only place where the loop waits for device values."""

import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax

from headrace.hardware import chips
from headrace.nn.module import Array, PyTree
from headrace.trackers.terminal import Row

Scalars = dict[str, float]  # metrics of one step


def peak_flops(device: jax.Device) -> float | None:
    """Dense bf16 FLOP/s of one device; None if unknown, as for a CPU."""
    chip = chips.find_chip(device.device_kind)
    return None if chip is None else chip.flops / chip.devices


def peak_memory(devices: Sequence[jax.Device] | None = None) -> int | None:
    """The most bytes that were in use on one of this process's devices; for a CPU, by the process."""
    devices = jax.local_devices() if devices is None else devices
    if devices[0].platform == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    stats = [device.memory_stats() or {} for device in devices]
    return max((each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each), default=None)


def memory_limit(devices: Sequence[jax.Device]) -> int | None:
    """Bytes that a run can use on each of these devices; for a CPU, on all of them together."""
    if devices[0].platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    return min((limit for limit in limits if limit), default=None)


def read_scalars(metrics: Mapping[str, Array]) -> Scalars:
    """Wait for the metrics of a step and read them from the device."""
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


class DeferredMetrics:
    """Reads the metrics of a step only after the next one was dispatched, so that the device always has work
    queued while the host waits."""

    def __init__(self) -> None:
        self._pending: tuple[int, Mapping[str, Array]] | None = None

    def push(self, step: int, metrics: Mapping[str, Array]) -> list[tuple[int, Scalars]]:
        """Store the metrics of `step`. Returns those of the step before, if there was one."""
        previous, self._pending = self._pending, (step, metrics)
        for value in metrics.values():
            value.copy_to_host_async()
        return [] if previous is None else [(previous[0], read_scalars(previous[1]))]

    def flush(self) -> list[tuple[int, Scalars]]:
        """Return the metrics of the last step that was pushed: before a pause, and at the end."""
        previous, self._pending = self._pending, None
        return [] if previous is None else [(previous[0], read_scalars(previous[1]))]


@dataclass(kw_only=True)
class Meter:
    """Makes the row that is logged from the metrics of a step.

    Call `begin` when the loop starts, `pause` around everything that is not a step, and `make_row` as soon as
    a step's metrics are read."""

    tokens_per_step: int
    flops_per_token: float
    total_steps: int
    num_devices: int
    peak_flops: float | None  # of a device
    clock: Callable[[], float] = time.perf_counter
    # Tokens of all steps up to one; None if each has as many.
    tokens_until: Callable[[int], int] | None = None

    def __post_init__(self) -> None:
        self._is_paused = False
        self.begin(0)

    def begin(self, step: int) -> None:
        """Start to measure; `step` steps are done."""
        self._first_step = self._step = step
        self._measured_at = self.clock()  # when `_step` was logged
        self._paused = 0.0  # seconds since then
        self._total_stepping = self._total_paused = 0.0  # seconds since the first step

    @contextlib.contextmanager
    def pause(self, pending: PyTree = None) -> Iterator[None]:
        """Exclude the time inside from that of the steps.

        Waits for `pending` first: steps that are queued on the device are work of the loop, not of the pause.
        A pause within a pause counts once."""
        if self._is_paused:
            yield
            return
        jax.block_until_ready(pending)
        started_at, self._is_paused = self.clock(), True
        try:
            yield
        finally:
            seconds, self._is_paused = self.clock() - started_at, False
            self._paused += seconds
            self._total_paused += seconds

    def make_row(self, step: int, metrics: Scalars) -> Row:
        """Make the row of `step`: its metrics, and the speed since the last row."""
        now, steps = self.clock(), step - self._step
        assert steps > 0, f"step {step} was logged already, the last was {self._step}"
        until = self.tokens_until or (lambda step: step * self.tokens_per_step)
        tokens = until(step) - until(self._step)
        seconds = max(now - self._measured_at - self._paused, 1e-9)
        self._total_stepping += seconds
        self._measured_at, self._paused, self._step = now, 0.0, step
        tokens_per_second = tokens / seconds
        total_peak = self.num_devices * self.peak_flops if self.peak_flops else None
        seconds_per_step = (self._total_stepping + self._total_paused) / (step - self._first_step)
        measured = {
            "tokens": until(step),
            "tokens_per_second": tokens_per_second,
            "step_seconds": seconds / steps,
            "mfu": self.flops_per_token * tokens_per_second / total_peak if total_peak else None,
            "memory": peak_memory(),
            "eta_seconds": max(self.total_steps - step, 0) * seconds_per_step,
        }
        return {"step": step} | metrics | measured
