"""The head and its loss by chunks of the vocabulary, as in cut cross entropy (arXiv 2411.09009): a first pass
finds each token's logsumexp, a second makes the logits of a chunk again and both gradients of them. Four
products instead of three, but nothing is as large as the vocabulary's matrix: devices that hold a part of its
width gather a chunk of it at a time, and share out the chunk's gradient at once. What is made of a chunk's
logits is made in plain JAX here, and by kernels in cut_mosaic.py."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from headrace.kernels.linear_cross_entropy import stats as loss_stats
from headrace.kernels.linear_cross_entropy.stats import (
    Array,
    HeadSharding,
    HeadSpec,
    LossTotals,
    Stats,
    add_losses,
    psum,
    zero,
)

LOGIT_BYTES = 2**26  # of what is held of a chunk's logits
SMALLEST_CHUNK, LANES = 512, 128


class VocabShard(NamedTuple):
    """What all chunks share. `own` are the targets' numbers among the rows that this device has."""

    head: HeadSpec
    split: HeadSharding
    x: Array
    own: Array
    rows: int

    @property
    def vocab(self) -> int:
        return self.rows * psum(1, self.split.vocab)


class Chunk(NamedTuple):
    """Rows [v d] of the matrix, as they are multiplied; `start` is the first one's number. The last chunk may
    end in padding."""

    matrix: Array
    start: Array

    def padded(self, cut: VocabShard) -> bool:
        return cut.rows % len(self.matrix) != 0


class Running(NamedTuple):
    """The statistics of the logits so far, [g c]: in as many parts as suits who adds to them."""

    top: Array
    exponentials: Array
    target: Array
    total: Array


class ChunkOps(NamedTuple):
    """Who makes something of a chunk's logits [c v]: adds them to the statistics, or makes their gradient, as
    [v c] and in x's dtype. `held` are the bytes of what is stored of a logit meanwhile."""

    add: Callable[[VocabShard, Chunk, Running], Running]
    d_logits: Callable[[VocabShard, Chunk, Stats, Stats], Array]
    groups: int = 1  # g
    multiple: int = 1  # of which a chunk must be
    held: int = 4


def totals(
    head: HeadSpec, split: HeadSharding, hidden: Array, unembed: Array, targets: Array, weights: Array
) -> LossTotals:
    return totals_by(PLAIN, head, split, hidden, unembed, targets, weights)


def totals_and_gradients(
    head: HeadSpec, split: HeadSharding, hidden: Array, unembed: Array, targets: Array, weights: Array
) -> tuple[LossTotals, Array, Array]:
    return totals_and_gradients_by(PLAIN, head, split, hidden, unembed, targets, weights)


def totals_by(
    parts: ChunkOps,
    head: HeadSpec,
    split: HeadSharding,
    hidden: Array,
    unembed: Array,
    targets: Array,
    weights: Array,
) -> LossTotals:
    cut, w = _cut(head, split, hidden, unembed, targets), weights.reshape(-1)
    stats = _stats(parts, cut, chunks(parts, head, unembed, len(cut.x)))
    return psum(add_losses(zero(), stats, head.per_token(stats), w), split.tokens)


def totals_and_gradients_by(
    parts: ChunkOps,
    head: HeadSpec,
    split: HeadSharding,
    hidden: Array,
    unembed: Array,
    targets: Array,
    weights: Array,
) -> tuple[LossTotals, Array, Array]:
    cut, w = _cut(head, split, hidden, unembed, targets), weights.reshape(-1)
    x, pieces = cut.x, chunks(parts, head, unembed, len(cut.x))
    stats = _stats(parts, cut, pieces)
    losses, pull = jax.vjp(head.per_token, stats)
    d_stats = pull(w)[0]

    def step(d_x: Array, piece: tuple[Array, Array]) -> tuple[Array, Array]:
        chunk = _chunk(cut, *piece)
        d = parts.d_logits(cut, chunk, stats, d_stats)
        d_x += jnp.einsum("vc,vd->cd", d, chunk.matrix, preferred_element_type=jnp.float32)
        d_matrix = jnp.einsum("vc,cd->vd", d, x, preferred_element_type=jnp.float32)
        if split.width:
            d_matrix = lax.psum_scatter(d_matrix, split.width, scatter_dimension=1, tiled=True)
        return d_x, psum(d_matrix, split.rest).astype(unembed.dtype)

    d_x, d_unembed = lax.scan(step, jnp.zeros(x.shape, jnp.float32), (jnp.arange(len(pieces)), pieces))
    d_hidden = psum(d_x, split.vocab).astype(x.dtype).reshape(hidden.shape)
    d_unembed = d_unembed.reshape(-1, d_unembed.shape[2])[: unembed.shape[0]]
    return psum(add_losses(zero(), stats, losses, w), split.tokens), d_hidden, d_unembed


