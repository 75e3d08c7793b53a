"""Attention tile by tile, on any device, in memory that grows with the length and not with its square.

Forward and backward pass are those of FlashAttention (arXiv 2205.14135 and 2307.08691; Rabe and Staats, arXiv
2112.05682): the backward pass recomputes each tile from the output and the log-sum-exp of the scores. Tiles
that the mask hides, and tiles whose queries and keys have no document in common, are skipped."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from headrace.attention import AttentionCall, blocks_sharing_documents, first_last_true
from headrace.nn.attention_mask import HIDDEN, Mask
from headrace.nn.remat import SAVED_ATTENTION
from headrace.nn.soft_cap import apply_soft_cap

Array = jax.Array
BlockRange = tuple[int | Array, int | Array]  # the first block, and the one after the last


@dataclass(frozen=True)
class Config:
    """The keys that `use: blockwise` adds to the `attention` section of a recipe."""

    block_q: int = 512  # queries in a tile [tokens]
    block_kv: int = 512  # keys in a tile [tokens]

    def __post_init__(self) -> None:
        for name in ("block_q", "block_kv"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more")


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
    """Compute attention row by row if rows are packed, else of all rows at once."""
    score = ScoreSpec(call.mask, call.soft_cap, call.scale, num_keys=k.shape[1])
    first = jnp.asarray(offset, jnp.int32)
    if q_segments is None or kv_segments is None:
        return _attend_rows(cfg, score, first, q, k, v, None, None)

    def attend_row(arrays: tuple[Array, ...]) -> Array:
        return _attend_rows(cfg, score, first, *(x[None] for x in arrays))[0]

    # Documents begin and end elsewhere in each row, so that all rows at once could skip only tiles that none
    # of them needs. 4 rows of 4,096 tokens in documents of 600: 3.2 s instead of 8.3 s (CPU, 2026-11).
    return jax.lax.map(attend_row, (q, k, v, q_segments, kv_segments))


def unsupported_reason(cfg: Config, call: AttentionCall) -> str | None:
    """Return None: every call is supported."""
    return None


class Blocks(NamedTuple):
    """The inputs, split along the sequence into blocks, whose number is the leading axis."""

    q: Array  # [i b k g s h], with g query heads for each kv head
    k: Array  # [j b k t h]
    v: Array  # [j b k t h]
    q_segments: Array | None  # [i b s]
    kv_segments: Array | None  # [j b t]
    offset: Array  # position of the first query among the keys


@dataclass(frozen=True)
class ScoreSpec:
    """The options that turn products of queries and keys into scores."""

    mask: Mask
    soft_cap: float | None
    scale: float
    num_keys: int  # before padding


class OutputGradient(NamedTuple):
    """The values that the backward pass reads, by blocks of queries."""

    d_out: Array  # [i b k g s h]
    lse: Array  # log-sum-exp of the scores [i b k g s]
    delta: Array  # what the softmax subtracts from the gradient of every score [i b k g s]


Residuals = tuple[Blocks, Array, Array]  # inputs, output, log-sum-exp
Carry = tuple[Array, Array, Array]  # of a loop over blocks


def _attend_rows(
    cfg: Config,
    score: ScoreSpec,
    offset: Array,
    q: Array,
    k: Array,
    v: Array,
    q_segments: Array | None,
    kv_segments: Array | None,
) -> Array:
    b, s, n, h = q.shape
    t, kv = k.shape[1], k.shape[2]
    block_q, block_kv = min(cfg.block_q, s), min(cfg.block_kv, t)
    queries = q.reshape(b, s, kv, n // kv, h).transpose(0, 2, 3, 1, 4)
    blocks = Blocks(
        q=_split(queries, block_q, axis=3),
        k=_split(k.transpose(0, 2, 1, 3), block_kv, axis=2),
        v=_split(v.transpose(0, 2, 1, 3), block_kv, axis=2),
        q_segments=None if q_segments is None else _split(q_segments, block_q, axis=1),
        kv_segments=None if kv_segments is None else _split(kv_segments, block_kv, axis=1),
        offset=offset,
    )
    out = _flash(score, blocks)
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(b, -1, n, h)[:, :s]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(score: ScoreSpec, blocks: Blocks) -> Array:
    """Compute the outputs of all blocks of queries [i b k g s h]."""
    return _forward(score, blocks)[0]


def _forward(score: ScoreSpec, blocks: Blocks) -> tuple[Array, Residuals]:
    q, k, offset = blocks.q, blocks.k, blocks.offset
    before, after = score.mask.reach
    block_q, block_kv = q.shape[-2], k.shape[-2]
    share_documents = _blocks_sharing_documents(blocks)

    def attend_block(i: Array) -> tuple[Array, Array]:
        first = offset + i * block_q
        keys = _block_range(first, first + block_q - 1, before, after, size=block_kv, count=len(k))
        low, high = keys if share_documents is None else _narrow(keys, share_documents[i])
        shape = q.shape[1:]
        empty = (jnp.zeros(shape[:-1]), jnp.full(shape[:-1], HIDDEN), jnp.zeros(shape))
        total, top, weighted = jax.lax.fori_loop(low, high, partial(_add_keys, score, blocks, i), empty)
        return (weighted / total[..., None]).astype(q.dtype), top + jnp.log(total)

    out, lse = checkpoint_name(jax.lax.map(attend_block, jnp.arange(len(q))), SAVED_ATTENTION)
    return out, (blocks, out, lse)


def _backward(score: ScoreSpec, residuals: Residuals, d_out: Array) -> tuple[Blocks]:
    blocks, out, lse = residuals
    q, k, v, _, _, offset = blocks
    before, after = score.mask.reach
    block_q, block_kv = q.shape[-2], k.shape[-2]
    share_documents = _blocks_sharing_documents(blocks)
    # What the softmax subtracts from the gradient of every score: the product of its output and gradient.
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), -1)
    saved = OutputGradient(d_out, lse, delta)

    def block_gradients(d_q: Array, j: Array) -> tuple[Array, tuple[Array, Array]]:
        # From keys to queries, the mask reaches as far back as it does forward from queries to keys.
        first = j * block_kv - offset
        queries = _block_range(first, first + block_kv - 1, after, before, size=block_q, count=len(q))
        low, high = queries if share_documents is None else _narrow(queries, share_documents[:, j])
        empty = jnp.zeros(k.shape[1:])
        d_q, d_k, d_v = jax.lax.fori_loop(
            low, high, partial(_add_queries, score, blocks, saved, j), (d_q, empty, empty)
        )
        return d_q, (d_k.astype(k.dtype), d_v.astype(v.dtype))

    d_q, (d_k, d_v) = jax.lax.scan(block_gradients, jnp.zeros(q.shape), jnp.arange(len(k)))
    return (Blocks(d_q.astype(q.dtype), d_k, d_v, None, None, None),)  # type: ignore[arg-type]


_flash.defvjp(_forward, _backward)


def _add_keys(score: ScoreSpec, blocks: Blocks, i: Array, j: Array, carry: Carry) -> Carry:
    """Add key block j to the softmax of query block i: its sum, its maximum and the weighted values."""
    total, top, weighted = carry
    scores, is_visible = _tile_scores(score, blocks, i, j)
    scores = jnp.where(is_visible, scores, HIDDEN)
    new_top = jnp.maximum(top, scores.max(-1))
    weights, decay = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
    values = _einsum("bkgst,bkth->bkgsh", weights.astype(blocks.v.dtype), blocks.v[j])
    return decay * total + weights.sum(-1), new_top, decay[..., None] * weighted + values


def _add_queries(
    score: ScoreSpec, blocks: Blocks, saved: OutputGradient, j: Array, i: Array, carry: Carry
) -> Carry:
    """Add query block i to the gradients of all queries and of key block j and its values."""
    q, k, v = blocks.q, blocks.k, blocks.v
    d_q, d_k, d_v = carry
    scores, is_visible = _tile_scores(score, blocks, i, j)
    weights = jnp.exp(jnp.where(is_visible, scores, HIDDEN) - saved.lse[i][..., None])
    d_v += _einsum("bkgst,bkgsh->bkth", weights.astype(v.dtype), saved.d_out[i])
    d_weights = _einsum("bkgsh,bkth->bkgst", saved.d_out[i], v[j])
    d_scores = score.scale * weights * (d_weights - saved.delta[i][..., None])
    if score.soft_cap is not None:
        d_scores *= 1 - (scores / score.soft_cap) ** 2
    d_scores = d_scores.astype(q.dtype)
    d_k += _einsum("bkgst,bkgsh->bkth", d_scores, q[i])
    return d_q.at[i].add(_einsum("bkgst,bkth->bkgsh", d_scores, k[j])), d_k, d_v


def _tile_scores(score: ScoreSpec, blocks: Blocks, i: Array, j: Array) -> tuple[Array, Array]:
    """Compute the scores of query block i and key block j, and which of them are visible."""
    q, k, _, q_segments, kv_segments, offset = blocks
    scores = apply_soft_cap(score.scale * _einsum("bkgsh,bkth->bkgst", q[i], k[j]), score.soft_cap)
    queries = offset + i * q.shape[-2] + jnp.arange(q.shape[-2])[:, None]
    keys = j * k.shape[-2] + jnp.arange(k.shape[-2])[None, :]
    is_visible = score.mask.allows(queries, keys) & (keys < score.num_keys)
    if q_segments is not None and kv_segments is not None:
        same_document = q_segments[i][:, None, None, :, None] == kv_segments[j][:, None, None, None, :]
        is_visible = is_visible & same_document
    return scores, is_visible


def _block_range(
    first: Array, last: Array, before: int | None, after: int | None, *, size: int, count: int
) -> BlockRange:
    """Find the blocks within reach of positions `first` to `last`, of `count` blocks of `size` positions."""
    low = 0 if before is None else jnp.clip((first - before) // size, 0, count)
    high = count if after is None else jnp.clip((last + after) // size + 1, 0, count)
    return low, high


def _blocks_sharing_documents(blocks: Blocks) -> Array | None:
    if blocks.q_segments is None or blocks.kv_segments is None:
        return None
    return blocks_sharing_documents(blocks.q_segments, blocks.kv_segments)


def _narrow(blocks: BlockRange, is_needed: Array) -> BlockRange:
    """Narrow a range to the first and the last block that is needed."""
    first, last = first_last_true(is_needed, 0)
    return jnp.maximum(blocks[0], first), jnp.minimum(blocks[1], last + 1)


def _split(x: Array, size: int, *, axis: int) -> Array:
    """Split an axis into blocks, the last padded with zeros, and move their number to the front."""
    count = -(-x.shape[axis] // size)
    padding = [(0, count * size - x.shape[axis] if dim == axis else 0) for dim in range(x.ndim)]
    padded = jnp.pad(x, padding).reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(padded, axis, 0)


def _einsum(spec: str, x: Array, y: Array) -> Array:
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)
