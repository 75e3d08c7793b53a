"""Products in int8, symmetric, rounded to nearest: the forward product and the one for the gradient of x.
That of the weight stays in the compute dtype, as in SwitchBack (arXiv 2304.13013), which rounds to nearest as
well: what rounding leaves of a product is the less exact the longer its sum, and this one goes over all
tokens of a batch. MaxText can leave it alone, too, or cut the sum into parts with scales of their own.

x has a scale for each token, which stays outside of the sum, and w one for each output. Backward, outputs are
what is summed over: there the scales of w are multiplied into the gradient before that is rounded, a token at
a time, and one copy of w in 8 bits serves both ways."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from headrace.low_precision.dot import LEAST, MatmulSpec, dot, first, kept, largest, last
from headrace.nn.module import Axes

Array = jax.Array

MOST = 127  # -128 is left out: what is symmetric has no bias


def round_weight(w: Array, axes: Axes) -> tuple[Array, Array]:
    """In 8 bits, and the scale of each layer's outputs."""
    inputs = tuple(range(axes.stacked, axes.stacked + axes.num_input_axes))
    values, scale = rounded(w, axis=inputs)
    return values, scale.squeeze(inputs)


def round_input(x: Array, inputs: int) -> tuple[Array, Array]:
    """In 8 bits, and the scale of each token."""
    values, scale = rounded(x, axis=last(x, inputs))
    return values, scale.squeeze(last(x, inputs))


def rounded(x: Array, axis: tuple[int, ...]) -> tuple[Array, Array]:
    """x in 8 bits and what these are to be multiplied by, one number for all along `axis`. A NaN makes the
    scale NaN, infinity makes it infinite: the loss shows it, and the step is skipped."""
    scale = largest(x, axis) / MOST
    scale = kept(jnp.where(scale < LEAST, LEAST, scale))  # a maximum may pass over NaN
    return jnp.clip(jnp.round(x.astype(jnp.float32) / scale), -MOST, MOST).astype(jnp.int8), scale


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply(spec: MatmulSpec, x: Array, w: Array, x8: tuple[Array, Array], w8: tuple[Array, Array]) -> Array:
    """w is here for its gradient alone, x for that of w besides; what is multiplied is x8 and w8."""
    (x_values, x_scale), (w_values, w_scale) = x8, w8
    over = last(x_values, spec.inputs), first(spec.inputs)
    product = dot(spec, x_values, w_values, over, x.dtype)
    return (product * _widened(x_scale, product.ndim) * w_scale).astype(x.dtype)


def _forward(spec: MatmulSpec, x: Array, w: Array, x8: Any, w8: Any) -> tuple[Array, Any]:
    return multiply(spec, x, w, x8, w8), (x, w8)


def _backward(spec: MatmulSpec, held: Any, d: Array) -> tuple[Array, Array, None, None]:
    x, (w_values, w_scale) = held
    outputs = w_values.ndim - spec.inputs
    d_values, d_scale = rounded(d.astype(jnp.float32) * w_scale, axis=last(d, outputs))
    d_x = dot(spec, d_values, w_values, (last(d, outputs), last(w_values, outputs)), d.dtype)
    d_x = d_x * _widened(d_scale.squeeze(last(d, outputs)), d_x.ndim)
    tokens = first(d.ndim - outputs)
    d_w = jnp.tensordot(x, d, (tokens, tokens))
    return d_x.astype(x.dtype), d_w, None, None


def _widened(scale: Array, ndim: int) -> Array:
    """A number for each token, to be multiplied with what each token has."""
    return scale.reshape(*scale.shape, *(1,) * (ndim - scale.ndim))


multiply.defvjp(_forward, _backward)
