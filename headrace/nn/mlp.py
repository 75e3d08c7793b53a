"""MLPs: gated by SwiGLU, GeGLU and ReGLU (arXiv 2002.05202) or by ReLU squared (arXiv 2109.08668), as in
BitNet b1.58, and without a gate."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from headrace.nn import activations
from headrace.nn.linear import project
from headrace.nn.module import PyTree

Activation = Literal["swiglu", "geglu", "geglu_erf", "reglu", "relu2"]
PlainActivation = Literal["gelu", "gelu_bits", "silu", "silu_bits", "relu", "relu_bits", "relu2"]


def project_gated(
    kind: Activation, gate: jax.Array, up: jax.Array, w_down: PyTree, *, prevent_cse: bool
) -> jax.Array:
    """Compute the output of a gated MLP [b s d] from the products of its first two matrices [b s f].

    The gradient of w_down needs the hidden units. They are not saved, but computed again from gate and up:
    two arrays instead of three, for one multiplication. `prevent_cse` says that the compiler sees both
    computations, and must not merge them."""
    if not isinstance(w_down, jax.Array):  # the backward pass of an 8-bit product saves little
        return project(w_down, glu(kind, gate, up), "bsf,fd->bsd")
    down = jax.checkpoint(
        lambda gate, up, w: project(w, glu(kind, gate, up), "bsf,fd->bsd"), prevent_cse=prevent_cse
    )
    return down(gate, up, w_down)


def project_plain(kind: PlainActivation, up: jax.Array, w_down: PyTree, *, prevent_cse: bool) -> jax.Array:
    """Compute the output of an MLP without a gate [b s d] from the product of its first matrix [b s f].

    For GELU and SiLU only that product is saved, for ReLU and its square the hidden units; with `_bits` the
    hidden units and the bits, or only the bits if w_down is frozen."""
    down = lambda up, w: project(w, activations.PLAIN[kind](up), "bsf,fd->bsd")
    if kind not in ("gelu", "silu") or not isinstance(w_down, jax.Array):
        return down(up, w_down)
    return jax.checkpoint(down, prevent_cse=prevent_cse)(up, w_down)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def glu(kind: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Multiply `up` by the activation of `gate`."""
    return activate(kind, gate) * up


def activate(kind: Activation, gate: jax.Array) -> jax.Array:
    """Apply the activation of a gated MLP to its gate."""
    if kind == "swiglu":
        return jax.nn.silu(gate)
    if kind == "geglu":
        return jax.nn.gelu(gate, approximate=True)
    if kind == "geglu_erf":
        return jax.nn.gelu(gate, approximate=False)
    if kind == "reglu":
        return jax.nn.relu(gate)
    return jnp.square(jax.nn.relu(gate))


# The backward pass saves only gate and up. The one that JAX derives saves intermediate results too: five
# arrays in all for SwiGLU, seven for GeGLU, each as wide as the MLP.
def _glu_forward(
    kind: Activation, gate: jax.Array, up: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return glu(kind, gate, up), (gate, up)


def _glu_backward(
    kind: Activation, residuals: tuple[jax.Array, jax.Array], d: jax.Array
) -> tuple[jax.Array, jax.Array]:
    gate, up = residuals
    active, activation_gradient = jax.vjp(partial(activate, kind), gate)
    return activation_gradient(d * up)[0], d * active


glu.defvjp(_glu_forward, _glu_backward)
