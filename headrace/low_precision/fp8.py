"""Products in fp8: activations and weights in e4m3, gradients in e5m2 (arXiv 2209.05433), all three products
of a matrix (forward, and for both gradients), each tensor with one scale from its own largest number.

One scale for a tensor, because that is what cuBLASLt takes on Hopper, and because one rounding of x then
serves the forward product and the one for the weight's gradient, which sum over different dimensions. Scales
are powers of two: a floating-point format loses nothing by it, and to multiply by them is exact."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from headrace.low_precision.dot import LEAST, MatmulSpec, dot, first, kept, largest, last
from headrace.nn.module import Axes

Array = jax.Array

FORWARD, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2


def round_weight(w: Array, axes: Axes) -> tuple[Array, Array]:
    """In 8 bits, and the scale of each layer."""
    values, scale = rounded(w, FORWARD, axis=tuple(range(axes.stacked, w.ndim)))
    return values, scale.reshape(w.shape[: axes.stacked])


def round_input(x: Array, inputs: int) -> tuple[Array, Array]:
    values, scale = rounded(x, FORWARD, axis=tuple(range(x.ndim)))
    return values, scale.reshape(())


def rounded(x: Array, dtype: Any, axis: tuple[int, ...]) -> tuple[Array, Array]:
    """x in 8 bits and what these are to be multiplied by, one number for all along `axis`."""
    scale = kept(power_of_two(largest(x, axis) / float(jnp.finfo(dtype).max)))
    return (x.astype(jnp.float32) * (1 / scale)).astype(dtype), scale


def power_of_two(x: Array) -> Array:
    """The next that is not below x, by its bits: exp2 is not exact on every chip. NaN where x is not finite,
    so that the loss is too, and the step is skipped."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    power = jax.lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)
    return jnp.where(jnp.isfinite(x), jnp.maximum(power, LEAST), jnp.nan)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply(spec: MatmulSpec, x: Array, w: Array, x8: tuple[Array, Array], w8: tuple[Array, Array]) -> Array:
    """x and w are here for their gradients alone; what is multiplied is x8 and w8."""
    (x_values, x_scale), (w_values, w_scale) = x8, w8
    over = last(x_values, spec.inputs), first(spec.inputs)
    return _scaled(dot(spec, x_values, w_values, over, x.dtype), x_scale * w_scale)


def _forward(spec: MatmulSpec, x: Array, w: Array, x8: Any, w8: Any) -> tuple[Array, Any]:
    return multiply(spec, x, w, x8, w8), (x8, w8)


def _backward(spec: MatmulSpec, held: Any, d: Array) -> tuple[Array, Array, None, None]:
    (x_values, x_scale), (w_values, w_scale) = held
    d_values, d_scale = rounded(d, GRADIENT, axis=tuple(range(d.ndim)))
    d_scale = d_scale.reshape(())
    outputs = w_values.ndim - spec.inputs
    # `precise`: Hopper's quick sums keep 14 bits, which is enough forward; Transformer Engine and Flax, too,
    # take the exact ones for gradients.
    over = last(d_values, outputs), last(w_values, outputs)
    d_x = _scaled(dot(spec, d_values, w_values, over, d.dtype, precise=True), d_scale * w_scale)
    tokens = first(d.ndim - outputs)
    d_w = _scaled(dot(spec, x_values, d_values, (tokens, tokens), d.dtype, precise=True), x_scale * d_scale)
    return d_x, d_w, None, None


def _scaled(product: Array, scale: Array) -> Array:
    """In the product's own dtype: XLA then hands the scale to cuBLASLt, or fuses it with what comes next."""
    return product * scale.astype(product.dtype)


multiply.defvjp(_forward, _backward)
