"""BitNet's two stages: a high learning rate with weight decay, then at `switch` a drop to a lower one without
(arXiv 2402.17764 and its training tips). Ternary weights settle only once decay stops pulling at them."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from headrace.errors import UserError
from headrace.config.durations import Curves
from headrace.schedules.constant import after_warmup


@dataclass(frozen=True)
class Config:
    switch: int | str = "50 %"  # where the second stage begins
    middle: float = 0.53  # end of the first stage, as a share of the peak
    second: float = 0.33  # start of the second
    floor: float = 0.0  # where it ends

    def __post_init__(self) -> None:
        for name in ("middle", "second"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected a share from 0 to 1")


def make(cfg: Any) -> Curves:
    if not cfg.warmup < cfg.switch < cfg.steps:
        raise UserError(
            f"schedule.switch: found step {cfg.switch}, expected one after the warmup ({cfg.warmup}) "
            f"and before the end ({cfg.steps})"
        )
    first = optax.linear_schedule(1.0, cfg.middle, cfg.switch - cfg.warmup)
    second = optax.linear_schedule(cfg.second, cfg.floor, cfg.steps - cfg.switch)
    stages = optax.join_schedules([first, second], [cfg.switch - cfg.warmup])

    def weight_decay(step: ArrayLike) -> Array:
        return jnp.where(jnp.asarray(step) < cfg.switch, 1.0, 0.0)

    return Curves(after_warmup(cfg.warmup, stages), weight_decay)
