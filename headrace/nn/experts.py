"""Mixture of experts: each token passes through the few MLPs that a router chooses for it (arXiv 1701.06538,
2101.03961), and no token is dropped. Pairs of a token and an expert are sorted by expert, and each expert
multiplies its own (`jax.lax.ragged_dot`).

If `mesh.expert` splits the experts, every device gathers the tokens of the others along that axis, computes
the pairs of its own experts, and the outputs are summed back on the tokens' devices. The number of its pairs
is not known at compile time: they are computed in rounds of `SLACK` times the number of equal loads, so that
one round is nearly always enough, and very unequal loads take more."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from headrace.nn.mlp import Activation, glu
from headrace.nn.module import Array, PyTree
from headrace.nn.sharding import current_mesh, partition_spec

Scores = Literal["softmax", "sigmoid"]
SLACK = 1.25
FURTHER_ROUNDS = "rounds_of_a_crowd"  # scope of the loop that rarely runs; `plan` recognizes it by this name


class Routing(NamedTuple):
    """The experts of each token and the weights of their outputs, [b s k]."""

    experts: Array
    weights: Array


class ExpertWeights(NamedTuple):
    """The matrices of all experts: [e d f], [e d f] and [e f d]."""

    gate: Array
    up: Array
    down: Array


def route(
    logits: Array,
    bias: Array | None,
    is_real: Array | None,
    *,
    top_k: int,
    scores: Scores,
    normalize: bool,
    scale: float,
    balance: float,
) -> Routing:
    """Choose each token's experts by logits [b s e] plus bias, which has no effect on their weights (arXiv
    2408.15664). `is_real` marks tokens that are not padding; None: all.

    With `balance`, that multiple of Switch's loss is added to the gradient: per expert, its share of choices
    times its mean probability times the number of experts, which is 1 in sum if all are equal. The "gradient"
    of the bias is the number of tokens that chose each expert, for `update_router_bias`."""
    logits = logits.astype(jnp.float32)
    probabilities = jax.nn.softmax(logits) if scores == "softmax" else jax.nn.sigmoid(logits)
    preference = probabilities if bias is None else probabilities + bias
    chosen = jax.lax.top_k(jax.lax.stop_gradient(preference), top_k)[1]
    # A comparison, not a lookup, whose gradient would be a scatter.
    is_chosen = chosen[..., None] == jnp.arange(logits.shape[-1])
    weights = jnp.sum(jnp.where(is_chosen, probabilities[..., None, :], 0), axis=-1)
    if normalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    weights = scale * weights
    if bias is None and not balance:
        return Routing(chosen, weights)
    counted = is_chosen.any(axis=-2) if is_real is None else is_chosen.any(axis=-2) & is_real[..., None]
    loads = jnp.sum(counted.astype(jnp.float32), axis=(0, 1))
    aux_loss = jnp.zeros(())
    if bias is not None:
        aux_loss += jnp.sum(bias * loads)
    if balance:
        shares = probabilities / probabilities.sum(axis=-1, keepdims=True)
        shares = shares if is_real is None else jnp.where(is_real[..., None], shares, 0)
        factor = logits.shape[-1] / jnp.maximum(loads.sum(), 1)
        aux_loss += balance * factor * jnp.sum(jnp.sum(shares, axis=(0, 1)) * loads)
    return Routing(chosen, add_aux_loss(weights, aux_loss))


@jax.custom_vjp
def add_aux_loss(x: Array, term: Array) -> Array:
    """Add `term` to the loss that is differentiated, and return x. No layer has to pass the term on."""
    return x


add_aux_loss.defvjp(lambda x, term: (x, None), lambda _, d: (d, jnp.ones(())))


def update_router_bias(rate: float, bias: Array, loads: Array) -> Array:
    """Update the bias [l e] after a step: it falls for experts with a load above their layer's mean, and
    rises for others."""
    return bias + rate * jnp.sign(loads.mean(axis=-1, keepdims=True) - loads)


def max_load(loads: Array) -> Array:
    """The largest load of an expert [l e], as a multiple of its layer's mean."""
    return jnp.max(loads.max(axis=-1) / jnp.maximum(loads.mean(axis=-1), 1e-9))


