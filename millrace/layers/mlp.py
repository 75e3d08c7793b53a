"""The gated feed-forward activations: SwiGLU and GeGLU (arXiv 2002.05202), and ReLU squared as the gate
(arXiv 2109.08668), as BitNet b1.58 has it."""

from typing import Literal

import jax
import jax.numpy as jnp

Activation = Literal["swiglu", "geglu", "relu2"]


def glu(kind: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    if kind == "swiglu":
        return jax.nn.silu(gate) * up
    if kind == "geglu":
        return jax.nn.gelu(gate, approximate=True) * up
    return jnp.square(jax.nn.relu(gate)) * up
