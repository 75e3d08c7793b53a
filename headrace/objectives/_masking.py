"""Random corruption of text, uniform within the step and never stored: masked tokens and spans, replaced
tokens, and the noise of masked diffusion.

Each row is uniform independently of the others, so that the result does not depend on how rows and positions
are split over devices."""

import functools
import math

import jax
import jax.numpy as jnp

from headrace.nn.module import Array
from headrace.objectives import Batch, SpecialTokens

MIN_MASK_RATE = 1e-3  # of diffusion: it bounds the weight of a token at 1,000, as in LLaDA


def maskable(special_tokens: SpecialTokens, batch: Batch) -> Array:
    """Mark the tokens [b s] that may be masked: those of documents that have a loss and are not special.

    Special tokens that `SpecialTokens` does not name, such as those of a chat, may be masked."""
    is_maskable = batch.segments > 0
    if batch.loss_mask is not None:
        is_maskable &= batch.loss_mask
    for token in _special_ids(special_tokens):
        is_maskable &= batch.tokens != token
    return is_maskable


def sample_positions(key: Array, is_maskable: Array, *, rate: float) -> Array:
    """Select this share of each row's maskable tokens; a fraction is rounded up or down at random.

    The number per row is fixed, unlike that of independent draws, so the number of logits is known."""
    draw_key, round_key = jax.random.split(key)
    uniform = jnp.where(is_maskable, jax.random.uniform(draw_key, is_maskable.shape), 1.0)
    rank = jnp.argsort(jnp.argsort(uniform, axis=1), axis=1)
    count = rate * is_maskable.sum(axis=1, keepdims=True) + jax.random.uniform(
        round_key, (len(is_maskable), 1)
    )
    return is_maskable & (rank < jnp.floor(count))


def max_selected(length: int, *, rate: float, max_span: int = 1) -> int:
    """The most tokens of a row that are selected.

    With spans it is four standard deviations above the mean, as if whole spans were independent. The last few
    tokens beyond it are not selected, which happens in one row of 30,000 or fewer."""
    deviation = 4 * math.sqrt(max_span * rate * (1 - rate) * length) if max_span > 1 else 0.0
    return min(length, math.ceil(rate * length + deviation - 1e-6))


def sample_spans(key: Array, is_maskable: Array, *, segments: Array, rate: float, max_span: int) -> Array:
    """Select spans of n <= `max_span` tokens, n with a probability proportional to 1/n (ALBERT, arXiv
    1909.11942).

    Each token is selected with probability `rate`, although spans may overlap. A span ends at the end of its
    document and before a token that may not be masked; the first tokens after such a place are selected as if
    spans could reach over from before it."""
    inside, first = _span_probabilities(rate, max_span)
    uniform = jax.random.uniform(key, is_maskable.shape)[..., None]
    continues = (
        (is_maskable & jnp.roll(is_maskable, 1, axis=1) & (segments == jnp.roll(segments, 1, axis=1)))
        .at[:, 0]
        .set(False)
    )
    span_length = jnp.where(
        continues, (uniform < jnp.array(inside)).sum(-1), (uniform < jnp.array(first)).sum(-1)
    )
    remaining = span_length  # tokens from here on that are selected
    for _ in range(max_span - 1):
        remaining = jnp.maximum(span_length, jnp.where(continues, jnp.roll(remaining, 1, axis=1) - 1, 0))
    selected = is_maskable & (remaining > 0)
    limit = max_selected(is_maskable.shape[1], rate=rate, max_span=max_span)
    return selected & (jnp.cumsum(selected, axis=1) <= limit)


def corrupt_tokens(
    key: Array,
    tokens: Array,
    *,
    selected: Array,
    special_tokens: SpecialTokens,
    masked: float,
    random: float,
) -> Array:
    """Replace the share `masked` of the selected tokens by the mask token, and the share `random` by another
    token, which is not special. The others do not change."""
    kind_key, token_key = jax.random.split(key)
    kind = jax.random.uniform(kind_key, tokens.shape)
    corrupted = tokens
    if random:
        is_replaced = selected & (kind >= masked) & (kind < masked + random)
        corrupted = jnp.where(is_replaced, _random_others(token_key, tokens, special_tokens), corrupted)
    if masked:
        assert special_tokens.mask is not None
        corrupted = jnp.where(selected & (kind < masked), special_tokens.mask, corrupted)
    return corrupted


