"""Attention in our kernels for Hopper GPUs (kernels/flash_hopper.py), for what cuDNN cannot do.

They skip the keys of other documents and keys outside of a window that looks both ways, and scores may have a
soft cap."""

from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from headrace.attention import AttentionCall, gradient_compile_error
from headrace.kernels.flash_hopper import (
    compute_key_value_gradients,
    compute_output_and_log_sums,
    compute_query_gradient,
)
from headrace.kernels.flash_tiles import BLOCK_SIZES, TILE, FlashShape, KeyBounds
from headrace.nn.attention_mask import Mask
from headrace.nn.remat import SAVED_ATTENTION

Array = jax.Array
Residuals = tuple[Array, Array, Array, KeyBounds, Array, Array]  # q, k, v, bounds, output, log-sum-exp


@dataclass(frozen=True)
class Config:
    """`use: hopper` adds no keys to the `attention` section of a recipe."""


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
    """Compute attention of rows that are multiples of a tile."""
    (b, s, n, h), (_, t, kv, _) = q.shape, k.shape
    shape = FlashShape(b, s, t, n, kv, h, call.scale, call.soft_cap)
    flat = (x.reshape(x.shape[0] * x.shape[1], -1) for x in (q, k, v))
    return _flash(shape, *flat, key_bounds(call.mask, b, s, t, kv_segments, offset)).reshape(q.shape)


def unsupported_reason(cfg: Config, call: AttentionCall) -> str | None:
    """Return why the kernels cannot compute the call; None if they can."""
    q, k = call.q, call.k
    device = jax.devices()[0]
    if call.platform != "gpu" or not str(getattr(device, "compute_capability", "")).startswith("9."):
        return "its kernels are for Hopper GPUs"
    if q.dtype != jnp.bfloat16:
        return f"its kernels are for bfloat16, and these activations are {q.dtype}"
    if q.shape[-1] not in BLOCK_SIZES:
        return f"its kernels are for heads of 64, 128 or 256 numbers, and these have {q.shape[-1]}"
    if q.size >= 2**31:
        return f"its kernels are not known to count past 2**31, and the queries are {q.size:,} numbers"
    for length in (q.shape[1], k.shape[1]):
        if length % TILE:
            return f"{length} tokens are not a multiple of {TILE}"
    return _compile_error(q.shape[2], k.shape[2], q.shape[-1], call.soft_cap)


@lru_cache
def _compile_error(heads: int, kv_heads: int, head_dim: int, soft_cap: float | None) -> str | None:
    """Compile the kernels for a single tile. Returns the compiler's message if it fails, or None."""
    q, k = (jax.ShapeDtypeStruct((1, TILE, n, head_dim), jnp.bfloat16) for n in (heads, kv_heads))
    call = AttentionCall(q, k, Mask(), 1.0, soft_cap, platform="gpu")
    run = partial(attend, Config(), call, q_segments=None, kv_segments=None, offset=0)
    return gradient_compile_error("gpu", run, q, k, k)


def key_bounds(
    mask: Mask, batch: int, num_queries: int, num_keys: int, segments: Array | None, offset: int | Array
) -> KeyBounds:
    """Find the range of keys that each query sees, by the mask and its document.

    `segments` are those of the keys [b t]; the tokens of a document lie side by side. Neither end of the
    range moves back from one query to the next."""
    before, after = mask.reach
    positions = jnp.arange(num_keys, dtype=jnp.int32)[None]
    first = jnp.zeros_like(positions) if before is None else jnp.maximum(positions - before, 0)
    if after is None:
        end = jnp.full_like(positions, num_keys)
    else:
        end = jnp.minimum(positions + after + 1, num_keys)
    if segments is not None:
        is_boundary = segments[:, 1:] != segments[:, :-1]
        is_first = jnp.pad(is_boundary, ((0, 0), (1, 0)), constant_values=True)
        is_last = jnp.pad(is_boundary, ((0, 0), (0, 1)), constant_values=True)
        doc_first = jax.lax.cummax(jnp.where(is_first, positions, 0), axis=1)
        doc_end = jax.lax.cummin(jnp.where(is_last, positions + 1, num_keys), axis=1, reverse=True)
        first, end = jnp.maximum(first, doc_first), jnp.minimum(end, doc_end)
    of_queries = (jax.lax.dynamic_slice_in_dim(x, offset, num_queries, axis=1) for x in (first, end))
    return KeyBounds(*(jnp.broadcast_to(x, (batch, num_queries)) for x in of_queries))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(shape: FlashShape, q: Array, k: Array, v: Array, bounds: KeyBounds) -> Array:
    return compute_output_and_log_sums(shape, q, k, v, bounds)[0]


def _forward(shape: FlashShape, q: Array, k: Array, v: Array, bounds: KeyBounds) -> tuple[Array, Residuals]:
    out, lse = checkpoint_name(compute_output_and_log_sums(shape, q, k, v, bounds), SAVED_ATTENTION)
    return out, (q, k, v, bounds, out, lse)


def _backward(shape: FlashShape, residuals: Residuals, d_out: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, bounds, out, lse = residuals
    # What the softmax subtracts from the gradient of every score: the product of its output and gradient.
    by_head = (
        x.reshape(shape.batch, shape.queries, shape.heads, -1).astype(jnp.float32) for x in (out, d_out)
    )
    delta = jnp.einsum("bsnh,bsnh->bns", *by_head).ravel()
    d_k, d_v = compute_key_value_gradients(shape, q, k, v, d_out, lse, delta, bounds)
    return compute_query_gradient(shape, q, k, v, d_out, lse, delta, bounds), d_k, d_v, None


_flash.defvjp(_forward, _backward)
