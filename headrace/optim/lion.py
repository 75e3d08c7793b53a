"""Lion: the sign of an interpolated momentum (arXiv 2302.06675). Its updates are larger than AdamW's: use a
learning rate 3 to 10 times lower, and a weight decay higher by as much."""

from dataclasses import dataclass

import optax

from headrace.nn.module import PyTree


@dataclass(frozen=True)
class Config:
    """The keys that `use: lion` adds to the `optimizer` section of a recipe."""

    b1: float = 0.9  # weight of the momentum in the update's direction
    b2: float = 0.99  # decay of the momentum

    def __post_init__(self) -> None:
        for name, decay in (("b1", self.b1), ("b2", self.b2)):
            if not 0 <= decay < 1:
                raise ValueError(f"{name}: expected a number from 0 up to, but not including, 1")


def make(cfg: Config, axes: PyTree) -> optax.GradientTransformation:
    """Make the transformation of gradients into update directions."""
    return optax.scale_by_lion(cfg.b1, cfg.b2)