def chunks(parts: ChunkOps, head: HeadSpec, unembed: Any, tokens: int) -> Array:
    """The matrix as [pieces rows width]: equal pieces where its rows have a fitting divisor, else padded."""
    size = chunk_rows(parts, head, len(unembed), tokens)
    pieces = -(-len(unembed) // size)
    if pieces * size > len(unembed):
        unembed = jnp.pad(unembed, ((0, pieces * size - len(unembed)), (0, 0)))
    return unembed.reshape(pieces, size, -1)


def chunk_rows(parts: ChunkOps, head: HeadSpec, rows: int, tokens: int) -> int:
    if head.chunk == "auto":
        most = max(SMALLEST_CHUNK, LOGIT_BYTES // (parts.held * tokens))
    else:
        most = int(head.chunk)
    unit = parts.multiple
    # Kernels may count logits in int32.
    most = min(most, -(-rows // unit) * unit, (2**31 - 1) // tokens)
    sizes = [size for size in range(most // 2 + 1, most + 1) if rows % size == 0 and size % unit == 0]
    if sizes:
        return max(sizes, key=lambda size: (size % LANES == 0, size))
    pieces = -(-rows // max(unit, most // unit * unit))
    return -(-rows // (pieces * unit)) * unit


def _cut(head: HeadSpec, split: HeadSharding, hidden: Array, unembed: Array, targets: Array) -> VocabShard:
    own = targets.reshape(-1) - loss_stats.first_column(len(unembed), split)
    return VocabShard(head, split, hidden.reshape(-1, hidden.shape[2]), own, len(unembed))


def _chunk(cut: VocabShard, i: Array, rows: Array) -> Chunk:
    matrix = rows.astype(cut.x.dtype)
    if cut.split.width:
        matrix = lax.all_gather(matrix, cut.split.width, axis=1, tiled=True)
    return Chunk(matrix, i * len(rows))


def _stats(parts: ChunkOps, cut: VocabShard, pieces: Array) -> Stats:
    def step(running: Running, piece: tuple[Array, Array]) -> tuple[Running, None]:
        return parts.add(cut, _chunk(cut, *piece), running), None

    empty = jnp.zeros((parts.groups, len(cut.x)), jnp.float32)
    start = Running(jnp.full_like(empty, -jnp.inf), empty, empty, empty)
    (top, exponentials, target, total), _ = lax.scan(step, start, (jnp.arange(len(pieces)), pieces))
    axes = cut.split.vocab
    highest = top.max(axis=0)
    if axes:
        highest = lax.pmax(highest, axes)
    sums = exponentials * jnp.exp(top - highest), target, total
    exponentials, target, total = psum(tuple(part.sum(axis=0) for part in sums), axes)
    return Stats(lse=highest + jnp.log(exponentials), target=target, mean=total / cut.vocab)


class _Tile(NamedTuple):
    """The logits [c v] of a chunk, where the targets are among them, and which are real."""

    scores: Array
    hit: Array
    seen: Any


def _tile(cut: VocabShard, chunk: Chunk) -> _Tile:
    first = chunk.start + loss_stats.first_column(cut.rows, cut.split)
    scores = loss_stats.logits(cut.head, cut.x, chunk.matrix, first)
    hit = loss_stats.is_target(scores, cut.own, chunk.start)
    if not chunk.padded(cut):
        return _Tile(scores, hit, True)
    seen = chunk.start + lax.broadcasted_iota(jnp.int32, scores.shape, 1) < cut.rows
    return _Tile(scores, hit & seen, seen)


def _add(cut: VocabShard, chunk: Chunk, running: Running) -> Running:
    top, exponentials, target, total = (part[0] for part in running)
    tile = _tile(cut, chunk)
    shown = jnp.where(tile.seen, tile.scores, -jnp.inf)
    higher = jnp.maximum(top, shown.max(axis=1))
    exponentials = exponentials * jnp.exp(top - higher) + jnp.exp(shown - higher[:, None]).sum(axis=1)
    target += jnp.where(tile.hit, tile.scores, 0).sum(axis=1)
    total += jnp.where(tile.seen, tile.scores, 0).sum(axis=1)
    return Running(higher[None], exponentials[None], target[None], total[None])


def _d_logits(cut: VocabShard, chunk: Chunk, stats: Stats, d_stats: Stats) -> Array:
    tile = _tile(cut, chunk)
    d = loss_stats.d_logits(cut.head, tile.scores, tile.hit, stats, d_stats, cut.vocab)
    return jnp.where(tile.seen, d, 0).astype(cut.x.dtype).T


PLAIN = ChunkOps(_add, _d_logits)
