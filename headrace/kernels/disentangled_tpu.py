"""Attention with relative distances (attention/_disentangled.py) in Pallas kernels for TPUs: neither scores
nor products with the vectors of distances leave the chip.

Scores by distance run along diagonals. A block of 128 rows is multiplied by the vectors of all distances that
occur in it, in their order; then row i of the product moves by i columns, and the backward pass moves it back
(tpu_rolls.py).

All keys of a row are on the chip at once, so that the backward pass reads only the inputs of the forward
pass, and computes all gradients in one kernel. On a CPU the kernels run in Pallas' interpreter, for tests."""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from headrace.kernels.tpu_lanes import (
    LANES,
    contract,
    head_columns,
    keep_columns,
    layout_unsupported_reason,
)
from headrace.kernels.tpu_rolls import reverse_rows, reverse_rows_float32, to_distances, to_positions
from headrace.nn.attention_mask import HIDDEN
from headrace.nn.compile_target import ArrayShape, compile_error, device

Array = jax.Array
Ref = jax.Ref
BlockedArray = tuple[Array, pl.BlockSpec]
BlockedShape = tuple[ArrayShape, pl.BlockSpec]
SegmentIds = tuple[Array, Array]  # of queries [b s] and of keys [b t]

# Queries of a tile: twice as many, or keys, do not fit the 16 MiB that a kernel may use.
MAX_TILE = 512
MAX_KEYS = 1024  # in a row
WITHOUT_STRIDED_ROLL = "TPU v4"  # rolls all rows of a register by the same distance
# VLIW bundles that libtpu 0.0.51 schedules per 1,024 scores, forward and backward, for rows of 512 and heads
# of 64; for rows of 1,024 they are a tenth to a fifth fewer (2026-11).
BUNDLES = {WITHOUT_STRIDED_ROLL: (50, 108), "TPU v6 lite": (15, 44), "TPU7x": (15, 40)}
OTHER_BUNDLES = (19, 52)
SINGLE_BUFFER = pl.Buffered(1)  # for blocks that all rows of the batch share, which need no prefetching


class KernelInputs(NamedTuple):
    """Arrays of a kernel, with heads side by side in the last axis.

    Distances are query position minus key position, with s queries and t keys."""

    q: Array  # [b s nh]
    k: Array  # [b t nh]
    v: Array  # [b t nh]
    query_vectors: Array  # [s+t nh], vectors that queries are multiplied by, of distances s to 1 - t
    key_vectors: Array  # [s+t nh], vectors that keys are multiplied by, of distances -t to s - 1


class DisentangledSpec(NamedTuple):
    """Settings that are fixed when a kernel is compiled."""

    head_dim: int
    tile: int  # queries
    scale: float
    has_strided_roll: bool  # the chip rolls each row of a register by a different distance
    interpret: bool


def unsupported_reason(q: ArrayShape, k: ArrayShape, has_segments: bool) -> str | None:
    """Return why the kernels cannot run on one device's queries and keys [b s n h]; None if they can."""
    if device().platform != "tpu":
        return "they are for TPUs"
    reason = shape_unsupported_reason(device().device_kind, q, k)
    if reason is not None:
        return reason
    row_q, row_k = (jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for x in (q, k))
    return _try_to_compile(row_q, row_k, has_segments)


def shape_unsupported_reason(device_kind: str, q: ArrayShape, k: ArrayShape) -> str | None:
    """Return why a kind of TPU cannot run the kernels on queries and keys [b s n h], as far as is known
    without its compiler; None if nothing prevents it."""
    if k.shape[1] > MAX_KEYS:
        return f"rows of {k.shape[1]} are longer than {MAX_KEYS}"
    return layout_unsupported_reason(device_kind, q, k)


def vliw_bundles(device_kind: str) -> tuple[int, int]:
    """The number of VLIW instruction bundles per 1,024 scores on a kind of TPU, forward and backward."""
    return BUNDLES.get(device_kind, OTHER_BUNDLES)


