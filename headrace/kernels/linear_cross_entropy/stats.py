"""Types and functions that all backends of linear cross entropy share: the settings of the head, the
statistics of a token's logits, and how a chunk of logits adds to the loss and to the gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from headrace.nn.compile_target import device
from headrace.nn.soft_cap import apply_soft_cap, soft_cap_slope

Array = jax.Array
T = TypeVar("T")

# Up to this soft cap, exp(logit - cap) is in the range of float32 for every logit (exp(-80) is 2e-35): the
# cap replaces the largest logit, and no pass over the logits has to find that.
SMALL_SOFT_CAP = 40.0
EXCLUDED_LOGIT = -1e9  # has no probability in float32, and a finite square


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogitStats:
    """The statistics of a token's logits from which losses are computed."""

    lse: Array  # logsumexp
    target: Array  # logit of the target
    mean: Array


PerTokenLoss = Callable[[LogitStats], Array]


def negative_log_likelihood(stats: LogitStats) -> Array:
    """Compute each token's negative log likelihood."""
    return stats.lse - stats.target


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossTotals:
    """Sums over tokens of weight x loss and of weight x negative log likelihood."""

    loss: Array
    nll: Array  # for logging: has no gradient


class HeadInputs(NamedTuple):
    """The arrays that head and loss are computed from, all or one device's share of them."""

    hidden: Array  # last hidden states [b s d]
    unembed: Array  # the vocabulary's matrix [v d]
    targets: Array  # tokens [b s]
    weights: Array  # of each token's loss [b s]


class LossAndGradients(NamedTuple):
    """The totals over the tokens of all devices, and the gradients of one device's share of the inputs."""

    totals: LossTotals
    d_hidden: Array
    d_unembed: Array


class LogitMatmul:
    """The three matmuls of the head: logits, and the gradients of hidden states and vocabulary matrix.

    Each is computed for a chunk of tokens, with inputs in the dtype of the hidden states and sums in
    float32."""

    def __init__(self, hidden: Array, unembed: Array) -> None:
        """Prepare hidden states [b s d] and the vocabulary's matrix [v d] for multiplication."""
        self.hidden, self.unembed = hidden, unembed

    def raw_logits(self, x: Array) -> Array:
        """Multiply a chunk [c d] of `self.hidden` by the matrix. Returns logits [c v] before the soft cap."""
        return jnp.einsum("cd,vd->cv", x, self.unembed, preferred_element_type=jnp.float32)

    def gradients(self, x: Array, d_raw: Array, d_stats: LogitStats) -> tuple[Array, Array]:
        """Compute the gradients of a chunk of hidden states [c d] and of the matrix [v d], from those of the
        raw logits [c v]."""
        d_raw = d_raw.astype(x.dtype)
        d_x = jnp.einsum("cv,vd->cd", d_raw, self.unembed, preferred_element_type=jnp.float32)
        if device().platform != "cpu":
            return d_x, jnp.einsum("cv,cd->vd", d_raw, x, preferred_element_type=jnp.float32)
        # The small factor is transposed: XLA's CPU compiler would transpose the logits, and take 22 ms
        # instead of 10 (demo recipe, Zen 4, 2026-11).
        d_unembed = jnp.einsum("cd,cv->dv", x, d_raw, preferred_element_type=jnp.float32)
        return d_x, lax.optimization_barrier(d_unembed).T


class Bf16Logits(LogitMatmul):
    """Matmuls with logits rounded to the dtype of the hidden states, as transformers does: half the bytes if
    that is bfloat16, and each logit up to 1/512 off."""

    def raw_logits(self, x: Array) -> Array:
        """Multiply a chunk [c d] of `self.hidden` by the matrix, and round."""
        narrow = jnp.einsum("cd,vd->cv", x, self.unembed, preferred_element_type=x.dtype)
        logits = narrow.astype(jnp.float32)
        if device().platform != "cpu":
            return logits
        # On CPUs, XLA drops a cast to a dtype between two wider ones, but not `reduce_precision`, which would
        # take a GPU 1 % of a step.
        bits = jnp.finfo(x.dtype)
        return lax.reduce_precision(logits, bits.nexp, bits.nmant)


