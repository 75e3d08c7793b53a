"""Attention in kernels for Hopper GPUs, where every query sees an interval of the keys (FlashAttention 2 and
3, arXiv 2307.08691 and 2407.08608): causal, within a window, within its document, all of it at once.

The forward pass keeps the logarithm of each row's sum. Backward, one kernel makes the scores again for a tile
of queries and sums their gradient, another for a tile of keys, over all the heads that share them. Every
number is summed by one group of threads in a fixed order, without atomics: the same bits come every time. Of
the keys a tile visits only those that one of its queries sees, and compares positions only where not all of
them do. Heads lie side by side, [rows of the batch x positions, heads x width]. Pallas' interpreter cannot
run these kernels: on a CPU they are only lowered."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

Array = jax.Array

GROUPS = 2  # of threads that multiply; a third feeds them
ROWS = 64  # of a tile, for each of them: what an instruction multiplies at once
TILE = GROUPS * ROWS
WIDE = 128  # heads wider than this leave no room in the registers for two sums of ROWS
HIDDEN = -1e30  # a score that is not seen; finite, so that differences of two are numbers
LOG2E = math.log2(math.e)


class Shape(NamedTuple):
    """One device's arrays, and how they are scored."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    width: int
    scale: float
    soft_cap: float | None

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def sizes(self) -> "Sizes":
        return SIZES[self.width]

    @property
    def held(self) -> int:
        """Keys of a tile in the backward pass: shared out to the groups of threads, or, of wide heads, all
        for both, of which one makes the gradient of the keys and the other that of the values."""
        return TILE if self.width <= WIDE else ROWS


class Sizes(NamedTuple):
    """Of blocks of keys that meet a tile of queries, forward and backward, and of queries that meet a tile of
    keys: how long they are, and how many there are in the shared memory."""

    forward: tuple[int, int]
    queries: tuple[int, int]
    keys: tuple[int, int]


# The fastest of some on an H200 (2026-11), by the width of a head.
SIZES = {
    64: Sizes(forward=(128, 2), queries=(128, 3), keys=(128, 2)),
    128: Sizes(forward=(128, 2), queries=(128, 4), keys=(64, 2)),
    256: Sizes(forward=(64, 2), queries=(64, 3), keys=(64, 2)),
}


class Bounds(NamedTuple):
    """The keys that each query sees, from the first up to but not including the last, [b s] each."""

    first: Array
    last: Array


