"""The output layer and the loss in one, so that the logits of all tokens never exist at once. Chunks of
tokens as in Liger's fused linear cross entropy (arXiv 2410.10989), the vocabulary split over devices as in
cut cross entropy (arXiv 2411.09009). Plain JAX, for every platform."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from millrace import mesh

Array = jax.Array

# One GiB of float32 logits a chunk: 8,192 tokens at a vocabulary of 32k, 1,024 at 256k. Each chunk reads
# and writes the float32 gradient of `unembed` once, 8 bytes a weight against 6 x chunk FLOP: at 700 TFLOP/s
# and 4.8 TB/s (H200) at most 200/chunk of the time of the products, 20 % at 1,024 tokens and 40 % at 512.
# Gemma 2 2B's head on a v5p needs 3,250 MiB with 1,024 (2,250 of them that gradient), 2,750 with 512,
# 12,000 with full logits (8,192 tokens, bf16, compiled by libtpu 0.0.51).
LOGIT_BYTES = 2**30
SMALLEST_CHUNK = 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stats:
    """All that a loss may know of a token's logits: their logsumexp, the target's logit and their mean."""

    lse: Array
    target: Array
    mean: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Totals:
    """Sums over tokens of weight x loss and of weight x negative log likelihood. `nll` is for reading
    only: no gradient flows through it."""

    loss: Array
    nll: Array


PerToken = Callable[[Stats], Array]


def bind(per_token: Callable[[Any, Stats], Array], cfg: Any) -> PerToken:
    """The loss of one losses/ file with its config, and the z-loss that all of them share."""
    if not cfg.z_loss:
        return lambda stats: per_token(cfg, stats)
    return lambda stats: per_token(cfg, stats) + cfg.z_loss * stats.lse**2


def cut(
    per_token: PerToken,
    hidden: Array,
    unembed: Array,
    targets: Array,
    weights: Array,
    *,
    soft_cap: float | None = None,
    chunk: int | str = "auto",
) -> Totals:
    """The totals of `per_token`, an elementwise function, over the logits of hidden [b s d] and unembed
    [v d], multiplied in hidden's dtype and summed in float32. `chunk` is the most tokens at a time on one
    device. A target may be anything where its weight is 0. Only `hidden` and `unembed` get gradients."""
    return _cut(_Head(per_token, soft_cap, chunk), hidden, unembed, targets, weights)


@dataclass(frozen=True)
class _Head:
    per_token: PerToken
    soft_cap: float | None
    chunk: int | str


@dataclass(frozen=True)
class _Split:
    """The mesh axes over which tokens and vocabulary are split here, and those among the tokens' axes over
    which the gradient of `unembed` is left split along its width. Empty on one device."""

    tokens: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()
    width: tuple[str, ...] = ()


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cut(head: _Head, hidden: Array, unembed: Array, targets: Array, weights: Array) -> Totals:
    return _on_mesh(_totals, head, hidden, unembed, targets, weights)


def _forward(head: _Head, hidden: Array, unembed: Array, targets: Array, weights: Array) -> Any:
    totals, *gradients = _on_mesh(_totals_and_gradients, head, hidden, unembed, targets, weights)
    return totals, gradients


def _backward(head: _Head, gradients: list[Array], cotangent: Totals) -> Any:
    # The forward rule has done the work while the logits were at hand: three products in all, not four.
    d_hidden, d_unembed = ((cotangent.loss * g).astype(g.dtype) for g in gradients)
    return d_hidden, d_unembed, None, None


_cut.defvjp(_forward, _backward)


def _on_mesh(
    work: Callable[..., Any], head: _Head, hidden: Array, unembed: Array, targets: Array, weights: Array
) -> Any:
    """Runs `work` on each device's share of the tokens and of the vocabulary."""
    # An ignored token gets a real target, so that its statistics are those of a token and stay finite.
    targets = jnp.where(weights == 0, 0, targets)
    current = mesh.current()
    if current is None:
        return work(head, _Split(), hidden, unembed, targets, weights)
    rows = mesh.spec(("batch", "sequence", None), hidden.shape, current)
    stored = mesh.spec(("vocab", "embed"), unembed.shape, current)
    tokens, vocab, width = _axes(rows[0]) + _axes(rows[1]), _axes(stored[0]), _axes(stored[1])
    split = _Split(tokens, vocab, width if set(width) <= set(tokens) else ())
    gradients = (rows, P(vocab or None, split.width or None))
    return jax.shard_map(
        partial(work, head, split),
        in_specs=(rows, P(vocab or None, None), P(*rows[:2]), P(*rows[:2])),
        out_specs=P() if work is _totals else (P(), *gradients),
        # Nothing in here is differentiated, so JAX need not know which values differ between devices.
        check_vma=False,
    )(hidden, unembed, targets, weights)


