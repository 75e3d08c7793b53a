"""Updates that are better left out: a loss or a gradient norm that is not finite, or far above what is usual.

Usual is the median of the last 128 steps, and a deviation their median distance from it (made as large as a
standard deviation): neither is moved by some wild values, as a mean would be. More than
`optimizer.spike_threshold` deviations above the median is too far; one counts as 5 % of the median at least,
so that a very even loss may rise too. All of it is decided on the device, from what the state carries: every
host decides the same, no host waits for it, and a run that goes on from a checkpoint decides as if it had
never stopped."""

from typing import Any

import jax.numpy as jnp

from headrace.nn.module import Array, module

WINDOW = 128  # steps
ENOUGH = 64  # of which so many must be known before any is judged
LEAST = 0.05  # of the median, as a deviation
DEVIATION = 1.4826  # of a normal distribution, in median distances


@module
class LossHistory:
    """Of the last steps, step n at place n % WINDOW."""

    measured: Array  # [k 128] losses and gradient norms; NaN before there were any
    left_out: Array  # [128] whether the update was


def empty_history(count: int) -> LossHistory:
    """Of so many losses and gradient norms."""
    return LossHistory(jnp.full((count, WINDOW), jnp.nan, jnp.float32), jnp.zeros(WINDOW, bool))


def names(turns: Any) -> list[str]:
    """Of the metrics that are watched."""
    return [turn.name + name for turn in turns for name in ("loss", "grad_norm")]


def is_spike(recent: LossHistory, now: Array, spike: float) -> Array:
    """Whether one of the values of a step [k] is far above its usual ones; NaN is no spike."""
    known = jnp.isfinite(recent.measured)
    middle = _median(recent.measured, known)
    deviation = DEVIATION * _median(jnp.abs(recent.measured - middle[:, None]), known)
    limit = middle + spike * jnp.maximum(deviation, LEAST * middle)
    return jnp.any((known.sum(axis=1) >= ENOUGH) & (now > limit))


def record(recent: LossHistory, step: Array, now: Array, left_out: Array) -> LossHistory:
    """With the values of this step in the place of the oldest. Spikes are among them, so that a level that
    stays higher becomes the usual one."""
    place = step % WINDOW
    return LossHistory(recent.measured.at[:, place].set(now), recent.left_out.at[place].set(left_out))


def skip_counts(recent: LossHistory, step: Array) -> dict[str, Array]:
    """How many updates of the window up to this step were left out, and how many steps ago the first was;
    both 0 if this one was not."""
    now = recent.left_out[step % WINDOW]
    ages = (step - jnp.arange(WINDOW)) % WINDOW
    oldest = jnp.max(jnp.where(recent.left_out, ages, 0))
    return {"left_out": now * recent.left_out.sum(), "since": now * oldest}


def _median(values: Array, known: Array) -> Array:
    """Of what is known in each row; infinite if nothing is."""
    rows, count = jnp.sort(jnp.where(known, values, jnp.inf), axis=1), known.sum(axis=1, keepdims=True)
    low, high = (jnp.take_along_axis(rows, place, axis=1)[:, 0] for place in ((count - 1) // 2, count // 2))
    return (low + high) / 2


def skipped_updates(recent: LossHistory, last: int, count: int) -> list[tuple[int, list[float]]]:
    """On the host: which of the `count` steps up to `last`, counted from 1, were left out, and their values.
    What the state carries may be a step ahead."""
    steps = range(last - min(count, WINDOW - 1) + 1, last + 1)
    found = [number for number in steps if recent.left_out[(number - 1) % WINDOW]]
    return [(number, recent.measured[:, (number - 1) % WINDOW].tolist()) for number in found]
