"""BitNet b1.58's products (arXiv 2402.17764): weights of -1, 0 and 1 times the mean size of their matrix,
activations in 8 bits with a scale for each token. Gradients go straight through both roundings and are made
of the rounded numbers, in the compute dtype: training sees the model that will be stored."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from headrace.low_precision.dot import MatmulSpec, dot, first, kept, largest, last
from headrace.nn.module import Axes

Array = jax.Array

LEAST = 1e-5  # of a scale's mean or maximum, as in the paper's formulas
MOST = 127


def round_weight(w: Array, axes: Axes) -> tuple[Array, Array]:
    """-1, 0 and 1, and the scale of each layer's matrix. From the master weights, not from what is left of
    them in bfloat16: rounded first, one in several hundred would fall on the other side."""
    w, own = w.astype(jnp.float32), tuple(range(axes.stacked, w.ndim))
    scale = _at_least(jnp.mean(jnp.abs(w), axis=own, keepdims=True))
    return jnp.clip(jnp.round(w / scale), -1, 1).astype(jnp.int8), scale.reshape(w.shape[: axes.stacked])


def round_input(x: Array, inputs: int) -> tuple[Array, Array]:
    """In 8 bits, and the scale of each token."""
    size = _at_least(largest(x, last(x, inputs)))
    values = jnp.round(x.astype(jnp.float32) * (MOST / size)).astype(jnp.int8)
    return values, kept((size / MOST).squeeze(last(x, inputs)))


def _at_least(size: Array) -> Array:
    """Not by a maximum, which may pass over NaN."""
    return jnp.where(size < LEAST, LEAST, size)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply(spec: MatmulSpec, x: Array, w: Array, x8: tuple[Array, Array], w8: tuple[Array, Array]) -> Array:
    """x and w are here for their gradients alone; what is multiplied is x8 and w8, whose sums are exact."""
    (x_values, x_scale), (w_values, w_scale) = x8, w8
    product = dot(spec, x_values, w_values, (last(x_values, spec.inputs), first(spec.inputs)), x.dtype)
    return (product * _widened(x_scale, product.ndim) * w_scale).astype(x.dtype)


def _forward(spec: MatmulSpec, x: Array, w: Array, x8: Any, w8: Any) -> tuple[Array, Any]:
    return multiply(spec, x, w, x8, w8), (x8, w8)


def _backward(spec: MatmulSpec, held: Any, d: Array) -> tuple[Array, Array, None, None]:
    (x_values, x_scale), (w_values, w_scale) = held
    outputs = w_values.ndim - spec.inputs
    over = last(d, outputs), last(w_values, outputs)
    d_x = jnp.tensordot(d, w_values.astype(d.dtype), over) * w_scale.astype(d.dtype)
    tokens = first(d.ndim - outputs)
    x = (x_values * _widened(x_scale, x_values.ndim)).astype(d.dtype)
    return d_x, jnp.tensordot(x, d, (tokens, tokens)), None, None


def _widened(scale: Array, ndim: int) -> Array:
    """A number for each token, to be multiplied with what each token has."""
    return scale.reshape(*scale.shape, *(1,) * (ndim - scale.ndim))


multiply.defvjp(_forward, _backward)
