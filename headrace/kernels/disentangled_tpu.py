"""Attention with distances (attention/_disentangled.py) in kernels for TPUs (Pallas' Mosaic): neither scores
nor products with the vectors of distances leave the chip.

Scores by distance run along diagonals. A block of 128 rows is multiplied by the vectors of all distances that
it meets, in their order; then row i of the product has to move by i, which is one instruction of a TPU (a
roll with a stride). The way back moves the other way, for which there is none: there the rows are turned
upside down first, by a product with a matrix of zeros and ones, and row i has to move by 128 - i again.

All keys of a row are on the chip at once, so that the backward pass takes nothing of the forward pass but its
inputs, and makes all gradients in one kernel. On a CPU the kernels run in Pallas' interpreter, which is for
tests."""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from headrace.kernels.tpu_lanes import LANES, dot, heads_of, only, unfit
from headrace.nn.attention_mask import HIDDEN
from headrace.nn.compile_target import compile_error, device

Array = jax.Array

# Queries of a tile at most: twice as many, or keys, do not fit the 16 MiB that a kernel may have.
QUERIES = 512
LONGEST = 1024  # row of keys
STRIDELESS = "TPU v4"  # which moves all rows of a register alike
# What libtpu 0.0.51 schedules for rows of 512 and heads of 64; for rows of 1,024 it is a tenth to a fifth
# less (2026-11).
SCHEDULED = {STRIDELESS: (50, 108), "TPU v6 lite": (15, 44), "TPU7x": (15, 40), "": (19, 52)}
ONCE = pl.Buffered(1)  # what stays for all rows of the batch is not fetched ahead


class KernelInputs(NamedTuple):
    """Arrays of a kernel, heads side by side in the last axis: queries [b s nh], keys and values [b t nh],
    the vectors of distances from s to 1 - t [s+t nh] for queries, and from -t to s - 1 for keys."""

    q: Array
    k: Array
    v: Array
    for_queries: Array
    for_keys: Array


class Shape(NamedTuple):
    """What is known when compiling."""

    head: int  # its width
    queries: int  # of a tile
    scale: float
    strided: bool  # the chip moves each row of a register by another distance
    interpret: bool


def unsupported_reason(q: Any, k: Any, segments: bool) -> str | None:
    """Why the kernels cannot be used for one device's queries and keys [b s n h], if they cannot."""
    if device().platform != "tpu":
        return "they are for TPUs"
    one = (jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for x in (q, k))
    return known_against(device().device_kind, q, k) or _try(*one, segments)


def known_against(kind: str, q: Any, k: Any) -> str | None:
    """What keeps a kind of TPU from them, as far as it is known without its compiler."""
    if k.shape[1] > LONGEST:
        return f"rows of {k.shape[1]} are longer than {LONGEST}"
    return unfit(kind, q, k)


def vliw_bundles(kind: str) -> tuple[int, int]:
    """Of instructions for each 1,024 scores on a kind of TPU, forward and backward."""
    return SCHEDULED.get(kind, SCHEDULED[""])


@lru_cache
def _try(q: Any, k: Any, segments: bool) -> str | None:
    table = jax.ShapeDtypeStruct((q.shape[1] + k.shape[1], *q.shape[2:]), q.dtype)
    ids = [jax.ShapeDtypeStruct(x.shape[:2], jnp.int32) if segments else None for x in (q, k)]

    def both(q: Array, k: Array, v: Array, for_queries: Array, for_keys: Array, *ids: Array | None) -> Any:
        mixed = lambda *given: attend(1.0, *given, *ids)
        out, pull = jax.vjp(mixed, q, k, v, for_queries, for_keys)
        return out, pull(out)

    return compile_error("tpu", both, q, k, k, table, table, *ids)


