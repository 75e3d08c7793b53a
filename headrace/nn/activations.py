"""Activations of a plain MLP, without a gate, whose backward pass does with less than their input. ReLU and
its square need their output alone, which the next product keeps anyway. Where it does not, since that matrix
is not trained, one bit an element is enough for ReLU, and two for SiLU and GELU with the derivative taken for
a step function (arXiv 2406.16282). docs/performance/activations.md says why no gated MLP saves by bits."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


@jax.custom_vjp
def relu(x: Array) -> Array:
    return jax.nn.relu(x)


def _keep(function: Callable[[Array], Array], x: Array) -> tuple[Array, Array]:
    y = function(x)
    return y, y


relu.defvjp(partial(_keep, jax.nn.relu), lambda y, d: (jnp.where(y > 0, d, 0),))


@jax.custom_vjp
def relu2(x: Array) -> Array:
    """ReLU squared (arXiv 2109.08668)."""
    return _squared(x)


def _squared(x: Array) -> Array:
    return jnp.square(jax.nn.relu(x))


# The root of a rounded square is the number itself, to the last bit, unless the square leaves the range of
# its dtype: below 1e-19 in float32 and bfloat16, the derivative comes out as 0.
relu2.defvjp(partial(_keep, _squared), lambda y, d: (jnp.where(y > 0, d * (2 * jnp.sqrt(y)), 0),))


@jax.custom_vjp
def relu_bits(x: Array) -> Array:
    """ReLU of x [... s f] that keeps one bit an element."""
    return jax.nn.relu(x)


def _mask_forward(x: Array) -> tuple[Array, Array]:
    return jax.nn.relu(x), pack((x > 0).astype(jnp.uint8), 1)


def _mask_backward(mask: Array, d: Array) -> tuple[Array]:
    return (jnp.where(unpack(mask, 1, d.shape[-2]) > 0, d, 0),)


relu_bits.defvjp(_mask_forward, _mask_backward)

# Of LowMemoryBP's ReSiLU2 and ReGELU2: where the step function rises, and by how much.
STEPS = {
    "silu": ((-6.30504610, -0.00086849, 6.32581524), (-0.04060357, 1.08092543, -0.04032186)),
    "gelu": ((-3.18588100, -0.00117882, 3.19083261), (-0.04922261, 1.09796321, -0.04874060)),
}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def smooth_bits(kind: str, x: Array) -> Array:
    """SiLU or GELU of x [... s f], exactly, with two bits an element for a derivative that is a step
    function: the gradient is not that of the loss, and a NaN has the derivative 0."""
    return jax.nn.silu(x) if kind == "silu" else jax.nn.gelu(x, approximate=False)


def _steps_forward(kind: str, x: Array) -> tuple[Array, Array]:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    places = [(wide > place).astype(jnp.uint8) for place in STEPS[kind][0]]
    return smooth_bits(kind, x), pack(sum(places[1:], places[0]), 2)


def _steps_backward(kind: str, kept: Array, d: Array) -> tuple[Array]:
    steps = unpack(kept, 2, d.shape[-2])
    low, first, second, high = np.cumsum([0.0, *STEPS[kind][1]])
    # Not jnp.select, with which libtpu takes 2080 MiB instead of 1600 for a stack of MLPs.
    upper = jnp.where(steps == 2, second, high)
    slope = jnp.where(steps == 0, low, jnp.where(steps == 1, first, upper))
    return ((d * slope).astype(d.dtype),)


smooth_bits.defvjp(_steps_forward, _steps_backward)


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
    """Small numbers of so many bits [... s f], several to a byte. Those a whole stretch of s apart share one,
    so that nothing moves along the last axis, which a mesh may split."""
    each = 8 // bits
    stretch = -(-codes.shape[-2] // each)
    padding = [(0, 0)] * (codes.ndim - 2) + [(0, each * stretch - codes.shape[-2]), (0, 0)]
    parts = jnp.split(jnp.pad(codes, padding), each, axis=-2)
    packed = parts[0]
    for number, part in enumerate(parts[1:], 1):
        packed |= part << (bits * number)
    return packed


def unpack(packed: Array, bits: int, length: int) -> Array:
    parts = [packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return jnp.concatenate(parts, axis=-2)[..., :length, :]
