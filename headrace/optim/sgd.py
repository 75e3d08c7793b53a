"""Gradient descent with momentum: the smallest optimizer, and the easiest to check others against."""

from dataclasses import dataclass
from typing import Any

import optax


@dataclass(frozen=True)
class Config:
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError("momentum: expected a number from 0 up to, but not including, 1")


def make(cfg: Config, axes: Any) -> optax.GradientTransformation:
    return optax.trace(cfg.momentum)
