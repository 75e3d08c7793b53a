"""Focal loss (arXiv 1708.02002): cross entropy times (1 - p)^gamma, p being the probability of the target,
so that tokens the model already knows count for little. Without the paper's class weights."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from headrace.kernels.linear_cross_entropy.stats import Stats


@dataclass(frozen=True)
class Config:
    gamma: float = 2.0

    def __post_init__(self) -> None:
        if self.gamma < 0:
            raise ValueError("gamma: must be at least 0")


def per_token(cfg: Any, stats: Stats) -> jax.Array:
    cross_entropy = stats.lse - stats.target
    # Never 0, where a gamma below 1 has an infinite slope. In float32, 1 - 3e-8 is 1.
    doubt = jnp.maximum(-jnp.expm1(-cross_entropy), 3e-8)
    return doubt**cfg.gamma * cross_entropy
