"""Attention by its definition (arXiv 1706.03762): all scores at once, in memory that grows with the square of
the length. Decoding uses no other backend."""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from headrace.attention import AttentionCall
from headrace.nn.attention_mask import HIDDEN
from headrace.nn.compile_target import threads

Array = jax.Array
Residuals = tuple[Array, Array, Array, Array | None, Array]  # q, k, v, the soft cap's slope, weights

MAX_SPLITS = 8  # each takes as long to compile as the whole


@dataclass(frozen=True)
class Config:
    """`use: xla` adds no keys to the `attention` section of a recipe."""


def attend(
    cfg: Config,
    call: AttentionCall,
    q: Array,
    k: Array,
    v: Array,
    *,
    q_segments: Array | None,
    kv_segments: Array | None,
    offset: int | Array,
) -> Array:
    """Compute attention, also of a few queries that continue a cache of keys."""
    b, s, n, h = q.shape
    t, kv = k.shape[1], k.shape[2]
    is_visible = call.mask.allows(offset + jnp.arange(s)[:, None], jnp.arange(t)[None, :])
    if q_segments is not None and kv_segments is not None:
        same_document = q_segments[:, None, None, :, None] == kv_segments[:, None, None, None, :]
        is_visible = is_visible & same_document
    # The queries of all heads that share a key are concatenated: one product for each row and kv head.
    queries = q.reshape(b, s, kv, n // kv, h).transpose(0, 2, 3, 1, 4).reshape(b, kv, -1, h)
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
    # XLA's CPU compiler runs a product of many small ones in one thread, but several such products at once:
    # two threads take 3 % less time for a step of the demo recipe if its rows are two products (Zen 4,
    # 2026-11).
    splits = math.gcd(b, min(threads(), MAX_SPLITS))
    inputs = [jnp.split(x, splits) for x in (queries, keys, values)]
    inputs.append(jnp.split(is_visible, splits) if is_visible.ndim == 5 else [is_visible] * splits)
    outputs = [_grouped_attention(call.scale, call.soft_cap, *rows) for rows in zip(*inputs, strict=True)]
    out = jnp.concatenate(outputs)
    return out.reshape(b, kv, n // kv, s, h).transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


def unsupported_reason(cfg: Config, call: AttentionCall) -> str | None:
    """Return a reason if the scores are too many for one array; None otherwise."""
    scores = call.q.shape[0] * call.q.shape[2] * call.q.shape[1] * call.k.shape[1]
    if scores >= 2**31:
        return f"its scores would be {scores:,} numbers, and an array ends at 2**31"
    return None


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped_attention(
    scale: float, soft_cap: float | None, q: Array, k: Array, v: Array, is_visible: Array
) -> Array:
    """Compute outputs [b k gs h] in float32, of queries [b k gs h] over keys and values [b k t h].

    g query heads share each kv head; `is_visible` broadcasts to [b k g s t]."""
    return _forward(scale, soft_cap, q, k, v, is_visible)[0]


# The backward pass is written out, since compilers multiply in the order that is written, and the order that
# JAX derives takes twice the CPU time, forward and backward (demo recipe, 2026-11).
def _forward(
    scale: float, soft_cap: float | None, q: Array, k: Array, v: Array, is_visible: Array
) -> tuple[Array, Residuals]:
    scores = scale * _dot(q, k, (3, 3))
    slope = None
    if soft_cap is not None:
        tanh = jnp.tanh(scores / soft_cap)
        scores, slope = soft_cap * tanh, 1 - tanh * tanh
    by_head = scores.reshape(*scores.shape[:2], -1, *is_visible.shape[-2:])
    scores = jnp.where(is_visible, by_head, HIDDEN).reshape(scores.shape)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return _dot(weights, v, (3, 2)), (q, k, v, slope, weights)


def _backward(
    scale: float, soft_cap: float | None, residuals: Residuals, d: Array
) -> tuple[Array | None, ...]:
    q, k, v, slope, weights = residuals
    d = d.astype(v.dtype)
    d_weights = _dot(d, v, (3, 3))
    mean = jnp.sum(weights * d_weights, axis=-1, keepdims=True)
    d_scores = scale * weights * (d_weights - mean)  # 0 where the weight is: for keys that are not visible
    if slope is not None:
        d_scores = d_scores * slope
    d_scores = d_scores.astype(q.dtype)
    # The small arrays are transposed before and after, behind barriers; else the compiler would transpose
    # the scores.
    q_transposed, d_transposed = jax.lax.optimization_barrier((q.swapaxes(2, 3), d.swapaxes(2, 3)))
    d_k, d_v = jax.lax.optimization_barrier(
        (_dot(q_transposed, d_scores, (3, 2)), _dot(d_transposed, weights, (3, 2)))
    )
    d_q = _dot(d_scores, k, (3, 2)).astype(q.dtype)
    return d_q, d_k.swapaxes(2, 3).astype(k.dtype), d_v.swapaxes(2, 3).astype(v.dtype), None


_grouped_attention.defvjp(_forward, _backward)


def _dot(a: Array, b: Array, dims: tuple[int, int]) -> Array:
    """Multiply for each row and kv head, summed over one dimension of each array."""
    dimensions = (((dims[0],), (dims[1],)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)
