"""The one seam through which every weight meets an activation. A weight is an array, or one in 8 bits
(products/weight.py); LoRA or ternary weights are other types registered here, and models never ask which they
hold."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from headrace.nn.sharding import constrain, current
from headrace.nn.compile_target import device


@functools.singledispatch
def project(w: Any, x: Any, spec: str) -> jax.Array:
    """`spec` is an einsum over (x, w), e.g. "bsd,dnh->bsnh". The product has x's dtype."""
    if spec.startswith("bs") and current() is None and device().platform == "cpu":
        # Rows end to end: the gradient of w then sums over one axis. Over two, this compiler transposes both
        # factors, and what is fused with the copy is computed again with every stride against the cache
        # (demo recipe, one core, 2026-11: 495 ms of CPU a step, and 378 ms this way).
        rows = jnp.einsum(spec.replace("bs", "s"), x.reshape(-1, *x.shape[2:]), w.astype(x.dtype))
        return rows.reshape(*x.shape[:2], *rows.shape[1:])
    return jnp.einsum(spec, x, w.astype(x.dtype))


@functools.singledispatch
def prepared(w: Any, x: jax.Array) -> Any:
    """x as products with w take it, for `project`: where several weights of a kind read the same x, what has
    to be done to it is then done once."""
    return x


@functools.singledispatch
def lookup(w: Any, tokens: jax.Array, dtype: Any) -> jax.Array:
    """Rows of an embedding table. Cast after the look-up: the gradient of a token that occurs thousands of
    times is a sum, and in bf16 most of it would be lost. On a mesh each device looks up its columns for the
    rows of all that hold other columns; swapping columns for rows is then one all-to-all. Left to itself the
    compiler takes the way over every row of the batch on every device ("involuntary rematerialization")."""
    found = w[constrain(tokens, "rows", "sequence")]
    return constrain(found, "rows", "sequence", "embed").astype(dtype)
