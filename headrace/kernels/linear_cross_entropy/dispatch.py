"""The output layer and the loss in one, so that the logits of all tokens never exist at once: by chunks of
tokens or of the vocabulary in plain JAX, or by kernels; one file each. The vocabulary may be split over
devices as in cut cross entropy (arXiv 2411.09009)."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from headrace.errors import UserError
from headrace.kernels.linear_cross_entropy.fp8 import Fp8Logits
from headrace.kernels.linear_cross_entropy.stats import (
    Array,
    Bf16Logits,
    HeadSharding,
    HeadSpec,
    LogitMatmul,
    LossTotals,
    PerToken,
    Stats,
)
from headrace.nn import sharding
from headrace.nn.compile_target import device

LOW: dict[str, type[LogitMatmul]] = {"bf16": Bf16Logits, "fp8": Fp8Logits}
_HEARD: ContextVar[list[str] | None] = ContextVar("heard", default=None)


@contextlib.contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """What heads that are traced in here have to say of their settings: which way is taken depends on devices
    and shapes, so only they know what has no effect."""
    lines: list[str] = []
    token = _HEARD.set(lines)
    try:
        yield lines
    finally:
        _HEARD.reset(token)


def with_z_loss(per_token: Callable[[Any, Stats], Array], cfg: Any) -> PerToken:
    """The loss of one losses/ file with its config, and the z-loss that all of them share."""
    if not cfg.z_loss:
        return lambda stats: per_token(cfg, stats)
    return lambda stats: per_token(cfg, stats) + cfg.z_loss * stats.lse**2


def fused_cross_entropy(
    per_token: PerToken,
    hidden: Array,
    unembed: Array,
    targets: Array,
    weights: Array,
    *,
    soft_cap: float | None = None,
    split: str = "auto",
    chunk: int | str = "auto",
    filter: float = 0.0,
    without: int | None = None,
) -> LossTotals:
    """The totals of `per_token`, an elementwise function, over the logits of hidden [b s d] and unembed
    [v d], multiplied in hidden's dtype and summed in float32. `chunk` is the most tokens, or rows of the
    vocabulary, at a time on one device. A target may be anything where its weight is 0. Only `hidden` and
    `unembed` get gradients. Where kernels can skip it, probabilities below `filter` are left out of them. The
    token `without` is ruled out; the mean of the logits then means nothing. Split as bf16 or fp8, it goes by
    tokens, and what trains has logits of 16 bits, or is multiplied in 8; what is only read is not."""
    products = LOW.get(split, LogitMatmul)
    head = HeadSpec(per_token, soft_cap, chunk, filter, without, products)
    return _cut(head, "tokens" if split in LOW else split, hidden, unembed, targets, weights)


def token_log_likelihoods(
    hidden: Array, unembed: Array, targets: Array, *, soft_cap: float | None = None, chunk: int | str = "auto"
) -> Array:
    """The negative log likelihood of every target [b s], for reading only: what is learnt by it goes through
    `fused_cross_entropy`, with weights that depend on it."""
    head = HeadSpec(likelihood, soft_cap, chunk)
    hidden, unembed = jax.lax.stop_gradient((hidden, unembed))
    current = sharding.current_mesh()
    if current is None:
        return _part("tokens").token_log_likelihoods(head, HeadSharding(), hidden, unembed, targets)
    rows, matrix, split = _layout(hidden, unembed, current)
    return jax.shard_map(
        partial(_part("tokens").token_log_likelihoods, head, split),
        in_specs=(rows, matrix, P(*rows[:2])),
        out_specs=P(*rows[:2]),
        check_vma=False,
    )(hidden, unembed, targets)


def likelihood(stats: Stats) -> Array:
    """A token's negative log likelihood."""
    return stats.lse - stats.target


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cut(
    head: HeadSpec, way: str, hidden: Array, unembed: Array, targets: Array, weights: Array
) -> LossTotals:
    return _sharded(False, head, way, hidden, unembed, targets, weights)


def _forward(head: HeadSpec, way: str, hidden: Array, unembed: Array, targets: Array, weights: Array) -> Any:
    totals, *gradients = _sharded(True, head, way, hidden, unembed, targets, weights)
    return totals, gradients


