"""AdamW (arXiv 1711.05101). As with every optimizer here, learning rate, decay and clipping are step.py's."""

from dataclasses import dataclass
from typing import Any

import optax


@dataclass(frozen=True)
class Config:
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8

    def __post_init__(self) -> None:
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a number from 0 up to, but not including, 1")
        if self.eps <= 0:
            raise ValueError("eps: expected a number above 0")


def make(cfg: Config, axes: Any) -> optax.GradientTransformation:
    return optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps)
