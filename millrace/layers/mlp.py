"""The gated feed-forward activations: SwiGLU and GeGLU (arXiv 2002.05202), and ReLU squared as the gate
(arXiv 2109.08668), as BitNet b1.58 has it."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

Activation = Literal["swiglu", "geglu", "relu2"]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def glu(kind: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    return activate(kind, gate) * up


def activate(kind: Activation, gate: jax.Array) -> jax.Array:
    if kind == "swiglu":
        return jax.nn.silu(gate)
    if kind == "geglu":
        return jax.nn.gelu(gate, approximate=True)
    return jnp.square(jax.nn.relu(gate))


# The backward pass keeps gate and up alone. JAX would keep what lies between as well: five arrays in all for
# SwiGLU, seven for GeGLU, each as wide as the MLP.
def _forward(kind: Activation, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, Any]:
    return glu(kind, gate, up), (gate, up)


def _backward(kind: Activation, kept: Any, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    gate, up = kept
    active, pull = jax.vjp(partial(activate, kind), gate)
    return pull(d * up)[0], d * active


glu.defvjp(_forward, _backward)
