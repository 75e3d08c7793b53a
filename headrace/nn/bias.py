"""Biases: of activations, with gradients that are sums in float32, and of logits, as a column of the head."""

import jax
import jax.numpy as jnp

Array = jax.Array

# The head's bias is one more column of its matrix, and the hidden states have a 1 there: the loss, which
# never holds the logits, need not know of it. It comes with as many columns as a TPU's registers are wide, so
# that meshes and kernels can still divide the width.
BIAS_COLUMNS = 128


def first_of_many(x: Array) -> Array:
    """x as the first of further columns, the others 0."""
    return jnp.pad(x[..., None], [(0, 0)] * x.ndim + [(0, BIAS_COLUMNS - 1)])


@jax.custom_vjp
def biased(x: Array, bias: Array) -> Array:
    """x plus a bias that has its last axes."""
    return x + bias.astype(x.dtype)


def _forward(x: Array, bias: Array) -> tuple[Array, Array]:
    return biased(x, bias), bias


def _backward(bias: Array, d: Array) -> tuple[Array, Array]:
    # Over all tokens, so in float32: in bf16 what comes late is lost.
    total = jnp.sum(d, axis=tuple(range(d.ndim - bias.ndim)), dtype=jnp.float32)
    return d, total.astype(bias.dtype)


biased.defvjp(_forward, _backward)