def mix(
    kind: Activation, x: Array, routing: Routing, experts: ExpertWeights, *, gather_again: bool = False
) -> Array:
    """Compute the weighted sum of the chosen experts' outputs for x [b s d].

    With `gather_again` the backward pass gathers weights from other devices again, instead of keeping those
    of every layer in memory."""
    mesh, names = current_mesh(), ("experts", "embed", "expert_mlp")
    if mesh is None:
        return _mix_on_device(kind, ExpertSharding(), x, routing, experts)
    weight_specs = [
        partition_spec([names[i] for i in order], experts[n].shape, mesh)
        for n, order in enumerate(AXIS_ORDERS)
    ]
    row_spec = partition_spec(("batch", "sequence", None), x.shape, mesh)
    split = ExpertSharding(*(_mesh_axes(weight_specs[0][i]) for i in range(3)))
    run: Callable[..., Array] = jax.shard_map(
        partial(_mix_on_device, kind, split),
        in_specs=(row_spec, row_spec, tuple(weight_specs)),
        out_specs=row_spec,
        check_vma=False,  # sums over devices are written explicitly
    )
    if gather_again:
        run = jax.checkpoint(run, policy=lambda primitive, *_, **__: primitive.name != "all_gather")
    return run(x, tuple(routing), tuple(experts))


AXIS_ORDERS = ((0, 1, 2), (0, 1, 2), (0, 2, 1))  # experts, width and hidden units in each of the matrices


class ExpertSharding(NamedTuple):
    """The mesh axes that split experts, their width and their hidden units."""

    experts: tuple[str, ...] = ()
    width: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()


def _mix_on_device(kind: Activation, split: ExpertSharding, x: Array, routing: Any, experts: Any) -> Array:
    """Pass one device's rows through the experts of all devices."""
    if split.width:
        pairs = zip(experts, AXIS_ORDERS, strict=True)
        experts = [gather(w, split.width, axis=order.index(1)) for w, order in pairs]
    tokens = x.reshape(-1, x.shape[-1])
    chosen, weights = (part.reshape(len(tokens), -1) for part in routing)
    if not split.experts:
        out = _run_rounds(kind, tokens, chosen, weights, ExpertWeights(*experts), chosen.size)
    else:
        first = jax.lax.axis_index(split.experts) * len(experts[0])
        all_tokens, all_chosen, all_weights = (
            gather(part, split.experts) for part in (tokens, chosen, weights)
        )
        capacity = min(balanced_capacity(chosen.size), all_chosen.size)
        out = _run_rounds(
            kind, all_tokens, all_chosen - first, all_weights, ExpertWeights(*experts), capacity
        )
        out = jax.lax.psum_scatter(out, split.experts, tiled=True)
    if split.hidden:
        out = jax.lax.psum(out, split.hidden)
    return out.reshape(x.shape)


def balanced_capacity(pairs: int) -> int:
    """The number of pairs in a round on each device: as many as with equal loads, times `SLACK`. `pairs` are
    those of the device's own tokens."""
    return math.ceil(SLACK * pairs / 128) * 128


def gather(x: Array, axes: tuple[str, ...], axis: int = 0) -> Array:
    """Concatenate the parts of x on all devices along mesh axes."""
    return jax.lax.all_gather(x, axes, axis=axis, tiled=True)