def _backward(head: HeadSpec, way: str, gradients: list[Array], cotangent: LossTotals) -> Any:
    # The forward rule has done the work: by tokens while the logits were at hand, by the vocabulary while
    # what it gathered was.
    d_hidden, d_unembed = ((cotangent.loss * g).astype(g.dtype) for g in gradients)
    return d_hidden, d_unembed, None, None


_cut.defvjp(_forward, _backward)


def _sharded(
    trains: bool, head: HeadSpec, way: str, hidden: Array, unembed: Array, targets: Array, weights: Array
) -> Any:
    """Runs the head on each device's share of the tokens and of the vocabulary."""
    # An ignored token gets a real target, so that its statistics are those of a token and stay finite.
    targets = jnp.where(weights == 0, 0, targets)
    current = sharding.current_mesh()
    if current is None:
        work = _pick_backend(trains, head, way, HeadSharding(), hidden, unembed)
        return work(head, HeadSharding(), hidden, unembed, targets, weights)
    rows, matrix, split = _layout(hidden, unembed, current)
    parts = [
        jax.ShapeDtypeStruct(NamedSharding(current, part).shard_shape(x.shape), x.dtype)
        for x, part in ((hidden, rows), (unembed, matrix))
    ]
    return jax.shard_map(
        partial(_pick_backend(trains, head, way, split, *parts), head, split),
        in_specs=(rows, matrix, P(*rows[:2]), P(*rows[:2])),
        out_specs=(P(), rows, matrix) if trains else P(),
        # Nothing in here is differentiated, so JAX need not know which values differ between devices.
        check_vma=False,
    )(hidden, unembed, targets, weights)


def _layout(hidden: Array, unembed: Array, current: Any) -> tuple[P, P, HeadSharding]:
    """How hidden states and the vocabulary's matrix are split over this mesh."""
    rows = sharding.partition_spec(("batch", "sequence", None), hidden.shape, current)
    stored = sharding.partition_spec(("vocab", "embed"), unembed.shape, current)
    tokens, vocab, width = _axes(rows[0]) + _axes(rows[1]), _axes(stored[0]), _axes(stored[1])
    split = HeadSharding(tokens, vocab, width if set(width) <= set(tokens) else ())
    return rows, P(vocab or None, split.width or None), split


def _pick_backend(
    trains: bool, head: HeadSpec, way: str, split: HeadSharding, hidden: Any, unembed: Any
) -> Callable[..., Any]:
    """By tokens it is a product less, so that is the way, unless the matrix is in parts on many devices: they
    would gather all of it, and each hold its whole gradient. Kernels are ahead where they can skip on a GPU,
    and on most TPUs of what goes by the vocabulary (docs/performance/loss.md)."""
    kernel = "mosaic" if device().platform == "tpu" else "hopper"
    if kernel == "mosaic":
        ahead = bool(split.width) and _part(kernel).is_faster_than_plain(hidden.shape[2])
    else:
        ahead = head.filter > 0
    reason = None
    if way == "kernel" or (way == "auto" and ahead):
        reason = _part(kernel).unsupported_reason(head, split, hidden, unembed)
        if reason is not None and way == "kernel":
            raise UserError(f"loss.backend: kernels cannot be used here: {reason}. Set loss.backend to auto")
    if way == "auto":
        way = "kernel" if ahead and reason is None else "vocabulary" if split.width else "tokens"
    part = _part(kernel if way == "kernel" else way)
    if trains and head.filter and part is not _part("hopper"):
        _tell_unfiltered(head, split, hidden, unembed)
    return part.totals_and_gradients if trains else part.totals


def _tell_unfiltered(head: HeadSpec, split: HeadSharding, hidden: Any, unembed: Any) -> None:
    lines = _HEARD.get()
    if lines is None:
        return
    why = _part("hopper").unsupported_reason(head, split, hidden, unembed)
    line = (
        f"loss.filter_eps: {head.filter:g} has no effect here: the kernels that skip gradients cannot be used"
        f"{f', since {why}' if why else ''}. No gradient is left out; loss.filter_eps=0 says the same"
    )
    if line not in lines:
        lines.append(line)


FILES = {"tokens": "by_tokens", "vocabulary": "by_vocab", "hopper": "hopper", "mosaic": "tpu"}


def _part(way: str) -> Any:
    return importlib.import_module(f"headrace.kernels.linear_cross_entropy.{FILES[way]}")


def _axes(entry: Any) -> tuple[str, ...]:
    """The axes in one place of a PartitionSpec, which holds a lone axis as a bare string."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
