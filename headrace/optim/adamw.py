"""AdamW (arXiv 1711.05101)."""

from dataclasses import dataclass

import optax

from headrace.nn.module import PyTree


@dataclass(frozen=True)
class Config:
    """The keys that `use: adamw` adds to the `optimizer` section of a recipe."""

    b1: float = 0.9  # decay of the running mean of gradients
    b2: float = 0.95  # decay of the running mean of squared gradients
    eps: float = 1e-8  # constant added to the root of the running mean

    def __post_init__(self) -> None:
        for name, decay in (("b1", self.b1), ("b2", self.b2)):
            if not 0 <= decay < 1:
                raise ValueError(f"{name}: expected a number from 0 up to, but not including, 1")
        if self.eps <= 0:
            raise ValueError("eps: expected a number above 0")


def make(cfg: Config, axes: PyTree) -> optax.GradientTransformation:
    """Make the transformation of gradients into update directions."""
    return optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps)
