"""Attention in Pallas kernels for Hopper GPUs, where each query sees an interval of the keys: causal, within
a window, within its document, or all of these (FlashAttention 2 and 3, arXiv 2307.08691 and 2407.08608).

The forward pass saves the logarithm of each row's sum. In the backward pass one kernel computes the scores
again for a tile of queries and sums their gradient, another for a tile of keys, over all heads that share
them. Every number is summed by one warpgroup in a fixed order, without atomics: the same bits every time. A
tile visits only keys that one of its queries sees, and compares positions only in blocks that not all of them
see. Heads are side by side: [rows of the batch x positions, heads x head_dim]. Pallas' interpreter cannot run
these kernels: on a CPU they are only lowered."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.ref import AbstractRef

from headrace.kernels.hopper_pipeline import (
    WARPGROUPS,
    Barrier,
    Ref,
    block_spec,
    make_pipeline,
    swizzle,
    transpose,
)
from headrace.nn.module import PyTree

Array = jax.Array

ROWS = 64  # of a tile, per warpgroup: what one instruction multiplies
TILE = WARPGROUPS * ROWS
MAX_SPLIT_HEAD_DIM = 128  # larger heads leave no registers for two sums of ROWS
HIDDEN = -1e30  # score of a key that is not seen; finite, so that differences of two are numbers
LOG2E = math.log2(math.e)


class FlashShape(NamedTuple):
    """The sizes of one device's arrays, and the settings of the scores."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    soft_cap: float | None

    @property
    def group(self) -> int:
        """Heads of queries that share a head of keys."""
        return self.heads // self.kv_heads

    @property
    def block_sizes(self) -> "BlockSizes":
        """The sizes of blocks for this head dimension."""
        return BLOCK_SIZES[self.head_dim]

    @property
    def splits_keys(self) -> bool:
        """Whether warpgroups share the keys of a tile in the backward pass. If heads are too large for that,
        both have all keys: one computes the gradient of the keys, the other that of the values."""
        return self.head_dim <= MAX_SPLIT_HEAD_DIM

    @property
    def key_tile(self) -> int:
        """Keys of a tile in the backward pass."""
        return TILE if self.splits_keys else ROWS


class BlockSizes(NamedTuple):
    """Lengths of the blocks that a tile meets one after the other, and how many of them are in shared
    memory."""

    forward: tuple[int, int]  # blocks of keys, in the forward pass
    queries: tuple[int, int]  # blocks of keys, for the gradient of queries
    keys: tuple[int, int]  # blocks of queries, for the gradients of keys and values


# By head dimension; the fastest of those tried on an H200 (2026-11).
BLOCK_SIZES = {
    64: BlockSizes(forward=(128, 2), queries=(128, 3), keys=(128, 2)),
    128: BlockSizes(forward=(128, 2), queries=(128, 4), keys=(64, 2)),
    256: BlockSizes(forward=(64, 2), queries=(64, 3), keys=(64, 2)),
}


class KeyBounds(NamedTuple):
    """The keys that each query sees, [b s] each. Neither bound decreases from one query to the next."""

    start: Array
    end: Array  # the key after the last


class BlockSpan(NamedTuple):
    """The blocks that a tile visits: from `start` to `end`. Those from `full_start` to `full_end` are seen in
    full."""

    start: Array
    full_start: Array
    full_end: Array
    end: Array


