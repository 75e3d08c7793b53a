"""Linear cross entropy by chunks of tokens, as in Liger's fused linear cross entropy (arXiv 2410.10989).

The logits of a chunk are computed once, and both gradients from them while they are in memory. Takes three
matmuls, and memory for the gradient of the whole vocabulary matrix in float32."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from headrace.kernels.linear_cross_entropy.stats import (
    SMALL_SOFT_CAP,
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
    negative_log_likelihood,
    psum,
    to_logits,
    vocab_offset,
    zero_totals,
)
from headrace.nn.module import PyTree

# One GiB of float32 logits per chunk: 8,192 tokens at a vocabulary of 32k, 1,024 at 256k; more where a GPU
# has room. Each chunk reads and writes the float32 gradient of `unembed` once, 8 bytes per weight for 6 x
# chunk FLOPs: at 700 TFLOP/s and 4.8 TB/s (H200) at most 200/chunk of the time of the matmuls, 20 % at 1,024
# tokens and 40 % at 512. Llama 3.2 1B on an H200 trains 63,900 tokens/s with 2,048, 64,900 with 8,192
# (2026-11). Gemma 2 2B's head on a v5p needs 3,250 MiB with 1,024 (2,250 of them for that gradient), 2,750
# with 512, 12,000 with full logits (8,192 tokens, bf16, compiled by libtpu 0.0.51).
MIN_LOGIT_BYTES = 2**30
GPU_MEMORY_SHARE = 1 / 24  # of a GPU's memory, for logits, if that is more
MIN_CHUNK = 128

# (carry, one chunk's rows) -> (carry, output), like the body of `jax.lax.scan`
ChunkStep = Callable[[PyTree, tuple[Array, ...]], tuple[PyTree, PyTree]]


def compute_loss(head: HeadSpec, sharding: HeadSharding, inputs: HeadInputs) -> LossTotals:
    """Compute the totals over the tokens of all devices."""
    hidden, unembed, targets, weights = inputs
    unembed = _gather_width(unembed, sharding).astype(hidden.dtype)

    def step(totals: LossTotals, chunk: tuple[Array, ...]) -> tuple[LossTotals, tuple[()]]:
        x, targets, weights = chunk
        stats = _compute_stats(head, LogitMatmul(x, unembed).raw_logits(x), targets, sharding)
        return add_losses(totals, stats, head.per_token_loss(stats), weights), ()

    rows = hidden, targets, weights
    totals, _ = _scan_chunks(step, zero_totals(), rows, _max_tokens_per_chunk(head, unembed))
    return psum(totals, sharding.token_axes)


def compute_negative_log_likelihoods(
    head: HeadSpec, sharding: HeadSharding, hidden: Array, unembed: Array, targets: Array
) -> Array:
    """Compute the negative log likelihood of each of this device's targets [b s]."""
    unembed = _gather_width(unembed, sharding).astype(hidden.dtype)

    def step(carry: tuple[()], chunk: tuple[Array, ...]) -> tuple[tuple[()], Array]:
        x, targets = chunk
        raw_logits = LogitMatmul(x, unembed).raw_logits(x)
        return carry, negative_log_likelihood(_compute_stats(head, raw_logits, targets, sharding))

    return _scan_chunks(step, (), (hidden, targets), _max_tokens_per_chunk(head, unembed))[1]


def compute_loss_and_gradients(
    head: HeadSpec, sharding: HeadSharding, inputs: HeadInputs
) -> LossAndGradients:
    """Compute the totals, and the gradients of this device's hidden states and matrix."""
    dtype = inputs.hidden.dtype
    unembed = _gather_width(inputs.unembed, sharding).astype(dtype)
    matmul = head.matmul(inputs.hidden, unembed)
    offset = vocab_offset(len(unembed), sharding)

    def step(
        carry: tuple[LossTotals, Array], chunk: tuple[Array, ...]
    ) -> tuple[tuple[LossTotals, Array], Array]:
        totals, d_unembed = carry
        x, targets, weights = chunk
        raw_logits = matmul.raw_logits(x)
        stats = _compute_stats(head, raw_logits, targets, sharding)
        losses, pull = jax.vjp(head.per_token_loss, stats)
        (d_stats,) = pull(weights)
        logits = to_logits(head, raw_logits, offset, avoid_cse=True)
        target_mask = is_target(raw_logits, targets, offset)
        vocab = raw_logits.shape[1] * psum(1, sharding.vocab_axes)
        d_raw = compute_d_logits(head, logits, target_mask, stats, d_stats, vocab)
        d_x, d_matrix = matmul.gradients(x, d_raw, d_stats)
        totals = add_losses(totals, stats, losses, weights)
        return (totals, d_unembed + d_matrix), psum(d_x, sharding.vocab_axes).astype(dtype)

    # float32: a sum over chunks in bf16 loses whatever is below 1/256 of it.
    start = zero_totals(), jnp.zeros(unembed.shape, jnp.float32)
    rows = matmul.hidden, inputs.targets, inputs.weights
    (totals, d_unembed), d_hidden = _scan_chunks(step, start, rows, _max_tokens_per_chunk(head, unembed))
    if sharding.width_axes:
        # Each device keeps the columns that it stores: half the traffic of a sum on all devices.
        d_unembed = lax.psum_scatter(d_unembed, sharding.width_axes, scatter_dimension=1, tiled=True)
    totals = psum(totals, sharding.token_axes)
    d_unembed = psum(d_unembed, sharding.sum_axes).astype(inputs.unembed.dtype)
    return LossAndGradients(totals, d_hidden, d_unembed)


