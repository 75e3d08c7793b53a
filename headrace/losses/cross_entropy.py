"""Cross entropy with optional label smoothing (arXiv 1512.00567), smoothed as in torch: the target keeps
1 - a of the weight and a is spread over the whole vocabulary, the target included."""

from dataclasses import dataclass
from typing import Any

import jax

from headrace.kernels.linear_cross_entropy.stats import Stats


@dataclass(frozen=True)
class Config:
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError("label_smoothing: must be at least 0 and below 1")


def per_token(cfg: Any, stats: Stats) -> jax.Array:
    if not cfg.label_smoothing:
        return stats.lse - stats.target
    # The mean over the vocabulary of -log p is lse - mean, so the two terms share their lse.
    return stats.lse - (1 - cfg.label_smoothing) * stats.target - cfg.label_smoothing * stats.mean
