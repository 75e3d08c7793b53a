"""The plain reading of the definition (arXiv 1706.03762): every score of every query at once, in memory
that grows with the square of the length. The one backend that decoding uses."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from headrace.nn.attention_mask import HIDDEN, Mask
from headrace.nn.compile_target import threads

Array = jax.Array

# Finite, so that a row that sees nothing stays finite; far enough down for its exponential to be 0.

# At most: each is as much to compile as the whole.
PARTS = 8


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
    seen = mask.allows(offset + jnp.arange(s)[:, None], jnp.arange(t)[None, :])
    if q_segments is not None and kv_segments is not None:
        seen = seen & (q_segments[:, None, None, :, None] == kv_segments[:, None, None, None, :])
    # The queries of all heads that share a key end to end: one product for each row and key head.
    queries = q.reshape(b, s, kv, n // kv, h).transpose(0, 2, 3, 1, 4).reshape(b, kv, -1, h)
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
    # XLA's CPU gives a product of many small ones to one thread, but does several such products at once: two
    # threads take 3 % less time for a step of the demo recipe if its rows are two products (Zen 4, 2026-11).
    parts = math.gcd(b, min(threads(), PARTS))
    shares = [jnp.split(x, parts) for x in (queries, keys, values)]
    shares.append(jnp.split(seen, parts) if seen.ndim == 5 else [seen] * parts)
    out = jnp.concatenate([_whole(scale, soft_cap, *share) for share in zip(*shares, strict=True)])
    return out.reshape(b, kv, n // kv, s, h).transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _whole(scale: float, soft_cap: float | None, q: Array, k: Array, v: Array, seen: Array) -> Array:
    """In float32 [b k gs h], of queries [b k gs h] over keys and values [b k t h]; `seen` fits
    [b k g s t]."""
    return _forward(scale, soft_cap, q, k, v, seen)[0]


# By hand, since of the orders in which gradients can be multiplied a compiler takes the one that is written,
# and JAX writes another: forward and backward in half the CPU time (demo recipe, 2026-11).
def _forward(
    scale: float, soft_cap: float | None, q: Array, k: Array, v: Array, seen: Array
) -> tuple[Array, Any]:
    scores = scale * _dot(q, k, (3, 3))
    slope = None
    if soft_cap is not None:
        bent = jnp.tanh(scores / soft_cap)
        scores, slope = soft_cap * bent, 1 - bent * bent
    apart = scores.reshape(*scores.shape[:2], -1, *seen.shape[-2:])
    scores = jnp.where(seen, apart, HIDDEN).reshape(scores.shape)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return _dot(weights, v, (3, 2)), (q, k, v, slope, weights)


def _backward(scale: float, soft_cap: float | None, kept: Any, d: Array) -> tuple[Array | None, ...]:
    q, k, v, slope, weights = kept
    d = d.astype(v.dtype)
    d_weights = _dot(d, v, (3, 3))
    mean = jnp.sum(weights * d_weights, axis=-1, keepdims=True)
    d_scores = scale * weights * (d_weights - mean)  # 0 where the weight is: of keys that are not seen
    if slope is not None:
        d_scores = d_scores * slope
    d_scores = d_scores.astype(q.dtype)
    # Turned round before and after, and the small ones, or the compiler turns the scores.
    q_turned, d_turned = jax.lax.optimization_barrier((q.swapaxes(2, 3), d.swapaxes(2, 3)))
    d_k, d_v = jax.lax.optimization_barrier(
        (_dot(q_turned, d_scores, (3, 2)), _dot(d_turned, weights, (3, 2)))
    )
    d_q = _dot(d_scores, k, (3, 2)).astype(q.dtype)
    return d_q, d_k.swapaxes(2, 3).astype(k.dtype), d_v.swapaxes(2, 3).astype(v.dtype), None


_whole.defvjp(_forward, _backward)


def _dot(a: Array, b: Array, over: tuple[int, int]) -> Array:
    """Summed over one dimension of each, for each row and key head."""
    dimensions = (((over[0],), (over[1],)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def unsupported_reason(
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
