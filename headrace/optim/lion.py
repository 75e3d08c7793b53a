"""Lion, the sign of an interpolated momentum (arXiv 2302.06675). Its steps are larger than AdamW's: take a
learning rate 3 to 10 times lower and a weight decay as much higher."""

from dataclasses import dataclass
from typing import Any

import optax


@dataclass(frozen=True)
class Config:
    b1: float = 0.9
    b2: float = 0.99

    def __post_init__(self) -> None:
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a number from 0 up to, but not including, 1")


def make(cfg: Config, axes: Any) -> optax.GradientTransformation:
    return optax.scale_by_lion(cfg.b1, cfg.b2)
