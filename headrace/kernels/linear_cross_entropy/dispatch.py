"""Linear cross entropy: head and loss in one function, so that the logits of all tokens never exist at once.

Backends compute them in chunks of tokens or of the vocabulary in plain JAX, or in kernels. The vocabulary may
be split over devices, as in cut cross entropy (arXiv 2411.09009)."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from headrace.errors import UserError
from headrace.kernels.linear_cross_entropy import by_tokens, by_vocab
from headrace.kernels.linear_cross_entropy.fp8 import Fp8Logits
from headrace.kernels.linear_cross_entropy.stats import (
    Array,
    Bf16Logits,
    HeadInputs,
    HeadSharding,
    HeadSpec,
    LogitMatmul,
    LossAndGradients,
    LossTotals,
    PerTokenLoss,
    negative_log_likelihood,
)
from headrace.nn.compile_target import ArrayShape, device
from headrace.nn.sharding import current_mesh, partition_spec

LOW_PRECISION: dict[str, type[LogitMatmul]] = {"bf16": Bf16Logits, "fp8": Fp8Logits}

_warnings: ContextVar[list[str] | None] = ContextVar("warnings", default=None)


class LossBackend(Protocol):
    """A backend's module. Its functions run on one device's share of tokens and vocabulary."""

    def compute_loss(self, head: HeadSpec, sharding: HeadSharding, inputs: HeadInputs) -> LossTotals:
        """Compute the totals over the tokens of all devices."""

    def compute_loss_and_gradients(
        self, head: HeadSpec, sharding: HeadSharding, inputs: HeadInputs
    ) -> LossAndGradients:
        """Compute the totals, and the gradients of hidden states and matrix."""


class KernelBackend(LossBackend, Protocol):
    """A backend of kernels for one kind of device."""

    def unsupported_reason(
        self, head: HeadSpec, sharding: HeadSharding, hidden: ArrayShape, unembed: ArrayShape
    ) -> str | None:
        """Return why the kernels cannot run on one device's arrays; None if they can."""

    def is_faster_than_plain(self, head: HeadSpec, sharding: HeadSharding, width: int) -> bool:
        """Whether the kernels are faster than plain JAX for hidden states of this width."""


