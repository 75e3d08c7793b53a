"""Detection of updates to skip: a loss or gradient norm that is not finite, or far above its usual value.

The usual value is the median of the last 128 steps; deviations are measured by the median absolute deviation
from it. Unlike mean and variance, a few outliers barely move either. A value is a spike if it is more than
`optimizer.spike_threshold` deviations above the median. A deviation is at least 5 % of the median, so that
even a very smooth loss may rise a little.

The decision is made on the device, from values that the state carries: all hosts decide alike, no host waits
for it, and a run that was resumed decides as if it had never stopped."""

from collections.abc import Sequence

import jax.numpy as jnp

from headrace.nn.module import Array, module
from headrace.objectives import UpdatePhase

WINDOW = 128  # steps
MIN_VALUES = 64  # finite values in the window that are needed to judge
MIN_DEVIATION = 0.05  # of the median
STD_PER_MAD = 1.4826  # standard deviation of a normal distribution, in median absolute deviations


@module
class LossHistory:
    """Values of the last steps, as a ring buffer: step n is at index n % WINDOW."""

    measured: Array  # [k 128] losses and gradient norms; NaN before the first step
    left_out: Array  # [128] bool: the update was skipped


def empty_history(num_metrics: int) -> LossHistory:
    """Make the history of a run that has taken no step yet."""
    return LossHistory(jnp.full((num_metrics, WINDOW), jnp.nan, jnp.float32), jnp.zeros(WINDOW, bool))


def guarded_metric_names(phases: Sequence[UpdatePhase]) -> list[str]:
    """Name the metrics that are checked for spikes: loss and gradient norm of each phase."""
    return [phase.name + name for phase in phases for name in ("loss", "grad_norm")]


def exceeds_running_median(history: LossHistory, latest: Array, threshold: float) -> Array:
    """Whether one of the latest values [k] is more than `threshold` deviations above its median. NaN is no
    spike."""
    is_finite = jnp.isfinite(history.measured)
    median = _masked_median(history.measured, is_finite)
    deviation = STD_PER_MAD * _masked_median(jnp.abs(history.measured - median[:, None]), is_finite)
    limit = median + threshold * jnp.maximum(deviation, MIN_DEVIATION * median)
    return jnp.any((is_finite.sum(axis=1) >= MIN_VALUES) & (latest > limit))


def record(history: LossHistory, step: Array, latest: Array, is_skipped: Array) -> LossHistory:
    """Put the values of `step` in the place of the oldest. Spikes are recorded too, so that a level that
    remains higher becomes the usual one."""
    index = step % WINDOW
    return LossHistory(
        measured=history.measured.at[:, index].set(latest),
        left_out=history.left_out.at[index].set(is_skipped),
    )


def skip_counts(history: LossHistory, step: Array) -> dict[str, Array]:
    """Count the skipped updates in the window up to `step` (`left_out`), and the steps since the first of
    them (`since`). Both are 0 if the update of `step` was not skipped."""
    is_skipped = history.left_out[step % WINDOW]
    ages = (step - jnp.arange(WINDOW)) % WINDOW
    oldest = jnp.max(jnp.where(history.left_out, ages, 0))
    return {"left_out": is_skipped * history.left_out.sum(), "since": is_skipped * oldest}


def skipped_updates(history: LossHistory, *, first: int, last: int) -> list[tuple[int, list[float]]]:
    """List the steps from `first` to `last` whose updates were skipped, each with its values. For the host.

    Steps count from 1, as in logs. The window has one step less to offer, since the state may be a step ahead
    of `last`."""
    steps = range(max(first, last - WINDOW + 2), last + 1)
    skipped = [step for step in steps if history.left_out[(step - 1) % WINDOW]]
    return [(step, history.measured[:, (step - 1) % WINDOW].tolist()) for step in skipped]


def _masked_median(values: Array, mask: Array) -> Array:
    """Median of the values in each row where `mask` is true; infinite if there are none."""
    rows, count = jnp.sort(jnp.where(mask, values, jnp.inf), axis=1), mask.sum(axis=1, keepdims=True)
    low, high = (jnp.take_along_axis(rows, index, axis=1)[:, 0] for index in ((count - 1) // 2, count // 2))
    return (low + high) / 2
