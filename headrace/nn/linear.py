"""The one place where weights meet activations.

A weight is an array or another registered type: 8-bit (low_precision/weight.py), LoRA, ternary and others.
Models call these functions whatever the type is."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from headrace.nn.compile_target import device
from headrace.nn.sharding import constrain, current_mesh


@functools.singledispatch
def project(w: Any, x: Any, spec: str) -> jax.Array:
    """Multiply an activation by a weight. `spec` is an einsum over (x, w), e.g. "bsd,dnh->bsnh"; the result
    has x's dtype."""
    if spec.startswith("bs") and current_mesh() is None and device().platform == "cpu":
        # Rows are concatenated, so that the gradient of w sums over one axis. Over two, the CPU compiler
        # transposes both factors, and recomputes what it fuses with the copy in an order that misses the
        # cache (demo recipe, one core, 2026-11: 495 ms of CPU per step, and 378 ms this way).
        rows = jnp.einsum(spec.replace("bs", "s"), x.reshape(-1, *x.shape[2:]), w.astype(x.dtype))
        return rows.reshape(*x.shape[:2], *rows.shape[1:])
    return jnp.einsum(spec, x, w.astype(x.dtype))


@functools.singledispatch
def quantize_input(w: Any, x: jax.Array) -> Any:
    """Convert x to the form that `project` with w needs. Weights of the same type that read the same x share
    the result, so that it is converted once."""
    return x


@functools.singledispatch
def embed(w: Any, tokens: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Look up rows of an embedding table [v d].

    The rows are cast after the lookup: the gradient of a token that occurs thousands of times is a sum, and
    bfloat16 would lose most of it. On a mesh each device looks up its columns for the rows of all devices
    that have other columns; exchanging columns for rows is then one all-to-all. By itself the compiler would
    gather every row of the batch on every device ("involuntary rematerialization")."""
    rows = w[constrain(tokens, "rows", "sequence")]
    return constrain(rows, "rows", "sequence", "embed").astype(dtype)
