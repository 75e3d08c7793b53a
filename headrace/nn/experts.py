"""A mixture of experts: each token goes through the few MLPs that a router chooses for it (arXiv 1701.06538,
2101.03961), and none is dropped. Pairs of a token and an expert are sorted by expert, and each expert
multiplies its own (`jax.lax.ragged_dot`).

Where `mesh.expert` splits the experts, every device gathers the tokens of the others along that axis, takes
those that chose its experts, and what comes out is summed back to where the tokens were. How many chose them
is not known when compiling: they come in rounds of `SLACK` times as many as an even share, so that one round
nearly always does, and a crowd takes more of them."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from headrace.nn.mlp import Activation, glu
from headrace.nn.sharding import current, spec
from headrace.nn.module import Array

Scores = Literal["softmax", "sigmoid"]
SLACK = 1.25
FURTHER = "rounds_of_a_crowd"  # by which `plan` knows the loop that hardly ever runs


class Choice(NamedTuple):
    """The experts of each token and how much each of them counts, [b s k]."""

    experts: Array
    weights: Array


class Matrices(NamedTuple):
    """Of all experts, [e d f], [e d f] and [e f d]."""

    gate: Array
    up: Array
    down: Array


def route(
    logits: Array,
    bias: Array | None,
    real: Array | None,
    *,
    top_k: int,
    scores: Scores,
    normalise: bool,
    scale: float,
    balance: float,
) -> Choice:
    """Chooses by logits [b s e] and the bias, which weighs in the choice alone (arXiv 2408.15664). `real`
    marks the tokens that are no padding. Each of them adds `balance` times its term of Switch's loss to the
    gradient: the share of choices that an expert has, times its probability here, times the number of
    experts; with all equal that is 1. The gradient of the bias is how many tokens chose each expert."""
    logits = logits.astype(jnp.float32)
    sizes = jax.nn.softmax(logits) if scores == "softmax" else jax.nn.sigmoid(logits)
    preferred = sizes if bias is None else sizes + bias
    chosen = jax.lax.top_k(jax.lax.stop_gradient(preferred), top_k)[1]
    # Compared, not looked up: the gradient of a look-up is a scatter.
    taken = chosen[..., None] == jnp.arange(logits.shape[-1])
    weights = jnp.sum(jnp.where(taken, sizes[..., None, :], 0), axis=-1)
    if normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    weights = scale * weights
    if bias is None and not balance:
        return Choice(chosen, weights)
    counted = taken.any(axis=-2) if real is None else taken.any(axis=-2) & real[..., None]
    loads = jnp.sum(counted.astype(jnp.float32), axis=(0, 1))
    extra = jnp.zeros(())
    if bias is not None:
        extra += jnp.sum(bias * loads)
    if balance:
        shares = sizes / sizes.sum(axis=-1, keepdims=True)
        shares = shares if real is None else jnp.where(real[..., None], shares, 0)
        even = logits.shape[-1] / jnp.maximum(loads.sum(), 1)
        extra += balance * even * jnp.sum(jnp.sum(shares, axis=(0, 1)) * loads)
    return Choice(chosen, beside(weights, extra))


@jax.custom_vjp
def beside(x: Array, term: Array) -> Array:
    """x. What is differentiated has `term` as one more summand, which nobody has to carry to the end."""
    return x


beside.defvjp(lambda x, term: (x, None), lambda _, d: (d, jnp.ones(())))


def even_out(rate: float, bias: Array, loads: Array) -> Array:
    """The bias [l e] after a step: those chosen more often than the mean of their layer lose, others gain."""
    return bias + rate * jnp.sign(loads.mean(axis=-1, keepdims=True) - loads)


def busiest(loads: Array) -> Array:
    """How often the busiest expert of any layer is chosen, as a multiple of the mean of that layer."""
    return jnp.max(loads.max(axis=-1) / jnp.maximum(loads.mean(axis=-1), 1e-9))


def mix(
    kind: Activation, x: Array, choice: Choice, experts: Matrices, *, gather_again: bool = False
) -> Array:
    """What the chosen experts make of x [b s d], summed by their weights. With `gather_again` the backward
    pass gathers from other devices once more, and does not keep every layer's weights whole until then."""
    mesh, names = current(), ("experts", "embed", "expert_mlp")
    if mesh is None:
        return _local(kind, Split(), x, choice, experts)
    stored = [spec([names[i] for i in order], experts[n].shape, mesh) for n, order in enumerate(ORDERS)]
    rows = spec(("batch", "sequence", None), x.shape, mesh)
    split = Split(*(_axes(stored[0][i]) for i in range(3)))
    run: Callable[..., Array] = jax.shard_map(
        partial(_local, kind, split),
        in_specs=(rows, rows, tuple(stored)),
        out_specs=rows,
        check_vma=False,  # sums over devices are written out here
    )
    if gather_again:
        run = jax.checkpoint(run, policy=lambda operation, *_, **__: operation.name != "all_gather")
    return run(x, tuple(choice), tuple(experts))


ORDERS = ((0, 1, 2), (0, 1, 2), (0, 2, 1))  # of the axes of each matrix


