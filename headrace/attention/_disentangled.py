"""Disentangled attention (DeBERTa, arXiv 2006.03654): a score is the product of a query and a key, of the
query and a vector for their distance, and of the key and another vector for it. Distances share vectors, the
more the larger they are (buckets on a logarithmic scale).

Distances run along the diagonals of the scores. Of a tile of queries the products with all vectors that it
can need are one matrix, whose rows, each moved by one more than the row before, are the scores. In memory
such a shift is a shorter row, so it is a slice and costs no gather; and its gradient, padding, no scatter."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from headrace.attention import blockwise, over_mesh
from headrace.errors import UserError
from headrace.kernels import disentangled_tpu
from headrace.nn.attention_mask import HIDDEN
from headrace.nn.remat import SAVED_ATTENTION

Array = jax.Array
BACKENDS = ("auto", "xla", "blockwise")


def attend(
    cfg: Any,
    q: Array,
    k: Array,
    v: Array,
    *,
    k_table: Array,
    q_table: Array,
    reach: int,
    segments: Array | None = None,
) -> Array:
    """Attention of q over k and v, [b s n h] each, that looks both ways. The tables [r n h] have the vectors
    of distances: keys that queries meet, and queries that keys meet. `cfg` is the recipe's attention section:
    `xla` takes all queries at once, `blockwise` some at a time, in memory that grows with the length and not
    its square. `auto` takes kernels on a TPU that has them for these shapes, and else the first of the two up
    to 1,024 tokens."""
    if cfg.use not in BACKENDS:
        raise UserError(
            f"attention.use: {cfg.use} cannot be used here: it has no scores by distance. "
            f"Set attention.use to {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}"
        )

    def one(q: Array, k: Array, v: Array, k_table: Array, q_table: Array, **rows: Any) -> Array:
        if cfg.use == "auto" and disentangled_tpu.unsupported_reason(q, k, segments is not None) is None:
            return _by_kernel(reach, q, k, v, k_table, q_table, **rows)
        most = _queries(cfg, q, k)
        whole = partial(_mix, reach)
        if q.shape[1] <= most:
            seen = _seen(rows["q_segments"], rows["kv_segments"])
            return whole(q, k, v, k_table, q_table, seen, jnp.asarray(rows["offset"]))
        return _in_blocks(whole, most, q, k, v, k_table, q_table, **rows)

    return over_mesh(one, q, k, v, k_table, q_table, segments=segments)


def distance_buckets(distance: np.ndarray, buckets: int, reach: int) -> np.ndarray:
    """Which of the 2 x `buckets` vectors a distance has: up to half of the buckets each its own, beyond that
    on a logarithmic scale that ends at `reach`. In float32, in which the published ones were rounded."""
    middle = buckets // 2
    size = np.maximum(np.abs(distance), middle).astype(np.float32)
    scale = np.log(np.float32((reach - 1) / middle))
    far = np.ceil(np.log(size / np.float32(middle)) / scale * np.float32(middle - 1)) + middle
    bucket = np.where(np.abs(distance) <= middle, distance, np.sign(distance) * far)
    return np.clip(bucket + buckets, 0, 2 * buckets - 1).astype(np.int32)


def _queries(cfg: Any, q: Array, k: Array) -> int:
    """How many to take at a time."""
    if cfg.use == "blockwise":
        return int(cfg.block_q)
    short = k.shape[1] <= 1024 and q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1] < 2**30
    return q.shape[1] if cfg.use == "xla" or short else blockwise.Config().block_q


def _seen(q_segments: Array | None, kv_segments: Array | None) -> tuple[Array, Array] | None:
    return None if q_segments is None or kv_segments is None else (q_segments, kv_segments)


def _by_kernel(
    reach: int,
    q: Array,
    k: Array,
    v: Array,
    k_table: Array,
    q_table: Array,
    *,
    q_segments: Array | None,
    kv_segments: Array | None,
    offset: Any,
) -> Array:
    s, t = q.shape[1], k.shape[1]
    number, first = np.arange(s + t), jnp.asarray(offset)
    for_queries = _found(reach, k_table, first + s - number, s + t)
    for_keys = _found(reach, q_table, first + number - t, s + t)
    out = disentangled_tpu.attend(_scale(q), q, k, v, for_queries, for_keys, q_segments, kv_segments)
    return checkpoint_name(out, SAVED_ATTENTION)


def _in_blocks(
    whole: Any,
    size: int,
    q: Array,
    k: Array,
    v: Array,
    *tables: Array,
    q_segments: Array | None,
    kv_segments: Array | None,
    offset: Any,
) -> Array:
    """A block of queries at a time, whose scores the backward pass makes again."""
    b, s = q.shape[:2]
    count = -(-s // size)

    def split(x: Array) -> Array:
        padded = jnp.pad(x, [(0, 0), (0, count * size - s), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(padded.reshape(b, count, size, *x.shape[2:]), 1, 0)

    # Gradients of what every block reads are sums over blocks, so in float32.
    shared = jax.tree.map(lambda x: x.astype(jnp.float32), (k, v, *tables))

    @jax.checkpoint
    def block(shared: Any, its: Any) -> Array:
        k, v, *tables = jax.tree.map(lambda x: x.astype(q.dtype), shared)
        queries, ids, number = its
        return whole(queries, k, v, *tables, _seen(ids, kv_segments), offset + number * size)

    ids = None if q_segments is None else split(q_segments)
    out = jax.lax.map(partial(block, shared), (split(q), ids, jnp.arange(count)))
    return jnp.moveaxis(out, 0, 1).reshape(b, count * size, *q.shape[2:])[:, :s]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(
    reach: int, q: Array, k: Array, v: Array, k_table: Array, q_table: Array, seen: Any, first: Array
) -> Array:
    """The values [b s n h] that queries from position `first` on get. `seen` are the segments of both."""
    return _forward(reach, q, k, v, k_table, q_table, seen, first)[0]


def _forward(
    reach: int, q: Array, k: Array, v: Array, k_table: Array, q_table: Array, seen: Any, first: Array
) -> tuple[Array, Any]:
    by_content, by_query, by_key = _products(reach, first, q, k, k_table, q_table)
    wide = lambda x: x.astype(jnp.float32)
    scores = (wide(by_content) + wide(by_query) + wide(by_key)) * _scale(q)
    if seen is not None:
        scores = jnp.where(seen[0][:, None, :, None] == seen[1][:, None, None, :], scores, HIDDEN)
    # Kept in the dtype of the values, by which they are multiplied.
    weights = checkpoint_name(jax.nn.softmax(scores, axis=-1).astype(v.dtype), SAVED_ATTENTION)
    out = checkpoint_name(jnp.einsum("bnst,btnh->bsnh", weights, v), SAVED_ATTENTION)
    return out, (q, k, v, k_table, q_table, first, weights, out)


def _backward(reach: int, kept: Any, d: Array) -> Any:
    q, k, v, k_table, q_table, first, weights, out = kept
    # What the softmax takes from every score of a row: the product of its output and its gradient.
    shared = jnp.einsum("bsnh,bsnh->bns", d.astype(jnp.float32), out.astype(jnp.float32))
    d_v = jnp.einsum("bnst,bsnh->btnh", weights, d)
    d_weights = jnp.einsum("bsnh,btnh->bnst", d, v)
    d_scores = weights.astype(jnp.float32) * (d_weights.astype(jnp.float32) - shared[..., None]) * _scale(q)
    d_scores = d_scores.astype(q.dtype)
    _, pull = jax.vjp(partial(_products, reach, first), q, k, k_table, q_table)
    d_q, d_k, d_k_table, d_q_table = pull((d_scores, d_scores, d_scores))
    return d_q, d_k, d_v, d_k_table, d_q_table, None, None


_mix.defvjp(_forward, _backward)


def _scale(q: Array) -> float:
    """Of a sum of three products."""
    return (3 * q.shape[-1]) ** -0.5


def _products(
    reach: int, first: Array, q: Array, k: Array, k_table: Array, q_table: Array
) -> tuple[Array, Array, Array]:
    """The three parts of the scores [b n s t], in the dtype of q."""
    by_content = jnp.einsum("bsnh,btnh->bnst", q, k)
    by_query = _by_distance(reach, q, k_table, k.shape[1], first, 1)
    by_key = _by_distance(reach, k, q_table, q.shape[1], first, -1)
    return by_content, by_query, _turned(by_key)


@jax.custom_vjp
def _turned(x: Array) -> Array:
    """The last two axes swapped, in memory: what reads it, or its gradient, several times and row by row,
    would otherwise be fused with the swap and read one number of every row each time."""
    return jax.lax.optimization_barrier(x.swapaxes(-1, -2))


_turned.defvjp(lambda x: (_turned(x), None), lambda _, d: (_turned(d),))


def _by_distance(reach: int, x: Array, table: Array, length: int, first: Array, sign: int) -> Array:
    """[b n s l]: row i of x [b s n h] times the vector of the distance first + `sign` (i - j), for j up to
    `length`. By tiles of x: each meets as many vectors as there are j and rows of it."""
    b, s, n, h = x.shape
    tile = min(s, 128 if s <= 1024 else 512)
    count = -(-s // tile)
    tiles = jnp.pad(x, [(0, 0), (0, count * tile - s), (0, 0), (0, 0)]).reshape(b, count, tile, n, h)
    width = length + tile
    begins, column = np.arange(count)[:, None] * tile, np.arange(width)
    distance = first + sign * (begins + tile - 1 - column)
    found = _found(reach, table, distance, 2 * max(count * tile, length) + tile)
    products = jnp.einsum("bcsnh,cwnh->ncbsw", tiles, found)
    # Row i of the result begins one further to the left than row i - 1 does.
    flat = products.reshape(n, count, b, tile * width)
    moved = flat[..., tile - 1 : tile - 1 + tile * (width - 1)].reshape(n, count, b, tile, width - 1)
    return moved[..., :length].transpose(2, 0, 1, 3, 4).reshape(b, n, count * tile, length)[:, :, :s]


def _found(reach: int, table: Array, distance: Array, furthest: int) -> Array:
    """The vectors of distances, none of which is larger than `furthest`."""
    rows = jnp.asarray(distance_buckets(np.arange(-furthest, furthest + 1), table.shape[0] // 2, reach))
    return _look_up(table, rows[distance + furthest])


@jax.custom_vjp
def _look_up(table: Array, rows: Array) -> Array:
    return table.at[rows].get(mode="promise_in_bounds")


def _look_up_forward(table: Array, rows: Array) -> tuple[Array, Any]:
    return _look_up(table, rows), (rows, table)


def _look_up_backward(kept: Any, d: Array) -> tuple[Array, None]:
    # A product instead of a scatter: there are few vectors, and many places for each.
    rows, table = kept
    is_row = (rows.reshape(-1, 1) == jnp.arange(len(table))).astype(d.dtype)
    total = jnp.einsum(
        "wr,wnh->rnh", is_row, d.reshape(-1, *table.shape[1:]), preferred_element_type=jnp.float32
    )
    return total.astype(table.dtype), None


_look_up.defvjp(_look_up_forward, _look_up_backward)
