"""Products in fp8: activations and weights in e4m3, gradients in e5m2 (arXiv 2209.05433).

All three products of a matrix are in fp8: the forward one, and those of both gradients. Each tensor has a
single scale, by its largest absolute value: cuBLASLt supports no other on Hopper, and one rounding of x then
serves the forward product and that of the weight's gradient, which sum over different dimensions. Scales are
powers of two: a floating-point format loses nothing by it, and multiplying by them is exact."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from headrace.low_precision.dot import (
    MIN_SCALE,
    MatmulSpec,
    Scaled,
    absmax,
    dot,
    first_dims,
    last_dims,
    mark_saved,
)
from headrace.nn.module import Axes

Array = jax.Array

FORWARD, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2


def round_weight(w: Array, axes: Axes) -> Scaled:
    """Round stacked weights, with one scale for each layer."""
    values, scale = round_tensor(w, FORWARD, axis=tuple(range(axes.stacked, w.ndim)))
    return values, scale.reshape(w.shape[: axes.stacked])


def round_input(x: Array, num_input_axes: int) -> Scaled:
    """Round an activation, with one scale."""
    values, scale = round_tensor(x, FORWARD, axis=tuple(range(x.ndim)))
    return values, scale.reshape(())


def round_tensor(x: Array, dtype: DTypeLike, axis: tuple[int, ...]) -> Scaled:
    """Round x to 8 bits, with one scale for all values along `axis`."""
    scale = mark_saved(round_up_to_power_of_two(absmax(x, axis) / float(jnp.finfo(dtype).max)))
    return (x.astype(jnp.float32) * (1 / scale)).astype(dtype), scale


def round_up_to_power_of_two(x: Array) -> Array:
    """Round up to a power of two, by bits: exp2 is not exact on every chip.

    The result is NaN where x is not finite, so that the loss is NaN too, and the step is skipped."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    power = jax.lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)
    return jnp.where(jnp.isfinite(x), jnp.maximum(power, MIN_SCALE), jnp.nan)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply(spec: MatmulSpec, x: Array, w: Array, x8: Scaled, w8: Scaled) -> Array:
    """Multiply x8 by w8, the rounded x and w. x and w themselves only receive the gradients."""
    (x_values, x_scale), (w_values, w_scale) = x8, w8
    contract = last_dims(x_values, spec.num_input_axes), first_dims(spec.num_input_axes)
    return _scale(dot(spec, x_values, w_values, contract, x.dtype), x_scale * w_scale)


def _forward(
    spec: MatmulSpec, x: Array, w: Array, x8: Scaled, w8: Scaled
) -> tuple[Array, tuple[Scaled, Scaled]]:
    return multiply(spec, x, w, x8, w8), (x8, w8)


def _backward(
    spec: MatmulSpec, residuals: tuple[Scaled, Scaled], d: Array
) -> tuple[Array, Array, None, None]:
    (x_values, x_scale), (w_values, w_scale) = residuals
    d_values, d_scale = round_tensor(d, GRADIENT, axis=tuple(range(d.ndim)))
    d_scale = d_scale.reshape(())
    num_outputs = w_values.ndim - spec.num_input_axes
    # `precise`: Hopper's fast sums have 14 bits, which is enough in the forward pass; Transformer Engine and
    # Flax, too, use exact sums for gradients.
    outputs = last_dims(d_values, num_outputs), last_dims(w_values, num_outputs)
    d_x = _scale(dot(spec, d_values, w_values, outputs, d.dtype, precise=True), d_scale * w_scale)
    tokens = first_dims(d.ndim - num_outputs)
    d_w = _scale(dot(spec, x_values, d_values, (tokens, tokens), d.dtype, precise=True), x_scale * d_scale)
    return d_x, d_w, None, None


def _scale(product: Array, scale: Array) -> Array:
    """Multiply in the product's dtype: XLA then passes the scale to cuBLASLt, or fuses the multiplication
    with what reads the result."""
    return product * scale.astype(product.dtype)


multiply.defvjp(_forward, _backward)