@contextlib.contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Collect warnings of losses that are traced in this context, e.g. that `loss.filter_eps` has no effect.

    The backend depends on devices and shapes, so that only tracing shows which settings have no effect."""
    lines: list[str] = []
    token = _warnings.set(lines)
    try:
        yield lines
    finally:
        _warnings.reset(token)


def add_z_loss(per_token_loss: PerTokenLoss, coefficient: float) -> PerTokenLoss:
    """Add the z-loss to a loss: `coefficient` x logsumexp^2 for each token."""
    if not coefficient:
        return per_token_loss
    return lambda stats: per_token_loss(stats) + coefficient * stats.lse**2


def fused_cross_entropy(
    per_token_loss: PerTokenLoss,
    hidden: Array,
    unembed: Array,
    targets: Array,
    weights: Array,
    *,
    soft_cap: float | None = None,
    backend: str = "auto",
    chunk_size: int | str = "auto",
    filter_eps: float = 0.0,
    excluded_token: int | None = None,
) -> LossTotals:
    """Compute the weighted sum of `per_token_loss` over tokens, from hidden states [b s d] and the
    vocabulary's matrix `unembed` [v d].

    `targets` and `weights` are [b s]; a target may be any number where its weight is 0. Only `hidden` and
    `unembed` have gradients. `backend` is a value of the recipe's `loss.backend`, of which bf16 and fp8 apply
    to training only. `chunk_size` is the largest number of tokens, or of rows of the matrix, that a device
    processes at a time. Kernels drop gradients of probabilities below `filter_eps`. `excluded_token` gets no
    probability; the mean of the logits then has no meaning."""
    matmul = LOW_PRECISION.get(backend, LogitMatmul)
    head = HeadSpec(per_token_loss, soft_cap, chunk_size, filter_eps, excluded_token, matmul)
    name = "tokens" if backend in LOW_PRECISION else backend
    return _cross_entropy(head, name, hidden, unembed, targets, weights)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(
    head: HeadSpec, backend: str, hidden: Array, unembed: Array, targets: Array, weights: Array
) -> LossTotals:
    compute = partial(_local_totals, head, backend)
    targets = _replace_ignored(targets, weights)
    return _run_sharded(compute, lambda layout: P(), hidden, unembed, targets, weights)


def _forward(
    head: HeadSpec, backend: str, hidden: Array, unembed: Array, targets: Array, weights: Array
) -> tuple[LossTotals, tuple[Array, Array]]:
    # Gradients are computed here and not in the backward pass: here the logits of a chunk, or the gathered
    # rows of the matrix, are in memory.
    compute = partial(_local_totals_and_gradients, head, backend)
    # Specs in the places of the arrays.
    out_specs = lambda layout: LossAndGradients(P(), layout.hidden, layout.unembed)  # type: ignore[arg-type]
    targets = _replace_ignored(targets, weights)
    totals, d_hidden, d_unembed = _run_sharded(compute, out_specs, hidden, unembed, targets, weights)
    return totals, (d_hidden, d_unembed)


def _backward(
    head: HeadSpec, backend: str, gradients: tuple[Array, Array], cotangent: LossTotals
) -> tuple[Array, Array, None, None]:
    d_hidden, d_unembed = ((cotangent.loss * gradient).astype(gradient.dtype) for gradient in gradients)
    return d_hidden, d_unembed, None, None


_cross_entropy.defvjp(_forward, _backward)


def compute_negative_log_likelihoods(
    hidden: Array,
    unembed: Array,
    targets: Array,
    *,
    soft_cap: float | None = None,
    chunk_size: int | str = "auto",
) -> Array:
    """Compute the negative log likelihood of each target [b s], without gradients.

    A loss that depends on likelihoods trains through `fused_cross_entropy`, with weights computed from
    them."""
    head = HeadSpec(negative_log_likelihood, soft_cap, chunk_size)
    hidden, unembed = jax.lax.stop_gradient((hidden, unembed))
    compute = partial(by_tokens.compute_negative_log_likelihoods, head)
    return _run_sharded(compute, lambda layout: layout.tokens, hidden, unembed, targets)


def _replace_ignored(targets: Array, weights: Array) -> Array:
    """Give ignored tokens a real target, so that their statistics are finite."""
    return jnp.where(weights == 0, 0, targets)


class HeadLayout(NamedTuple):
    """The partitioning of the head's arrays over a mesh."""

    hidden: P
    unembed: P
    tokens: P  # of arrays [b s]
    sharding: HeadSharding


def _run_sharded(
    compute: Callable[..., Any],
    out_specs: Callable[[HeadLayout], Any],
    hidden: Array,
    unembed: Array,
    *rows: Array,
) -> Any:
    """Run `compute(sharding, hidden, unembed, *rows)` on each device's share. `rows` are [b s]."""
    mesh = current_mesh()
    if mesh is None:
        return compute(HeadSharding(), hidden, unembed, *rows)
    layout = _head_layout(hidden, unembed, mesh)
    return jax.shard_map(
        partial(compute, layout.sharding),
        in_specs=(layout.hidden, layout.unembed, *[layout.tokens] * len(rows)),
        out_specs=out_specs(layout),
        # Nothing in `compute` is differentiated: JAX need not know which values differ between devices.
        check_vma=False,
    )(hidden, unembed, *rows)


