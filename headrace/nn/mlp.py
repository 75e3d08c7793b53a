"""The gated feed-forward activations: SwiGLU, GeGLU and ReGLU (arXiv 2002.05202), and ReLU squared as the
gate (arXiv 2109.08668), as BitNet b1.58 has it; and MLPs without a gate."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from headrace.nn import activations
from headrace.nn.linear import project

Activation = Literal["swiglu", "geglu", "geglu_erf", "reglu", "relu2"]
Plain = Literal["gelu", "gelu_bits", "silu", "silu_bits", "relu", "relu_bits", "relu2"]


def gated(kind: Activation, gate: jax.Array, up: jax.Array, w_down: Any, *, merges: bool) -> jax.Array:
    """The output of an MLP [b s d] from the products of its first two matrices [b s f]. Its hidden units,
    which the gradient of w_down takes, are not kept but made again from gate and up: two arrays instead of
    three, for one multiplication. `merges` says that the compiler sees both times, and must be held back."""
    if not isinstance(w_down, jax.Array):  # in 8 bits a product keeps little of them
        return project(w_down, glu(kind, gate, up), "bsf,fd->bsd")
    down = jax.checkpoint(
        lambda gate, up, w: project(w, glu(kind, gate, up), "bsf,fd->bsd"), prevent_cse=merges
    )
    return down(gate, up, w_down)


def plain(kind: Plain, up: jax.Array, w_down: Any, *, merges: bool) -> jax.Array:
    """The output of an MLP [b s d] without a gate from the product of its first matrix [b s f]. Of GELU and
    SiLU that product alone is kept, of ReLU and its square the hidden units; with bits the hidden units and
    the bits, or, where w_down is frozen, the bits alone."""
    active = lambda up, w: project(w, activations.PLAIN[kind](up), "bsf,fd->bsd")
    if kind not in ("gelu", "silu") or not isinstance(w_down, jax.Array):
        return active(up, w_down)
    return jax.checkpoint(active, prevent_cse=merges)(up, w_down)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def glu(kind: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    return activate(kind, gate) * up


def activate(kind: Activation, gate: jax.Array) -> jax.Array:
    if kind == "swiglu":
        return jax.nn.silu(gate)
    if kind == "geglu":
        return jax.nn.gelu(gate, approximate=True)
    if kind == "geglu_erf":
        return jax.nn.gelu(gate, approximate=False)
    if kind == "reglu":
        return jax.nn.relu(gate)
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
