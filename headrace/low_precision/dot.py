"""What all formats of 8 bits have in common: the largest number of a tensor, which sets its scale, and the
product of two arrays of 8 bits, summed over some of their dimensions in 32."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from headrace.nn.remat import SAVED_PRODUCT

Array = jax.Array


@dataclass(frozen=True)
class MatmulSpec:
    """How a weight is multiplied. Its first `inputs` dimensions are summed over with the last ones of x."""

    format: str
    native: bool  # the chip multiplies the format itself; others multiply the rounded numbers as they do all
    inputs: int


LEAST = 2.0**-60  # of a scale: that of zeros, and such that no two of them multiply to zero


def largest(x: Array, axis: tuple[int, ...]) -> Array:
    """The largest size along `axis`, in float32: NaN if there is one, else infinity if there is one. By the
    bits, whose order as integers is that of sizes: a maximum of floating-point numbers may pass over NaN, as
    it does on CPUs."""
    bits = jax.lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=axis, keepdims=True), jnp.float32)


def kept(x: Array) -> Array:
    """Marks what the backward pass may find in memory: products in 8 bits, which a rule for products does not
    see, and scales, without which the largest number would be looked for again."""
    return checkpoint_name(x, SAVED_PRODUCT)


def dot(
    spec: MatmulSpec, a: Array, b: Array, over: tuple[Any, Any], dtype: Any, *, precise: bool = False
) -> Array:
    """In `dtype`; of integers in float32. Without a unit for 8 bits the numbers are multiplied in `dtype`,
    which holds each of them exactly: the result is the same but for the order of sums."""
    wanted = jnp.float32 if a.dtype == jnp.int8 else dtype
    if not spec.native:
        a, b = a.astype(dtype), b.astype(dtype)
    elif a.dtype == jnp.int8:
        wanted = jnp.int32
    precision = jax.lax.Precision.HIGHEST if precise and spec.native else None
    product = jax.lax.dot_general(a, b, (over, ((), ())), precision=precision, preferred_element_type=wanted)
    return product.astype(jnp.float32) if wanted == jnp.int32 else product


def first(count: int) -> tuple[int, ...]:
    return tuple(range(count))


def last(x: Array, count: int) -> tuple[int, ...]:
    return tuple(range(x.ndim - count, x.ndim))
