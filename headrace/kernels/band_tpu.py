"""Attention within a window (attention/band.py) in Pallas kernels for TPUs: 128 queries at a time, with all
keys that they may see. No other scores are computed.

The softmax of a query is computed at once. The backward pass reads only the inputs of the forward pass, not
even the logarithms of its sums, and computes all gradients in one kernel. Arrays are [b n h s], with
positions along the lanes of a register: heads of 64 would fill half of one, and matmuls over positions need
no transposition. On a CPU the kernels run in Pallas' interpreter, for tests."""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from headrace.kernels.tpu_lanes import LANES, contract
from headrace.nn.attention_mask import HIDDEN
from headrace.nn.compile_target import OLD_TPUS, ArrayShape, compile_error, device

Array = jax.Array
Ref = jax.Ref

MAX_TILE = 1024  # queries of a step of the grid
# Numbers in the row of a head: it is on the chip, with its gradients in float32.
MAX_ROW_NUMBERS = 64 * 8192
SUBLANES = 16  # rows of a register in 16 bits
# VLIW bundles that libtpu 0.0.51 schedules per 1,024 scores, forward and backward, with 384 keys for 128
# queries and heads of 64 (2026-11).
BUNDLES = {"TPU v4": (13, 22), "TPU v6 lite": (7, 13), "TPU7x": (7, 13)}
OTHER_BUNDLES = (11, 19)


class BandSpec(NamedTuple):
    """Settings that are fixed when a kernel is compiled."""

    before: int  # number of keys that a query sees before its own position
    after: int
    scale: float
    interpret: bool


