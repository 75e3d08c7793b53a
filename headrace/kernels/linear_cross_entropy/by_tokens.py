"""The head and its loss by chunks of tokens, as in Liger's fused linear cross entropy (arXiv 2410.10989): the
logits of a chunk exist once, and while they are at hand both gradients are made of them. Three products in
all, and the gradient of the vocabulary's matrix in float32, whole."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from headrace.kernels.linear_cross_entropy.stats import (
    NO_PEAK,
    Array,
    HeadSharding,
    HeadSpec,
    LogitMatmul,
    LossTotals,
    Stats,
    add_losses,
    d_logits,
    first_column,
    is_target,
    psum,
    soft_capped,
    zero,
)

# One GiB of float32 logits a chunk: 8,192 tokens at a vocabulary of 32k, 1,024 at 256k; more where a GPU has
# room. Each chunk reads and writes the float32 gradient of `unembed` once, 8 bytes a weight against 6 x chunk
# FLOP: at 700 TFLOP/s and 4.8 TB/s (H200) at most 200/chunk of the time of the products, 20 % at 1,024 tokens
# and 40 % at 512. Llama 3.2 1B on an H200 makes 63,900 tokens/s with 2,048, 64,900 with 8,192 (2026-11).
# Gemma 2 2B's head on a v5p needs 3,250 MiB with 1,024 (2,250 of them that gradient), 2,750 with 512,
# 12,000 with full logits (8,192 tokens, bf16, compiled by libtpu 0.0.51).
LOGIT_BYTES, LOGIT_SHARE = 2**30, 1 / 24  # at least, and of a GPU's memory
SMALLEST_CHUNK = 128


def totals(
    head: HeadSpec, split: HeadSharding, hidden: Array, unembed: Array, targets: Array, weights: Array
) -> LossTotals:
    unembed = _whole(unembed, split).astype(hidden.dtype)

    def step(sums: LossTotals, piece: tuple[Array, Array, Array]) -> tuple[LossTotals, tuple[()]]:
        x, y, w = piece
        stats = _stats(head, LogitMatmul(x, unembed).scores(x), y, split)
        return add_losses(sums, stats, head.per_token(stats), w), ()

    sums, _ = _over_chunks(step, zero(), (hidden, targets, weights), _chunk(head, unembed))
    return psum(sums, split.tokens)


def token_log_likelihoods(
    head: HeadSpec, split: HeadSharding, hidden: Array, unembed: Array, targets: Array
) -> Array:
    """The negative log likelihood of every token [b s]."""
    unembed = _whole(unembed, split).astype(hidden.dtype)

    def step(carry: tuple[()], piece: tuple[Array, Array]) -> tuple[tuple[()], Array]:
        x, y = piece
        stats = _stats(head, LogitMatmul(x, unembed).scores(x), y, split)
        return carry, stats.lse - stats.target

    return _over_chunks(step, (), (hidden, targets), _chunk(head, unembed))[1]


def totals_and_gradients(
    head: HeadSpec, split: HeadSharding, hidden: Array, unembed: Array, targets: Array, weights: Array
) -> tuple[LossTotals, Array, Array]:
    matrix = _whole(unembed, split).astype(hidden.dtype)
    products = head.products(hidden, matrix)
    first = first_column(len(matrix), split)

    def step(carry: tuple[LossTotals, Array], piece: tuple[Array, Array, Array]) -> Any:
        sums, d_unembed = carry
        x, y, w = piece
        raw = products.scores(x)
        stats = _stats(head, raw, y, split)
        losses, pull = jax.vjp(head.per_token, stats)
        (d_stats,) = pull(w)
        scores, hit = soft_capped(head, raw, first, again=True), is_target(raw, y, first)
        d = d_logits(head, scores, hit, stats, d_stats, vocab=raw.shape[1] * psum(1, split.vocab))
        d_x, d_matrix = products.gradients(x, d, d_stats)
        sums = add_losses(sums, stats, losses, w)
        return (sums, d_unembed + d_matrix), psum(d_x, split.vocab).astype(hidden.dtype)

    # float32: in bf16 a sum over chunks loses whatever is below 1/256 of it.
    start = zero(), jnp.zeros(matrix.shape, jnp.float32)
    pieces = products.rows, targets, weights
    (sums, d_unembed), d_hidden = _over_chunks(step, start, pieces, _chunk(head, matrix))
    if split.width:
        # Each device keeps only the columns it stores: half the traffic of a sum that all devices get.
        d_unembed = lax.psum_scatter(d_unembed, split.width, scatter_dimension=1, tiled=True)
    return psum(sums, split.tokens), d_hidden, psum(d_unembed, split.rest).astype(unembed.dtype)


def _whole(unembed: Array, split: HeadSharding) -> Array:
    return lax.all_gather(unembed, split.width, axis=1, tiled=True) if split.width else unembed


def _stats(head: HeadSpec, raw: Array, targets: Array, split: HeadSharding) -> Stats:
    """Of products that are not capped yet."""
    first = first_column(raw.shape[1], split)
    scores, hit = soft_capped(head, raw, first), is_target(raw, targets, first)
    if head.soft_cap is not None and head.soft_cap <= NO_PEAK:
        top = jnp.full(raw.shape[:1], head.soft_cap)  # none is above it: the logits are read once less
    else:
        top = scores.max(axis=1)
        top = lax.pmax(top, split.vocab) if split.vocab else top
    sums = (
        jnp.exp(scores - top[:, None]).sum(axis=1),
        jnp.where(hit, raw, 0).sum(axis=1),
        scores.sum(axis=1),
    )
    exponentials, target, total = psum(sums, split.vocab)
    vocab = raw.shape[1] * psum(1, split.vocab)
    # One by one: capped logits that two sums want would be written to memory.
    target = soft_capped(head, target[:, None], targets[:, None])[:, 0]
    return Stats(lse=top + jnp.log(exponentials), target=target, mean=total / vocab)


def _chunk(head: HeadSpec, unembed: Array) -> int:
    # Fewer where the logits would pass 2**31 numbers: kernels may count in int32.
    most = (2**31 - 1) // unembed.shape[0]
    if head.chunk != "auto":
        return min(int(head.chunk), most)
    room = LOGIT_BYTES
    if jax.default_backend() == "gpu":
        memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
        room = max(room, int(LOGIT_SHARE * memory))
    return min(max(SMALLEST_CHUNK, room // (4 * unembed.shape[0])), most)


def _over_chunks(step: Callable[..., Any], carry: Any, arrays: tuple[Array, ...], most: int) -> Any:
    """Scans [b s ...] arrays in equal chunks of at most `most` tokens; the outputs come back as [b s ...]."""
    batch, sequence = arrays[0].shape[:2]
    tokens = batch * sequence
    pieces = -(-tokens // most)
    size = -(-tokens // pieces)
    flat = [x.reshape(tokens, *x.shape[2:]) for x in arrays]
    if pieces == 1:
        carry, out = step(carry, tuple(flat))
        return carry, jax.tree.map(lambda y: y.reshape(batch, sequence, *y.shape[1:]), out)
    # Padding is zeros, the weights among them: it counts for nothing.
    padded = [jnp.pad(x, [(0, pieces * size - tokens)] + [(0, 0)] * (x.ndim - 1)) for x in flat]
    carry, out = lax.scan(step, carry, tuple(x.reshape(pieces, size, *x.shape[1:]) for x in padded))
    return carry, jax.tree.map(
        lambda y: y.reshape(pieces * size, *y.shape[2:])[:tokens].reshape(batch, sequence, *y.shape[2:]), out
    )
