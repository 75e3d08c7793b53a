"""Functions that all 8-bit formats share: the largest absolute value of a tensor, which sets its scale, and
the product of two arrays of 8 bits, summed in 32 bits."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from headrace.nn.remat import SAVED_PRODUCT

Array = jax.Array
Scaled = tuple[Array, Array]  # values in 8 bits, and the scale that multiplies them

MIN_SCALE = 2.0**-60  # the scale of zeros, and so large that the product of two scales is not 0


@dataclass(frozen=True)
class MatmulSpec:
    """The product of an activation and a weight, summed over the weight's first axes and x's last."""

    format: str  # a key of weight.FORMATS
    native: bool  # the chip multiplies the format itself; other chips multiply in the compute dtype
    num_input_axes: int  # of the weight, that are summed over


def absmax(x: Array, axis: tuple[int, ...]) -> Array:
    """The largest absolute value along `axis`, in float32: NaN or infinity if one is there, NaN first.

    It compares bits, whose order as integers is that of absolute values: a maximum of floating-point numbers
    may skip NaN, as it does on CPUs."""
    bits = jax.lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=axis, keepdims=True), jnp.float32)


def mark_saved(x: Array) -> Array:
    """Mark an array as one that remat policies save: an 8-bit product, which policies for products do not
    recognize, or a scale, for which the backward pass would search for the largest value again."""
    return checkpoint_name(x, SAVED_PRODUCT)


def dot(
    spec: MatmulSpec,
    a: Array,
    b: Array,
    contract: tuple[Sequence[int], Sequence[int]],
    dtype: DTypeLike,
    *,
    precise: bool = False,
) -> Array:
    """Multiply 8-bit arrays, summed over the dimensions `contract` of a and of b.

    The result has `dtype`, or float32 if the arrays are integers. A chip without 8-bit units multiplies the
    numbers in `dtype`, which represents them exactly: only the order of sums differs. `precise` asks units
    that sum with fewer bits for exact sums."""
    sum_dtype = jnp.float32 if a.dtype == jnp.int8 else dtype
    if not spec.native:
        a, b = a.astype(dtype), b.astype(dtype)
    elif a.dtype == jnp.int8:
        sum_dtype = jnp.int32
    precision = jax.lax.Precision.HIGHEST if precise and spec.native else None
    product = jax.lax.dot_general(
        a, b, (contract, ((), ())), precision=precision, preferred_element_type=sum_dtype
    )
    return product.astype(jnp.float32) if sum_dtype == jnp.int32 else product


def first_dims(count: int) -> tuple[int, ...]:
    """The first `count` dimensions of any array."""
    return tuple(range(count))


def last_dims(x: Array, count: int) -> tuple[int, ...]:
    """The last `count` dimensions of x."""
    return tuple(range(x.ndim - count, x.ndim))


def append_axes(scale: Array, ndim: int) -> Array:
    """Append axes of size 1 to scales of tokens, so that they multiply arrays of `ndim` dimensions."""
    return scale.reshape(*scale.shape, *(1,) * (ndim - scale.ndim))
