"""What a window lets see (attention/band.py) in kernels for TPUs (Pallas' Mosaic): each 128 queries at once
with all keys that they may see, and nothing else is visited.

A query's softmax is made in one go. The backward pass takes nothing of the forward pass but its inputs, not
even the logarithms of sums, and makes all gradients in one kernel. Arrays are [b n h s], positions side by
side in a register: heads of 64 would fill half of one, and products that sum over positions or give them need
no turning round. On a CPU the kernels run in Pallas' interpreter, which is for tests."""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from headrace.kernels.tpu_lanes import LANES, dot
from headrace.nn.attention_mask import HIDDEN
from headrace.nn.compile_target import OLD_TPUS, compile_error, device

Array = jax.Array

TILE = 1024  # queries of a step of the grid at most
ROOM = 64 * 8192  # numbers of a head's row at most: it is on the chip, with its gradients in float32
ROWS = 16  # of a register in 16 bits
# Bundles of instructions that libtpu 0.0.51 schedules for each 1,024 scores, forward and backward, with 384
# keys for 128 queries and heads of 64 (2026-11).
SCHEDULED = {"TPU v4": (13, 22), "TPU v6 lite": (7, 13), "TPU7x": (7, 13), "": (11, 19)}


class Shape(NamedTuple):
    """What is known when compiling."""

    before: int  # keys that a query sees before itself
    after: int
    scale: float
    interpret: bool


def keys(length: int, before: int, after: int) -> int:
    """Those that 128 queries meet, in whole blocks."""
    return min(length, LANES + sum(-(-reach // LANES) * LANES for reach in (before, after)))


def vliw_bundles(kind: str) -> tuple[int, int]:
    """Of instructions for each 1,024 scores on a kind of TPU, forward and backward."""
    return SCHEDULED.get(kind, SCHEDULED[""])


def unsupported_reason(q: Any, k: Any, reach: tuple[int, int], segments: bool) -> str | None:
    """Why the kernels cannot be used for one device's queries and keys [b s n h], if they cannot."""
    one = (jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for x in (q, k))
    return known_against(device().device_kind, q) or _try(*one, reach, segments)


def known_against(kind: str, q: Any) -> str | None:
    """What keeps a kind of TPU from them, as far as it is known without its compiler."""
    length, _, width = q.shape[1:]
    if kind in OLD_TPUS:
        return f"{kind} has no products of bfloat16 in kernels"
    if q.dtype != jnp.bfloat16:
        return f"its kernels are for bfloat16, and the activations are {q.dtype}"
    if width % ROWS or width > LANES:
        return f"heads of {width} are not a multiple of {ROWS}, up to {LANES}"
    if length % LANES:
        return f"{length} positions are not a multiple of {LANES}"
    most = min(ROOM // width, ROOM // 64)
    return f"rows of {length} with heads of {width} are longer than {most}" if length > most else None


@lru_cache
def _try(q: Any, k: Any, reach: tuple[int, int], segments: bool) -> str | None:
    ids = jax.ShapeDtypeStruct(q.shape[:2], jnp.int32) if segments else None

    def both(q: Array, k: Array, v: Array, ids: Array | None) -> Any:
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, ids, reach=reach, scale=1.0), q, k, v)
        return out, pull(out)

    return compile_error("tpu", both, q, k, k, ids)


def attend(
    q: Array, k: Array, v: Array, segments: Array | None, *, reach: tuple[int, int], scale: float
) -> Array:
    """The values [b s n h] that queries get."""

    def run(interpret: bool) -> Callable[..., Array]:
        return partial(_mix, Shape(*reach, scale, interpret))

    turned = [x.transpose(0, 2, 3, 1) for x in (q, k, v)]
    # Decided when lowering: a TPU slice may be compiled for on a machine that has none.
    out = lax.platform_dependent(*turned, segments, tpu=run(False), default=run(True))
    return out.transpose(0, 3, 1, 2)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(shape: Shape, q: Array, k: Array, v: Array, segments: Array | None) -> Array:
    return _call("band_forward", shape, q, k, v, segments, None)[0]


def _forward(shape: Shape, q: Array, k: Array, v: Array, segments: Array | None) -> tuple[Array, Any]:
    return _mix(shape, q, k, v, segments), (q, k, v, segments)


def _backward(shape: Shape, kept: Any, d: Array) -> Any:
    q, k, v, segments = kept
    d_q, d_k, d_v = _call("band_backward", shape, q, k, v, segments, d)
    return d_q, d_k.astype(d.dtype), d_v.astype(d.dtype), None


_mix.defvjp(_forward, _backward)


def _call(
    name: str, shape: Shape, q: Array, k: Array, v: Array, segments: Array | None, d: Array | None
) -> list[Array]:
    """One of the kernels over rows of the batch, heads of keys, the heads of queries that share each, and
    tiles of queries, in this order."""
    (batch, heads, width, length), shared = q.shape, q.shape[1] // k.shape[1]
    tile = max(n for n in range(LANES, TILE + 1, LANES) if length % n == 0)
    grid = batch, k.shape[1], shared, length // tile
    some = pl.BlockSpec((None, None, width, tile), lambda b, m, g, i: (b, m * shared + g, 0, i))
    row = pl.BlockSpec((None, None, width, length), lambda b, m, g, i: (b, m, 0, 0))
    inputs = [(q, some), (k, row), (v, row)]
    if segments is not None:
        inputs += [
            (segments[..., None], pl.BlockSpec((None, tile, 1), lambda b, m, g, i: (b, i, 0))),
            (segments[:, None], pl.BlockSpec((None, 1, length), lambda b, m, g, i: (b, 0, 0))),
        ]
    outputs: list[Any] = [(q, some)]
    if d is not None:
        # Sums over tiles, and over the heads that share keys.
        wide = jax.ShapeDtypeStruct(k.shape, jnp.float32)
        inputs, outputs = [*inputs, (d, some)], [*outputs, (wide, row), (wide, row)]
    scores = batch * heads * length * keys(length, shape.before, shape.after)
    over = 2 * scores * LANES  # the matrix unit sums over 128 where a head is summed over
    cost = pl.CostEstimate(
        flops=over + 2 * scores * width if d is None else 2 * over + 6 * scores * width,
        transcendentals=scores,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x, _ in (*inputs, *outputs)),
    )
    each = vliw_bundles(device().device_kind)[d is not None]
    # For headrace/plan/instruction_cost.py
    notes = {"tiles": math.prod(grid), "bundles": scores * each // 1024}
    return pl.pallas_call(
        partial(_forward_body if d is None else _backward_body, shape),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in outputs],
        grid=grid,
        in_specs=[spec for _, spec in inputs],
        out_specs=[spec for _, spec in outputs],
        # Cores may share rows and heads of keys; the rest adds up, one after the other.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")
        ),
        cost_estimate=cost,
        metadata={key: str(number) for key, number in notes.items()},
        interpret=shape.interpret,
        name=name,
    )(*(x for x, _ in inputs))