def _gather_width(unembed: Array, sharding: HeadSharding) -> Array:
    """Gather all columns of this device's rows of the matrix."""
    axes = sharding.width_axes
    return lax.all_gather(unembed, axes, axis=1, tiled=True) if axes else unembed


def _compute_stats(head: HeadSpec, raw_logits: Array, targets: Array, sharding: HeadSharding) -> LogitStats:
    """Compute the statistics of raw logits [c v] over the whole vocabulary."""
    offset = vocab_offset(raw_logits.shape[1], sharding)
    logits, target_mask = to_logits(head, raw_logits, offset), is_target(raw_logits, targets, offset)
    if head.soft_cap is not None and head.soft_cap <= SMALL_SOFT_CAP:
        # No logit is larger: a pass over the logits less.
        largest = jnp.full(raw_logits.shape[:1], head.soft_cap)
    else:
        largest = logits.max(axis=1)
        largest = lax.pmax(largest, sharding.vocab_axes) if sharding.vocab_axes else largest
    sums = (
        jnp.exp(logits - largest[:, None]).sum(axis=1),
        jnp.where(target_mask, raw_logits, 0).sum(axis=1),
        logits.sum(axis=1),
    )
    exp_sum, target, total = psum(sums, sharding.vocab_axes)
    vocab = raw_logits.shape[1] * psum(1, sharding.vocab_axes)
    # The targets are capped after their sum: capped logits that two sums use would be written to memory.
    target = to_logits(head, target[:, None], targets[:, None])[:, 0]
    return LogitStats(lse=largest + jnp.log(exp_sum), target=target, mean=total / vocab)


def _max_tokens_per_chunk(head: HeadSpec, unembed: Array) -> int:
    # A chunk has fewer than 2**31 logits: kernels may index them by int32.
    limit = (2**31 - 1) // unembed.shape[0]
    if head.chunk_size != "auto":
        return min(int(head.chunk_size), limit)
    logit_bytes = MIN_LOGIT_BYTES
    if jax.default_backend() == "gpu":
        memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
        logit_bytes = max(logit_bytes, int(GPU_MEMORY_SHARE * memory))
    return min(max(MIN_CHUNK, logit_bytes // (4 * unembed.shape[0])), limit)


def _scan_chunks(
    step: ChunkStep, carry: PyTree, rows: tuple[Array, ...], max_tokens: int
) -> tuple[PyTree, PyTree]:
    """Scan arrays [b s ...] in equal chunks of at most `max_tokens` tokens. Returns the last carry and the
    outputs as [b s ...]."""
    batch, sequence = rows[0].shape[:2]
    tokens = batch * sequence
    chunks = -(-tokens // max_tokens)
    size = -(-tokens // chunks)
    flat = [x.reshape(tokens, *x.shape[2:]) for x in rows]
    if chunks == 1:
        carry, outputs = step(carry, tuple(flat))
        return carry, jax.tree.map(lambda y: y.reshape(batch, sequence, *y.shape[1:]), outputs)
    # Padding is zeros, and so are its weights: it adds nothing.
    padded = [jnp.pad(x, [(0, chunks * size - tokens)] + [(0, 0)] * (x.ndim - 1)) for x in flat]
    carry, outputs = lax.scan(step, carry, tuple(x.reshape(chunks, size, *x.shape[1:]) for x in padded))
    unpad = lambda y: y.reshape(chunks * size, *y.shape[2:])[:tokens]
    return carry, jax.tree.map(lambda y: unpad(y).reshape(batch, sequence, *y.shape[2:]), outputs)
