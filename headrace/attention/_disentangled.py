"""Disentangled attention (DeBERTa, arXiv 2006.03654), whose scores depend on distances between tokens.

A score is the sum of three products: of a query and a key, of the query and a vector of their distance, and
of the key and another vector of their distance. Distances share vectors, the more the larger they are
(buckets on a logarithmic scale).

Along a diagonal of the scores the distance is the same. For a tile of queries, the products with all vectors
that it can need are one matrix; its rows, each shifted by one more than the row before, are the scores. In
memory such a shift is a shorter row, so it is a slice and not a gather, and its gradient is padding and not a
scatter."""

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from headrace.attention import attend_on_mesh, blockwise
from headrace.errors import UserError
from headrace.kernels import disentangled_tpu
from headrace.nn.attention_mask import HIDDEN
from headrace.nn.module import PyTree
from headrace.nn.remat import SAVED_ATTENTION
from headrace.nn.stack import AttentionConfig

Array = jax.Array
Segments = tuple[Array, Array] | None  # of queries [b s] and of keys [b t]; None: one document
Residuals = tuple[Array, Array, Array, Array, Array, Array, Array, Array]
BACKENDS = ("auto", "xla", "blockwise")


def attend(
    cfg: AttentionConfig,
    q: Array,
    k: Array,
    v: Array,
    *,
    k_table: Array,
    q_table: Array,
    max_distance: int,
    segments: Array | None = None,
) -> Array:
    """Compute bidirectional attention of q over k and v, [b s n h] each, with scores that depend on distance.

    The tables [r n h] have the vectors of distance buckets: `k_table` is multiplied by queries, `q_table` by
    keys. `cfg` is the recipe's `attention` section: `xla` takes all queries at once, `blockwise` some at a
    time, in memory that grows with the length and not with its square. `auto` takes kernels on a TPU that
    has them for these shapes, and otherwise `xla` up to 1,024 tokens."""
    if cfg.use not in BACKENDS:
        raise UserError(
            f"attention.use: {cfg.use} cannot be used here: it has no scores by distance. "
            f"Set attention.use to {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}"
        )
    attend_local = partial(_attend_local, cfg, max_distance)
    return attend_on_mesh(attend_local, q, k, v, k_table, q_table, segments=segments)


def distance_buckets(distance: np.ndarray, buckets: int, max_distance: int) -> np.ndarray:
    """Map distances to rows of a table of 2 x `buckets` vectors.

    Up to half of `buckets` each distance has a row to itself, beyond that rows are on a logarithmic scale
    that ends at `max_distance`. Computed in float32, in which the published models rounded."""
    middle = buckets // 2
    size = np.maximum(np.abs(distance), middle).astype(np.float32)
    scale = np.log(np.float32((max_distance - 1) / middle))
    far = np.ceil(np.log(size / np.float32(middle)) / scale * np.float32(middle - 1)) + middle
    bucket = np.where(np.abs(distance) <= middle, distance, np.sign(distance) * far)
    return np.clip(bucket + buckets, 0, 2 * buckets - 1).astype(np.int32)


def _attend_local(
    cfg: AttentionConfig,
    max_distance: int,
    q: Array,
    k: Array,
    v: Array,
    k_table: Array,
    q_table: Array,
    *,
    q_segments: Array | None,
    kv_segments: Array | None,
    offset: int | Array,
) -> Array:
    """Compute attention on one device. `offset` is the position of the first query among the keys."""
    segments = None if q_segments is None or kv_segments is None else (q_segments, kv_segments)
    if cfg.use == "auto" and disentangled_tpu.unsupported_reason(q, k, segments is not None) is None:
        return _attend_by_kernel(max_distance, q, k, v, k_table, q_table, segments, offset)
    block = _block_size(cfg, q, k)
    if q.shape[1] <= block:
        return _attend_at_once(max_distance, q, k, v, k_table, q_table, segments, jnp.asarray(offset))
    return _attend_by_blocks(max_distance, block, q, k, v, k_table, q_table, segments, offset)


def _block_size(cfg: AttentionConfig, q: Array, k: Array) -> int:
    """The number of queries to take at a time."""
    if cfg.use == "blockwise":
        return int(cast(blockwise.Config, cfg).block_q)
    is_short = k.shape[1] <= 1024 and q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1] < 2**30
    return q.shape[1] if cfg.use == "xla" or is_short else blockwise.Config().block_q


