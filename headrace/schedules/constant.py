"""Linear warmup, then the peak learning rate to the end. Every other schedule begins with this warmup."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from headrace.config.durations import Curve, Curves


@dataclass(frozen=True)
class Config:
    pass


def make(cfg: Any) -> Curves:
    return Curves(after_warmup(cfg.warmup, unchanged), unchanged)


def unchanged(step: ArrayLike) -> Array:
    return jnp.ones(jnp.shape(step), jnp.float32)


def after_warmup(warmup: int, curve: Curve) -> Curve:
    """`curve`, counted from the end of the warmup. Step 0 already learns, at 1 / warmup."""

    def multiplier(step: ArrayLike) -> Array:
        step = jnp.asarray(step)
        return jnp.where(step < warmup, (step + 1) / max(warmup, 1), curve(jnp.maximum(step - warmup, 0)))

    return multiplier
