"""Attention within a window, as plain products that every device has, or as kernels on TPUs.

Each chunk of queries meets only the keys around it, so that the work grows with the length times the window
(sliding chunks, as in Longformer, arXiv 2004.05150). On TPUs the plain products would move more data than
they compute (kernels/band_tpu.py)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from headrace.attention import AttentionCall
from headrace.kernels import band_tpu
from headrace.nn.attention_mask import HIDDEN, Mask
from headrace.nn.compile_target import device
from headrace.nn.remat import SAVED_ATTENTION
from headrace.nn.soft_cap import apply_soft_cap

Array = jax.Array

UNIT = 64  # keys that are gathered together
WIDEST = 512  # keys to both sides: the scores of a chunk are in memory, twice as many as are needed


@dataclass(frozen=True)
class Config:
    """`use: band` adds no keys to the `attention` section of a recipe."""


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
    """Compute attention of entire rows; `offset` is 0."""
    if device().platform == "tpu":
        out = band_tpu.attend(q, k, v, q_segments, reach=_reach(call.mask), scale=call.scale)
        return checkpoint_name(out, SAVED_ATTENTION)
    # The backward pass computes scores again: they are cheap, and large in memory.
    run = jax.checkpoint(_attend_chunks, static_argnums=(0,))
    return checkpoint_name(run(call, q, k, v, q_segments), SAVED_ATTENTION)


def _attend_chunks(call: AttentionCall, q: Array, k: Array, v: Array, segments: Array | None) -> Array:
    b, s, n, h = q.shape
    kv = k.shape[2]
    before, after, units = _chunk_units(call.mask)
    chunk = units * UNIT
    count = -(-s // chunk)
    padding = count * chunk - s

    def gather_neighbors(x: Array, fill: int) -> Array:
        """Concatenate for each chunk the keys from `before` units before it to `after` units behind it."""
        widths = [(0, 0), (before * UNIT, after * UNIT + padding)] + [(0, 0)] * (x.ndim - 2)
        padded = jnp.pad(x, widths, constant_values=fill)
        blocks = padded.reshape(b, -1, UNIT, *x.shape[2:])
        neighbors = [
            blocks[:, first : first + count * units : units] for first in range(before + units + after)
        ]
        return jnp.concatenate(neighbors, axis=2)

    def split_chunks(x: Array, fill: int) -> Array:
        padded = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
        return padded.reshape(b, count, chunk, *x.shape[2:])

    grouped = split_chunks(q, 0).reshape(b, count, chunk, kv, n // kv, h)
    scores = call.scale * jnp.einsum(
        "bcskgh,bctkh->bckgst", grouped, gather_neighbors(k, 0), preferred_element_type=jnp.float32
    )
    scores = apply_soft_cap(scores, call.soft_cap)
    # Padding is a document that no query belongs to.
    ids = jnp.ones((b, s), jnp.int32) if segments is None else segments
    positions = jnp.arange(scores.shape[-1]) - before * UNIT
    is_visible = call.mask.allows(jnp.arange(chunk)[:, None], positions[None, :])
    is_visible = is_visible & (split_chunks(ids, -2)[..., :, None] == gather_neighbors(ids, -1)[..., None, :])
    weights = jax.nn.softmax(jnp.where(is_visible[:, :, None, None], scores, HIDDEN), axis=-1)
    out = jnp.einsum(
        "bckgst,bctkh->bcskgh",
        weights.astype(v.dtype),
        gather_neighbors(v, 0),
        preferred_element_type=jnp.float32,
    )
    return out.reshape(b, count * chunk, n, h)[:, :s].astype(q.dtype)


def unsupported_reason(cfg: Config, call: AttentionCall) -> str | None:
    """Return why the call cannot be computed in bands; None if it can."""
    if call.mask.window is None:
        return "it is for windows, and these layers have none"
    if sum(_reach(call.mask)) > WIDEST:
        return f"it is for windows of at most {WIDEST} keys, and this one is {call.mask.window}"
    if call.context > 1:
        return "it needs entire sequences, and mesh.context splits them"
    if call.platform != "tpu":
        return None
    if call.soft_cap is not None:
        return "its kernels have no soft cap"
    return band_tpu.unsupported_reason(call.q, call.k, _reach(call.mask), call.has_segments)


def is_cheaper(mask: Mask, length: int) -> bool:
    """Whether the chunks of a row have fewer scores than all of its queries have with all of its keys, for a
    mask with a window."""
    before, after, units = _chunk_units(mask)
    queries = -(-length // (units * UNIT)) * units * UNIT
    return queries * (before + units + after) * UNIT < length**2


def _chunk_units(mask: Mask) -> tuple[int, int, int]:
    """The units of keys before a chunk and after it, and of queries in it: as many as of keys around them."""
    before, after = (-(-reach // UNIT) for reach in _reach(mask))
    return before, after, max(1, before + after)


def _reach(mask: Mask) -> tuple[int, int]:
    before, after = mask.reach
    assert before is not None and after is not None  # see `unsupported_reason`
    return before, after
