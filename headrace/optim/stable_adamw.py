"""StableAdamW: AdamW with Adafactor's update clipping instead of gradient clipping (arXiv 2304.13013), as in
the training of ModernBERT. A weight whose gradients exceed their running average gets a smaller update."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from headrace.nn.module import Axes, PyTree


@dataclass(frozen=True)
class Config:
    """The keys that `use: stable_adamw` adds to the `optimizer` section of a recipe."""

    b1: float = 0.9  # decay of the running mean of gradients
    b2: float = 0.98  # decay of the running mean of squared gradients
    eps: float = 1e-6  # constant added to the root of the running mean

    def __post_init__(self) -> None:
        for name, decay in (("b1", self.b1), ("b2", self.b2)):
            if not 0 <= decay < 1:
                raise ValueError(f"{name}: expected a number from 0 up to, but not including, 1")
        if self.eps <= 0:
            raise ValueError("eps: expected a number above 0")


def make(cfg: Config, axes: PyTree) -> optax.GradientTransformation:
    """Make the transformation of gradients into update directions."""
    adam = optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps)

    def update(grads: PyTree, state: optax.OptState, params: PyTree = None) -> tuple[PyTree, optax.OptState]:
        direction, state = adam.update(grads, state, params)
        # The paper debiases by betas that change with the step, which gives exactly Adam's corrected moments.
        correction = 1 - cfg.b2 ** state.count.astype(jnp.float32)

        clip = functools.partial(clip_update, cfg.eps, correction)
        return jax.tree.map(clip, direction, grads, state.nu, axes), state

    return optax.GradientTransformation(adam.init, update)


def clip_update(
    eps: float,
    correction: jax.Array,
    direction: jax.Array,
    grad: jax.Array,
    second_moment: jax.Array,
    axes: Axes,
) -> jax.Array:
    """Shorten the update of each layer whose gradients exceed the root of their second moment on average.

    `correction` removes the bias of the second moment towards 0."""
    ratio = grad / jnp.sqrt(jnp.maximum(second_moment / correction, eps**2))
    return direction / jnp.maximum(1, layer_rms(ratio, axes)).astype(direction.dtype)


def layer_rms(x: jax.Array, axes: Axes) -> jax.Array:
    """The root mean square of each layer's part of a stacked weight, in a shape that broadcasts with it."""
    own_axes = tuple(range(axes.stacked, x.ndim))
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=own_axes, keepdims=True))
