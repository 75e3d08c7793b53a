"""Optimizers: plugins of `optimizer.use`, one per file, with `Config` and `make`.

They give the direction of an update. Learning rate, weight decay and clipping are the same for all
(training/step.py)."""

import importlib
from dataclasses import dataclass
from typing import Protocol, cast

import optax

from headrace.config.sections import OptimizerKeys
from headrace.nn.module import PyTree


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(OptimizerKeys):
    """The `optimizer` section of a recipe. Each optimizer adds keys of its own."""

    use: str


class Optimizer(Protocol):
    """An optimizer's module."""

    def make(self, cfg: OptimizerConfig, axes: PyTree) -> optax.GradientTransformation:
        """Make the transformation of gradients into update directions. `axes` has the `Axes` of each
        weight."""


def load_optimizer(cfg: OptimizerConfig) -> Optimizer:
    """Load the optimizer that `optimizer.use` names."""
    return cast(Optimizer, importlib.import_module(f"headrace.optim.{cfg.use}"))
