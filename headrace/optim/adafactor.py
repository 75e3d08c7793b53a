"""Adafactor: a second moment kept as one row and one column per matrix (arXiv 1804.04235).

optax's version takes the two largest dimensions for the matrix (embed and head_dim of a query weight, or the
layers of a deep stack) and clips all stacked layers as one. Here rows and columns are the weight's own inputs
and outputs, layer by layer. Averaged axes stay, with size 1, so that state is sharded like its weight."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from headrace.nn.module import Axes
from headrace.optim.stable_adamw import layer_rms


@dataclass(frozen=True)
class Config:
    parameter_scale: bool = False  # the learning rate is then relative to the size of each weight


class State(NamedTuple):
    updates: jax.Array
    rows: Any
    columns: Any


def make(cfg: Config, axes: Any) -> optax.GradientTransformation:
    def init(params: Any) -> State:
        def zeros(dims: Callable[[Axes], tuple[int, ...]]) -> Any:
            return jax.tree.map(lambda p, axes: jnp.zeros_like(mean_square(p, dims(axes))), params, axes)

        return State(jnp.zeros([], jnp.int32), zeros(outputs), zeros(inputs))

    def update(grads: Any, state: State, params: Any = None) -> tuple[Any, State]:
        updates = optax.safe_increment(state.updates)
        keep = 1 - updates.astype(jnp.float32) ** -0.8

        def average(old: Any, dims: Callable[[Axes], tuple[int, ...]]) -> Any:
            def leaf(old: jax.Array, grad: jax.Array, axes: Axes) -> jax.Array:
                return keep * old + (1 - keep) * mean_square(grad, dims(axes))

            return jax.tree.map(leaf, old, grads, axes)

        def direction(grad: Any, row: Any, column: Any, param: Any, axes: Axes) -> jax.Array:
            shape = row / row.mean(inputs(axes), keepdims=True)
            # Two roots, not the root of a product, which would underflow for gradients below 1e-11.
            step = grad * jax.lax.rsqrt(shape) * jax.lax.rsqrt(column)
            step = step / jnp.maximum(1, layer_rms(step, axes))
            scale = jnp.maximum(layer_rms(param, axes), 1e-3) if cfg.parameter_scale else 1
            return (step * scale).astype(param.dtype)

        rows, columns = average(state.rows, outputs), average(state.columns, inputs)
        return jax.tree.map(direction, grads, rows, columns, params, axes), State(updates, rows, columns)

    return optax.GradientTransformation(init, update)


def inputs(axes: Axes) -> tuple[int, ...]:
    """The dims summed over. A vector counts as all inputs, so that its row is all of its second moment."""
    return tuple(range(axes.stacked, axes.stacked + (axes.inputs if axes.is_matrix else len(axes.own))))


def outputs(axes: Axes) -> tuple[int, ...]:
    return tuple(range(axes.stacked + len(inputs(axes)), len(axes.names)))


def mean_square(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    # 1e-30 keeps the roots of an all-zero gradient finite.
    return jnp.mean(jnp.square(x.astype(jnp.float32)) + 1e-30, dims, keepdims=True)