def _forward_body(shape: Shape, q: Any, k: Any, v: Any, *refs: Any) -> None:
    *ids, out = refs
    for here, near, seen in _blocks(shape, q, k, ids):
        weights = _weights(shape, q[:, here], k[:, near], seen)
        out[:, here] = dot(v[:, near], weights.astype(v.dtype), 1, 1).astype(out.dtype)


def _backward_body(shape: Shape, q: Any, k: Any, v: Any, *refs: Any) -> None:
    *ids, d, d_q, d_k, d_v = refs

    @pl.when((pl.program_id(2) == 0) & (pl.program_id(3) == 0))
    def begin_row() -> None:
        for total in (d_k, d_v):
            total[...] = jnp.zeros(total.shape, total.dtype)

    for here, near, seen in _blocks(shape, q, k, ids):
        weights = _weights(shape, q[:, here], k[:, near], seen)
        d_v[:, near] += dot(d[:, here], weights.astype(d.dtype), 1, 0)
        d_weights = dot(d[:, here].T, v[:, near], 1, 0)
        shared = (weights * d_weights).sum(1, keepdims=True)
        d_scores = (weights * (d_weights - shared) * shape.scale).astype(d.dtype)
        d_k[:, near] += dot(q[:, here], d_scores, 1, 0)
        d_q[:, here] = dot(k[:, near], d_scores, 1, 1).astype(d_q.dtype)


def _blocks(shape: Shape, q: Any, k: Any, ids: list[Any]) -> list[tuple[Any, Any, Array]]:
    """Where each 128 queries of the tile are, where the keys that they may see, and which of them they do."""
    tile, length = q.shape[1], k.shape[1]
    many, before = keys(length, shape.before, shape.after), -(-shape.before // LANES) * LANES
    row, column = (lax.broadcasted_iota(jnp.int32, (LANES, many), axis) for axis in (0, 1))
    found = []
    for a in range(0, tile, LANES):
        here, place = slice(a, a + LANES), pl.program_id(3) * tile + a
        first = pl.multiple_of(jnp.clip(place - before, 0, length - many), LANES)
        near, distance = pl.ds(first, many), row - column
        seen = (distance <= shape.before - (place - first)) & (distance >= -shape.after - (place - first))
        if ids:
            seen &= ids[0][here] == ids[1][:, near]
        found.append((here, near, seen))
    return found


def _weights(shape: Shape, q: Array, k: Array, seen: Array) -> Array:
    scores = jnp.where(seen, dot(q.T, k, 1, 0), HIDDEN)
    weights = jnp.exp((scores - scores.max(1, keepdims=True)) * shape.scale)
    return weights / weights.sum(1, keepdims=True)
