"""Muon: momentum whose matrices are orthogonalized (kellerjordan.github.io/posts/muon), at Moonlight's scale
(arXiv 2502.16982), so that AdamW's learning rate and weight decay can be kept. Only for hidden matrices:
embeddings, heads and vectors are updated by AdamW."""

import math
from dataclasses import dataclass

import jax
import optax

from headrace.kernels.newton_schulz import newton_schulz
from headrace.nn.module import Axes, PyTree


@dataclass(frozen=True)
class Config:
    """The keys that `use: muon` adds to the `optimizer` section of a recipe."""

    momentum: float = 0.95  # decay of the momentum of matrices
    ns_steps: int = 5  # number of Newton-Schulz iterations
    b1: float = 0.9  # decay of the running mean of gradients, for weights that AdamW updates
    b2: float = 0.95  # decay of the running mean of squared gradients, for weights that AdamW updates
    eps: float = 1e-8  # constant added to the root of the running mean, for weights that AdamW updates

    def __post_init__(self) -> None:
        for name, decay in (("momentum", self.momentum), ("b1", self.b1), ("b2", self.b2)):
            if not 0 <= decay < 1:
                raise ValueError(f"{name}: expected a number from 0 up to, but not including, 1")
        if self.eps <= 0:
            raise ValueError("eps: expected a number above 0")
        if self.ns_steps < 1:
            raise ValueError("ns_steps: expected 1 or more")


def make(cfg: Config, axes: PyTree) -> optax.GradientTransformation:
    """Make the transformation of gradients into update directions."""
    labels = jax.tree.map(lambda axes: "muon" if axes.is_hidden_matrix else "adam", axes)
    hidden_axes = jax.tree.map(lambda axes: axes if axes.is_hidden_matrix else optax.MaskedNode(), axes)

    def orthogonalize_all(updates: PyTree, params: PyTree) -> PyTree:
        return jax.tree.map(
            lambda update, axes: orthogonalize(update, axes, cfg.ns_steps), updates, hidden_axes
        )

    muon = optax.chain(optax.trace(cfg.momentum, nesterov=True), optax.stateless(orthogonalize_all))
    adam = optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps)
    # A function that returns the labels: optax would call a tree that is callable, as models are.
    return optax.partition({"muon": muon, "adam": adam}, lambda params: labels)


def orthogonalize(update: jax.Array, axes: Axes, steps: int) -> jax.Array:
    """Give each layer's matrix [inputs, outputs] singular values near 1, times Moonlight's scale."""
    layers, shape = update.shape[: axes.stacked], update.shape[axes.stacked :]
    inputs, outputs = math.prod(shape[: axes.num_input_axes]), math.prod(shape[axes.num_input_axes :])
    matrix = newton_schulz(update.reshape(*layers, inputs, outputs), steps)
    # 0.2 is the root mean square of AdamW's updates.
    return 0.2 * math.sqrt(max(inputs, outputs)) * matrix.reshape(update.shape)
