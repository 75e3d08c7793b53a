"""The plain reading of the definition (arXiv 1706.03762): every score of every query at once, in memory
that grows with the square of the length. The one backend that decoding uses."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from millrace.layers.attention import Mask

Array = jax.Array

# Finite, so that a row that sees nothing stays finite; far enough down for its exponential to be 0.
HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)


@dataclass(frozen=True)
class Config:
    pass


def attend(
    cfg: Any,
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Mask,
    q_segments: Array | None,
    kv_segments: Array | None,
    soft_cap: float | None,
    scale: float,
    offset: int | Array,
) -> Array:
    b, s, n, h = q.shape
    t, kv = k.shape[1], k.shape[2]
    grouped = q.reshape(b, s, kv, n // kv, h)
    scores = scale * jnp.einsum("bskgh,btkh->bkgst", grouped, k, preferred_element_type=jnp.float32)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    seen = mask.allows(offset + jnp.arange(s)[:, None], jnp.arange(t)[None, :])
    if q_segments is not None and kv_segments is not None:
        seen = seen & (q_segments[:, None, None, :, None] == kv_segments[:, None, None, None, :])
    weights = jax.nn.softmax(jnp.where(seen, scores, HIDDEN), axis=-1)
    out = jnp.einsum("bkgst,btkh->bskgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype)


def refuses(
    cfg: Any,
    platform: str,
    q: Any,
    k: Any,
    *,
    mask: Mask,
    segments: bool,
    soft_cap: float | None,
    context: int,
) -> str | None:
    scores = q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]
    if scores >= 2**31:
        return f"its scores would be {scores:,} numbers, and an array ends at 2**31"
    return None
