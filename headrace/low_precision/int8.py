"""Products in int8, symmetric and rounded to nearest: the forward product, and that of the gradient of x.

The product of the weight's gradient stays in the compute dtype, as in SwitchBack (arXiv 2304.13013), which
rounds to nearest as well: the longer a product's sum, the less exact rounding leaves it, and this one goes
over all tokens of a batch. MaxText, too, can leave it unrounded, or split the sum into parts with scales of
their own.

x has a scale for each token, which stays outside of the sum, and w one for each output. The backward pass
sums over outputs: there the scales of w multiply the gradient before it is rounded, token by token, so that
one copy of w in 8 bits serves both passes."""

from functools import partial

import jax
import jax.numpy as jnp

from headrace.low_precision.dot import (
    MIN_SCALE,
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

MAX_VALUE = 127  # -128 is not used: a symmetric range has no bias


def round_weight(w: Array, axes: Axes) -> Scaled:
    """Round stacked weights, with one scale for each output of each layer."""
    inputs = tuple(range(axes.stacked, axes.stacked + axes.num_input_axes))
    values, scale = round_tensor(w, axis=inputs)
    return values, scale.squeeze(inputs)


def round_input(x: Array, num_input_axes: int) -> Scaled:
    """Round an activation, with one scale for each token."""
    values, scale = round_tensor(x, axis=last_dims(x, num_input_axes))
    return values, scale.squeeze(last_dims(x, num_input_axes))


def round_tensor(x: Array, axis: tuple[int, ...]) -> Scaled:
    """Round x to 8 bits, with one scale for all values along `axis`.

    The scale is NaN or infinite if a value is, and so is the loss, so that the step is skipped."""
    scale = absmax(x, axis) / MAX_VALUE
    scale = mark_saved(jnp.where(scale < MIN_SCALE, MIN_SCALE, scale))  # jnp.maximum may skip NaN
    values = jnp.clip(jnp.round(x.astype(jnp.float32) / scale), -MAX_VALUE, MAX_VALUE).astype(jnp.int8)
    return values, scale


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply(spec: MatmulSpec, x: Array, w: Array, x8: Scaled, w8: Scaled) -> Array:
    """Multiply x8 by w8, the rounded x and w. w itself only receives its gradient, for which x is needed."""
    (x_values, x_scale), (w_values, w_scale) = x8, w8
    contract = last_dims(x_values, spec.num_input_axes), first_dims(spec.num_input_axes)
    product = dot(spec, x_values, w_values, contract, x.dtype)
    return (product * append_axes(x_scale, product.ndim) * w_scale).astype(x.dtype)


def _forward(
    spec: MatmulSpec, x: Array, w: Array, x8: Scaled, w8: Scaled
) -> tuple[Array, tuple[Array, Scaled]]:
    return multiply(spec, x, w, x8, w8), (x, w8)


def _backward(spec: MatmulSpec, residuals: tuple[Array, Scaled], d: Array) -> tuple[Array, Array, None, None]:
    x, (w_values, w_scale) = residuals
    num_outputs = w_values.ndim - spec.num_input_axes
    d_values, d_scale = round_tensor(d.astype(jnp.float32) * w_scale, axis=last_dims(d, num_outputs))
    outputs = last_dims(d, num_outputs), last_dims(w_values, num_outputs)
    d_x = dot(spec, d_values, w_values, outputs, d.dtype)
    d_x = d_x * append_axes(d_scale.squeeze(last_dims(d, num_outputs)), d_x.ndim)
    tokens = first_dims(d.ndim - num_outputs)
    d_w = jnp.tensordot(x, d, (tokens, tokens))
    return d_x.astype(x.dtype), d_w, None, None


multiply.defvjp(_forward, _backward)