def keys_per_block(length: int, before: int, after: int) -> int:
    """The number of keys that 128 queries are multiplied by, if each sees this many before and after its own
    position: whole blocks of 128, up to `length`."""
    return min(length, LANES + sum(-(-reach // LANES) * LANES for reach in (before, after)))


def vliw_bundles(device_kind: str) -> tuple[int, int]:
    """The number of VLIW instruction bundles per 1,024 scores on a kind of TPU, forward and backward."""
    return BUNDLES.get(device_kind, OTHER_BUNDLES)


def unsupported_reason(
    q: ArrayShape, k: ArrayShape, reach: tuple[int, int], has_segments: bool
) -> str | None:
    """Return why the kernels cannot run on one device's queries and keys [b s n h]; None if they can.

    `reach` is the number of keys that a query sees before and after its own position."""
    reason = shape_unsupported_reason(device().device_kind, q)
    if reason is not None:
        return reason
    row_q, row_k = (jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for x in (q, k))
    return _try_to_compile(row_q, row_k, reach, has_segments)


def shape_unsupported_reason(device_kind: str, q: ArrayShape) -> str | None:
    """Return why a kind of TPU cannot run the kernels on these queries [b s n h], as far as is known without
    its compiler; None if nothing prevents it."""
    length, _, head_dim = q.shape[1:]
    if device_kind in OLD_TPUS:
        return f"{device_kind} has no bfloat16 matmuls in kernels"
    if q.dtype != jnp.bfloat16:
        return f"its kernels are for bfloat16, and the activations are {q.dtype}"
    if head_dim % SUBLANES or head_dim > LANES:
        return f"heads of {head_dim} are not a multiple of {SUBLANES}, up to {LANES}"
    if length % LANES:
        return f"{length} positions are not a multiple of {LANES}"
    limit = min(MAX_ROW_NUMBERS // head_dim, MAX_ROW_NUMBERS // 64)
    return f"rows of {length} with heads of {head_dim} are longer than {limit}" if length > limit else None


@lru_cache
def _try_to_compile(
    q: jax.ShapeDtypeStruct, k: jax.ShapeDtypeStruct, reach: tuple[int, int], has_segments: bool
) -> str | None:
    """Compile both kernels for a row. Returns the compiler's message if it fails, or None."""
    ids = jax.ShapeDtypeStruct(q.shape[:2], jnp.int32) if has_segments else None

    def run(q: Array, k: Array, v: Array, ids: Array | None) -> tuple[Array, tuple[Array, ...]]:
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, ids, reach=reach, scale=1.0), q, k, v)
        return out, pull(out)

    return compile_error("tpu", run, q, k, k, ids)


def attend(
    q: Array, k: Array, v: Array, segments: Array | None, *, reach: tuple[int, int], scale: float
) -> Array:
    """Compute attention of queries [b s n h] over keys and values [b s k h] within a window and, if
    `segments` [b s] are given, within a segment. Returns [b s n h].

    `reach` is the number of keys that a query sees before and after its own position."""

    def make_kernel(interpret: bool) -> Callable[..., Array]:
        return partial(_attend, BandSpec(*reach, scale, interpret))

    transposed = [x.transpose(0, 2, 3, 1) for x in (q, k, v)]
    # The platform is known only when lowering: a TPU slice may be compiled for on a machine without TPUs.
    out = lax.platform_dependent(*transposed, segments, tpu=make_kernel(False), default=make_kernel(True))
    return out.transpose(0, 3, 1, 2)


BandInputs = tuple[Array, Array, Array, Array | None]  # q, k, v [b n h s], segments [b s]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(spec: BandSpec, q: Array, k: Array, v: Array, segments: Array | None) -> Array:
    return _run_kernel("band_forward", spec, (q, k, v, segments), None)[0]


def _forward(
    spec: BandSpec, q: Array, k: Array, v: Array, segments: Array | None
) -> tuple[Array, BandInputs]:
    return _attend(spec, q, k, v, segments), (q, k, v, segments)


def _backward(spec: BandSpec, inputs: BandInputs, d_out: Array) -> tuple[Array, Array, Array, None]:
    d_q, d_k, d_v = _run_kernel("band_backward", spec, inputs, d_out)
    return d_q, d_k.astype(d_out.dtype), d_v.astype(d_out.dtype), None


_attend.defvjp(_forward, _backward)


def _run_kernel(name: str, spec: BandSpec, inputs: BandInputs, d_out: Array | None) -> list[Array]:
    """Run a kernel, the backward one if `d_out` is given, over rows of the batch, heads of keys, the heads of
    queries that share each, and tiles of queries, nested in this order."""
    q, k, v, segments = inputs
    (batch, heads, head_dim, length), shared = q.shape, q.shape[1] // k.shape[1]
    tile = max(n for n in range(LANES, MAX_TILE + 1, LANES) if length % n == 0)
    grid = batch, k.shape[1], shared, length // tile
    tile_spec = pl.BlockSpec((None, None, head_dim, tile), lambda b, m, g, i: (b, m * shared + g, 0, i))
    row_spec = pl.BlockSpec((None, None, head_dim, length), lambda b, m, g, i: (b, m, 0, 0))
    blocked_inputs = [(q, tile_spec), (k, row_spec), (v, row_spec)]
    if segments is not None:
        blocked_inputs += [
            (segments[..., None], pl.BlockSpec((None, tile, 1), lambda b, m, g, i: (b, i, 0))),
            (segments[:, None], pl.BlockSpec((None, 1, length), lambda b, m, g, i: (b, 0, 0))),
        ]
    outputs: list[tuple[ArrayShape, pl.BlockSpec]] = [(q, tile_spec)]
    if d_out is not None:
        blocked_inputs.append((d_out, tile_spec))
        # Sums over tiles, and over the heads that share keys.
        wide = jax.ShapeDtypeStruct(k.shape, jnp.float32)
        outputs += [(wide, row_spec), (wide, row_spec)]
    scores = batch * heads * length * keys_per_block(length, spec.before, spec.after)
    over_head = 2 * scores * LANES  # the matrix unit sums over 128 numbers where a head is summed over
    over_keys = 2 * scores * head_dim
    cost = pl.CostEstimate(
        flops=over_head + over_keys if d_out is None else 2 * over_head + 3 * over_keys,
        transcendentals=scores,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x, _ in (*blocked_inputs, *outputs)),
    )
    bundles = vliw_bundles(device().device_kind)[d_out is not None]
    # For headrace/plan/instruction_cost.py
    metadata = {"tiles": math.prod(grid), "bundles": scores * bundles // 1024}
    return pl.pallas_call(
        partial(_forward_body if d_out is None else _backward_body, spec),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in outputs],
        grid=grid,
        in_specs=[block_spec for _, block_spec in blocked_inputs],
        out_specs=[block_spec for _, block_spec in outputs],
        # Cores may share rows and heads of keys; the other axes add up, one step after the other.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")
        ),
        cost_estimate=cost,
        metadata={key: str(number) for key, number in metadata.items()},
        interpret=spec.interpret,
        name=name,
    )(*(x for x, _ in blocked_inputs))


