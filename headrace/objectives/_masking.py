"""What objectives hide of a text, drawn within the step from its key and never stored: single tokens, spans,
tokens replaced by others, and the noise of masked diffusion. Each row is drawn for itself: however rows and
positions are split over devices, the same is drawn."""

import functools
import math

import jax
import jax.numpy as jnp

from headrace.nn.module import Array
from headrace.objectives import Batch, Vocabulary

FLOOR = 1e-3  # the least share that diffusion hides: it bounds the weight of a token at 1,000, as in LLaDA


def choosable(vocabulary: Vocabulary, batch: Batch) -> Array:
    """The tokens that may be hidden: those of a document that are to be learnt, but none that the vocabulary
    names. Special tokens it does not name, such as the marks of a chat, are tokens like any other."""
    may = batch.segments > 0
    if batch.loss is not None:
        may &= batch.loss
    for special in _special(vocabulary):
        may &= batch.tokens != special
    return may


def choose(key: Array, may: Array, *, rate: float) -> Array:
    """Of the tokens of each row that `may` be chosen this share, rounded up or down by chance. As many in
    every row, not each token by itself: so it is known how many logits there will be."""
    draw_key, round_key = jax.random.split(key)
    drawn = jnp.where(may, jax.random.uniform(draw_key, may.shape), 1.0)
    rank = jnp.argsort(jnp.argsort(drawn, axis=1), axis=1)
    wanted = rate * may.sum(axis=1, keepdims=True) + jax.random.uniform(round_key, (len(may), 1))
    return may & (rank < jnp.floor(wanted))


def most_chosen(length: int, *, rate: float, longest: int = 1) -> int:
    """How many tokens of a row can be chosen. Of spans it is four standard deviations beyond the mean, as if
    whole spans were drawn one by one; of one row in 30,000 or fewer, the last few tokens are left out."""
    spread = 4 * math.sqrt(longest * rate * (1 - rate) * length) if longest > 1 else 0.0
    return min(length, math.ceil(rate * length + spread - 1e-6))


def choose_spans(key: Array, may: Array, *, segments: Array, rate: float, longest: int) -> Array:
    """Spans of n <= `longest` tokens, n with a probability proportional to 1/n (ALBERT, arXiv 1909.11942).

    A span can begin at any token, with a chance such that each token is chosen at `rate` although spans may
    overlap. None goes beyond a document or over a token that may not be chosen: spans end there, and behind
    it begin those that would have reached over from a text that went on."""
    inside, first = _reaches(rate, longest)
    drawn = jax.random.uniform(key, may.shape)[..., None]
    joined = (
        (may & jnp.roll(may, 1, axis=1) & (segments == jnp.roll(segments, 1, axis=1))).at[:, 0].set(False)
    )
    begun = jnp.where(joined, (drawn < jnp.array(inside)).sum(-1), (drawn < jnp.array(first)).sum(-1))
    left = begun  # how many tokens are chosen from here on
    for _ in range(longest - 1):
        left = jnp.maximum(begun, jnp.where(joined, jnp.roll(left, 1, axis=1) - 1, 0))
    chosen = may & (left > 0)
    most = most_chosen(may.shape[1], rate=rate, longest=longest)
    return chosen & (jnp.cumsum(chosen, axis=1) <= most)


def replace(
    key: Array, tokens: Array, *, chosen: Array, vocabulary: Vocabulary, masked: float, random: float
) -> Array:
    """The tokens as the model is to read them: of the chosen, the share `masked` as the mask token, the share
    `random` as some other token, which is never the same nor a special one, and the rest as they are."""
    share_key, other_key = jax.random.split(key)
    share = jax.random.uniform(share_key, tokens.shape)
    shown = tokens
    if random:
        swapped = chosen & (share >= masked) & (share < masked + random)
        shown = jnp.where(swapped, _others(other_key, tokens, vocabulary), shown)
    if masked:
        assert vocabulary.mask is not None
        shown = jnp.where(chosen & (share < masked), vocabulary.mask, shown)
    return shown


def diffuse(key: Array, may: Array) -> tuple[Array, Array]:
    """The noise of masked diffusion: each row has a time t, and each of its tokens is chosen with a chance p
    that grows with t from almost 0 to 1. Returns the chosen, [b s], and the weight of each, 1/p, [b 1].

    The times of a batch lie evenly over 0 to 1 and are shifted together: each is uniform, and their mean
    hardly varies between batches (arXiv 2107.00630)."""
    time_key, token_key = jax.random.split(key)
    rows = may.shape[0]
    time = (jax.random.uniform(time_key) + jnp.arange(rows)[:, None] / rows) % 1
    chance = (1 - FLOOR) * time + FLOOR
    return may & (jax.random.uniform(token_key, may.shape) < chance), 1 / chance


def choose_number(key: Array, may: Array, place: Array) -> tuple[Array, Array]:
    """The same noise for evaluation, told with less chance (LLaDA, arXiv 2502.09992): of the n tokens of each
    row that `may` be chosen exactly k, all k from 1 to n alike, by the row's `place` in 0 to 1, [b]. Returns
    the chosen, [b s], and the weight of each, n/k, [b 1]."""
    tokens = may.sum(axis=1, keepdims=True)
    number = jnp.clip(1 + jnp.floor(place[:, None] * tokens), 1, jnp.maximum(tokens, 1))
    drawn = jnp.where(may, jax.random.uniform(key, may.shape), 1.0)
    rank = jnp.argsort(jnp.argsort(drawn, axis=1), axis=1)
    return may & (rank < number), tokens / number


def _special(vocabulary: Vocabulary) -> list[int]:
    named = (vocabulary.pad, vocabulary.bos, vocabulary.eos, vocabulary.mask)
    return sorted({token for token in named if token is not None})


def _others(key: Array, tokens: Array, vocabulary: Vocabulary) -> Array:
    """For each token another, all ordinary ones alike: a number among those that are left, counted on past
    the token itself and past the special ones. Nothing of use where the token itself is special."""
    special = _special(vocabulary)
    left = vocabulary.size - len(special) - 1
    assert left > 0, "a vocabulary of fewer than two ordinary tokens"
    drawn = jax.random.randint(key, tokens.shape, 0, left, tokens.dtype)
    drawn += drawn >= tokens - sum(tokens > token for token in special)
    for token in special:
        drawn += drawn >= token
    return drawn


@functools.cache
def _reaches(rate: float, longest: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """For n from 1 to `longest`: the chance that a span begins at a token and has n tokens or more; and the
    chance that n or more tokens are chosen by it or by spans that began before it. The second is for the
    first token of a document, as if there were text before it. Its first entry is the chance that a token is
    chosen at all and must be `rate`. It grows with the chance that a span begins, found here by halving."""
    total = sum(1 / n for n in range(1, longest + 1))
    at_least = [sum(1 / n for n in range(least, longest + 1)) / total for least in range(1, longest + 1)]
    low, high = 0.0, rate
    for _ in range(60):
        begins = (low + high) / 2
        inside = [begins * share for share in at_least]
        first: list[float] = []
        spared = 1.0
        for reach in reversed(inside):
            spared *= 1 - reach
            first.insert(0, 1 - spared)
        low, high = (begins, high) if first[0] < rate else (low, begins)
    return tuple(inside), tuple(first)