def _totals(
    head: _Head, split: _Split, hidden: Array, unembed: Array, targets: Array, weights: Array
) -> Totals:
    unembed = unembed.astype(hidden.dtype)

    def step(totals: Totals, piece: tuple[Array, Array, Array]) -> tuple[Totals, tuple[()]]:
        x, y, w = piece
        logits = _logits(head, x, unembed)
        stats = _stats(logits, _is_target(logits, y, split), split)
        return _add(totals, stats, head.per_token(stats), w), ()

    totals, _ = _over_chunks(step, _zero(), (hidden, targets, weights), _chunk(head, unembed))
    return _psum(totals, split.tokens)


def _totals_and_gradients(
    head: _Head, split: _Split, hidden: Array, unembed: Array, targets: Array, weights: Array
) -> tuple[Totals, Array, Array]:
    matrix = unembed.astype(hidden.dtype)

    def step(carry: tuple[Totals, Array], piece: tuple[Array, Array, Array]) -> Any:
        totals, d_unembed = carry
        x, y, w = piece
        logits = _logits(head, x, matrix)
        is_target = _is_target(logits, y, split)
        stats = _stats(logits, is_target, split)
        losses, pull = jax.vjp(head.per_token, stats)
        d_logits = _d_logits(head, logits, is_target, stats, pull(w)[0], split).astype(x.dtype)
        d_x = jnp.einsum("cv,vd->cd", d_logits, matrix, preferred_element_type=jnp.float32)
        d_unembed += jnp.einsum("cv,cd->vd", d_logits, x, preferred_element_type=jnp.float32)
        return (_add(totals, stats, losses, w), d_unembed), _psum(d_x, split.vocab).astype(x.dtype)

    # float32: in bf16 a sum over chunks loses whatever is below 1/256 of it.
    start = _zero(), jnp.zeros(unembed.shape, jnp.float32)
    pieces = hidden, targets, weights
    (totals, d_unembed), d_hidden = _over_chunks(step, start, pieces, _chunk(head, unembed))
    if split.width:
        # Each device keeps only the columns it stores: half the traffic of a sum that all devices get.
        d_unembed = lax.psum_scatter(d_unembed, split.width, scatter_dimension=1, tiled=True)
    d_unembed = _psum(d_unembed, tuple(axis for axis in split.tokens if axis not in split.width))
    return _psum(totals, split.tokens), d_hidden, d_unembed.astype(unembed.dtype)


def _logits(head: _Head, x: Array, unembed: Array) -> Array:
    logits = jnp.einsum("cd,vd->cv", x, unembed, preferred_element_type=jnp.float32)
    return logits if head.soft_cap is None else head.soft_cap * jnp.tanh(logits / head.soft_cap)


def _is_target(logits: Array, targets: Array, split: _Split) -> Array:
    """A comparison the compiler fuses into its users: neither a one-hot matrix nor a scatter is stored."""
    first = lax.axis_index(split.vocab) * logits.shape[1] if split.vocab else 0
    return lax.broadcasted_iota(jnp.int32, logits.shape, 1) + first == targets[:, None]


def _stats(logits: Array, is_target: Array, split: _Split) -> Stats:
    top = logits.max(axis=1)
    if split.vocab:
        top = lax.pmax(top, split.vocab)
    sums = (
        jnp.exp(logits - top[:, None]).sum(axis=1),
        jnp.where(is_target, logits, 0).sum(axis=1),
        logits.sum(axis=1),
    )
    exponentials, target, total = _psum(sums, split.vocab)
    return Stats(lse=top + jnp.log(exponentials), target=target, mean=total / _vocab(logits, split))


def _d_logits(
    head: _Head, logits: Array, is_target: Array, stats: Stats, d_stats: Stats, split: _Split
) -> Array:
    d_logits = (
        d_stats.lse[:, None] * jnp.exp(logits - stats.lse[:, None])
        + jnp.where(is_target, d_stats.target[:, None], 0)
        + d_stats.mean[:, None] / _vocab(logits, split)
    )
    return d_logits if head.soft_cap is None else d_logits * (1 - (logits / head.soft_cap) ** 2)


def _vocab(logits: Array, split: _Split) -> int:
    return logits.shape[1] * _psum(1, split.vocab)


def _zero() -> Totals:
    return Totals(loss=jnp.zeros((), jnp.float32), nll=jnp.zeros((), jnp.float32))


def _add(totals: Totals, stats: Stats, losses: Array, weights: Array) -> Totals:
    return Totals(
        loss=totals.loss + (weights * losses).sum(),
        nll=totals.nll + (weights * (stats.lse - stats.target)).sum(),
    )


def _chunk(head: _Head, unembed: Array) -> int:
    if head.chunk == "auto":
        return max(SMALLEST_CHUNK, LOGIT_BYTES // (4 * unembed.shape[0]))
    # Fewer where the logits would pass 2**31 numbers: kernels may count in int32.
    return min(int(head.chunk), (2**31 - 1) // unembed.shape[0])


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


def _psum(x: Any, axes: tuple[str, ...]) -> Any:
    return lax.psum(x, axes) if axes else x


def _axes(entry: Any) -> tuple[str, ...]:
    """The axes in one place of a PartitionSpec, which holds a lone axis as a bare string."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
