"""StableAdamW: AdamW with Adafactor's update clipping instead of gradient clipping (arXiv 2304.13013), as
ModernBERT was trained. A tensor whose gradients outgrow their running average takes a shorter step."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from headrace.nn.module import Axes


@dataclass(frozen=True)
class Config:
    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a number from 0 up to, but not including, 1")
        if self.eps <= 0:
            raise ValueError("eps: expected a number above 0")


def make(cfg: Config, axes: Any) -> optax.GradientTransformation:
    adam = optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        direction, state = adam.update(grads, state, params)
        # The paper debiases by betas that change with the step, which gives exactly Adam's corrected moments.
        correction = 1 - cfg.b2 ** state.count.astype(jnp.float32)

        def steady(direction: jax.Array, grad: jax.Array, second: jax.Array, axes: Axes) -> jax.Array:
            surprise = grad / jnp.sqrt(jnp.maximum(second / correction, cfg.eps**2))
            return direction / jnp.maximum(1, layer_rms(surprise, axes)).astype(direction.dtype)

        return jax.tree.map(steady, direction, grads, state.nu, axes), state

    return optax.GradientTransformation(adam.init, update)


def layer_rms(x: jax.Array, axes: Axes) -> jax.Array:
    """The root mean square of each layer's weight by itself, shaped to divide the whole stack."""
    own = tuple(range(axes.stacked, x.ndim))
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=own, keepdims=True))