def attend(
    scale: float,
    q: Array,
    k: Array,
    v: Array,
    for_queries: Array,
    for_keys: Array,
    q_segments: Array | None,
    kv_segments: Array | None,
) -> Array:
    """The values [b s n h] that queries get of v [b t n h]. The vectors of distances [s+t n h]: number r of
    `for_queries` is of s - r, number r of `for_keys` of r - t, both counted from the first query and key."""
    flat = KernelInputs(*(x.reshape(*x.shape[:-2], -1) for x in (q, k, v, for_queries, for_keys)))
    ids = None
    if q_segments is not None and kv_segments is not None:
        ids = q_segments, kv_segments

    def run(interpret: bool) -> Callable[..., Array]:
        size = max(n for n in range(LANES, QUERIES + 1, LANES) if q.shape[1] % n == 0)
        # The interpreter would compile 128 moves of a row for each.
        strided = not interpret and device().device_kind != STRIDELESS
        shape = Shape(q.shape[3], size, scale, strided, interpret)
        return partial(_mix, shape)

    # Decided when lowering: a TPU slice may be compiled for on a machine that has none.
    return lax.platform_dependent(flat, ids, tpu=run(False), default=run(True)).reshape(q.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(shape: Shape, given: KernelInputs, ids: Any) -> Array:
    at = Places(shape, given)
    inputs = at.inputs(given)
    if ids is not None:
        inputs += [at.across(ids[1], all_of_it=True), at.down(ids[0], all_of_it=False)]
    scratch = [pltpu.VMEM((shape.queries, at.keys), jnp.float32)]
    products = 2 + at.by_query + at.by_key
    call = partial(at.call, "disentangled_forward", _forward_body, 0, products)
    return call(inputs, [(given.q, at.tile)], scratch)[0]


def _forward(shape: Shape, given: KernelInputs, ids: Any) -> tuple[Array, Any]:
    return _mix(shape, given, ids), (given, ids)


def _backward(shape: Shape, kept: Any, d: Array) -> Any:
    given, ids = kept
    at = Places(shape, given)
    inputs = at.inputs(given)
    if ids is not None:
        inputs += [at.across(ids[0], all_of_it=False), at.down(ids[1], all_of_it=True)]
    table = jax.ShapeDtypeStruct(given.for_queries.shape[::-1], jnp.float32)
    turned = pl.BlockSpec((LANES, at.distances), lambda n, b, i: (n, 0), pipeline_mode=ONCE)
    outputs = [(given.q, at.tile), (given.k, at.row), (given.v, at.row), (table, turned), (table, turned)]
    scratch = [pltpu.VMEM((at.keys, shape.queries), dtype) for dtype in (jnp.float32, d.dtype)]
    scratch += [pltpu.VMEM((n, LANES), jnp.float32) for n in (shape.queries, at.keys, at.keys)]
    # Of content, to and fro by distance, and those that turn rows upside down.
    products = 5 + 3 * (at.by_query + at.by_key) + 2
    call = partial(at.call, "disentangled_backward", _backward_body, 1, products)
    d_q, d_k, d_v, *tables = call([*inputs, (d, at.tile)], outputs, scratch)
    return KernelInputs(d_q, d_k, d_v, *(x.T.astype(d.dtype) for x in tables)), None


_mix.defvjp(_forward, _backward)


class Places:
    """Which parts of its arrays a kernel has on the chip. It goes over heads, rows of the batch and tiles of
    queries, in this order, so that what belongs to heads stays there meanwhile."""

    def __init__(self, shape: Shape, given: KernelInputs) -> None:
        self.shape, (self.batch, self.length, self.width) = shape, given.q.shape
        self.keys, self.distances = given.k.shape[1], len(given.for_queries)
        self.tile = pl.BlockSpec((None, shape.queries, LANES), lambda n, b, i: (b, i, n))
        self.row = pl.BlockSpec((None, self.keys, LANES), lambda n, b, i: (b, 0, n))
        self.table = pl.BlockSpec((self.distances, LANES), lambda n, b, i: (0, n), pipeline_mode=ONCE)
        # Products by distance, for each one of content.
        self.by_query = (self.keys + LANES) / self.keys
        self.by_key = (shape.queries + LANES) / shape.queries

    def inputs(self, given: KernelInputs) -> list[tuple[Array, Any]]:
        return list(zip(given, (self.tile, self.row, self.row, self.table, self.table), strict=True))

    def across(self, ids: Array, *, all_of_it: bool) -> tuple[Array, Any]:
        """The documents of a row, or of a tile of it, side by side."""
        size = self.keys if all_of_it else self.shape.queries
        return ids[:, None], pl.BlockSpec((None, 1, size), lambda n, b, i: (b, 0, 0 if all_of_it else i))

    def down(self, ids: Array, *, all_of_it: bool) -> tuple[Array, Any]:
        size = self.keys if all_of_it else self.shape.queries
        return ids[..., None], pl.BlockSpec((None, size, 1), lambda n, b, i: (b, 0 if all_of_it else i, 0))

    def call(
        self,
        name: str,
        body: Any,
        way: int,
        products: float,
        inputs: list[tuple[Array, Any]],
        outputs: list[tuple[Any, Any]],
        scratch: list[Any],
    ) -> list[Array]:
        shape, scores = self.shape, self.batch * self.width // self.shape.head * self.length * self.keys
        grid = self.width // LANES, self.batch, self.length // shape.queries
        cost = pl.CostEstimate(
            flops=int(2 * scores * LANES * products),
            transcendentals=scores,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x, _ in (*inputs, *outputs)),
        )
        each = vliw_bundles(device().device_kind)[way]
        # For headrace/plan/instruction_cost.py
        notes = {"tiles": math.prod(grid), "bundles": scores * each // 1024}
        return pl.pallas_call(
            partial(body, shape),
            [jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in outputs],
            grid=grid,
            in_specs=[spec for _, spec in inputs],
            out_specs=[spec for _, spec in outputs],
            scratch_shapes=scratch,
            # Heads may be shared out to cores; the rest adds up, one after the other.
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
            cost_estimate=cost,
            metadata={key: str(number) for key, number in notes.items()},
            interpret=shape.interpret,
            name=name,
        )(*(x for x, _ in inputs))


def _forward_body(shape: Shape, q: Any, k: Any, v: Any, for_queries: Any, for_keys: Any, *refs: Any) -> None:
    *ids, out, by_key = refs
    keys = k.shape[0]
    for n, mine in enumerate(heads_of(shape.head)):
        for c in range(0, keys, LANES):
            by_key[:, c : c + LANES] = _by_key(shape, only(mine, k[c : c + LANES]), c, keys, for_keys).T
        for a in range(0, shape.queries, LANES):
            here = slice(a, a + LANES)
            own = only(mine, q[here])
            scores = by_key[here] + dot(own, k[...], 1, 1) + _by_query(shape, own, a, keys, for_queries)
            if ids:
                scores = jnp.where(ids[0][...] == ids[1][here], scores, HIDDEN)
            weights = _softmax(shape, scores, 1)
            mixed = only(mine, dot(weights.astype(v.dtype), v[...], 1, 0)).astype(out.dtype)
            out[here] = mixed if n == 0 else out[here] + mixed


def _backward_body(shape: Shape, q: Any, k: Any, v: Any, for_queries: Any, for_keys: Any, *refs: Any) -> None:
    """Scores are [t s] here, queries side by side."""
    *ids, d, d_q, d_k, d_v, d_for_queries, d_for_keys, by_key, d_scores, q_sum, k_sum, v_sum = refs
    keys, dtype = k.shape[0], q.dtype
    tile = pl.program_id(2)

    @pl.when((pl.program_id(1) == 0) & (tile == 0))
    def begin_head() -> None:
        for table in (d_for_queries, d_for_keys):
            table[...] = jnp.zeros(table.shape, table.dtype)

    @pl.when(tile == 0)
    def begin_row() -> None:
        for total in (k_sum, v_sum):
            total[...] = jnp.zeros(total.shape, total.dtype)

    q_sum[...] = jnp.zeros(q_sum.shape, q_sum.dtype)
    for mine in heads_of(shape.head):
        for c in range(0, keys, LANES):
            by_key[c : c + LANES] = _by_key(shape, only(mine, k[c : c + LANES]), c, keys, for_keys)
        for a in range(0, shape.queries, LANES):
            here = slice(a, a + LANES)
            own, d_own = only(mine, q[here]), only(mine, d[here])
            scores = by_key[:, here] + dot(k[...], own, 1, 1)
            scores += _by_query(shape, own, a, keys, for_queries).T
            if ids:
                scores = jnp.where(ids[0][:, here] == ids[1][...], scores, HIDDEN)
            weights = _softmax(shape, scores, 0)
            v_sum[...] += dot(weights.astype(dtype), d_own, 1, 0)
            d_weights = dot(v[...], d_own, 1, 1)
            shared = (weights * d_weights).sum(0, keepdims=True)
            d_own_scores = (weights * (d_weights - shared) * shape.scale).astype(dtype)
            d_scores[:, here] = d_own_scores
            k_sum[...] += dot(d_own_scores, own, 1, 0)
            rows = d_own_scores.T
            moved, near = _moved_back(shape, rows), _near_queries(shape, a, keys)
            by_distance = _turned(dot(moved, for_queries[near], 1, 0))
            q_sum[here] += only(mine, dot(rows, k[...], 1, 0) + by_distance)
            d_for_queries[:, near] += dot(_turned_rows(own).T, moved, 1, 0)
        for c in range(0, keys, LANES):
            here = slice(c, c + LANES)
            moved, near = _moved_back(shape, d_scores[here]), _near_keys(shape, c, keys)
            k_sum[here] += only(mine, _turned(dot(moved, for_keys[near], 1, 0)))
            d_for_keys[:, near] += dot(_turned_rows(only(mine, k[here])).T, moved, 1, 0)
    d_q[...] = q_sum[...].astype(dtype)

    @pl.when(tile == pl.num_programs(2) - 1)
    def end_row() -> None:
        d_k[...] = k_sum[...].astype(dtype)
        d_v[...] = v_sum[...].astype(dtype)


def _softmax(shape: Shape, scores: Array, axis: int) -> Array:
    weights = jnp.exp((scores - scores.max(axis, keepdims=True)) * shape.scale)
    return weights / weights.sum(axis, keepdims=True)


def _by_query(shape: Shape, rows: Array, a: int, keys: int, for_queries: Any) -> Array:
    """Queries from number a of the tile on with the vectors of their distances to all keys: [128 t]."""
    return _moved(shape, dot(rows, for_queries[_near_queries(shape, a, keys)], 1, 1))


def _by_key(shape: Shape, rows: Array, c: int, keys: int, for_keys: Any) -> Array:
    """Keys from number c on with the vectors of their distances to the queries of the tile: [128 s]."""
    return _moved(shape, dot(rows, for_keys[_near_keys(shape, c, keys)], 1, 1))


def _near_queries(shape: Shape, a: int, keys: int) -> Any:
    """Where the distances of 128 queries to all keys lie among the vectors of `for_queries`."""
    last = (pl.num_programs(2) - 1 - pl.program_id(2)) * shape.queries
    return pl.ds(pl.multiple_of(last + (shape.queries - LANES - a), LANES), keys + LANES)


def _near_keys(shape: Shape, c: int, keys: int) -> Any:
    return pl.ds(
        pl.multiple_of(pl.program_id(2) * shape.queries + (keys - LANES - c), LANES), shape.queries + LANES
    )


def _moved(shape: Shape, x: Array) -> Array:
    """Of [128 l+128] the part [128 l] that begins in row i at 128 - i."""
    length = x.shape[1] - LANES
    return _rolled(shape, x, length)[:, :length]


def _moved_back(shape: Shape, x: Array) -> Array:
    """[128 l] as the part of zeros [128 l+128] that begins in row i at 128 - i; its rows upside down."""
    wide = jnp.concatenate([_turned_rows(x).astype(jnp.float32), jnp.zeros((LANES, LANES), jnp.float32)], 1)
    return _rolled(shape, wide, 1).astype(x.dtype)


def _rolled(shape: Shape, x: Array, first: int) -> Array:
    """Row i [128 l] by `first` + i to the right, and what leaves it there in again on the left."""
    if shape.strided:
        return pltpu.roll(x, first, 1, stride=1, stride_axis=0)
    # Rows of a register by 0 to 7, bit by bit, and registers by multiples of 8.
    row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    for bit in (1, 2, 4):
        x = jnp.where((row & bit) > 0, pltpu.roll(x, bit, 1), x)
    shifts = [(first + start) % x.shape[1] for start in range(0, LANES, 8)]
    return jnp.concatenate([pltpu.roll(x[8 * n : 8 * n + 8], far, 1) for n, far in enumerate(shifts)])


def _turned_rows(x: Array) -> Array:
    """Upside down: exact, since every sum has one number."""
    row, column = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
    return dot((row + column == LANES - 1).astype(x.dtype), x, 1, 0).astype(x.dtype)


def _turned(x: Array) -> Array:
    """The same of float32, by its upper and lower 16 bits."""
    high = x.astype(jnp.bfloat16)
    low = (x - high.astype(jnp.float32)).astype(jnp.bfloat16)
    return _turned_rows(high).astype(jnp.float32) + _turned_rows(low).astype(jnp.float32)
