"""BitNet's two stages: a high learning rate with weight decay, then from `stage2_start` on a lower one
without it (arXiv 2402.17764 and its training tips). Ternary weights converge only without weight decay."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from headrace.errors import UserError
from headrace.schedules import Curves, after_warmup


@dataclass(frozen=True)
class Config:
    """The keys that `use: two_stage` adds to the `schedule` section of a recipe."""

    stage2_start: int | str = "50 %"  # start of the second stage [steps, "3B tokens" or "20 %"]
    stage1_end_ratio: float = 0.53  # learning rate at the end of the first stage, as a share of the peak
    stage2_start_ratio: float = 0.33  # learning rate at the start of the second stage, as a share of the peak
    min_lr_ratio: float = 0.0  # learning rate at the end, as a share of the peak

    def __post_init__(self) -> None:
        for name, ratio in (
            ("stage1_end_ratio", self.stage1_end_ratio),
            ("stage2_start_ratio", self.stage2_start_ratio),
        ):
            if not 0 <= ratio <= 1:
                raise ValueError(f"{name}: expected a share from 0 to 1")


def make(cfg: Any) -> Curves:
    """Make the curves. Raises UserError if the switch is not between warmup and end."""
    if not cfg.warmup < cfg.stage2_start < cfg.steps:
        raise UserError(
            f"schedule.stage2_start: found step {cfg.stage2_start}, expected one after the warmup "
            f"({cfg.warmup}) and before the end ({cfg.steps})"
        )
    first = optax.linear_schedule(1.0, cfg.stage1_end_ratio, cfg.stage2_start - cfg.warmup)
    second = optax.linear_schedule(cfg.stage2_start_ratio, cfg.min_lr_ratio, cfg.steps - cfg.stage2_start)
    stages = optax.join_schedules([first, second], [cfg.stage2_start - cfg.warmup])

    def weight_decay(step: ArrayLike) -> Array:
        return jnp.where(jnp.asarray(step) < cfg.stage2_start, 1.0, 0.0)

    return Curves(after_warmup(cfg.warmup, stages), weight_decay)
