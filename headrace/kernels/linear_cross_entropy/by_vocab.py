"""Linear cross entropy by chunks of the vocabulary, as in cut cross entropy (arXiv 2411.09009).

A first pass over the chunks computes each token's logsumexp; a second computes the logits again, and both
gradients from them. Takes four matmuls instead of three, but no array as large as the vocabulary's matrix:
devices that each have a part of its width gather one chunk at a time, and reduce-scatter the chunk's gradient
at once. A `ChunkOps` has the functions that process a chunk's logits: plain JAX here, kernels in tpu.py."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from headrace.kernels.linear_cross_entropy.stats import (
    Array,
    HeadInputs,
    HeadSharding,
    HeadSpec,
    LogitMatmul,
    LogitStats,
    LossAndGradients,
    LossTotals,
    add_losses,
    compute_d_logits,
    is_target,
    psum,
    to_logits,
    vocab_offset,
    zero_totals,
)

CHUNK_LOGIT_BYTES = 2**26  # of what is stored of a chunk's logits
MIN_CHUNK, LANES = 512, 128


class VocabShard(NamedTuple):
    """One device's inputs, which all chunks share."""

    head: HeadSpec
    sharding: HeadSharding
    hidden: Array  # [c d]
    local_targets: Array  # [c], rows of this device's matrix if they are from 0 to `rows`
    rows: int  # of this device's matrix

    @property
    def vocab(self) -> int:
        """The size of the whole vocabulary."""
        return self.rows * psum(1, self.sharding.vocab_axes)


class VocabChunk(NamedTuple):
    """Some rows of the vocabulary's matrix."""

    unembed: Array  # [v d] in the dtype of the hidden states; the last chunk may end in padding
    start: Array  # number of the first row

    def is_padded(self, shard: VocabShard) -> bool:
        """Whether the last chunk has padding."""
        return shard.rows % len(self.unembed) != 0


class RunningStats(NamedTuple):
    """Statistics of the logits of the chunks so far, [g c]. The `ChunkOps` choose the number of groups g in
    which statistics are accumulated; sums over groups are taken after the last chunk."""

    max: Array
    exp_sum: Array  # of exp(logit - max)
    target: Array
    sum: Array


class ChunkOps(NamedTuple):
    """The functions that process a chunk's logits, and what they require of its size."""

    add_statistics: Callable[[VocabShard, VocabChunk, RunningStats], RunningStats]
    # -> the gradient of the raw logits, [v c] in the dtype of the hidden states
    compute_d_logits: Callable[[VocabShard, VocabChunk, LogitStats, LogitStats], Array]
    groups: int = 1  # of `RunningStats`
    row_multiple: int = 1  # of rows in a chunk
    logit_bytes: int = 4  # bytes stored per logit


def compute_loss(head: HeadSpec, sharding: HeadSharding, inputs: HeadInputs) -> LossTotals:
    """Compute the totals over the tokens of all devices."""
    return compute_loss_by_chunks(PLAIN_OPS, head, sharding, inputs)


def compute_loss_and_gradients(
    head: HeadSpec, sharding: HeadSharding, inputs: HeadInputs
) -> LossAndGradients:
    """Compute the totals, and the gradients of this device's hidden states and matrix."""
    return compute_loss_and_gradients_by_chunks(PLAIN_OPS, head, sharding, inputs)


def compute_loss_by_chunks(
    ops: ChunkOps, head: HeadSpec, sharding: HeadSharding, inputs: HeadInputs
) -> LossTotals:
    """Like `compute_loss`, with these `ops`."""
    shard, weights = _make_shard(head, sharding, inputs), inputs.weights.reshape(-1)
    stats = _compute_stats(ops, shard, split_unembed(ops, head, inputs.unembed, len(shard.hidden)))
    return psum(add_losses(zero_totals(), stats, head.per_token_loss(stats), weights), sharding.token_axes)


