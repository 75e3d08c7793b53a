"""Adafactor: a second moment that is stored as one row and one column per matrix (arXiv 1804.04235).

optax factors the two largest dimensions of a weight (embed and head_dim of a query weight, or the layers of a
deep stack), and clips all stacked layers as one. Here rows and columns are the weight's inputs and outputs,
layer by layer. Averaged axes have size 1, so that the state is sharded like its weight."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from headrace.nn.module import Axes, PyTree
from headrace.optim.stable_adamw import layer_rms

AxisNumbers = Callable[[Axes], tuple[int, ...]]


@dataclass(frozen=True)
class Config:
    """The keys that `use: adafactor` adds to the `optimizer` section of a recipe."""

    parameter_scale: bool = False  # whether the learning rate is relative to the size of each weight


class FactoredState(NamedTuple):
    """The number of updates, and for each weight the row and column of its second moment."""

    updates: jax.Array
    rows: PyTree
    columns: PyTree


def make(cfg: Config, axes: PyTree) -> optax.GradientTransformation:
    """Make the transformation of gradients into update directions."""

    def init(params: PyTree) -> FactoredState:
        zeros = lambda average_over: jax.tree.map(
            lambda w, axes: jnp.zeros_like(mean_square(w, average_over(axes))), params, axes
        )
        return FactoredState(jnp.zeros([], jnp.int32), zeros(output_axes), zeros(input_axes))

    def update(grads: PyTree, state: FactoredState, params: PyTree = None) -> tuple[PyTree, FactoredState]:
        updates = optax.safe_increment(state.updates)
        decay = 1 - updates.astype(jnp.float32) ** -0.8
        rows = _update_average(state.rows, grads, axes, output_axes, decay)
        columns = _update_average(state.columns, grads, axes, input_axes, decay)
        direction = jax.tree.map(_make_direction(cfg), grads, rows, columns, params, axes)
        return direction, FactoredState(updates, rows, columns)

    return optax.GradientTransformation(init, update)


def _update_average(
    average: PyTree, grads: PyTree, axes: PyTree, average_over: AxisNumbers, decay: jax.Array
) -> PyTree:
    """Update the running means of squared gradients."""

    def update_leaf(average: jax.Array, grad: jax.Array, axes: Axes) -> jax.Array:
        return decay * average + (1 - decay) * mean_square(grad, average_over(axes))

    return jax.tree.map(update_leaf, average, grads, axes)


def _make_direction(cfg: Config) -> Callable[..., jax.Array]:
    def direction(
        grad: jax.Array, row: jax.Array, column: jax.Array, param: jax.Array, axes: Axes
    ) -> jax.Array:
        normalized_row = row / row.mean(input_axes(axes), keepdims=True)
        # Two roots: the root of the product would underflow for gradients below 1e-11.
        step = grad * jax.lax.rsqrt(normalized_row) * jax.lax.rsqrt(column)
        step = step / jnp.maximum(1, layer_rms(step, axes))
        scale = jnp.maximum(layer_rms(param, axes), 1e-3) if cfg.parameter_scale else 1
        return (step * scale).astype(param.dtype)

    return direction


def input_axes(axes: Axes) -> tuple[int, ...]:
    """Numbers of the axes that count as inputs. A vector is all inputs, so its row is its second moment."""
    count = axes.num_input_axes if axes.is_matrix else len(axes.weight_axes)
    return tuple(range(axes.stacked, axes.stacked + count))


def output_axes(axes: Axes) -> tuple[int, ...]:
    """Numbers of the other axes of one layer's weight."""
    return tuple(range(axes.stacked + len(input_axes(axes)), len(axes.names)))


def mean_square(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The mean of squares over axes, plus 1e-30, which makes the roots for an all-zero gradient finite."""
    return jnp.mean(jnp.square(x.astype(jnp.float32)) + 1e-30, axes, keepdims=True)