def forward(shape: Shape, q: Array, k: Array, v: Array, bounds: Bounds) -> tuple[Array, Array]:
    """The values' means [b*s n*h], and the logarithms (of base 2) of the sums [b*n*s]."""
    (block, stages), tiles = shape.sizes.forward, shape.queries // TILE

    def body(
        q_ref: Any, k_ref: Any, v_ref: Any, known_ref: Any, spans_ref: Any, out_ref: Any, sum_ref: Any
    ) -> None:
        head, tile, row, wg = (lax.axis_index(name) for name in ("head", "tile", "row", "wg"))
        tile = tiles - 1 - tile  # where a row of tiles is long, it had better begin early
        span = _span(spans_ref, row * tiles + tile)

        @partial(
            pl.run_scoped,
            x=_matrix(GROUPS, ROWS, shape.width),
            known=plgpu.SMEM((GROUPS, 2, ROWS), jnp.float32),
            sums=plgpu.SMEM((GROUPS, ROWS), jnp.float32),
            here=plgpu.Barrier(num_arrivals=2, num_barriers=GROUPS),
            turn=plgpu.Barrier(num_arrivals=GROUPS),
            collective_axes="wg",
        )
        def scope(x: Any, known: Any, sums: Any, here: Any, turn: Any) -> None:
            mine = pl.ds(row * shape.queries + tile * TILE + wg * ROWS, ROWS)
            place = mine, pl.ds(head * shape.width, shape.width)

            def change() -> None:
                """Lets the other group of threads multiply."""
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

            def context(run: Callable[[Any], Any]) -> None:
                plgpu.copy_gmem_to_smem(q_ref.at[place], x.at[wg], here.at[wg])
                plgpu.copy_gmem_to_smem(known_ref.at[:, mine], known.at[wg], here.at[wg])
                plgpu.barrier_wait(here.at[wg])
                pl.when(wg == 1)(change)
                start = _full((ROWS, shape.width), 0.0), _row(HIDDEN), _row(0.0)
                acc, top, total = run(start)
                pl.when(wg == 0)(change)
                x[wg] = (acc / _down(total, acc.shape)).astype(x.dtype)
                sums[wg] = top + jnp.log(total) * LOG2E
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(x.at[wg], out_ref.at[place])
                at = (row * shape.heads + head) * shape.queries + tile * TILE + wg * ROWS
                plgpu.copy_smem_to_gmem(sums.at[wg], sum_ref.at[pl.ds(at, ROWS)])
                plgpu.wait_smem_to_gmem(0)

            def step(at: Any, keys: Any, values: Any, k_done: Any, v_done: Any, carry: Any) -> Any:
                acc, top, total = carry
                number = span[0] + at[0]

                def multiply(ref: Any) -> Array:
                    plgpu.wgmma(ref, x.at[wg], _turned(keys))
                    change()
                    return ref[...]

                products = pl.run_scoped(multiply, plgpu.ACC((ROWS, block), jnp.float32))
                plgpu.barrier_arrive(k_done)
                scores = _scores(shape, products)
                scores = _masked(scores, known.at[wg], number, span, block)
                higher = jnp.maximum(top, scores.max(axis=1))
                fade = jnp.exp2(top - higher)
                weights = jnp.exp2(scores - _down(higher, scores.shape))
                acc *= _down(fade, acc.shape)
                total *= fade
                narrow = weights.astype(x.dtype)
                change()
                total += weights.sum(axis=1)
                acc = _add(acc, narrow, values)
                plgpu.barrier_arrive(v_done)
                return acc, higher, total

            kv_head = lax.div(head, jnp.int32(shape.group))
            keys = lambda n: (row * (shape.keys // block) + span[0] + n, kv_head)
            specs = [_block((block, shape.width), keys)] * 2
            _pipeline(span[3] - span[0], specs, step, context, stages)(k_ref, v_ref)

    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    sums = jax.ShapeDtypeStruct((shape.batch * shape.heads * shape.queries,), jnp.float32)
    grid = (shape.heads, tiles, shape.batch)
    spans = _spans(bounds, TILE, block)
    return _kernel(body, (out, sums), grid)(q, k, v, _known(bounds), spans)


def gradient_of_queries(
    shape: Shape, q: Array, k: Array, v: Array, d_out: Array, sums: Array, shared: Array, bounds: Bounds
) -> Array:
    """`sums` are the forward pass's, `shared` [b*n*s] what the softmax takes from all scores of a row."""
    (block, stages), tiles = shape.sizes.queries, shape.queries // TILE

    def body(
        q_ref: Any,
        d_ref: Any,
        kv_ref: Any,
        known_ref: Any,
        sums_ref: Any,
        spans_ref: Any,
        out_ref: Any,
    ) -> None:
        head, tile, row, wg = (lax.axis_index(name) for name in ("head", "tile", "row", "wg"))
        tile = tiles - 1 - tile
        span = _span(spans_ref, row * tiles + tile)

        @partial(
            pl.run_scoped,
            x=_matrix(GROUPS, ROWS, shape.width),
            d=_matrix(GROUPS, ROWS, shape.width),
            known=plgpu.SMEM((GROUPS, 2, ROWS), jnp.float32),
            made=plgpu.SMEM((GROUPS, 2, ROWS), jnp.float32),
            here=plgpu.Barrier(num_arrivals=4, num_barriers=GROUPS),
            collective_axes="wg",
        )
        def scope(x: Any, d: Any, known: Any, made: Any, here: Any) -> None:
            mine = pl.ds(row * shape.queries + tile * TILE + wg * ROWS, ROWS)
            place = mine, pl.ds(head * shape.width, shape.width)
            at = (row * shape.heads + head) * shape.queries + tile * TILE + wg * ROWS

            def context(run: Callable[[Any], Any]) -> None:
                plgpu.copy_gmem_to_smem(q_ref.at[place], x.at[wg], here.at[wg])
                plgpu.copy_gmem_to_smem(d_ref.at[place], d.at[wg], here.at[wg])
                plgpu.copy_gmem_to_smem(known_ref.at[:, mine], known.at[wg], here.at[wg])
                plgpu.copy_gmem_to_smem(sums_ref.at[:, pl.ds(at, ROWS)], made.at[wg], here.at[wg])
                plgpu.barrier_wait(here.at[wg])
                acc, _ = run((_full((ROWS, shape.width), 0.0), _full((ROWS, block), 0.0)))
                x[wg] = (acc * shape.scale).astype(x.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(x.at[wg], out_ref.at[place])
                plgpu.wait_smem_to_gmem(0)

            def step(at: Any, both: Any, done: Any, carry: Any) -> Any:
                number = span[0] + lax.div(at[0], jnp.int32(2))

                def values(acc: Array, _: Array) -> tuple[Array, Array]:
                    return acc, _product(d.at[wg], _turned(both), (ROWS, block))

                def keys(acc: Array, d_weights: Array) -> tuple[Array, Array]:
                    scores = _scores(shape, _product(x.at[wg], _turned(both), (ROWS, block)))
                    seen = _masked(scores, known.at[wg], number, span, block)
                    weights = jnp.exp2(seen - _down(_load(made.at[wg], 0, 1), seen.shape))
                    d_scores = weights * (d_weights - _down(_load(made.at[wg], 1, 1), seen.shape))
                    narrow = _uncapped(shape, scores, d_scores).astype(x.dtype)
                    return _add(acc, narrow, both), d_weights

                carry = lax.cond(lax.rem(at[0], jnp.int32(2)) == 0, values, keys, *carry)
                plgpu.barrier_arrive(done)
                return carry

            kv_head, blocks = lax.div(head, jnp.int32(shape.group)), shape.keys // block
            # A block of values, then the same of keys, and so on.
            half = lambda n: (1 - lax.rem(n, jnp.int32(2))) * (shape.batch * blocks)
            place_of = lambda n: (half(n) + row * blocks + span[0] + lax.div(n, jnp.int32(2)), kv_head)
            specs = [_block((block, shape.width), place_of)]
            _pipeline(2 * (span[3] - span[0]), specs, step, context, stages)(kv_ref)

    grid = (shape.heads, tiles, shape.batch)
    spans = _spans(bounds, TILE, block)
    made = jnp.stack([sums, shared])
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    return _kernel(body, out, grid)(q, d_out, jnp.concatenate([k, v]), _known(bounds), made, spans)


def gradient_of_keys(
    shape: Shape, q: Array, k: Array, v: Array, d_out: Array, sums: Array, shared: Array, bounds: Bounds
) -> tuple[Array, Array]:
    """Of keys and values, [b*t k*h] each."""
    held, tiles, (block, stages) = shape.held, shape.keys // shape.held, shape.sizes.keys
    apart = held == TILE

    def body(
        k_ref: Any,
        v_ref: Any,
        q_ref: Any,
        d_ref: Any,
        rows_ref: Any,
        spans_ref: Any,
        dk_ref: Any,
        dv_ref: Any,
    ) -> None:
        kv_head, tile, row, wg = (lax.axis_index(name) for name in ("head", "tile", "row", "wg"))
        span = _span(spans_ref, row * tiles + tile)
        count = span[3] - span[0]
        mine = wg if apart else 0

        @partial(
            pl.run_scoped,
            x=_matrix(held // ROWS, ROWS, shape.width),
            y=_matrix(held // ROWS, ROWS, shape.width),
            here=plgpu.Barrier(num_arrivals=2, num_barriers=GROUPS),
            turn=plgpu.Barrier(num_arrivals=GROUPS),
            collective_axes="wg",
        )
        def scope(x: Any, y: Any, here: Any, turn: Any) -> None:
            first = tile * held + mine * ROWS
            place = pl.ds(row * shape.keys + first, ROWS), pl.ds(kv_head * shape.width, shape.width)
            empty = _full((ROWS, shape.width), 0.0)

            def fetch() -> None:
                plgpu.copy_gmem_to_smem(k_ref.at[place], x.at[mine], here.at[mine])
                plgpu.copy_gmem_to_smem(v_ref.at[place], y.at[mine], here.at[mine])

            def write(smem: Any, gmem: Any, sums: Array) -> None:
                smem[mine] = sums.astype(smem.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(smem.at[mine], gmem.at[place])

            def context(run: Callable[[Any], Any]) -> None:
                if apart:
                    fetch()
                else:
                    pl.when(wg == 0)(fetch)
                plgpu.barrier_wait(here.at[mine])
                sums = run((empty, empty) if apart else empty)
                if apart:
                    write(x, dk_ref, sums[0] * shape.scale)
                    write(y, dv_ref, sums[1])
                else:
                    plgpu.barrier_arrive(turn)  # the other group may not be done with what we write to
                    plgpu.barrier_wait(turn)
                    pl.when(wg == 0)(lambda: write(x, dk_ref, sums * shape.scale))
                    pl.when(wg == 1)(lambda: write(y, dv_ref, sums))
                plgpu.wait_smem_to_gmem(0)

            def weigh(at: Any, queries: Any, rows: Any) -> tuple[Array, Array]:
                """Scores and weights, keys down and queries across."""
                number = span[0] + lax.rem(at[0], count)
                scores = _scores(shape, _product(x.at[mine], _turned(queries), (ROWS, block)))
                seen = _masked_keys(scores, rows, first, number, span)
                return scores, jnp.exp2(seen - _across(_load(rows, 0, 0), seen.shape))

            def narrowed(scores: Array, weights: Array, d_weights: Array, rows: Any) -> Array:
                d_scores = weights * (d_weights - _across(_load(rows, 1, 0), scores.shape))
                return _uncapped(shape, scores, d_scores).astype(x.dtype)

            def both(at: Any, queries: Any, d: Any, rows: Any, *rest: Any) -> Any:
                q_done, d_done, rows_done, (d_k, d_v) = rest
                scores, weights = weigh(at, queries, rows)
                narrow = weights.astype(x.dtype)

                def multiply(refs: Any) -> None:
                    plgpu.wgmma(refs[0], narrow, d)
                    plgpu.wgmma(refs[1], y.at[mine], _turned(d))

                start = plgpu.ACC.init(d_v), plgpu.ACC.init(_full((ROWS, block), 0.0))
                d_v, d_weights = pl.run_state(multiply)(start)
                plgpu.barrier_arrive(d_done)
                d_scores = narrowed(scores, weights, d_weights, rows)
                plgpu.barrier_arrive(rows_done)
                d_k = _add(d_k, d_scores, queries)
                plgpu.barrier_arrive(q_done)
                return d_k, d_v

            def one(at: Any, queries: Any, d: Any, rows: Any, *rest: Any) -> Array:
                *done, sums = rest
                scores, weights = weigh(at, queries, rows)

                def of_keys(sums: Array) -> Array:
                    d_weights = _product(y.at[mine], _turned(d), (ROWS, block))
                    return _add(sums, narrowed(scores, weights, d_weights, rows), queries)

                sums = lax.cond(wg == 0, of_keys, lambda sums: _add(sums, weights.astype(x.dtype), d), sums)
                for barrier in done:
                    plgpu.barrier_arrive(barrier)
                return sums

            blocks = shape.queries // block
            head = lambda n: kv_head * shape.group + lax.div(n, count)
            queries = lambda n: (row * blocks + span[0] + lax.rem(n, count), head(n))
            facts = lambda n: (0, (row * shape.heads + head(n)) * blocks + span[0] + lax.rem(n, count))
            specs = [_block((block, shape.width), queries)] * 2 + [plgpu.BlockSpec((4, block), facts)]
            step = both if apart else one
            _pipeline(count * shape.group, specs, step, context, stages)(q_ref, d_ref, rows_ref)

    grid = (shape.kv_heads, tiles, shape.batch)
    spans = _spans_of_keys(bounds, block, shape.keys, held)
    known = _known(bounds).reshape(2, shape.batch, 1, shape.queries)
    known = jnp.broadcast_to(known, (2, shape.batch, shape.heads, shape.queries)).reshape(2, -1)
    rows = jnp.concatenate([jnp.stack([sums, shared]), known])
    out = jax.ShapeDtypeStruct(k.shape, k.dtype)
    return _kernel(body, (out, out), grid)(k, v, q, d_out, rows, spans)


def _known(bounds: Bounds) -> Array:
    """As numbers beside which positions, of the same kind, can be put: exact up to 2**24."""
    return jnp.stack([bounds.first.ravel(), bounds.last.ravel()]).astype(jnp.float32)


def _spans(bounds: Bounds, tile: int, block: int) -> Array:
    """Of the blocks of keys that each tile of queries visits: the first, the first that all of it sees whole,
    the first that it no longer does, and the end; one after the other."""
    firsts, lasts = (x.reshape(x.shape[0], -1, tile) for x in bounds)
    low, high = firsts.min(-1) // block, -(-lasts.max(-1) // block)
    whole, until = -(-firsts.max(-1) // block), lasts.min(-1) // block
    whole = jnp.clip(whole, low, high)
    return jnp.stack([low, whole, jnp.clip(until, whole, high), high], -1).astype(jnp.int32).ravel()


def _spans_of_keys(bounds: Bounds, block: int, keys: int, tile: int) -> Array:
    """The same for tiles of keys and blocks of queries. Neither end of what is seen ever goes back from one
    query to the next, so that these are intervals as well."""
    firsts, lasts = (x.reshape(x.shape[0], 1, -1, block) for x in bounds)
    begin = jnp.arange(0, keys, tile)[None, :, None]
    end = begin + tile
    count = lambda which: which.sum(-1, dtype=jnp.int32)
    low, high = count(lasts.max(-1) <= begin), count(firsts.min(-1) < end)
    whole, until = count(lasts.min(-1) < end), count(firsts.max(-1) <= begin)
    whole = jnp.clip(whole, low, high)
    return jnp.stack([low, whole, jnp.clip(until, whole, high), high], -1).ravel()


def _span(spans_ref: Any, number: Array) -> tuple[Array, Array, Array, Array]:
    low, whole, until, high = (spans_ref[number * 4 + n] for n in range(4))
    return low, whole, until, high


def _scores(shape: Shape, products: Array) -> Array:
    """In units of log 2, which spares a product in every exponential."""
    if shape.soft_cap is None:
        return products * (shape.scale * LOG2E)
    return shape.soft_cap * LOG2E * jnp.tanh(products * (shape.scale / shape.soft_cap))


def _uncapped(shape: Shape, scores: Array, d: Array) -> Array:
    if shape.soft_cap is None:
        return d
    share = scores * (1 / (shape.soft_cap * LOG2E))
    return d * (1 - share * share)


def _masked(scores: Array, known: Any, number: Array, span: Any, block: int) -> Array:
    """Queries down, keys across."""

    def hide(scores: Array) -> Array:
        places = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        keys = (places + number * block).astype(jnp.float32)
        first, last = (_down(_load(known, n, 1), scores.shape) for n in range(2))
        return jnp.where((keys >= first) & (keys < last), scores, HIDDEN)

    return lax.cond((number >= span[1]) & (number < span[2]), lambda scores: scores, hide, scores)


def _masked_keys(scores: Array, rows: Any, first: Array, number: Array, span: Any) -> Array:
    """Keys down, queries across."""

    def hide(scores: Array) -> Array:
        places = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
        keys = (places + first).astype(jnp.float32)
        low, high = (_across(_load(rows, n, 0), scores.shape) for n in (2, 3))
        return jnp.where((keys >= low) & (keys < high), scores, HIDDEN)

    return lax.cond((number >= span[1]) & (number < span[2]), lambda scores: scores, hide, scores)


def _product(a: Any, b: Any, shape: tuple[int, int]) -> Array:
    def multiply(ref: Any) -> Array:
        plgpu.wgmma(ref, a, b)
        return ref[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def _add(sums: Array, a: Any, b: Any) -> Array:
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(sums))


def _pipeline(steps: Any, specs: Any, body: Any, context: Any, stages: int) -> Any:
    return plgpu.emit_pipeline_warp_specialized(
        body,
        grid=(steps,),
        memory_registers=40,
        in_specs=specs,
        wg_axis="wg",
        num_compute_wgs=GROUPS,
        max_concurrent_steps=stages,
        manual_consumed_barriers=True,
        compute_context=context,
    )


def _block(shape: tuple[int, int], index: Callable[[Array], tuple[Any, Any]]) -> Any:
    return plgpu.BlockSpec(shape, index, transforms=_swizzled(), memory_space=plgpu.SMEM)


def _kernel(body: Callable[..., None], out: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    names = ("head", "tile", "row")
    mesh = plgpu.Mesh(grid=grid, grid_names=names, num_threads=GROUPS + 1, thread_name="wg")
    return pl.kernel(body, out, mesh=mesh, compiler_params=plgpu.CompilerParams(approx_math=True))


def _matrix(*shape: int) -> Any:
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=_swizzled())


def _swizzled() -> tuple[Any, ...]:
    return plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)


def _turned(ref: Any) -> Any:
    return plgpu.transpose_ref(ref, (1, 0))


def _full(shape: tuple[int, int], value: float) -> Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), plgpu.Layout.WGMMA)


def _row(value: float) -> Array:
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def _load(ref: Any, number: int, axis: int) -> Array:
    """A row of numbers, one for each row (axis 1 is summed over) or column (axis 0) of a tile."""
    return plgpu.load(ref, (number,), layout=plgpu.Layout.WGMMA.reduce(axis))


def _down(x: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(x, shape, [0])


def _across(x: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(x, shape, [1])