@lru_cache
def _try_to_compile(q: jax.ShapeDtypeStruct, k: jax.ShapeDtypeStruct, has_segments: bool) -> str | None:
    """Compile both kernels for a row. Returns the compiler's message if it fails, or None."""
    vectors = jax.ShapeDtypeStruct((q.shape[1] + k.shape[1], *q.shape[2:]), q.dtype)
    ids = [jax.ShapeDtypeStruct(x.shape[:2], jnp.int32) if has_segments else None for x in (q, k)]

    def run(
        q: Array, k: Array, v: Array, query_vectors: Array, key_vectors: Array, *ids: Array | None
    ) -> tuple[Array, tuple[Array, ...]]:
        out, pull = jax.vjp(
            lambda *inputs: attend(*inputs, *ids, scale=1.0), q, k, v, query_vectors, key_vectors
        )
        return out, pull(out)

    return compile_error("tpu", run, q, k, k, vectors, vectors, *ids)


def attend(
    q: Array,
    k: Array,
    v: Array,
    query_vectors: Array,
    key_vectors: Array,
    q_segments: Array | None,
    kv_segments: Array | None,
    *,
    scale: float,
) -> Array:
    """Compute attention of q [b s n h] over k and v [b t n h], with scores that depend on relative distances.

    A score is the product of query and key, of the query and a vector for their distance, and of the key and
    another one. Vector r of `query_vectors` [s+t n h] is for distance s - r, vector r of `key_vectors` for
    r - t, where distances are query position minus key position. Returns [b s n h]."""
    arrays = q, k, v, query_vectors, key_vectors
    inputs = KernelInputs(*(x.reshape(*x.shape[:-2], -1) for x in arrays))
    ids = None
    if q_segments is not None and kv_segments is not None:
        ids = q_segments, kv_segments

    def make_kernel(interpret: bool) -> Callable[..., Array]:
        tile = max(n for n in range(LANES, MAX_TILE + 1, LANES) if q.shape[1] % n == 0)
        # The interpreter would compile 128 rolls of a row each.
        has_strided_roll = not interpret and device().device_kind != WITHOUT_STRIDED_ROLL
        return partial(_attend, DisentangledSpec(q.shape[3], tile, scale, has_strided_roll, interpret))

    # The platform is known only when lowering: a TPU slice may be compiled for on a machine without TPUs.
    out = lax.platform_dependent(inputs, ids, tpu=make_kernel(False), default=make_kernel(True))
    return out.reshape(q.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(spec: DisentangledSpec, inputs: KernelInputs, ids: SegmentIds | None) -> Array:
    blocks = BlockLayout(spec, inputs)
    blocked = blocks.block_inputs(inputs)
    if ids is not None:
        blocked += [blocks.key_ids_row(ids[1]), blocks.query_ids_column(ids[0])]
    scratch = [pltpu.VMEM((spec.tile, blocks.keys), jnp.float32)]
    matmuls = 2 + blocks.query_distance_matmuls + blocks.key_distance_matmuls
    return blocks.run_kernel(
        "disentangled_forward",
        _forward_body,
        blocked,
        [(inputs.q, blocks.tile)],
        scratch,
        matmuls=matmuls,
        bundles=vliw_bundles(device().device_kind)[0],
    )[0]


def _forward(
    spec: DisentangledSpec, inputs: KernelInputs, ids: SegmentIds | None
) -> tuple[Array, tuple[KernelInputs, SegmentIds | None]]:
    return _attend(spec, inputs, ids), (inputs, ids)


def _backward(
    spec: DisentangledSpec, residuals: tuple[KernelInputs, SegmentIds | None], d_out: Array
) -> tuple[KernelInputs, None]:
    inputs, ids = residuals
    blocks = BlockLayout(spec, inputs)
    blocked = blocks.block_inputs(inputs)
    if ids is not None:
        blocked += [blocks.query_ids_row(ids[0]), blocks.key_ids_column(ids[1])]
    d_vectors = jax.ShapeDtypeStruct(inputs.query_vectors.shape[::-1], jnp.float32)
    transposed = pl.BlockSpec((LANES, blocks.distances), lambda n, b, i: (n, 0), pipeline_mode=SINGLE_BUFFER)
    outputs: list[BlockedShape] = [
        (inputs.q, blocks.tile),
        (inputs.k, blocks.row),
        (inputs.v, blocks.row),
        (d_vectors, transposed),
        (d_vectors, transposed),
    ]
    scratch = [pltpu.VMEM((blocks.keys, spec.tile), dtype) for dtype in (jnp.float32, d_out.dtype)]
    scratch += [pltpu.VMEM((n, LANES), jnp.float32) for n in (spec.tile, blocks.keys, blocks.keys)]
    # Of content, by distance forward and backward, and those that reverse rows.
    matmuls = 5 + 3 * (blocks.query_distance_matmuls + blocks.key_distance_matmuls) + 2
    d_q, d_k, d_v, *d_tables = blocks.run_kernel(
        "disentangled_backward",
        _backward_body,
        [*blocked, (d_out, blocks.tile)],
        outputs,
        scratch,
        matmuls=matmuls,
        bundles=vliw_bundles(device().device_kind)[1],
    )
    return KernelInputs(d_q, d_k, d_v, *(x.T.astype(d_out.dtype) for x in d_tables)), None


_attend.defvjp(_forward, _backward)


class BlockLayout:
    """The blocks of its arrays that a kernel has on the chip.

    It loops over heads, rows of the batch and tiles of queries, nested in this order, so that what belongs to
    heads stays on the chip meanwhile."""

    def __init__(self, spec: DisentangledSpec, inputs: KernelInputs) -> None:
        """Lay out blocks for inputs of these shapes."""
        self.spec, (self.batch, self.length, self.width) = spec, inputs.q.shape
        self.keys, self.distances = inputs.k.shape[1], len(inputs.query_vectors)
        self.tile = pl.BlockSpec((None, spec.tile, LANES), lambda n, b, i: (b, i, n))
        self.row = pl.BlockSpec((None, self.keys, LANES), lambda n, b, i: (b, 0, n))
        self.vectors = pl.BlockSpec(
            (self.distances, LANES), lambda n, b, i: (0, n), pipeline_mode=SINGLE_BUFFER
        )
        # Matmuls by distance, per matmul of queries and keys.
        self.query_distance_matmuls = (self.keys + LANES) / self.keys
        self.key_distance_matmuls = (spec.tile + LANES) / spec.tile

    def block_inputs(self, inputs: KernelInputs) -> list[BlockedArray]:
        """Pair each input with its blocks."""
        return list(zip(inputs, (self.tile, self.row, self.row, self.vectors, self.vectors), strict=True))

    def query_ids_row(self, ids: Array) -> BlockedArray:
        """Segment ids of a tile's queries [b s], as rows [1 s]."""
        return ids[:, None], pl.BlockSpec((None, 1, self.spec.tile), lambda n, b, i: (b, 0, i))

    def key_ids_row(self, ids: Array) -> BlockedArray:
        """Segment ids of all keys [b t], as rows [1 t]."""
        return ids[:, None], pl.BlockSpec((None, 1, self.keys), lambda n, b, i: (b, 0, 0))

    def query_ids_column(self, ids: Array) -> BlockedArray:
        """Segment ids of a tile's queries [b s], as columns [s 1]."""
        return ids[..., None], pl.BlockSpec((None, self.spec.tile, 1), lambda n, b, i: (b, i, 0))

    def key_ids_column(self, ids: Array) -> BlockedArray:
        """Segment ids of all keys [b t], as columns [t 1]."""
        return ids[..., None], pl.BlockSpec((None, self.keys, 1), lambda n, b, i: (b, 0, 0))

    def run_kernel(
        self,
        name: str,
        body: Callable[..., None],
        inputs: list[BlockedArray],
        outputs: list[BlockedShape],
        scratch: list[pl.MemoryRef],
        *,
        matmuls: float,
        bundles: int,
    ) -> list[Array]:
        """Run a kernel over all blocks. Its cost is estimated from the number of matmuls over all scores, and
        of VLIW bundles per 1,024 scores."""
        spec = self.spec
        scores = self.batch * self.width // spec.head_dim * self.length * self.keys
        grid = self.width // LANES, self.batch, self.length // spec.tile
        cost = pl.CostEstimate(
            flops=int(2 * scores * LANES * matmuls),
            transcendentals=scores,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x, _ in (*inputs, *outputs)),
        )
        # For headrace/plan/instruction_cost.py
        metadata = {"tiles": math.prod(grid), "bundles": scores * bundles // 1024}
        return pl.pallas_call(
            partial(body, spec),
            [jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in outputs],
            grid=grid,
            in_specs=[block_spec for _, block_spec in inputs],
            out_specs=[block_spec for _, block_spec in outputs],
            scratch_shapes=scratch,
            # Cores may share heads; the other axes add up, one step after the other.
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
            cost_estimate=cost,
            metadata={key: str(number) for key, number in metadata.items()},
            interpret=spec.interpret,
            name=name,
        )(*(x for x, _ in inputs))


def _forward_body(
    spec: DisentangledSpec, q: Ref, k: Ref, v: Ref, query_vectors: Ref, key_vectors: Ref, *refs: Ref
) -> None:
    *ids, out, key_scores = refs
    keys = k.shape[0]
    for n, columns in enumerate(head_columns(spec.head_dim)):
        for start in range(0, keys, LANES):
            block = slice(start, start + LANES)
            head_k = keep_columns(columns, k[block])
            vectors = key_vectors[_key_slice(spec, start, keys)]
            key_scores[:, block] = _distance_scores(spec, head_k, vectors).T
        for start in range(0, spec.tile, LANES):
            block = slice(start, start + LANES)
            head_q = keep_columns(columns, q[block])
            scores = key_scores[block] + contract(head_q, k[...], 1, 1)
            scores = scores + _distance_scores(spec, head_q, query_vectors[_query_slice(spec, start, keys)])
            if ids:
                scores = jnp.where(ids[0][...] == ids[1][block], scores, HIDDEN)
            weights = _softmax(spec, scores, 1)
            head_out = keep_columns(columns, contract(weights.astype(v.dtype), v[...], 1, 0))
            head_out = head_out.astype(out.dtype)
            out[block] = head_out if n == 0 else out[block] + head_out


def _backward_body(
    spec: DisentangledSpec, q: Ref, k: Ref, v: Ref, query_vectors: Ref, key_vectors: Ref, *refs: Ref
) -> None:
    """Compute all gradients. Scores are [t s] here, with queries along the lanes."""
    *ids, d_out, d_q, d_k, d_v, d_query_vectors, d_key_vectors = refs[:-5]
    key_scores, d_scores, q_sum, k_sum, v_sum = refs[-5:]
    keys, dtype = k.shape[0], q.dtype
    tile = pl.program_id(2)

    @pl.when((pl.program_id(1) == 0) & (tile == 0))
    def clear_vectors() -> None:
        for total in (d_query_vectors, d_key_vectors):
            total[...] = jnp.zeros(total.shape, total.dtype)

    @pl.when(tile == 0)
    def clear_row() -> None:
        for total in (k_sum, v_sum):
            total[...] = jnp.zeros(total.shape, total.dtype)

    q_sum[...] = jnp.zeros(q_sum.shape, q_sum.dtype)
    for columns in head_columns(spec.head_dim):
        for start in range(0, keys, LANES):
            block = slice(start, start + LANES)
            head_k = keep_columns(columns, k[block])
            key_scores[block] = _distance_scores(spec, head_k, key_vectors[_key_slice(spec, start, keys)])
        for start in range(0, spec.tile, LANES):
            block = slice(start, start + LANES)
            head_q, d_head = keep_columns(columns, q[block]), keep_columns(columns, d_out[block])
            scores = key_scores[:, block] + contract(k[...], head_q, 1, 1)
            scores += _distance_scores(spec, head_q, query_vectors[_query_slice(spec, start, keys)]).T
            if ids:
                scores = jnp.where(ids[0][:, block] == ids[1][...], scores, HIDDEN)
            weights = _softmax(spec, scores, 0)
            v_sum[...] += contract(weights.astype(dtype), d_head, 1, 0)
            d_weights = contract(v[...], d_head, 1, 1)
            mean = (weights * d_weights).sum(0, keepdims=True)
            d_block = (weights * (d_weights - mean) * spec.scale).astype(dtype)
            d_scores[:, block] = d_block
            k_sum[...] += contract(d_block, head_q, 1, 0)
            rows = d_block.T
            by_distance = to_distances(rows, spec.has_strided_roll)
            vectors = _query_slice(spec, start, keys)
            d_by_distance = _multiply_vectors(by_distance, query_vectors[vectors])
            q_sum[block] += keep_columns(columns, contract(rows, k[...], 1, 0) + d_by_distance)
            d_query_vectors[:, vectors] += contract(reverse_rows(head_q).T, by_distance, 1, 0)
        for start in range(0, keys, LANES):
            block = slice(start, start + LANES)
            by_distance = to_distances(d_scores[block], spec.has_strided_roll)
            vectors = _key_slice(spec, start, keys)
            k_sum[block] += keep_columns(columns, _multiply_vectors(by_distance, key_vectors[vectors]))
            d_key_vectors[:, vectors] += contract(
                reverse_rows(keep_columns(columns, k[block])).T, by_distance, 1, 0
            )
    d_q[...] = q_sum[...].astype(dtype)

    @pl.when(tile == pl.num_programs(2) - 1)
    def write_row() -> None:
        d_k[...] = k_sum[...].astype(dtype)
        d_v[...] = v_sum[...].astype(dtype)


def _softmax(spec: DisentangledSpec, scores: Array, axis: int) -> Array:
    weights = jnp.exp((scores - scores.max(axis, keepdims=True)) * spec.scale)
    return weights / weights.sum(axis, keepdims=True)


def _distance_scores(spec: DisentangledSpec, rows: Array, vectors: Array) -> Array:
    """Multiply 128 queries or keys by the vectors of all distances that occur. Returns scores [128 l], by the
    positions of keys or queries."""
    return to_positions(contract(rows, vectors, 1, 1), spec.has_strided_roll)


def _multiply_vectors(by_distance: Array, vectors: Array) -> Array:
    """Multiply what `to_distances` returns by the vectors of these distances, with the rows in their
    original order."""
    return reverse_rows_float32(contract(by_distance, vectors, 1, 0))


def _query_slice(spec: DisentangledSpec, start: int, keys: int) -> slice | pl.Slice:
    """The part of `query_vectors` that 128 queries need, from number `start` of the tile on."""
    first = (pl.num_programs(2) - 1 - pl.program_id(2)) * spec.tile
    return pl.ds(pl.multiple_of(first + (spec.tile - LANES - start), LANES), keys + LANES)


def _key_slice(spec: DisentangledSpec, start: int, keys: int) -> slice | pl.Slice:
    """The part of `key_vectors` that 128 keys need, from number `start` on."""
    first = pl.program_id(2) * spec.tile + (keys - LANES - start)
    return pl.ds(pl.multiple_of(first, LANES), spec.tile + LANES)
