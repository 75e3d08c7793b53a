"""Attention in Pallas kernels for Hopper GPUs, where each query sees an interval of the keys: causal, within
a window, within its document, or all of these (FlashAttention 2 and 3, arXiv 2307.08691 and 2407.08608).

The forward pass saves the logarithm of each row's sum. In the backward pass one kernel computes the scores
again for a tile of queries and sums their gradient, another for a tile of keys, over all heads that share
them. Every number is summed by one warpgroup in a fixed order, without atomics: the same bits every time. A
tile visits only keys that one of its queries sees, and compares positions only in blocks that not all of them
see. Heads are side by side: [rows of the batch x positions, heads x head_dim]. Pallas' interpreter cannot run
these kernels: on a CPU they are only lowered."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.ref import AbstractRef

from headrace.kernels.flash_tiles import (
    LOG2E,
    MASKED_SCORE,
    ROWS,
    TILE,
    FlashShape,
    KeyBounds,
    add_product,
    bounds_to_floats,
    broadcast_per_column,
    broadcast_per_row,
    fill_matrix,
    fill_per_row,
    find_key_blocks,
    find_query_blocks,
    load_per_column,
    load_per_row,
    mask_keys,
    mask_queries,
    multiply,
    read_span,
    smem_matrix,
    to_d_products,
    to_scores,
)
from headrace.kernels.hopper_pipeline import (
    WARPGROUPS,
    Barrier,
    Ref,
    block_spec,
    make_pipeline,
    transpose,
)
from headrace.nn.module import PyTree

Array = jax.Array


def compute_output_and_log_sums(
    shape: FlashShape, q: Array, k: Array, v: Array, bounds: KeyBounds
) -> tuple[Array, Array]:
    """Compute attention of q [b*s n*h] over k and v [b*t k*h]. Returns the output [b*s n*h] and the base-2
    logarithm of each query's sum of exponentials [b*n*s]."""
    (block, stages), tiles = shape.block_sizes.forward, shape.queries // TILE

    def body(
        q_ref: Ref, k_ref: Ref, v_ref: Ref, bounds_ref: Ref, spans_ref: Ref, out_ref: Ref, log_sum_ref: Ref
    ) -> None:
        head, tile, row, wg = (lax.axis_index(name) for name in ("head", "tile", "row", "wg"))
        tile = tiles - 1 - tile  # with a causal mask the last tiles take longest, so they start first
        span = read_span(spans_ref, row * tiles + tile)

        @partial(
            pl.run_scoped,
            fetched=plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
            key_bounds=plgpu.SMEM((WARPGROUPS, 2, ROWS), jnp.float32),
            log_sums=plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
            multiply_turn=plgpu.Barrier(num_arrivals=WARPGROUPS),
            queries=smem_matrix(WARPGROUPS, ROWS, shape.head_dim),
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
                start = (
                    fill_matrix((ROWS, shape.head_dim), 0.0),
                    fill_per_row(MASKED_SCORE),
                    fill_per_row(0.0),
                )
                out, largest, total = run_loop(start)
                pl.when(wg == 0)(change_turns)
                # The queries are no longer needed: their memory takes the output on its way.
                queries[wg] = (out / broadcast_per_row(total, out.shape)).astype(queries.dtype)
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

                def multiply_keys(sums: Ref) -> Array:
                    plgpu.wgmma(sums, queries.at[wg], transpose(keys))  # type: ignore[arg-type]
                    change_turns()
                    return sums[...]

                products = pl.run_scoped(multiply_keys, plgpu.ACC((ROWS, block), jnp.float32))
                plgpu.barrier_arrive(keys_done)
                scores = to_scores(shape, products)
                scores = mask_keys(scores, key_bounds.at[wg], number, block, span)
                new_largest = jnp.maximum(largest, scores.max(axis=1))
                decay = jnp.exp2(largest - new_largest)
                weights = jnp.exp2(scores - broadcast_per_row(new_largest, scores.shape))
                out *= broadcast_per_row(decay, out.shape)
                total *= decay
                narrow = weights.astype(queries.dtype)
                change_turns()
                total += weights.sum(axis=1)
                out = add_product(out, narrow, values)
                plgpu.barrier_arrive(values_done)
                return out, new_largest, total

            kv_head = lax.div(head, jnp.int32(shape.group))
            key_block = lambda n: (row * (shape.keys // block) + span.start + n, kv_head)
            specs = [block_spec((block, shape.head_dim), key_block)] * 2
            _run_pipeline(span.end - span.start, specs, step, context, stages, k_ref, v_ref)

    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    log_sums = jax.ShapeDtypeStruct((shape.batch * shape.heads * shape.queries,), jnp.float32)
    grid = (shape.heads, tiles, shape.batch)
    spans = find_key_blocks(bounds, TILE, block)
    return _make_kernel(body, (out, log_sums), grid)(q, k, v, bounds_to_floats(bounds), spans)


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
        span = read_span(spans_ref, row * tiles + tile)

        @partial(
            pl.run_scoped,
            d_out=smem_matrix(WARPGROUPS, ROWS, shape.head_dim),
            fetched=plgpu.Barrier(num_arrivals=4, num_barriers=WARPGROUPS),
            key_bounds=plgpu.SMEM((WARPGROUPS, 2, ROWS), jnp.float32),
            per_query=plgpu.SMEM((WARPGROUPS, 2, ROWS), jnp.float32),
            queries=smem_matrix(WARPGROUPS, ROWS, shape.head_dim),
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
                d_q, _ = run_loop((fill_matrix((ROWS, shape.head_dim), 0.0), fill_matrix((ROWS, block), 0.0)))
                queries[wg] = (d_q * shape.scale).astype(queries.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(queries.at[wg], d_q_ref.at[place])
                plgpu.wait_smem_to_gmem(0)

            def step(
                index: tuple[Array, ...], keys_or_values: Ref, block_done: Barrier, carry: tuple[Array, Array]
            ) -> tuple[Array, Array]:
                number = span.start + lax.div(index[0], jnp.int32(2))

                def multiply_values(d_q: Array, _: Array) -> tuple[Array, Array]:
                    return d_q, multiply(d_out.at[wg], transpose(keys_or_values), (ROWS, block))

                def multiply_keys(d_q: Array, d_weights: Array) -> tuple[Array, Array]:
                    products = multiply(queries.at[wg], transpose(keys_or_values), (ROWS, block))
                    scores = to_scores(shape, products)
                    masked = mask_keys(scores, key_bounds.at[wg], number, block, span)
                    log_sums = load_per_row(per_query.at[wg], 0)
                    weights = jnp.exp2(masked - broadcast_per_row(log_sums, masked.shape))
                    delta = load_per_row(per_query.at[wg], 1)
                    d_scores = weights * (d_weights - broadcast_per_row(delta, masked.shape))
                    narrow = to_d_products(shape, scores, d_scores).astype(queries.dtype)
                    return add_product(d_q, narrow, keys_or_values), d_weights

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
    spans = find_key_blocks(bounds, TILE, block)
    per_query = jnp.stack([log_sums, delta])
    d_q = jax.ShapeDtypeStruct(q.shape, q.dtype)
    kernel = _make_kernel(body, d_q, grid)
    return kernel(q, d_out, jnp.concatenate([k, v]), bounds_to_floats(bounds), per_query, spans)


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
        span = read_span(spans_ref, row * tiles + tile)
        count = span.end - span.start
        part = wg if shape.splits_keys else 0  # of the tile, which this warpgroup has

        @partial(
            pl.run_scoped,
            fetched=plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
            finished=plgpu.Barrier(num_arrivals=WARPGROUPS),
            keys=smem_matrix(key_tile // ROWS, ROWS, shape.head_dim),
            values=smem_matrix(key_tile // ROWS, ROWS, shape.head_dim),
            collective_axes="wg",
        )
        def run(fetched: Barrier, finished: Barrier, keys: Ref, values: Ref) -> None:
            first_key = tile * key_tile + part * ROWS
            rows = pl.ds(row * shape.keys + first_key, ROWS)
            place = rows, pl.ds(kv_head * shape.head_dim, shape.head_dim)
            zeros = fill_matrix((ROWS, shape.head_dim), 0.0)

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
                products = multiply(keys.at[part], transpose(queries), (ROWS, block))
                scores = to_scores(shape, products)
                masked = mask_queries(scores, per_query, number, first_key, span)
                log_sums = load_per_column(per_query, 0)
                return scores, jnp.exp2(masked - broadcast_per_column(log_sums, masked.shape))

            def compute_d_products(
                scores: Array, weights: Array, d_weights: Array, per_query: AbstractRef
            ) -> Array:
                delta = load_per_column(per_query, 1)
                d_scores = weights * (d_weights - broadcast_per_column(delta, scores.shape))
                return to_d_products(shape, scores, d_scores).astype(keys.dtype)

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

                def multiply_both(sums: tuple[Ref, Ref]) -> None:
                    plgpu.wgmma(sums[0], narrow, d_out)  # type: ignore[arg-type]
                    plgpu.wgmma(sums[1], values.at[part], transpose(d_out))  # type: ignore[arg-type]

                start = plgpu.ACC.init(d_v), plgpu.ACC.init(fill_matrix((ROWS, block), 0.0))
                d_v, d_weights = pl.run_state(multiply_both)(start)
                plgpu.barrier_arrive(d_out_done)
                d_products = compute_d_products(scores, weights, d_weights, per_query)
                plgpu.barrier_arrive(per_query_done)
                d_k = add_product(d_k, d_products, queries)
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
                    d_weights = multiply(values.at[part], transpose(d_out), (ROWS, block))
                    d_products = compute_d_products(scores, weights, d_weights, per_query)
                    return add_product(d_k, d_products, queries)

                def add_to_values(d_v: Array) -> Array:
                    return add_product(d_v, weights.astype(keys.dtype), d_out)

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
    spans = find_query_blocks(bounds, key_tile, block, shape.keys)
    by_row = bounds_to_floats(bounds).reshape(2, shape.batch, 1, shape.queries)
    by_head = jnp.broadcast_to(by_row, (2, shape.batch, shape.heads, shape.queries)).reshape(2, -1)
    per_query = jnp.concatenate([jnp.stack([log_sums, delta]), by_head])
    gradient = jax.ShapeDtypeStruct(k.shape, k.dtype)
    return _make_kernel(body, (gradient, gradient), grid)(k, v, q, d_out, per_query, spans)


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