def compute_output(shape: FlashShape, q: Array, k: Array, v: Array, bounds: KeyBounds) -> tuple[Array, Array]:
    """Compute attention of q [b*s n*h] over k and v [b*t k*h]. Returns the output [b*s n*h] and the base-2
    logarithm of each query's sum of exponentials [b*n*s]."""
    (block, stages), tiles = shape.block_sizes.forward, shape.queries // TILE

    def body(
        q_ref: Ref, k_ref: Ref, v_ref: Ref, bounds_ref: Ref, spans_ref: Ref, out_ref: Ref, log_sum_ref: Ref
    ) -> None:
        head, tile, row, wg = (lax.axis_index(name) for name in ("head", "tile", "row", "wg"))
        tile = tiles - 1 - tile  # with a causal mask the last tiles take longest, so they start first
        span = _read_span(spans_ref, row * tiles + tile)

        @partial(
            pl.run_scoped,
            fetched=plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
            key_bounds=plgpu.SMEM((WARPGROUPS, 2, ROWS), jnp.float32),
            log_sums=plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
            multiply_turn=plgpu.Barrier(num_arrivals=WARPGROUPS),
            queries=_matrix(WARPGROUPS, ROWS, shape.head_dim),
            collective_axes="wg",
        )
        def run(
            fetched: Barrier, key_bounds: Ref, log_sums: Ref, multiply_turn: Barrier, queries: Ref
        ) -> None:
            rows = pl.ds(row * shape.queries + tile * TILE + wg * ROWS, ROWS)
            place = rows, pl.ds(head * shape.head_dim, shape.head_dim)

            def change_turns() -> None:
                """Let the other warpgroup multiply."""
                plgpu.barrier_arrive(multiply_turn)
                plgpu.barrier_wait(multiply_turn)

            def context(run_loop: Callable[[PyTree], PyTree]) -> None:
                plgpu.copy_gmem_to_smem(q_ref.at[place], queries.at[wg], fetched.at[wg])
                plgpu.copy_gmem_to_smem(bounds_ref.at[:, rows], key_bounds.at[wg], fetched.at[wg])
                plgpu.barrier_wait(fetched.at[wg])
                pl.when(wg == 1)(change_turns)
                start = _full((ROWS, shape.head_dim), 0.0), _full_row(HIDDEN), _full_row(0.0)
                out, largest, total = run_loop(start)
                pl.when(wg == 0)(change_turns)
                # The queries are no longer needed: their memory takes the output on its way.
                queries[wg] = (out / _broadcast_rows(total, out.shape)).astype(queries.dtype)
                log_sums[wg] = largest + jnp.log(total) * LOG2E
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(queries.at[wg], out_ref.at[place])
                first = (row * shape.heads + head) * shape.queries + tile * TILE + wg * ROWS
                plgpu.copy_smem_to_gmem(log_sums.at[wg], log_sum_ref.at[pl.ds(first, ROWS)])
                plgpu.wait_smem_to_gmem(0)

            def step(
                index: tuple[Array, ...],
                keys: Ref,
                values: Ref,
                keys_done: Barrier,
                values_done: Barrier,
                carry: tuple[Array, Array, Array],
            ) -> tuple[Array, Array, Array]:
                out, largest, total = carry
                number = span.start + index[0]

                def multiply(sums: Ref) -> Array:
                    plgpu.wgmma(sums, queries.at[wg], transpose(keys))  # type: ignore[arg-type]
                    change_turns()
                    return sums[...]

                products = pl.run_scoped(multiply, plgpu.ACC((ROWS, block), jnp.float32))
                plgpu.barrier_arrive(keys_done)
                scores = _to_scores(shape, products)
                scores = _mask_keys(scores, key_bounds.at[wg], number, span, block)
                new_largest = jnp.maximum(largest, scores.max(axis=1))
                decay = jnp.exp2(largest - new_largest)
                weights = jnp.exp2(scores - _broadcast_rows(new_largest, scores.shape))
                out *= _broadcast_rows(decay, out.shape)
                total *= decay
                narrow = weights.astype(queries.dtype)
                change_turns()
                total += weights.sum(axis=1)
                out = _add_product(out, narrow, values)
                plgpu.barrier_arrive(values_done)
                return out, new_largest, total

            kv_head = lax.div(head, jnp.int32(shape.group))
            key_block = lambda n: (row * (shape.keys // block) + span.start + n, kv_head)
            specs = [block_spec((block, shape.head_dim), key_block)] * 2
            _run_pipeline(span.end - span.start, specs, step, context, stages, k_ref, v_ref)

    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    log_sums = jax.ShapeDtypeStruct((shape.batch * shape.heads * shape.queries,), jnp.float32)
    grid = (shape.heads, tiles, shape.batch)
    spans = spans_of_queries(bounds, TILE, block)
    return _make_kernel(body, (out, log_sums), grid)(q, k, v, _to_floats(bounds), spans)


def compute_query_gradient(
    shape: FlashShape,
    q: Array,
    k: Array,
    v: Array,
    d_out: Array,
    log_sums: Array,
    delta: Array,
    bounds: KeyBounds,
) -> Array:
    """Compute the gradient of the queries [b*s n*h] from that of the output.

    `log_sums` are those of the forward pass. `delta` [b*n*s] is the product of the output and its gradient,
    which the derivative of the softmax subtracts."""
    (block, stages), tiles = shape.block_sizes.queries, shape.queries // TILE

    def body(
        q_ref: Ref,
        d_out_ref: Ref,
        kv_ref: Ref,
        bounds_ref: Ref,
        per_query_ref: Ref,
        spans_ref: Ref,
        d_q_ref: Ref,
    ) -> None:
        head, tile, row, wg = (lax.axis_index(name) for name in ("head", "tile", "row", "wg"))
        tile = tiles - 1 - tile
        span = _read_span(spans_ref, row * tiles + tile)

        @partial(
            pl.run_scoped,
            d_out=_matrix(WARPGROUPS, ROWS, shape.head_dim),
            fetched=plgpu.Barrier(num_arrivals=4, num_barriers=WARPGROUPS),
            key_bounds=plgpu.SMEM((WARPGROUPS, 2, ROWS), jnp.float32),
            per_query=plgpu.SMEM((WARPGROUPS, 2, ROWS), jnp.float32),
            queries=_matrix(WARPGROUPS, ROWS, shape.head_dim),
            collective_axes="wg",
        )
        def run(d_out: Ref, fetched: Barrier, key_bounds: Ref, per_query: Ref, queries: Ref) -> None:
            rows = pl.ds(row * shape.queries + tile * TILE + wg * ROWS, ROWS)
            place = rows, pl.ds(head * shape.head_dim, shape.head_dim)
            first = (row * shape.heads + head) * shape.queries + tile * TILE + wg * ROWS

            def context(run_loop: Callable[[PyTree], PyTree]) -> None:
                plgpu.copy_gmem_to_smem(q_ref.at[place], queries.at[wg], fetched.at[wg])
                plgpu.copy_gmem_to_smem(d_out_ref.at[place], d_out.at[wg], fetched.at[wg])
                plgpu.copy_gmem_to_smem(bounds_ref.at[:, rows], key_bounds.at[wg], fetched.at[wg])
                numbers = per_query_ref.at[:, pl.ds(first, ROWS)]
                plgpu.copy_gmem_to_smem(numbers, per_query.at[wg], fetched.at[wg])
                plgpu.barrier_wait(fetched.at[wg])
                d_q, _ = run_loop((_full((ROWS, shape.head_dim), 0.0), _full((ROWS, block), 0.0)))
                queries[wg] = (d_q * shape.scale).astype(queries.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(queries.at[wg], d_q_ref.at[place])
                plgpu.wait_smem_to_gmem(0)

            def step(
                index: tuple[Array, ...], keys_or_values: Ref, block_done: Barrier, carry: tuple[Array, Array]
            ) -> tuple[Array, Array]:
                number = span.start + lax.div(index[0], jnp.int32(2))

                def multiply_values(d_q: Array, _: Array) -> tuple[Array, Array]:
                    return d_q, _multiply(d_out.at[wg], transpose(keys_or_values), (ROWS, block))

                def multiply_keys(d_q: Array, d_weights: Array) -> tuple[Array, Array]:
                    products = _multiply(queries.at[wg], transpose(keys_or_values), (ROWS, block))
                    scores = _to_scores(shape, products)
                    masked = _mask_keys(scores, key_bounds.at[wg], number, span, block)
                    log_sums = _load(per_query.at[wg], 0, 1)
                    weights = jnp.exp2(masked - _broadcast_rows(log_sums, masked.shape))
                    delta = _load(per_query.at[wg], 1, 1)
                    d_scores = weights * (d_weights - _broadcast_rows(delta, masked.shape))
                    narrow = _to_d_products(shape, scores, d_scores).astype(queries.dtype)
                    return _add_product(d_q, narrow, keys_or_values), d_weights

                is_values = lax.rem(index[0], jnp.int32(2)) == 0
                carry = lax.cond(is_values, multiply_values, multiply_keys, *carry)
                plgpu.barrier_arrive(block_done)
                return carry

            kv_head, blocks = lax.div(head, jnp.int32(shape.group)), shape.keys // block
            # A block of values, then the same of keys, and so on.
            first_block = lambda n: (1 - lax.rem(n, jnp.int32(2))) * (shape.batch * blocks)
            kv_block = lambda n: (
                first_block(n) + row * blocks + span.start + lax.div(n, jnp.int32(2)),
                kv_head,
            )
            specs = [block_spec((block, shape.head_dim), kv_block)]
            _run_pipeline(2 * (span.end - span.start), specs, step, context, stages, kv_ref)

    grid = (shape.heads, tiles, shape.batch)
    spans = spans_of_queries(bounds, TILE, block)
    per_query = jnp.stack([log_sums, delta])
    d_q = jax.ShapeDtypeStruct(q.shape, q.dtype)
    kernel = _make_kernel(body, d_q, grid)
    return kernel(q, d_out, jnp.concatenate([k, v]), _to_floats(bounds), per_query, spans)


def compute_key_value_gradients(
    shape: FlashShape,
    q: Array,
    k: Array,
    v: Array,
    d_out: Array,
    log_sums: Array,
    delta: Array,
    bounds: KeyBounds,
) -> tuple[Array, Array]:
    """Compute the gradients of keys and values, [b*t k*h] each, from that of the output.

    `log_sums` and `delta` are as in `compute_query_gradient`."""
    key_tile, tiles, (block, stages) = shape.key_tile, shape.keys // shape.key_tile, shape.block_sizes.keys

    def body(
        k_ref: Ref,
        v_ref: Ref,
        q_ref: Ref,
        d_out_ref: Ref,
        per_query_ref: Ref,
        spans_ref: Ref,
        d_k_ref: Ref,
        d_v_ref: Ref,
    ) -> None:
        kv_head, tile, row, wg = (lax.axis_index(name) for name in ("head", "tile", "row", "wg"))
        span = _read_span(spans_ref, row * tiles + tile)
        count = span.end - span.start
        part = wg if shape.splits_keys else 0  # of the tile, which this warpgroup has

        @partial(
            pl.run_scoped,
            fetched=plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
            finished=plgpu.Barrier(num_arrivals=WARPGROUPS),
            keys=_matrix(key_tile // ROWS, ROWS, shape.head_dim),
            values=_matrix(key_tile // ROWS, ROWS, shape.head_dim),
            collective_axes="wg",
        )
        def run(fetched: Barrier, finished: Barrier, keys: Ref, values: Ref) -> None:
            first_key = tile * key_tile + part * ROWS
            rows = pl.ds(row * shape.keys + first_key, ROWS)
            place = rows, pl.ds(kv_head * shape.head_dim, shape.head_dim)
            zeros = _full((ROWS, shape.head_dim), 0.0)

            def fetch() -> None:
                plgpu.copy_gmem_to_smem(k_ref.at[place], keys.at[part], fetched.at[part])
                plgpu.copy_gmem_to_smem(v_ref.at[place], values.at[part], fetched.at[part])

            def write(smem: Ref, gmem: Ref, gradient: Array) -> None:
                smem[part] = gradient.astype(smem.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(smem.at[part], gmem.at[place])

            def context(run_loop: Callable[[PyTree], PyTree]) -> None:
                if shape.splits_keys:
                    fetch()
                else:
                    pl.when(wg == 0)(fetch)
                plgpu.barrier_wait(fetched.at[part])
                sums = run_loop((zeros, zeros) if shape.splits_keys else zeros)
                if shape.splits_keys:
                    write(keys, d_k_ref, sums[0] * shape.scale)
                    write(values, d_v_ref, sums[1])
                else:
                    plgpu.barrier_arrive(finished)  # the other warpgroup may still read what is overwritten
                    plgpu.barrier_wait(finished)
                    pl.when(wg == 0)(lambda: write(keys, d_k_ref, sums * shape.scale))
                    pl.when(wg == 1)(lambda: write(values, d_v_ref, sums))
                plgpu.wait_smem_to_gmem(0)

            def compute_weights(
                index: tuple[Array, ...], queries: Ref, per_query: AbstractRef
            ) -> tuple[Array, Array]:
                """Compute scores and weights [keys queries]."""
                number = span.start + lax.rem(index[0], count)
                products = _multiply(keys.at[part], transpose(queries), (ROWS, block))
                scores = _to_scores(shape, products)
                masked = _mask_queries(scores, per_query, first_key, number, span)
                log_sums = _load(per_query, 0, 0)
                return scores, jnp.exp2(masked - _broadcast_columns(log_sums, masked.shape))

            def compute_d_products(
                scores: Array, weights: Array, d_weights: Array, per_query: AbstractRef
            ) -> Array:
                delta = _load(per_query, 1, 0)
                d_scores = weights * (d_weights - _broadcast_columns(delta, scores.shape))
                return _to_d_products(shape, scores, d_scores).astype(keys.dtype)

            def step_both(
                index: tuple[Array, ...],
                queries: Ref,
                d_out: Ref,
                per_query: AbstractRef,
                queries_done: Barrier,
                d_out_done: Barrier,
                per_query_done: Barrier,
                carry: tuple[Array, Array],
            ) -> tuple[Array, Array]:
                """Add a block of queries to the gradients of this warpgroup's keys and values."""
                d_k, d_v = carry
                scores, weights = compute_weights(index, queries, per_query)
                narrow = weights.astype(keys.dtype)

                def multiply(sums: tuple[Ref, Ref]) -> None:
                    plgpu.wgmma(sums[0], narrow, d_out)  # type: ignore[arg-type]
                    plgpu.wgmma(sums[1], values.at[part], transpose(d_out))  # type: ignore[arg-type]

                start = plgpu.ACC.init(d_v), plgpu.ACC.init(_full((ROWS, block), 0.0))
                d_v, d_weights = pl.run_state(multiply)(start)
                plgpu.barrier_arrive(d_out_done)
                d_products = compute_d_products(scores, weights, d_weights, per_query)
                plgpu.barrier_arrive(per_query_done)
                d_k = _add_product(d_k, d_products, queries)
                plgpu.barrier_arrive(queries_done)
                return d_k, d_v

            def step_single(
                index: tuple[Array, ...],
                queries: Ref,
                d_out: Ref,
                per_query: AbstractRef,
                queries_done: Barrier,
                d_out_done: Barrier,
                per_query_done: Barrier,
                carry: Array,
            ) -> Array:
                """Add a block of queries to the gradient of the keys, or of the values."""
                scores, weights = compute_weights(index, queries, per_query)

                def add_to_keys(d_k: Array) -> Array:
                    d_weights = _multiply(values.at[part], transpose(d_out), (ROWS, block))
                    d_products = compute_d_products(scores, weights, d_weights, per_query)
                    return _add_product(d_k, d_products, queries)

                def add_to_values(d_v: Array) -> Array:
                    return _add_product(d_v, weights.astype(keys.dtype), d_out)

                carry = lax.cond(wg == 0, add_to_keys, add_to_values, carry)
                for barrier in (queries_done, d_out_done, per_query_done):
                    plgpu.barrier_arrive(barrier)
                return carry

            blocks = shape.queries // block
            head = lambda n: kv_head * shape.group + lax.div(n, count)
            query_block = lambda n: (row * blocks + span.start + lax.rem(n, count), head(n))
            per_query_block = lambda n: (
                0,
                (row * shape.heads + head(n)) * blocks + span.start + lax.rem(n, count),
            )
            specs = [block_spec((block, shape.head_dim), query_block)] * 2
            specs.append(plgpu.BlockSpec((4, block), per_query_block))
            step = step_both if shape.splits_keys else step_single
            refs = q_ref, d_out_ref, per_query_ref
            _run_pipeline(count * shape.group, specs, step, context, stages, *refs)

    grid = (shape.kv_heads, tiles, shape.batch)
    spans = spans_of_keys(bounds, block, shape.keys, key_tile)
    by_row = _to_floats(bounds).reshape(2, shape.batch, 1, shape.queries)
    by_head = jnp.broadcast_to(by_row, (2, shape.batch, shape.heads, shape.queries)).reshape(2, -1)
    per_query = jnp.concatenate([jnp.stack([log_sums, delta]), by_head])
    gradient = jax.ShapeDtypeStruct(k.shape, k.dtype)
    return _make_kernel(body, (gradient, gradient), grid)(k, v, q, d_out, per_query, spans)


def spans_of_queries(bounds: KeyBounds, tile: int, block: int) -> Array:
    """The blocks of keys that each tile of queries visits: the numbers of a `BlockSpan` per tile, in one
    array."""
    starts, ends = (x.reshape(x.shape[0], -1, tile) for x in bounds)
    start, end = starts.min(-1) // block, -(-ends.max(-1) // block)
    full_start, full_end = -(-starts.max(-1) // block), ends.min(-1) // block
    full_start = jnp.clip(full_start, start, end)
    span = start, full_start, jnp.clip(full_end, full_start, end), end
    return jnp.stack(span, -1).astype(jnp.int32).ravel()


def spans_of_keys(bounds: KeyBounds, block: int, keys: int, tile: int) -> Array:
    """The blocks of queries that each tile of keys visits, in the form of `spans_of_queries`.

    They are intervals too, since bounds do not decrease from one query to the next."""
    starts, ends = (x.reshape(x.shape[0], 1, -1, block) for x in bounds)
    tile_start = jnp.arange(0, keys, tile)[None, :, None]
    tile_end = tile_start + tile
    count = lambda is_before: is_before.sum(-1, dtype=jnp.int32)
    start, end = count(ends.max(-1) <= tile_start), count(starts.min(-1) < tile_end)
    full_start, full_end = count(ends.min(-1) < tile_end), count(starts.max(-1) <= tile_start)
    full_start = jnp.clip(full_start, start, end)
    return jnp.stack([start, full_start, jnp.clip(full_end, full_start, end), end], -1).ravel()


def _read_span(spans_ref: Ref, tile: Array) -> BlockSpan:
    return BlockSpan(*(spans_ref[tile * 4 + n] for n in range(4)))


def _to_floats(bounds: KeyBounds) -> Array:
    """Stack bounds [2 b*s] as floats, to be compared with positions in floats: exact up to 2**24."""
    return jnp.stack([bounds.start.ravel(), bounds.end.ravel()]).astype(jnp.float32)


def _to_scores(shape: FlashShape, products: Array) -> Array:
    """Scale and cap products of queries and keys. Scores are in units of log 2, which saves a multiplication
    in every exponential."""
    if shape.soft_cap is None:
        return products * (shape.scale * LOG2E)
    return shape.soft_cap * LOG2E * jnp.tanh(products * (shape.scale / shape.soft_cap))


def _to_d_products(shape: FlashShape, scores: Array, d_scores: Array) -> Array:
    """Multiply the gradient of scores by the derivative of the soft cap. The scale is left to the caller."""
    if shape.soft_cap is None:
        return d_scores
    share = scores * (1 / (shape.soft_cap * LOG2E))
    return d_scores * (1 - share * share)


def _mask_keys(scores: Array, bounds: AbstractRef, number: Array, span: BlockSpan, block: int) -> Array:
    """Mask scores [queries keys] of a tile and block `number` of the keys, by the bounds of its queries."""

    def mask(scores: Array) -> Array:
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        keys = (column + number * block).astype(jnp.float32)
        start, end = (_broadcast_rows(_load(bounds, n, 1), scores.shape) for n in range(2))
        return jnp.where((keys >= start) & (keys < end), scores, HIDDEN)

    is_full = (number >= span.full_start) & (number < span.full_end)
    return lax.cond(is_full, lambda scores: scores, mask, scores)


def _mask_queries(
    scores: Array, per_query: AbstractRef, first_key: Array, number: Array, span: BlockSpan
) -> Array:
    """Mask scores [keys queries] of keys from `first_key` on and block `number` of the queries."""

    def mask(scores: Array) -> Array:
        row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
        keys = (row + first_key).astype(jnp.float32)
        start, end = (_broadcast_columns(_load(per_query, n, 0), scores.shape) for n in (2, 3))
        return jnp.where((keys >= start) & (keys < end), scores, HIDDEN)

    is_full = (number >= span.full_start) & (number < span.full_end)
    return lax.cond(is_full, lambda scores: scores, mask, scores)


def _multiply(a: Ref, b: Ref, shape: tuple[int, int]) -> Array:
    """Multiply two matrices in shared memory."""

    def multiply(sums: Ref) -> Array:
        plgpu.wgmma(sums, a, b)  # type: ignore[arg-type]
        return sums[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def _add_product(sums: Array, a: Array, b: Ref) -> Array:
    """Add the product of a matrix in registers and one in shared memory."""
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(sums))


def _run_pipeline(
    steps: Array,
    specs: list[plgpu.BlockSpec],
    step: Callable[..., PyTree],
    context: Callable[[Callable[[PyTree], PyTree]], None],
    stages: int,
    *refs: Ref,
) -> None:
    """Run `step` for each block of `refs`."""
    make_pipeline(steps, specs, step, context, stages=stages, releases_blocks=True)(*refs)


def _make_kernel(body: Callable[..., None], out: PyTree, grid: tuple[int, ...]) -> Callable[..., PyTree]:
    names = ("head", "tile", "row")
    mesh = plgpu.Mesh(grid=grid, grid_names=names, num_threads=WARPGROUPS + 1, thread_name="wg")
    return pl.kernel(body, out, mesh=mesh, compiler_params=plgpu.CompilerParams(approx_math=True))


def _matrix(*shape: int) -> pl.MemoryRef:
    """A matrix in shared memory."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=swizzle())


def _full(shape: tuple[int, int], value: float) -> Array:
    """A matrix in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), plgpu.Layout.WGMMA)


def _full_row(value: float) -> Array:
    """One number per row of a matrix, in registers."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def _load(ref: AbstractRef, number: int, reduced_axis: int) -> Array:
    """Load row `number`, which has one number per row (reduced axis 1) or column (0) of a tile."""
    return plgpu.load(ref, (number,), layout=plgpu.Layout.WGMMA.reduce(reduced_axis))


def _broadcast_rows(x: Array, shape: tuple[int, ...]) -> Array:
    """Repeat one number per row along the columns."""
    return lax.broadcast_in_dim(x, shape, [0])


def _broadcast_columns(x: Array, shape: tuple[int, ...]) -> Array:
    """Repeat one number per column along the rows."""
    return lax.broadcast_in_dim(x, shape, [1])