class Split(NamedTuple):
    """The axes of the mesh over which experts, their width and their hidden units are split."""

    experts: tuple[str, ...] = ()
    width: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()


def _local(kind: Activation, split: Split, x: Array, choice: Any, experts: Any) -> Array:
    """One device's rows, through the experts of all devices."""
    if split.width:
        pairs = zip(experts, ORDERS, strict=True)
        experts = [gathered(w, split.width, axis=order.index(1)) for w, order in pairs]
    tokens = x.reshape(-1, x.shape[-1])
    chosen, weights = (part.reshape(len(tokens), -1) for part in choice)
    if not split.experts:
        out = _rounds(kind, tokens, chosen, weights, Matrices(*experts), chosen.size)
    else:
        first = jax.lax.axis_index(split.experts) * len(experts[0])
        every, whose, much = (gathered(part, split.experts) for part in (tokens, chosen, weights))
        most = min(even_share(chosen.size), whose.size)
        out = _rounds(kind, every, whose - first, much, Matrices(*experts), most)
        out = jax.lax.psum_scatter(out, split.experts, tiled=True)
    if split.hidden:
        out = jax.lax.psum(out, split.hidden)
    return out.reshape(x.shape)


def even_share(pairs: int) -> int:
    """Room on each device for the pairs of its experts, when as many come from each as go to it."""
    return math.ceil(SLACK * pairs / 128) * 128


def gathered(x: Array, axes: tuple[str, ...], axis: int = 0) -> Array:
    return jax.lax.all_gather(x, axes, axis=axis, tiled=True)


def _rounds(kind: Activation, x: Array, chosen: Array, weights: Array, experts: Matrices, most: int) -> Array:
    """What these experts, counted from 0, make of the tokens [t d] that chose them, `most` pairs at a time,
    summed by weights; other tokens get zeros."""
    count, k = len(experts.gate), chosen.shape[1]
    flat = chosen.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < count), flat, count)  # those of other devices come last
    order = jnp.argsort(flat)
    ends = jnp.cumsum(jnp.sum(flat[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32))
    rounds = -(-len(order) // most)
    order = jnp.pad(order, (0, rounds * most - len(order)))

    def one(number: Any, places: Any, x: Array, weights: Array, experts: Matrices) -> Array:
        order, ends = places
        pairs = jax.lax.dynamic_slice_in_dim(order, number * most, most)
        within = jnp.clip(ends - number * most, 0, most)
        sizes = jnp.diff(within, prepend=0)
        # Rows beyond the last expert's are whatever the memory held.
        there = (jnp.arange(most) < within[-1])[:, None]
        h = jnp.where(there, rows_of(x, pairs // k), 0)
        gate, up = (jax.lax.ragged_dot(h, w, sizes) for w in (experts.gate, experts.up))
        y = jax.lax.ragged_dot(glu(kind, gate, up), experts.down, sizes)
        y = jnp.where(there, y, 0) * weights.reshape(-1)[pairs][:, None]
        return sum_rows(len(x), y.astype(x.dtype), pairs // k)

    if rounds == 1:
        return one(0, (order, ends), x, weights, experts)
    return _repeated(one)(-(-ends[-1] // most), (order, ends), x, weights, experts)


def _repeated(one: Callable[..., Array]) -> Callable[..., Array]:
    """The sum of `one(number, whole numbers, ...)` over so many rounds as are given first: a number that is
    not known when compiling. It has a gradient, for which each round is computed again."""

    def total(rounds: Array, one: Callable[[Any], Any]) -> Any:
        def add(number: Any, so_far: Any) -> Any:
            return jax.tree.map(jnp.add, so_far, one(number))

        first = one(0)  # not in the loop: there is nothing yet to add it to
        with jax.named_scope(FURTHER):
            return jax.lax.fori_loop(1, rounds, add, first)

    @jax.custom_vjp
    def run(rounds: Array, whole: Any, *inputs: Any) -> Array:
        return total(rounds, lambda number: one(number, whole, *inputs))

    def backward(kept: Any, d: Array) -> Any:
        rounds, whole, *inputs = kept
        return None, None, *total(rounds, lambda number: jax.vjp(partial(one, number, whole), *inputs)[1](d))

    run.defvjp(lambda *inputs: (run(*inputs), inputs), backward)
    return run


@jax.custom_vjp
def rows_of(x: Array, places: Array) -> Array:
    """x[places], whose gradient is summed in float32."""
    return x[places]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_rows(count: int, y: Array, places: Array) -> Array:
    """Rows added up, in float32, where `places` says, of so many."""
    total = jnp.zeros((count, *y.shape[1:]), jnp.float32)
    return total.at[places].add(y.astype(jnp.float32)).astype(y.dtype)


rows_of.defvjp(
    lambda x, places: (x[places], (len(x), places)), lambda kept, d: (sum_rows(kept[0], d, kept[1]), None)
)
sum_rows.defvjp(
    lambda count, y, places: (sum_rows(count, y, places), places),
    lambda count, places, d: (rows_of(d, places), None),
)


def _axes(entry: Any) -> tuple[str, ...]:
    """The axes in one place of a PartitionSpec, which holds a lone axis as a bare string."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
