"""Muon: momentum with its matrices orthogonalised (kellerjordan.github.io/posts/muon), at Moonlight's scale
(arXiv 2502.16982), so that AdamW's learning rate and decay serve here too. Hidden matrices only: embeddings,
heads and vectors get AdamW."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import optax

from headrace.kernels.newton_schulz import newton_schulz
from headrace.nn.module import Axes


@dataclass(frozen=True)
class Config:
    momentum: float = 0.95
    steps: int = 5  # of the Newton-Schulz iteration
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8

    def __post_init__(self) -> None:
        for name in ("momentum", "b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a number from 0 up to, but not including, 1")
        if self.eps <= 0:
            raise ValueError("eps: expected a number above 0")
        if self.steps < 1:
            raise ValueError("steps: expected 1 or more")


def make(cfg: Config, axes: Any) -> optax.GradientTransformation:
    kinds = jax.tree.map(lambda axes: "muon" if axes.is_hidden_matrix else "adam", axes)
    hidden = jax.tree.map(lambda axes: axes if axes.is_hidden_matrix else optax.MaskedNode(), axes)

    def directions(updates: Any, params: Any) -> Any:
        return jax.tree.map(lambda update, axes: orthogonal(update, axes, cfg.steps), updates, hidden)

    muon = optax.chain(optax.trace(cfg.momentum, nesterov=True), optax.stateless(directions))
    adam = optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps)
    # A function, since a model can be called and optax would call it in place of one.
    return optax.partition({"muon": muon, "adam": adam}, lambda params: kinds)


def orthogonal(update: jax.Array, axes: Axes, steps: int) -> jax.Array:
    """Each layer's matrix [inputs, outputs] with all its singular values near 1, times Moonlight's scale."""
    layers, own = update.shape[: axes.stacked], update.shape[axes.stacked :]
    inputs, outputs = math.prod(own[: axes.inputs]), math.prod(own[axes.inputs :])
    matrix = newton_schulz(update.reshape(*layers, inputs, outputs), steps)
    # 0.2 is the root mean square of AdamW's own updates.
    return 0.2 * math.sqrt(max(inputs, outputs)) * matrix.reshape(update.shape)
