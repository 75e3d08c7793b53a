"""Attention in kernels of our own for Hopper GPUs (kernels/flash_hopper.py), for what cuDNN does not do: what
lies outside of a document, or of a window that looks both ways, is not visited, and scores may have a soft
cap."""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from headrace.attention import compile_error
from headrace.kernels.flash_hopper import (
    SIZES,
    TILE,
    Bounds,
    Shape,
    forward,
    gradient_of_keys,
    gradient_of_queries,
)
from headrace.nn.attention_mask import Mask
from headrace.nn.remat import SAVED_ATTENTION

Array = jax.Array


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
    (b, s, n, h), (_, t, kv, _) = q.shape, k.shape
    shape = Shape(b, s, t, n, kv, h, scale, soft_cap)
    flat = (x.reshape(x.shape[0] * x.shape[1], -1) for x in (q, k, v))
    return _flash(shape, *flat, bounds(mask, b, s, t, kv_segments, offset)).reshape(q.shape)


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
    device = jax.devices()[0]
    if platform != "gpu" or not str(getattr(device, "compute_capability", "")).startswith("9."):
        return "its kernels are for Hopper GPUs"
    if q.dtype != jnp.bfloat16:
        return f"its kernels are for bfloat16, and these activations are {q.dtype}"
    if q.shape[-1] not in SIZES:
        return f"its kernels are for heads of 64, 128 or 256 numbers, and these have {q.shape[-1]}"
    if q.size >= 2**31:
        return f"its kernels are not known to count past 2**31, and the queries are {q.size:,} numbers"
    for length in (q.shape[1], k.shape[1]):
        if length % TILE:
            return f"{length} tokens are not a multiple of {TILE}"
    return _try(q.shape[2], k.shape[2], q.shape[-1], soft_cap)


@lru_cache
def _try(heads: int, kv_heads: int, width: int, soft_cap: float | None) -> str | None:
    """What the compiler says of the least that the kernels do."""
    how: dict[str, Any] = dict(soft_cap=soft_cap, scale=1.0, offset=0, q_segments=None, kv_segments=None)
    q, k = (jax.ShapeDtypeStruct((1, TILE, n, width), jnp.bfloat16) for n in (heads, kv_heads))
    return compile_error("gpu", partial(attend, None, mask=Mask(), **how), q, k, k)


def bounds(
    mask: Mask, batch: int, queries: int, keys: int, segments: Array | None, offset: int | Array
) -> Bounds:
    """What each query sees: keys within reach of its place among them, and of its own document, whose tokens
    lie side by side. Neither end goes back from one query to the next."""
    before, after = mask.reach
    places = jnp.arange(keys, dtype=jnp.int32)[None]
    first = jnp.zeros_like(places) if before is None else jnp.maximum(places - before, 0)
    last = jnp.full_like(places, keys) if after is None else jnp.minimum(places + after + 1, keys)
    if segments is not None:
        new = segments[:, 1:] != segments[:, :-1]
        begins = jnp.pad(new, ((0, 0), (1, 0)), constant_values=True)
        ends = jnp.pad(new, ((0, 0), (0, 1)), constant_values=True)
        begun = jax.lax.cummax(jnp.where(begins, places, 0), axis=1)
        ended = jax.lax.cummin(jnp.where(ends, places + 1, keys), axis=1, reverse=True)
        first, last = jnp.maximum(first, begun), jnp.minimum(last, ended)
    mine = (jax.lax.dynamic_slice_in_dim(x, offset, queries, axis=1) for x in (first, last))
    return Bounds(*(jnp.broadcast_to(x, (batch, queries)) for x in mine))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(shape: Shape, q: Array, k: Array, v: Array, seen: Bounds) -> Array:
    return forward(shape, q, k, v, seen)[0]


def _forward(shape: Shape, q: Array, k: Array, v: Array, seen: Bounds) -> Any:
    out, sums = checkpoint_name(forward(shape, q, k, v, seen), SAVED_ATTENTION)
    return out, (q, k, v, seen, out, sums)


def _backward(shape: Shape, saved: Any, d_out: Array) -> Any:
    q, k, v, seen, out, sums = saved
    both = (x.reshape(shape.batch, shape.queries, shape.heads, -1).astype(jnp.float32) for x in (out, d_out))
    shared = jnp.einsum("bsnh,bsnh->bns", *both).ravel()
    rest = d_out, sums, shared, seen
    d_k, d_v = gradient_of_keys(shape, q, k, v, *rest)
    return gradient_of_queries(shape, q, k, v, *rest), d_k, d_v, None


_flash.defvjp(_forward, _backward)