def sample_diffusion_mask(key: Array, is_maskable: Array) -> tuple[Array, Array]:
    """Draw the noise of masked diffusion: each row has a time t, and each of its tokens is masked with a
    probability p that grows with t from almost 0 to 1. Returns the masked tokens [b s] and the weight of
    each, 1/p [b 1].

    The times of a batch are spaced evenly over 0 to 1 and shifted together: each is uniform, and their mean
    hardly varies between batches (arXiv 2107.00630)."""
    time_key, token_key = jax.random.split(key)
    rows = is_maskable.shape[0]
    time = (jax.random.uniform(time_key) + jnp.arange(rows)[:, None] / rows) % 1
    probability = (1 - MIN_MASK_RATE) * time + MIN_MASK_RATE
    return is_maskable & (jax.random.uniform(token_key, is_maskable.shape) < probability), 1 / probability


def mask_by_level(key: Array, is_maskable: Array, level: Array) -> tuple[Array, Array]:
    """Draw the same noise with less variance, for evaluation (LLaDA, arXiv 2502.09992): of a row's n maskable
    tokens, mask exactly k, where the row's `level` [b] in [0, 1) maps evenly to k from 1 to n. Returns the
    masked tokens [b s] and the weight of each, n/k [b 1]."""
    total = is_maskable.sum(axis=1, keepdims=True)
    count = jnp.clip(1 + jnp.floor(level[:, None] * total), 1, jnp.maximum(total, 1))
    uniform = jnp.where(is_maskable, jax.random.uniform(key, is_maskable.shape), 1.0)
    rank = jnp.argsort(jnp.argsort(uniform, axis=1), axis=1)
    return is_maskable & (rank < count), total / count


def _special_ids(special_tokens: SpecialTokens) -> list[int]:
    ids = (special_tokens.pad, special_tokens.bos, special_tokens.eos, special_tokens.mask)
    return sorted({token for token in ids if token is not None})


def _random_others(key: Array, tokens: Array, special_tokens: SpecialTokens) -> Array:
    """Draw another token for each token, uniformly from those that are not special: a number among those that
    remain, increased to skip the token itself and special ones. Arbitrary where the token is special."""
    special = _special_ids(special_tokens)
    remaining = special_tokens.size - len(special) - 1
    assert remaining > 0, "a vocabulary of fewer than two ordinary tokens"
    sampled = jax.random.randint(key, tokens.shape, 0, remaining, tokens.dtype)
    sampled += sampled >= tokens - sum(tokens > token for token in special)
    for token in special:
        sampled += sampled >= token
    return sampled


@functools.cache
def _span_probabilities(rate: float, max_span: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Two probabilities for n from 1 to `max_span`: that a span starts at a token and has n tokens or more;
    and that n or more tokens are selected by it or by spans that started earlier.

    The second is for the first token of a document, as if there were text before it. Its first entry, the
    probability that a token is selected at all, must be `rate`. It grows with the probability that a span
    starts, which is found by bisection."""
    total = sum(1 / n for n in range(1, max_span + 1))
    at_least = [sum(1 / n for n in range(least, max_span + 1)) / total for least in range(1, max_span + 1)]
    low, high = 0.0, rate
    for _ in range(60):
        start_rate = (low + high) / 2
        inside = [start_rate * share for share in at_least]
        first: list[float] = []
        not_selected = 1.0
        for probability in reversed(inside):
            not_selected *= 1 - probability
            first.insert(0, 1 - not_selected)
        low, high = (start_rate, high) if first[0] < rate else (low, start_rate)
    return tuple(inside), tuple(first)
