"""Warmup, a long constant stretch at the peak, and a short decay to the floor (arXiv 2404.06395; the sqrt
tail is from arXiv 2405.18392). A run can be continued from any step before the decay."""

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from headrace.errors import UserError
from headrace.schedules import Curve, Curves, after_warmup, unit_curve

DecayShape = Literal["linear", "sqrt", "cosine"]


@dataclass(frozen=True)
class Config:
    """The keys that `use: wsd` adds to the `schedule` section of a recipe."""

    decay: int | str = "20 %"  # length of the decay at the end [steps, "3B tokens" or "20 %"]
    decay_type: Literal["linear", "sqrt", "cosine"] = "sqrt"  # shape of the decay


def make(cfg: Any) -> Curves:
    """Make the curves. Raises UserError if the decay is longer than the run after its warmup."""
    after = cfg.steps - cfg.warmup
    if cfg.decay > after:
        raise UserError(
            f"schedule.decay: found {cfg.decay} steps, expected at most the {after} after the warmup"
        )
    decay = make_decay(cfg.decay_type, cfg.decay, cfg.min_lr_ratio)
    peak_then_decay = optax.join_schedules([unit_curve, decay], [after - cfg.decay])
    return Curves(after_warmup(cfg.warmup, peak_then_decay), unit_curve)


def make_decay(shape: DecayShape, length: int, floor: float) -> Curve:
    """Make a curve that falls from 1 to `floor` in `length` steps."""
    if length == 0:
        return unit_curve
    if shape == "linear":
        return optax.linear_schedule(1.0, floor, length)
    if shape == "cosine":
        return optax.cosine_decay_schedule(1.0, length, alpha=floor)

    def sqrt(step: ArrayLike) -> Array:
        # `join_schedules` also calls it with steps before its start, where the root would be NaN.
        return floor + (1 - floor) * (1 - jnp.sqrt(jnp.clip(step / length, 0, 1)))

    return sqrt
