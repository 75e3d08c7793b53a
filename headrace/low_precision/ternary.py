"""The products of BitNet b1.58 (arXiv 2402.17764): weights of -1, 0 and 1 times the mean absolute value of
their matrix, and activations in 8 bits with a scale for each token.

Gradients pass straight through both roundings and are computed from the rounded numbers, in the compute
dtype: the model in training is the one that will be stored."""

from functools import partial

import jax
import jax.numpy as jnp

from headrace.low_precision.dot import (
    MatmulSpec,
    Scaled,
    absmax,
    append_axes,
    dot,
    first_dims,
    last_dims,
    mark_saved,
)
from headrace.nn.module import Axes

Array = jax.Array

MIN_SIZE = 1e-5  # of the mean or the largest absolute value that sets a scale, as in the paper's formulas
MAX_VALUE = 127


def round_weight(w: Array, axes: Axes) -> Scaled:
    """Round stacked weights to -1, 0 and 1, with one scale for each layer.

    They are rounded from the master weights: one in several hundred would be rounded differently from a copy
    in bfloat16."""
    w, matrix_dims = w.astype(jnp.float32), tuple(range(axes.stacked, w.ndim))
    scale = _bound_below(jnp.mean(jnp.abs(w), axis=matrix_dims, keepdims=True))
    return jnp.clip(jnp.round(w / scale), -1, 1).astype(jnp.int8), scale.reshape(w.shape[: axes.stacked])


def round_input(x: Array, num_input_axes: int) -> Scaled:
    """Round an activation to 8 bits, with one scale for each token."""
    size = _bound_below(absmax(x, last_dims(x, num_input_axes)))
    values = jnp.round(x.astype(jnp.float32) * (MAX_VALUE / size)).astype(jnp.int8)
    return values, mark_saved((size / MAX_VALUE).squeeze(last_dims(x, num_input_axes)))


def _bound_below(size: Array) -> Array:
    """Replace sizes below MIN_SIZE. NaN stays: jnp.maximum may skip it."""
    return jnp.where(size < MIN_SIZE, MIN_SIZE, size)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply(spec: MatmulSpec, x: Array, w: Array, x8: Scaled, w8: Scaled) -> Array:
    """Multiply x8 by w8, the rounded x and w, with exact sums. x and w themselves only receive the
    gradients."""
    (x_values, x_scale), (w_values, w_scale) = x8, w8
    contract = last_dims(x_values, spec.num_input_axes), first_dims(spec.num_input_axes)
    product = dot(spec, x_values, w_values, contract, x.dtype)
    return (product * append_axes(x_scale, product.ndim) * w_scale).astype(x.dtype)


def _forward(
    spec: MatmulSpec, x: Array, w: Array, x8: Scaled, w8: Scaled
) -> tuple[Array, tuple[Scaled, Scaled]]:
    return multiply(spec, x, w, x8, w8), (x8, w8)


def _backward(
    spec: MatmulSpec, residuals: tuple[Scaled, Scaled], d: Array
) -> tuple[Array, Array, None, None]:
    (x_values, x_scale), (w_values, w_scale) = residuals
    num_outputs = w_values.ndim - spec.num_input_axes
    outputs = last_dims(d, num_outputs), last_dims(w_values, num_outputs)
    d_x = jnp.tensordot(d, w_values.astype(d.dtype), outputs) * w_scale.astype(d.dtype)
    tokens = first_dims(d.ndim - num_outputs)
    x = (x_values * append_axes(x_scale, x_values.ndim)).astype(d.dtype)
    return d_x, jnp.tensordot(x, d, (tokens, tokens)), None, None


multiply.defvjp(_forward, _backward)