def _head_layout(hidden: Array, unembed: Array, mesh: AbstractMesh) -> HeadLayout:
    rows = partition_spec(("batch", "sequence", None), hidden.shape, mesh)
    stored = partition_spec(("vocab", "embed"), unembed.shape, mesh)
    token_axes = _mesh_axes(rows[0]) + _mesh_axes(rows[1])
    vocab_axes, width_axes = _mesh_axes(stored[0]), _mesh_axes(stored[1])
    if not set(width_axes) <= set(token_axes):
        width_axes = ()
    sharding = HeadSharding(token_axes, vocab_axes, width_axes)
    return HeadLayout(rows, P(vocab_axes or None, width_axes or None), P(*rows[:2]), sharding)


def _mesh_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Convert an entry of a PartitionSpec, which may be a single axis, to a tuple of axes."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _local_totals(head: HeadSpec, backend: str, sharding: HeadSharding, *arrays: Array) -> LossTotals:
    inputs = HeadInputs(*arrays)
    name = pick_backend(backend, head, sharding, inputs.hidden, inputs.unembed)
    return load_backend(name).compute_loss(head, sharding, inputs)


def _local_totals_and_gradients(
    head: HeadSpec, backend: str, sharding: HeadSharding, *arrays: Array
) -> LossAndGradients:
    inputs = HeadInputs(*arrays)
    name = pick_backend(backend, head, sharding, inputs.hidden, inputs.unembed)
    if head.filter_eps and name != "hopper":
        _warn_unfiltered(head, sharding, inputs)
    return load_backend(name).compute_loss_and_gradients(head, sharding, inputs)


def pick_backend(
    backend: str, head: HeadSpec, sharding: HeadSharding, hidden: ArrayShape, unembed: ArrayShape
) -> str:
    """Pick the backend for one device's arrays: `tokens`, `vocabulary`, or the kernels `tpu` or `hopper`.

    `backend` is a value of `loss.backend`; other than `auto` and `kernel` it is returned as it is. Raises
    UserError if it is `kernel` and the kernels cannot run.

    Chunks of tokens need one matmul less than chunks of the vocabulary. They are the default, unless the
    width of the matrix is split over devices: each device would gather the whole matrix and hold its whole
    gradient. Kernels are faster if they can skip gradients on a GPU, and on most TPUs than chunks of the
    vocabulary (docs/performance/loss.md)."""
    if backend not in ("auto", "kernel"):
        return backend
    platform = device().platform
    kernel = "tpu" if platform == "tpu" else "hopper"
    if backend == "kernel" or (
        platform in ("tpu", "gpu")
        and load_kernel(kernel).is_faster_than_plain(head, sharding, hidden.shape[2])
    ):
        reason = load_kernel(kernel).unsupported_reason(head, sharding, hidden, unembed)
        if reason is None:
            return kernel
        if backend == "kernel":
            raise UserError(f"loss.backend: kernels cannot be used here: {reason}. Set loss.backend to auto")
    return "vocabulary" if sharding.width_axes else "tokens"


def load_backend(name: str) -> LossBackend:
    """Load the backend that `pick_backend` named."""
    return {"tokens": by_tokens, "vocabulary": by_vocab}.get(name) or load_kernel(name)


def load_kernel(name: str) -> KernelBackend:
    """Load the kernels for TPUs (`tpu`) or for Hopper GPUs (`hopper`). They are imported only where they are
    used: importing Pallas takes 0.3 s."""
    if name == "tpu":
        from headrace.kernels.linear_cross_entropy import tpu

        return tpu
    from headrace.kernels.linear_cross_entropy import hopper

    return hopper


def _warn_unfiltered(head: HeadSpec, sharding: HeadSharding, inputs: HeadInputs) -> None:
    """Add a warning that `filter_eps` has no effect to those that `collect_warnings` collects."""
    lines = _warnings.get()
    if lines is None:
        return
    reason = load_kernel("hopper").unsupported_reason(head, sharding, inputs.hidden, inputs.unembed)
    line = (
        f"loss.filter_eps: {head.filter_eps:g} has no effect here: the kernels that skip gradients cannot be "
        f"used{f', since {reason}' if reason else ''}. All gradients are computed, as with loss.filter_eps=0"
    )
    if line not in lines:
        lines.append(line)
