"""Biases: of activations, with gradients that are summed in float32, and of logits, as a column of the
head."""

import jax
import jax.numpy as jnp

Array = jax.Array

# A bias of the head is a further column of its matrix, and hidden states have a 1 there: the loss, which
# never has all logits in memory, needs no special case. It is padded to the width of a TPU's registers, so
# that meshes and kernels can still divide the width.
BIAS_COLUMNS = 128


def pad_columns(x: Array) -> Array:
    """Make x [...] the first of BIAS_COLUMNS columns [... 128]; the others are 0."""
    return jnp.pad(x[..., None], [(0, 0)] * x.ndim + [(0, BIAS_COLUMNS - 1)])


@jax.custom_vjp
def add_bias(x: Array, bias: Array) -> Array:
    """Add a bias to x, over the last axes that it has."""
    return x + bias.astype(x.dtype)


def _forward(x: Array, bias: Array) -> tuple[Array, Array]:
    return add_bias(x, bias), bias


def _backward(bias: Array, d: Array) -> tuple[Array, Array]:
    # A sum over all tokens, so in float32: a bfloat16 sum would lose small terms.
    total = jnp.sum(d, axis=tuple(range(d.ndim - bias.ndim)), dtype=jnp.float32)
    return d, total.astype(bias.dtype)


add_bias.defvjp(_forward, _backward)