def compute_loss_and_gradients_by_chunks(
    ops: ChunkOps, head: HeadSpec, sharding: HeadSharding, inputs: HeadInputs
) -> LossAndGradients:
    """Like `compute_loss_and_gradients`, with these `ops`."""
    shard, weights = _make_shard(head, sharding, inputs), inputs.weights.reshape(-1)
    x, chunks = shard.hidden, split_unembed(ops, head, inputs.unembed, len(shard.hidden))
    stats = _compute_stats(ops, shard, chunks)
    losses, pull = jax.vjp(head.per_token_loss, stats)
    d_stats = pull(weights)[0]

    def step(d_x: Array, numbered_chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        chunk = _load_chunk(shard, *numbered_chunk)
        d_logits = ops.compute_d_logits(shard, chunk, stats, d_stats)
        d_x += jnp.einsum("vc,vd->cd", d_logits, chunk.unembed, preferred_element_type=jnp.float32)
        d_unembed = jnp.einsum("vc,cd->vd", d_logits, x, preferred_element_type=jnp.float32)
        if sharding.width_axes:
            d_unembed = lax.psum_scatter(d_unembed, sharding.width_axes, scatter_dimension=1, tiled=True)
        return d_x, psum(d_unembed, sharding.sum_axes).astype(inputs.unembed.dtype)

    start = jnp.zeros(x.shape, jnp.float32)
    d_x, d_unembed = lax.scan(step, start, (jnp.arange(len(chunks)), chunks))
    d_hidden = psum(d_x, sharding.vocab_axes).astype(x.dtype).reshape(inputs.hidden.shape)
    d_unembed = d_unembed.reshape(-1, d_unembed.shape[2])[: inputs.unembed.shape[0]]
    totals = psum(add_losses(zero_totals(), stats, losses, weights), sharding.token_axes)
    return LossAndGradients(totals, d_hidden, d_unembed)


def split_unembed(ops: ChunkOps, head: HeadSpec, unembed: Array, tokens: int) -> Array:
    """Split the matrix into chunks [n v d] of equal size, padded if no fitting size divides its rows."""
    size = rows_per_chunk(ops, head, len(unembed), tokens)
    chunks = -(-len(unembed) // size)
    if chunks * size > len(unembed):
        unembed = jnp.pad(unembed, ((0, chunks * size - len(unembed)), (0, 0)))
    return unembed.reshape(chunks, size, -1)


def rows_per_chunk(ops: ChunkOps, head: HeadSpec, rows: int, tokens: int) -> int:
    """Pick the size of chunks of a matrix with this many rows, for this many tokens of a device."""
    if head.chunk_size == "auto":
        limit = max(MIN_CHUNK, CHUNK_LOGIT_BYTES // (ops.logit_bytes * tokens))
    else:
        limit = int(head.chunk_size)
    multiple = ops.row_multiple
    # Kernels may index logits by int32.
    limit = min(limit, -(-rows // multiple) * multiple, (2**31 - 1) // tokens)
    divisors = [
        size for size in range(limit // 2 + 1, limit + 1) if rows % size == 0 and size % multiple == 0
    ]
    if divisors:
        return max(divisors, key=lambda size: (size % LANES == 0, size))
    chunks = -(-rows // max(multiple, limit // multiple * multiple))
    return -(-rows // (chunks * multiple)) * multiple


def _make_shard(head: HeadSpec, sharding: HeadSharding, inputs: HeadInputs) -> VocabShard:
    rows, width = len(inputs.unembed), inputs.hidden.shape[2]
    local_targets = inputs.targets.reshape(-1) - vocab_offset(rows, sharding)
    return VocabShard(head, sharding, inputs.hidden.reshape(-1, width), local_targets, rows)


def _load_chunk(shard: VocabShard, number: Array, rows: Array) -> VocabChunk:
    """Gather the whole width of a chunk, of which this device has `rows`."""
    unembed = rows.astype(shard.hidden.dtype)
    if shard.sharding.width_axes:
        unembed = lax.all_gather(unembed, shard.sharding.width_axes, axis=1, tiled=True)
    return VocabChunk(unembed, number * len(rows))


def _compute_stats(ops: ChunkOps, shard: VocabShard, chunks: Array) -> LogitStats:
    """Compute the statistics of all tokens over the whole vocabulary, in a pass over the chunks [n v d]."""

    def step(running: RunningStats, numbered_chunk: tuple[Array, Array]) -> tuple[RunningStats, None]:
        return ops.add_statistics(shard, _load_chunk(shard, *numbered_chunk), running), None

    empty = jnp.zeros((ops.groups, len(shard.hidden)), jnp.float32)
    start = RunningStats(jnp.full_like(empty, -jnp.inf), empty, empty, empty)
    running, _ = lax.scan(step, start, (jnp.arange(len(chunks)), chunks))
    axes = shard.sharding.vocab_axes
    largest = running.max.max(axis=0)
    if axes:
        largest = lax.pmax(largest, axes)
    sums = running.exp_sum * jnp.exp(running.max - largest), running.target, running.sum
    exp_sum, target, total = psum(tuple(groups.sum(axis=0) for groups in sums), axes)
    return LogitStats(lse=largest + jnp.log(exp_sum), target=target, mean=total / shard.vocab)


class ChunkLogits(NamedTuple):
    """The logits [c v] of a chunk."""

    logits: Array
    target_mask: Array
    is_real: Array | bool  # False for padding


def _compute_logits(shard: VocabShard, chunk: VocabChunk) -> ChunkLogits:
    offset = chunk.start + vocab_offset(shard.rows, shard.sharding)
    raw_logits = LogitMatmul(shard.hidden, chunk.unembed).raw_logits(shard.hidden)
    logits = to_logits(shard.head, raw_logits, offset)
    target_mask = is_target(logits, shard.local_targets, chunk.start)
    if not chunk.is_padded(shard):
        return ChunkLogits(logits, target_mask, True)
    is_real = chunk.start + lax.broadcasted_iota(jnp.int32, logits.shape, 1) < shard.rows
    return ChunkLogits(logits, target_mask & is_real, is_real)


def _add_statistics(shard: VocabShard, chunk: VocabChunk, running: RunningStats) -> RunningStats:
    largest, exp_sum, target, total = (groups[0] for groups in running)
    logits, target_mask, is_real = _compute_logits(shard, chunk)
    real_logits = jnp.where(is_real, logits, -jnp.inf)
    new_largest = jnp.maximum(largest, real_logits.max(axis=1))
    exp_sum = exp_sum * jnp.exp(largest - new_largest) + jnp.exp(real_logits - new_largest[:, None]).sum(
        axis=1
    )
    target += jnp.where(target_mask, logits, 0).sum(axis=1)
    total += jnp.where(is_real, logits, 0).sum(axis=1)
    return RunningStats(new_largest[None], exp_sum[None], target[None], total[None])


def _compute_d_logits(shard: VocabShard, chunk: VocabChunk, stats: LogitStats, d_stats: LogitStats) -> Array:
    logits, target_mask, is_real = _compute_logits(shard, chunk)
    d_logits = compute_d_logits(shard.head, logits, target_mask, stats, d_stats, shard.vocab)
    return jnp.where(is_real, d_logits, 0).astype(shard.hidden.dtype).T


PLAIN_OPS = ChunkOps(_add_statistics, _compute_d_logits)
