"""The head and its loss by chunks of the vocabulary, as in cut cross entropy (arXiv 2411.09009): a first pass
finds each token's logsumexp, a second makes the logits of a chunk again and both gradients of them. Four
products instead of three, but nothing is as large as the vocabulary's matrix: devices that hold a part of its
width gather a chunk of it at a time, and share out the chunk's gradient at once."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from millrace.kernels import head as common
from millrace.kernels.head import Array, Head, Split, Stats, Totals, add, d_logits, psum, zero

LOGIT_BYTES = 2**26  # of float32 logits of a chunk
SMALLEST_CHUNK, LANES = 512, 128


def totals(head: Head, split: Split, hidden: Array, unembed: Array, targets: Array, weights: Array) -> Totals:
    x, y, w = (array.reshape(-1, *array.shape[2:]) for array in (hidden, targets, weights))
    stats = _stats(_Cut(head, split, x, y, unembed.shape[0]), _chunks(head, unembed, len(x)))
    return psum(add(zero(), stats, head.per_token(stats), w), split.tokens)


def totals_and_gradients(
    head: Head, split: Split, hidden: Array, unembed: Array, targets: Array, weights: Array
) -> tuple[Totals, Array, Array]:
    x, y, w = (array.reshape(-1, *array.shape[2:]) for array in (hidden, targets, weights))
    cut, chunks = _Cut(head, split, x, y, unembed.shape[0]), _chunks(head, unembed, len(x))
    stats = _stats(cut, chunks)
    losses, pull = jax.vjp(head.per_token, stats)
    d_stats = pull(w)[0]

    def step(d_x: Array, piece: tuple[Array, Array]) -> tuple[Array, Array]:
        tile = cut.tile(*piece)
        d = d_logits(head, tile.scores, tile.hit, stats, d_stats, cut.vocab)
        d = jnp.where(tile.seen, d, 0).astype(x.dtype)
        d_x += jnp.einsum("cv,vd->cd", d, tile.matrix, preferred_element_type=jnp.float32)
        d_matrix = jnp.einsum("cv,cd->vd", d, x, preferred_element_type=jnp.float32)
        if split.width:
            d_matrix = lax.psum_scatter(d_matrix, split.width, scatter_dimension=1, tiled=True)
        return d_x, psum(d_matrix, split.rest).astype(unembed.dtype)

    d_x, d_unembed = lax.scan(step, jnp.zeros(x.shape, jnp.float32), (jnp.arange(len(chunks)), chunks))
    d_hidden = psum(d_x, split.vocab).astype(x.dtype).reshape(hidden.shape)
    d_unembed = d_unembed.reshape(-1, d_unembed.shape[2])[: unembed.shape[0]]
    return psum(add(zero(), stats, losses, w), split.tokens), d_hidden, d_unembed


class _Tile(NamedTuple):
    """The logits [c v] of all tokens in one chunk of the vocabulary: what they are made of, where the
    targets are, and which are real, since the last chunk may be padded."""

    matrix: Array
    scores: Array
    hit: Array
    seen: Any


class _Cut(NamedTuple):
    head: Head
    split: Split
    x: Array
    targets: Array
    rows: int  # of the vocabulary that this device has

    @property
    def vocab(self) -> int:
        return self.rows * psum(1, self.split.vocab)

    def tile(self, i: Array, rows: Array) -> _Tile:
        matrix = rows.astype(self.x.dtype)
        if self.split.width:
            matrix = lax.all_gather(matrix, self.split.width, axis=1, tiled=True)
        scores = common.logits(self.head, self.x, matrix)
        start = i * len(rows)
        hit = common.is_target(scores, self.targets, start + common.first_column(self.rows, self.split))
        if self.rows % len(rows) == 0:
            return _Tile(matrix, scores, hit, True)
        seen = start + lax.broadcasted_iota(jnp.int32, scores.shape, 1) < self.rows
        return _Tile(matrix, scores, hit & seen, seen)


def _stats(cut: _Cut, chunks: Array) -> Stats:
    def step(carry: Any, piece: tuple[Array, Array]) -> Any:
        top, exponentials, target, total = carry
        tile = cut.tile(*piece)
        shown = jnp.where(tile.seen, tile.scores, -jnp.inf)
        higher = jnp.maximum(top, shown.max(axis=1))
        exponentials = exponentials * jnp.exp(top - higher) + jnp.exp(shown - higher[:, None]).sum(axis=1)
        target += jnp.where(tile.hit, tile.scores, 0).sum(axis=1)
        total += jnp.where(tile.seen, tile.scores, 0).sum(axis=1)
        return (higher, exponentials, target, total), None

    empty = jnp.zeros(len(cut.x), jnp.float32)
    start = (jnp.full_like(empty, -jnp.inf), empty, empty, empty)
    (top, exponentials, target, total), _ = lax.scan(step, start, (jnp.arange(len(chunks)), chunks))
    if axes := cut.split.vocab:
        highest = lax.pmax(top, axes)
        exponentials = exponentials * jnp.exp(top - highest)
        top, (exponentials, target, total) = highest, psum((exponentials, target, total), axes)
    return Stats(lse=top + jnp.log(exponentials), target=target, mean=total / cut.vocab)


def _chunks(head: Head, unembed: Array, tokens: int) -> Array:
    """The matrix as [pieces rows width]: equal pieces where its rows have a fitting divisor, else padded."""
    rows = len(unembed)
    most = max(SMALLEST_CHUNK, LOGIT_BYTES // (4 * tokens)) if head.chunk == "auto" else int(head.chunk)
    most = min(most, rows, (2**31 - 1) // tokens)  # kernels may count logits in int32
    sizes = [size for size in range(most // 2 + 1, most + 1) if rows % size == 0]
    if sizes:
        size = max(sizes, key=lambda size: (size % LANES == 0, size))
        return unembed.reshape(rows // size, size, -1)
    pieces = -(-rows // most)
    size = -(-rows // pieces)
    return jnp.pad(unembed, ((0, pieces * size - rows), (0, 0))).reshape(pieces, size, -1)
