"""Cross entropy with optional label smoothing (arXiv 1512.00567), as in torch: the target keeps 1 - a of the
weight, and a is distributed over the whole vocabulary, target included."""

from dataclasses import dataclass

import jax

from headrace.kernels.linear_cross_entropy.stats import LogitStats


@dataclass(frozen=True)
class Config:
    """The keys that `use: cross_entropy` adds to the `loss` section of a recipe."""

    label_smoothing: float = 0.0  # share of the target probability that is spread over all tokens

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError("label_smoothing: must be at least 0 and below 1")


def per_token(cfg: Config, stats: LogitStats) -> jax.Array:
    """Compute the loss of each token from statistics of its logits."""
    if not cfg.label_smoothing:
        return stats.lse - stats.target
    # The mean over the vocabulary of -log p is lse - mean, so both terms have the same lse.
    return stats.lse - (1 - cfg.label_smoothing) * stats.target - cfg.label_smoothing * stats.mean