def _forward_body(spec: BandSpec, q: Ref, k: Ref, v: Ref, *refs: Ref) -> None:
    *segments, out = refs
    for queries, keys, is_visible in _split_tile(spec, q, k, segments):
        weights = _softmax(spec, q[:, queries], k[:, keys], is_visible)
        out[:, queries] = contract(v[:, keys], weights.astype(v.dtype), 1, 1).astype(out.dtype)


def _backward_body(spec: BandSpec, q: Ref, k: Ref, v: Ref, *refs: Ref) -> None:
    *segments, d_out, d_q, d_k, d_v = refs

    @pl.when((pl.program_id(2) == 0) & (pl.program_id(3) == 0))
    def clear() -> None:
        for total in (d_k, d_v):
            total[...] = jnp.zeros(total.shape, total.dtype)

    for queries, keys, is_visible in _split_tile(spec, q, k, segments):
        weights = _softmax(spec, q[:, queries], k[:, keys], is_visible)
        d_v[:, keys] += contract(d_out[:, queries], weights.astype(d_out.dtype), 1, 0)
        d_weights = contract(d_out[:, queries].T, v[:, keys], 1, 0)
        mean = (weights * d_weights).sum(1, keepdims=True)
        d_scores = (weights * (d_weights - mean) * spec.scale).astype(d_out.dtype)
        d_k[:, keys] += contract(q[:, queries], d_scores, 1, 0)
        d_q[:, queries] = contract(k[:, keys], d_scores, 1, 1).astype(d_q.dtype)


class QueryBlock(NamedTuple):
    """128 queries, and the keys that they are multiplied by."""

    queries: slice  # of the tile
    keys: slice | pl.Slice  # of the row
    is_visible: Array  # mask [queries, keys]


def _split_tile(spec: BandSpec, q: Ref, k: Ref, segments: list[Ref]) -> list[QueryBlock]:
    """Split a tile of queries into blocks. `segments` are those of the tile's queries and of all keys, or
    none."""
    tile, length = q.shape[1], k.shape[1]
    num_keys = keys_per_block(length, spec.before, spec.after)
    before = -(-spec.before // LANES) * LANES
    row, column = (lax.broadcasted_iota(jnp.int32, (LANES, num_keys), axis) for axis in (0, 1))
    blocks = []
    for start in range(0, tile, LANES):
        queries, position = slice(start, start + LANES), pl.program_id(3) * tile + start
        first_key = pl.multiple_of(jnp.clip(position - before, 0, length - num_keys), LANES)
        keys, distance = pl.ds(first_key, num_keys), row - column
        offset = position - first_key
        is_visible = (distance <= spec.before - offset) & (distance >= -spec.after - offset)
        if segments:
            is_visible &= segments[0][queries] == segments[1][:, keys]
        blocks.append(QueryBlock(queries, keys, is_visible))
    return blocks


def _softmax(spec: BandSpec, q: Array, k: Array, is_visible: Array) -> Array:
    """Compute the weights [queries, keys] of a block."""
    scores = jnp.where(is_visible, contract(q.T, k, 1, 0), HIDDEN)
    weights = jnp.exp((scores - scores.max(1, keepdims=True)) * spec.scale)
    return weights / weights.sum(1, keepdims=True)
