"""Gradient descent with momentum: the simplest optimizer, against which others are tested."""

from dataclasses import dataclass

import optax

from headrace.nn.module import PyTree


@dataclass(frozen=True)
class Config:
    """The keys that `use: sgd` adds to the `optimizer` section of a recipe."""

    momentum: float = 0.9  # decay of the momentum

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError("momentum: expected a number from 0 up to, but not including, 1")


def make(cfg: Config, axes: PyTree) -> optax.GradientTransformation:
    """Make the transformation of gradients into update directions."""
    return optax.trace(cfg.momentum)
