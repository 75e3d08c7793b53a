"""Warmup, a long stable stretch at the peak, and a short decay to the floor (arXiv 2404.06395; the sqrt tail
from arXiv 2405.18392). A run can be continued from any stable step and decayed later."""

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from headrace.errors import UserError
from headrace.config.durations import Curve, Curves
from headrace.schedules.constant import after_warmup, unchanged


@dataclass(frozen=True)
class Config:
    decay: int | str = "20 %"  # length of the tail: steps, tokens or a share of the run
    tail: Literal["linear", "sqrt", "cosine"] = "sqrt"


def make(cfg: Any) -> Curves:
    stable = cfg.steps - cfg.warmup - cfg.decay
    if stable < 0:
        room = cfg.steps - cfg.warmup
        raise UserError(f"schedule.decay: found {cfg.decay} steps, expected at most the {room} after warmup")
    peak_then_tail = optax.join_schedules([unchanged, tail(cfg.tail, cfg.decay, cfg.floor)], [stable])
    return Curves(after_warmup(cfg.warmup, peak_then_tail), unchanged)


def tail(shape: Literal["linear", "sqrt", "cosine"], length: int, floor: float) -> Curve:
    if length == 0:
        return unchanged
    if shape == "linear":
        return optax.linear_schedule(1.0, floor, length)
    if shape == "cosine":
        return optax.cosine_decay_schedule(1.0, length, alpha=floor)

    def sqrt(step: ArrayLike) -> Array:
        # From 0, since the joined curve also asks before the tail begins, where a root would be NaN.
        return floor + (1 - floor) * (1 - jnp.sqrt(jnp.clip(step / length, 0, 1)))

    return sqrt
