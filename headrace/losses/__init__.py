"""Losses: plugins of `loss.use`, one per file, with `Config` and `per_token`."""

import importlib
from dataclasses import dataclass
from typing import Protocol, cast

import jax

from headrace.config.sections import LossKeys
from headrace.kernels.linear_cross_entropy.stats import LogitStats


@dataclass(frozen=True, kw_only=True)
class LossConfig(LossKeys):
    """The `loss` section of a recipe. Each loss adds keys of its own."""

    use: str


class Loss(Protocol):
    """A loss's module."""

    def per_token(self, cfg: LossConfig, stats: LogitStats) -> jax.Array:
        """The loss of each token, from statistics of its logits: the logits are never all in memory."""


def load_loss(cfg: LossConfig) -> Loss:
    """Load the loss that `loss.use` names."""
    return cast(Loss, importlib.import_module(f"headrace.losses.{cfg.use}"))