@dataclass(frozen=True)
class HeadSpec:
    """The settings of the head and its loss."""

    per_token_loss: PerTokenLoss
    soft_cap: float | None = None
    chunk_size: int | str = "auto"  # tokens, or rows of the vocabulary's matrix, at a time
    filter_eps: float = 0.0  # kernels may drop gradients of probabilities below this
    excluded_token: int | None = None  # gets no probability, whatever its logit
    matmul: type[LogitMatmul] = LogitMatmul  # of training; evaluation uses `LogitMatmul`


@dataclass(frozen=True)
class HeadSharding:
    """Mesh axes that split the head. Empty on a single device."""

    token_axes: tuple[str, ...] = ()  # split tokens
    vocab_axes: tuple[str, ...] = ()  # split the vocabulary
    width_axes: tuple[str, ...] = ()  # split the width of `unembed`; some of `token_axes`

    @property
    def sum_axes(self) -> tuple[str, ...]:
        """Axes over which the gradient of `unembed` is summed; over `width_axes` it is reduce-scattered."""
        return tuple(axis for axis in self.token_axes if axis not in self.width_axes)


def to_logits(
    head: HeadSpec, raw_logits: Array, vocab_offset: int | Array, *, avoid_cse: bool = False
) -> Array:
    """Apply the soft cap to raw logits [c v], whose first column is token `vocab_offset`, and exclude the
    token `head.excluded_token`.

    With `avoid_cse` tanh is computed by another formula. Statistics and gradients need the same logits: XLA
    would merge equal expressions (common-subexpression elimination) and write the logits to memory, which
    takes longer than a second tanh. The other formula is off by 1e-7 of the cap where logits are far below
    it: 4e-6 at SMALL_SOFT_CAP. With a cap of 1e7 gradients would be off by half, so only small caps use
    it."""
    logits = raw_logits
    if head.soft_cap is not None and avoid_cse and head.soft_cap <= SMALL_SOFT_CAP:
        logits = head.soft_cap * (1 - 2 / (jnp.exp(2 * (raw_logits / head.soft_cap)) + 1))
    elif head.soft_cap is not None:
        logits = apply_soft_cap(raw_logits, head.soft_cap)
    if head.excluded_token is None:
        return logits
    columns = lax.broadcasted_iota(jnp.int32, (1, logits.shape[1]), 1) + vocab_offset
    return jnp.where(columns == head.excluded_token, EXCLUDED_LOGIT, logits)


def is_target(logits: Array, targets: Array, vocab_offset: int | Array) -> Array:
    """Mask [c v] of the targets [c] among logits whose first column is token `vocab_offset`.

    The compiler fuses the comparison into its users: neither a one-hot matrix nor a scatter is stored."""
    return lax.broadcasted_iota(jnp.int32, logits.shape, 1) + vocab_offset == targets[:, None]


def compute_d_logits(
    head: HeadSpec, logits: Array, target_mask: Array, stats: LogitStats, d_stats: LogitStats, vocab: int
) -> Array:
    """Compute the gradient of raw logits [c v] from that of their statistics [c].

    `vocab` is the size of the whole vocabulary, `target_mask` [c v] the result of `is_target`."""
    gradient = (
        d_stats.lse[:, None] * jnp.exp(logits - stats.lse[:, None])
        + jnp.where(target_mask, d_stats.target[:, None], 0)
        + d_stats.mean[:, None] / vocab
    )
    return gradient if head.soft_cap is None else gradient * soft_cap_slope(logits, head.soft_cap)


def add_losses(totals: LossTotals, stats: LogitStats, losses: Array, weights: Array) -> LossTotals:
    """Add the weighted losses and negative log likelihoods of some tokens to the totals."""
    return LossTotals(
        loss=totals.loss + (weights * losses).sum(),
        nll=totals.nll + (weights * negative_log_likelihood(stats)).sum(),
    )


def zero_totals() -> LossTotals:
    """Make the totals of no tokens."""
    return LossTotals(loss=jnp.zeros((), jnp.float32), nll=jnp.zeros((), jnp.float32))


def vocab_offset(rows: int, sharding: HeadSharding) -> int | Array:
    """The token of the first row that this device has of the vocabulary's matrix, if each device has `rows`
    of them."""
    return lax.axis_index(sharding.vocab_axes) * rows if sharding.vocab_axes else 0


def psum(x: T, axes: tuple[str, ...]) -> T:
    """Sum a pytree over mesh axes; over none, return it as it is."""
    return lax.psum(x, axes) if axes else x
