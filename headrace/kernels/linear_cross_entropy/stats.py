"""What every way to cut the head and its loss works with: the statistics of a token's logits, and how a part
of the logits adds to them and to the gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from headrace.nn.compile_target import device

Array = jax.Array

NO_PEAK = 40.0  # logits capped at this have exponentials in the range of float32, though none is the largest
OUT = -1e9  # the logit of a token that is ruled out: no probability in float32, and a finite square


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stats:
    """All that a loss may know of a token's logits: their logsumexp, the target's logit and their mean."""

    lse: Array
    target: Array
    mean: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossTotals:
    """Sums over tokens of weight x loss and of weight x negative log likelihood. `nll` is for reading
    only: no gradient flows through it."""

    loss: Array
    nll: Array


PerToken = Callable[[Stats], Array]


class LogitMatmul:
    """The three products of hidden states [b s d] with the vocabulary's matrix [v d] and the gradients of
    logits, a chunk of rows at a time, in the dtype of the hidden states and summed in float32."""

    def __init__(self, hidden: Array, matrix: Array) -> None:
        self.rows, self.matrix = hidden, matrix

    def scores(self, x: Array) -> Array:
        """Of a chunk of `rows` [c d] with all of the matrix [c v]."""
        return jnp.einsum("cd,vd->cv", x, self.matrix, preferred_element_type=jnp.float32)

    def gradients(self, x: Array, d: Array, d_stats: Stats) -> tuple[Array, Array]:
        """Those of the hidden states [c d] and of the matrix [v d], by those of the logits."""
        d = d.astype(x.dtype)
        d_x = jnp.einsum("cv,vd->cd", d, self.matrix, preferred_element_type=jnp.float32)
        if device().platform != "cpu":
            return d_x, jnp.einsum("cv,cd->vd", d, x, preferred_element_type=jnp.float32)
        # The small one is turned round: XLA's CPU would turn the logits, and take 22 ms instead of 10 (demo
        # recipe, Zen 4, 2026-11).
        d_matrix = jnp.einsum("cd,cv->dv", x, d, preferred_element_type=jnp.float32)
        return d_x, lax.optimization_barrier(d_matrix).T


class Bf16Logits(LogitMatmul):
    """Logits are kept in the dtype of the hidden states, as transformers keeps them: half the bytes, where
    that is bf16, and each up to 1/512 off."""

    def scores(self, x: Array) -> Array:
        made = jnp.einsum("cd,vd->cv", x, self.matrix, preferred_element_type=x.dtype).astype(jnp.float32)
        if device().platform != "cpu":
            return made
        # For CPUs, XLA leaves out a dtype between two wider ones, unless it is said like this; it would take
        # a GPU 1 % of a step.
        bits = jnp.finfo(x.dtype)
        return lax.reduce_precision(made, bits.nexp, bits.nmant)


@dataclass(frozen=True)
class HeadSpec:
    per_token: PerToken
    soft_cap: float | None = None
    chunk: int | str = "auto"  # tokens or rows of the vocabulary at a time
    filter: float = 0.0  # probabilities below may be left out of the gradients
    without: int | None = None  # a token that has no probability, whatever its logit
    products: type[LogitMatmul] = LogitMatmul  # in training; what is only read has those


@dataclass(frozen=True)
class HeadSharding:
    """The mesh axes over which tokens and vocabulary are split here, and those over which the width of
    `unembed` is. Empty on one device."""

    tokens: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()
    width: tuple[str, ...] = ()

    @property
    def rest(self) -> tuple[str, ...]:
        """The axes of the tokens over which the gradient of `unembed` is to be summed whole."""
        return tuple(axis for axis in self.tokens if axis not in self.width)


def logits(head: HeadSpec, x: Array, unembed: Array, first: Any) -> Array:
    """Of the tokens from number `first` on."""
    return soft_capped(head, LogitMatmul(x, unembed).scores(x), first)


def soft_capped(head: HeadSpec, scores: Array, first: Any, *, again: bool = False) -> Array:
    """Products of hidden states and the vocabulary's matrix [c v] as logits. `again` says that somebody else
    has them too: the compiler would write logits that two want to memory, which takes longer than to cap them
    a second time; it does not see that two formulas give the same. The second is off by 1e-7 of the cap where
    logits are far below it: 4e-6 at NO_PEAK, but with a cap of 1e7 gradients would be off by half."""
    if head.soft_cap is not None:
        within = scores / head.soft_cap
        other = again and head.soft_cap <= NO_PEAK
        within = 1 - 2 / (jnp.exp(2 * within) + 1) if other else jnp.tanh(within)
        scores = head.soft_cap * within
    if head.without is None:
        return scores
    columns = lax.broadcasted_iota(jnp.int32, (1, scores.shape[1]), 1) + first
    return jnp.where(columns == head.without, OUT, scores)


def is_target(scores: Array, targets: Array, first: Any) -> Array:
    """Where the target is among logits [c v] whose first column has the number `first`. A comparison the
    compiler fuses into its users: neither a one-hot matrix nor a scatter is stored."""
    return lax.broadcasted_iota(jnp.int32, scores.shape, 1) + first == targets[:, None]


def d_logits(head: HeadSpec, scores: Array, hit: Array, stats: Stats, d_stats: Stats, vocab: int) -> Array:
    gradient = (
        d_stats.lse[:, None] * jnp.exp(scores - stats.lse[:, None])
        + jnp.where(hit, d_stats.target[:, None], 0)
        + d_stats.mean[:, None] / vocab
    )
    return gradient if head.soft_cap is None else gradient * (1 - (scores / head.soft_cap) ** 2)


def add_losses(totals: LossTotals, stats: Stats, losses: Array, weights: Array) -> LossTotals:
    return LossTotals(
        loss=totals.loss + (weights * losses).sum(),
        nll=totals.nll + (weights * (stats.lse - stats.target)).sum(),
    )


def zero() -> LossTotals:
    return LossTotals(loss=jnp.zeros((), jnp.float32), nll=jnp.zeros((), jnp.float32))


def first_column(columns: int, split: HeadSharding) -> Any:
    """The number of this device's first column among all of the vocabulary."""
    return lax.axis_index(split.vocab) * columns if split.vocab else 0


def psum(x: Any, axes: tuple[str, ...]) -> Any:
    return lax.psum(x, axes) if axes else x
