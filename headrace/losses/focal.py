"""Focal loss (arXiv 1708.02002): cross entropy times (1 - p)^gamma, where p is the probability of the target,
so that tokens the model already predicts well have little weight. The paper's class weights are not
included."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from headrace.kernels.linear_cross_entropy.stats import LogitStats


@dataclass(frozen=True)
class Config:
    """The keys that `use: focal` adds to the `loss` section of a recipe."""

    gamma: float = 2.0  # exponent by which well-predicted tokens count less; 0: plain cross entropy

    def __post_init__(self) -> None:
        if self.gamma < 0:
            raise ValueError("gamma: must be at least 0")


def per_token(cfg: Config, stats: LogitStats) -> jax.Array:
    """Compute the loss of each token from statistics of its logits."""
    cross_entropy = stats.lse - stats.target
    # Never 0, where a gamma below 1 has an infinite slope. In float32, 1 - 3e-8 is 1.
    miss_probability = jnp.maximum(-jnp.expm1(-cross_entropy), 3e-8)
    return miss_probability**cfg.gamma * cross_entropy
