"""Warmup, then one over the square root of the step (arXiv 1706.03762). It has no end: `steps` and `floor`
do not bend it, and a longer run continues a shorter one."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from headrace.config.durations import Curves
from headrace.schedules.constant import after_warmup, unchanged


@dataclass(frozen=True)
class Config:
    pass


def make(cfg: Any) -> Curves:
    start = max(cfg.warmup, 1)

    def decay(step: ArrayLike) -> Array:
        return jnp.sqrt(start / (start + step))

    return Curves(after_warmup(cfg.warmup, decay), unchanged)
