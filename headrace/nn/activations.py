"""Activations of MLPs without a gate, whose backward passes save less than their input.

ReLU and its square only need their output, which the next product saves anyway. Where it does not, because
its matrix is frozen, one bit per element is enough for ReLU, and two for SiLU and GELU with a step function
as their derivative (arXiv 2406.16282). docs/performance/activations.md says why bits save nothing in a gated
MLP."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


@jax.custom_vjp
def relu(x: Array) -> Array:
    """ReLU, saving its output for the backward pass."""
    return jax.nn.relu(x)


def _save_output(function: Callable[[Array], Array], x: Array) -> tuple[Array, Array]:
    y = function(x)
    return y, y


relu.defvjp(partial(_save_output, jax.nn.relu), lambda y, d: (jnp.where(y > 0, d, 0),))


@jax.custom_vjp
def relu2(x: Array) -> Array:
    """ReLU squared (arXiv 2109.08668), saving its output for the backward pass."""
    return _square(x)


def _square(x: Array) -> Array:
    return jnp.square(jax.nn.relu(x))


# The root of a rounded square is the number itself, to the last bit, unless the square leaves the range of
# its dtype: below 1e-19 in float32 and bfloat16 the derivative becomes 0.
relu2.defvjp(partial(_save_output, _square), lambda y, d: (jnp.where(y > 0, d * (2 * jnp.sqrt(y)), 0),))


@jax.custom_vjp
def relu_bits(x: Array) -> Array:
    """ReLU of x [... s f], saving one bit per element for the backward pass."""
    return jax.nn.relu(x)


def _relu_bits_forward(x: Array) -> tuple[Array, Array]:
    return jax.nn.relu(x), pack((x > 0).astype(jnp.uint8), 1)


def _relu_bits_backward(packed: Array, d: Array) -> tuple[Array]:
    return (jnp.where(unpack(packed, 1, d.shape[-2]) > 0, d, 0),)


relu_bits.defvjp(_relu_bits_forward, _relu_bits_backward)

# Step functions of LowMemoryBP's ReSiLU2 and ReGELU2: where they rise, and by how much.
STEPS = {
    "silu": ((-6.30504610, -0.00086849, 6.32581524), (-0.04060357, 1.08092543, -0.04032186)),
    "gelu": ((-3.18588100, -0.00117882, 3.19083261), (-0.04922261, 1.09796321, -0.04874060)),
}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def smooth_bits(kind: str, x: Array) -> Array:
    """SiLU or GELU of x [... s f], saving two bits per element for the backward pass.

    The output is exact, the derivative is a step function: the gradient is not that of the loss. The
    derivative of NaN is 0."""
    return jax.nn.silu(x) if kind == "silu" else jax.nn.gelu(x, approximate=False)


def _smooth_bits_forward(kind: str, x: Array) -> tuple[Array, Array]:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    is_above = [(wide > threshold).astype(jnp.uint8) for threshold in STEPS[kind][0]]
    return smooth_bits(kind, x), pack(sum(is_above[1:], is_above[0]), 2)


def _smooth_bits_backward(kind: str, packed: Array, d: Array) -> tuple[Array]:
    steps = unpack(packed, 2, d.shape[-2])
    low, first, second, high = np.cumsum([0.0, *STEPS[kind][1]])
    # Not jnp.select, with which libtpu needs 2080 MiB instead of 1600 for a stack of MLPs.
    upper = jnp.where(steps == 2, second, high)
    slope = jnp.where(steps == 0, low, jnp.where(steps == 1, first, upper))
    return ((d * slope).astype(d.dtype),)


smooth_bits.defvjp(_smooth_bits_forward, _smooth_bits_backward)


PLAIN: dict[str, Callable[[Array], Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_bits": partial(smooth_bits, "gelu"),
    "silu": jax.nn.silu,
    "silu_bits": partial(smooth_bits, "silu"),
    "relu": relu,
    "relu_bits": relu_bits,
    "relu2": relu2,
}


def pack(codes: Array, bits: int) -> Array:
    """Pack numbers of 1 or 2 bits [... s f] into bytes.

    Numbers at equal distances along s share a byte, so that nothing moves along the last axis, which a mesh
    may split."""
    per_byte = 8 // bits
    distance = -(-codes.shape[-2] // per_byte)
    padding = [(0, 0)] * (codes.ndim - 2) + [(0, per_byte * distance - codes.shape[-2]), (0, 0)]
    parts = jnp.split(jnp.pad(codes, padding), per_byte, axis=-2)
    packed = parts[0]
    for number, part in enumerate(parts[1:], 1):
        packed |= part << (bits * number)
    return packed


def unpack(packed: Array, bits: int, length: int) -> Array:
    """Unpack what `pack` returns to [... length f]."""
    parts = [packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return jnp.concatenate(parts, axis=-2)[..., :length, :]