def _run_rounds(
    kind: Activation, x: Array, chosen: Array, weights: Array, experts: ExpertWeights, capacity: int
) -> Array:
    """Compute the weighted sum of these experts' outputs for the tokens x [t d] that chose them, `capacity`
    pairs at a time. Experts count from 0; tokens that chose others get zeros."""
    count, k = len(experts.gate), chosen.shape[1]
    flat = chosen.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < count), flat, count)  # pairs of other devices are last
    order = jnp.argsort(flat)
    ends = jnp.cumsum(jnp.sum(flat[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32))
    max_rounds = -(-len(order) // capacity)
    order = jnp.pad(order, (0, max_rounds * capacity - len(order)))

    def run_round(number: Any, indices: Any, x: Array, weights: Array, experts: ExpertWeights) -> Array:
        order, ends = indices
        pairs = jax.lax.dynamic_slice_in_dim(order, number * capacity, capacity)
        ends_in_round = jnp.clip(ends - number * capacity, 0, capacity)
        sizes = jnp.diff(ends_in_round, prepend=0)
        # Rows after the last expert's are uninitialized memory.
        is_used = (jnp.arange(capacity) < ends_in_round[-1])[:, None]
        h = jnp.where(is_used, take_rows(x, pairs // k), 0)
        gate, up = (jax.lax.ragged_dot(h, w, sizes) for w in (experts.gate, experts.up))
        y = jax.lax.ragged_dot(glu(kind, gate, up), experts.down, sizes)
        y = jnp.where(is_used, y, 0) * weights.reshape(-1)[pairs][:, None]
        return sum_rows(len(x), y.astype(x.dtype), pairs // k)

    if max_rounds == 1:
        return run_round(0, (order, ends), x, weights, experts)
    return _sum_over_rounds(run_round)(-(-ends[-1] // capacity), (order, ends), x, weights, experts)


def _sum_over_rounds(run_round: Callable[..., Array]) -> Callable[..., Array]:
    """Make the function (rounds, indices, *inputs) -> sum of `run_round(number, indices, *inputs)`.

    The number of rounds need not be known at compile time. The sum has a gradient with respect to `inputs`,
    for which each round is computed again."""

    @jax.custom_vjp
    def run(rounds: Array, indices: PyTree, *inputs: PyTree) -> Array:
        return _sum_dynamic(rounds, lambda number: run_round(number, indices, *inputs))

    def backward(residuals: PyTree, d: Array) -> PyTree:
        rounds, indices, *inputs = residuals
        round_gradient = lambda number: jax.vjp(partial(run_round, number, indices), *inputs)[1](d)
        return None, None, *_sum_dynamic(rounds, round_gradient)

    run.defvjp(lambda *inputs: (run(*inputs), inputs), backward)
    return run


def _sum_dynamic(rounds: Array, run_round: Callable[[Any], PyTree]) -> PyTree:
    """Sum `run_round(number)` for numbers from 0 to `rounds`, a number that is not known at compile time."""

    def add(number: Array, total: PyTree) -> PyTree:
        return jax.tree.map(jnp.add, total, run_round(number))

    first = run_round(0)  # outside of the loop: there is nothing to add it to
    with jax.named_scope(FURTHER_ROUNDS):
        return jax.lax.fori_loop(1, rounds, add, first)


@jax.custom_vjp
def take_rows(x: Array, indices: Array) -> Array:
    """Take rows of x, with a gradient that is summed in float32."""
    return x[indices]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_rows(count: int, y: Array, indices: Array) -> Array:
    """Sum rows of y with equal indices, in float32, to an array of `count` rows."""
    total = jnp.zeros((count, *y.shape[1:]), jnp.float32)
    return total.at[indices].add(y.astype(jnp.float32)).astype(y.dtype)


take_rows.defvjp(
    lambda x, indices: (x[indices], (len(x), indices)),
    lambda residuals, d: (sum_rows(residuals[0], d, residuals[1]), None),
)
sum_rows.defvjp(
    lambda count, y, indices: (sum_rows(count, y, indices), indices),
    lambda count, indices, d: (take_rows(d, indices), None),
)


def _mesh_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec, which has a single axis as a plain string."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
