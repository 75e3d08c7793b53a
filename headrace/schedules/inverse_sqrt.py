"""Warmup, then one over the square root of the step (arXiv 1706.03762).

The curve does not depend on `steps` or `floor`, so a longer run continues a shorter one."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from headrace.schedules import Curves, ScheduleConfig, after_warmup, unit_curve


@dataclass(frozen=True)
class Config:
    """The keys that `use: inverse_sqrt` adds to the `schedule` section of a recipe: none."""


def make(cfg: ScheduleConfig) -> Curves:
    """Make the curves."""
    start = max(cfg.warmup, 1)

    def decay(step: ArrayLike) -> Array:
        return jnp.sqrt(start / (start + step))

    return Curves(after_warmup(cfg.warmup, decay), unit_curve)