def _attend_by_kernel(
    max_distance: int,
    q: Array,
    k: Array,
    v: Array,
    k_table: Array,
    q_table: Array,
    segments: Segments,
    offset: int | Array,
) -> Array:
    s, t = q.shape[1], k.shape[1]
    index, first = np.arange(s + t), jnp.asarray(offset)
    for_queries = _gather_vectors(max_distance, k_table, first + s - index, s + t)
    for_keys = _gather_vectors(max_distance, q_table, first + index - t, s + t)
    q_segments, kv_segments = segments or (None, None)
    out = disentangled_tpu.attend(q, k, v, for_queries, for_keys, q_segments, kv_segments, scale=_scale(q))
    return checkpoint_name(out, SAVED_ATTENTION)


def _attend_by_blocks(
    max_distance: int,
    size: int,
    q: Array,
    k: Array,
    v: Array,
    k_table: Array,
    q_table: Array,
    segments: Segments,
    offset: int | Array,
) -> Array:
    """Attend with a block of queries at a time, whose scores the backward pass computes again."""
    b, s = q.shape[:2]
    count = -(-s // size)

    def split(x: Array) -> Array:
        padded = jnp.pad(x, [(0, 0), (0, count * size - s), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(padded.reshape(b, count, size, *x.shape[2:]), 1, 0)

    # Gradients of what every block reads are sums over blocks, so in float32.
    shared = jax.tree.map(lambda x: x.astype(jnp.float32), (k, v, k_table, q_table))

    @jax.checkpoint
    def attend_block(shared: PyTree, block: tuple[Array, Array | None, Array]) -> Array:
        k, v, k_table, q_table = jax.tree.map(lambda x: x.astype(q.dtype), shared)
        queries, ids, index = block
        block_segments = None if ids is None or segments is None else (ids, segments[1])
        first = offset + index * size
        return _attend_at_once(max_distance, queries, k, v, k_table, q_table, block_segments, first)

    ids = None if segments is None else split(segments[0])
    out = jax.lax.map(partial(attend_block, shared), (split(q), ids, jnp.arange(count)))
    return jnp.moveaxis(out, 0, 1).reshape(b, count * size, *q.shape[2:])[:, :s]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_at_once(
    max_distance: int,
    q: Array,
    k: Array,
    v: Array,
    k_table: Array,
    q_table: Array,
    segments: Segments,
    offset: Array,
) -> Array:
    return _forward(max_distance, q, k, v, k_table, q_table, segments, offset)[0]


def _forward(
    max_distance: int,
    q: Array,
    k: Array,
    v: Array,
    k_table: Array,
    q_table: Array,
    segments: Segments,
    offset: Array,
) -> tuple[Array, Residuals]:
    by_content, by_query, by_key = _score_terms(max_distance, offset, q, k, k_table, q_table)
    to_float32 = lambda x: x.astype(jnp.float32)
    scores = (to_float32(by_content) + to_float32(by_query) + to_float32(by_key)) * _scale(q)
    if segments is not None:
        same_document = segments[0][:, None, :, None] == segments[1][:, None, None, :]
        scores = jnp.where(same_document, scores, HIDDEN)
    # Saved in the dtype of the values, by which they are multiplied.
    weights = checkpoint_name(jax.nn.softmax(scores, axis=-1).astype(v.dtype), SAVED_ATTENTION)
    out = checkpoint_name(jnp.einsum("bnst,btnh->bsnh", weights, v), SAVED_ATTENTION)
    return out, (q, k, v, k_table, q_table, offset, weights, out)


def _backward(max_distance: int, residuals: Residuals, d: Array) -> tuple[Array | None, ...]:
    q, k, v, k_table, q_table, offset, weights, out = residuals
    # What the softmax subtracts from the gradient of every score: the product of its output and gradient.
    delta = jnp.einsum("bsnh,bsnh->bns", d.astype(jnp.float32), out.astype(jnp.float32))
    d_v = jnp.einsum("bnst,bsnh->btnh", weights, d)
    d_weights = jnp.einsum("bsnh,btnh->bnst", d, v)
    d_scores = weights.astype(jnp.float32) * (d_weights.astype(jnp.float32) - delta[..., None]) * _scale(q)
    d_scores = d_scores.astype(q.dtype)
    _, pull = jax.vjp(partial(_score_terms, max_distance, offset), q, k, k_table, q_table)
    d_q, d_k, d_k_table, d_q_table = pull((d_scores, d_scores, d_scores))
    return d_q, d_k, d_v, d_k_table, d_q_table, None, None


_attend_at_once.defvjp(_forward, _backward)


def _scale(q: Array) -> float:
    """The factor of scores, each a sum of three products."""
    return (3 * q.shape[-1]) ** -0.5


def _score_terms(
    max_distance: int, offset: Array, q: Array, k: Array, k_table: Array, q_table: Array
) -> tuple[Array, Array, Array]:
    """Compute the three terms of the scores [b n s t], in the dtype of q."""
    by_content = jnp.einsum("bsnh,btnh->bnst", q, k)
    by_query = _distance_products(max_distance, q, k_table, k.shape[1], offset, 1)
    by_key = _distance_products(max_distance, k, q_table, q.shape[1], offset, -1)
    return by_content, by_query, _transpose_in_memory(by_key)


@jax.custom_vjp
def _transpose_in_memory(x: Array) -> Array:
    """Swap the last two axes in memory. What reads the result, or its gradient, several times and row by row
    would otherwise be fused with the swap, and read one number of every row each time."""
    return jax.lax.optimization_barrier(x.swapaxes(-1, -2))


_transpose_in_memory.defvjp(
    lambda x: (_transpose_in_memory(x), None), lambda _, d: (_transpose_in_memory(d),)
)


def _distance_products(
    max_distance: int, x: Array, table: Array, length: int, offset: Array, sign: int
) -> Array:
    """Multiply row i of x [b s n h] by the vector of distance `offset + sign * (i - j)`, for each j below
    `length`: [b n s l].

    Computed by tiles of x: each needs as many vectors as there are j and rows in the tile."""
    b, s, n, h = x.shape
    tile = min(s, 128 if s <= 1024 else 512)
    count = -(-s // tile)
    tiles = jnp.pad(x, [(0, 0), (0, count * tile - s), (0, 0), (0, 0)]).reshape(b, count, tile, n, h)
    width = length + tile
    tile_start, column = np.arange(count)[:, None] * tile, np.arange(width)
    distance = offset + sign * (tile_start + tile - 1 - column)
    vectors = _gather_vectors(max_distance, table, distance, 2 * max(count * tile, length) + tile)
    products = jnp.einsum("bcsnh,cwnh->ncbsw", tiles, vectors)
    # Row i of the result begins one further to the left than row i - 1 does.
    flat = products.reshape(n, count, b, tile * width)
    shifted = flat[..., tile - 1 : tile - 1 + tile * (width - 1)].reshape(n, count, b, tile, width - 1)
    return shifted[..., :length].transpose(2, 0, 1, 3, 4).reshape(b, n, count * tile, length)[:, :, :s]


def _gather_vectors(max_distance: int, table: Array, distance: Array, bound: int) -> Array:
    """Look up the vectors of distances, none of which is larger than `bound`."""
    row_of = distance_buckets(np.arange(-bound, bound + 1), table.shape[0] // 2, max_distance)
    return _gather_rows(table, jnp.asarray(row_of)[distance + bound])


@jax.custom_vjp
def _gather_rows(table: Array, rows: Array) -> Array:
    return table.at[rows].get(mode="promise_in_bounds")


def _gather_rows_forward(table: Array, rows: Array) -> tuple[Array, tuple[Array, Array]]:
    return _gather_rows(table, rows), (rows, table)


def _gather_rows_backward(residuals: tuple[Array, Array], d: Array) -> tuple[Array, None]:
    # A product instead of a scatter: there are few vectors, and many positions for each.
    rows, table = residuals
    is_row = (rows.reshape(-1, 1) == jnp.arange(len(table))).astype(d.dtype)
    total = jnp.einsum(
        "wr,wnh->rnh", is_row, d.reshape(-1, *table.shape[1:]), preferred_element_type=jnp.float32
    )
    return total.astype(table.dtype), None


_gather_rows.defvjp(_gather_rows_forward, _gather_rows_backward)
