"""The Pallas kernels of hopper.py, for Hopper GPUs.

Every part of a result is summed by one thread block in a fixed order, without atomics: the same bits every
time. Two warpgroups share a tile, and a third loads their inputs. Pallas' interpreter cannot run these
kernels: on a CPU they are only lowered."""

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
    BlockIndex,
    Ref,
    block_spec,
    make_pipeline,
    swizzle,
    transpose,
)
from headrace.nn.module import PyTree
from headrace.nn.soft_cap import apply_soft_cap, soft_cap_slope

Array = jax.Array


class Operand(NamedTuple):
    """A factor of a matmul, loaded block by block along the summed axis."""

    ref: Ref
    block: tuple[int, int]  # shape
    block_index: BlockIndex


TOKENS, VOCAB = 128, 256  # sizes of a tile
STEP = 64  # length of the part of a summed axis that is multiplied at a time
HIDDEN_COLUMNS, UNEMBED_COLUMNS = 256, 128  # of the gradients' blocks that one thread block computes
WIDTH_MULTIPLE = HIDDEN_COLUMNS
STAGES = 3  # blocks of inputs in shared memory
LIST = 128  # numbers in a row of a list: TMA moves at most 256
MULTIPROCESSORS = 132  # of an H100 or H200, if none is attached


class TileSchedule(NamedTuple):
    """The tiles of one round.

    A tile is a block of tokens and a row of tiles, which is a block of the vocabulary. Tiles are numbered by
    row, then by block. Each has a slot, which stores the gradient of its logits."""

    tiles: Array  # number of the tile in each slot
    used: Array  # number of slots that have a tile: the first ones
    row_span: Array  # first row, and the row after the last
    row_ends: Array  # number of tiles selected before each row, of all rounds
    slots_by_block: Array  # slots, sorted by block of tokens
    block_starts: Array  # where those of each block begin in `slots_by_block`; one more for the end


def compute_tile_max_and_logsumexp(x: Array, w: Array, cap: float | None) -> tuple[Array, Array]:
    """Compute the largest logit and the logsumexp of each token [c d] in each row of tiles of the matrix
    [v d]. Returns two arrays [v / 256, c]."""
    blocks, rows, half = len(x) // TOKENS, len(w) // VOCAB, TOKENS // WARPGROUPS
    per_token = plgpu.SMEM((WARPGROUPS, half), jnp.float32)

    def body(x_ref: Ref, w_ref: Ref, *out_refs: Ref) -> None:
        @partial(
            pl.run_scoped,
            buffers=_allocate_buffers(x_ref, w_ref, (TOKENS, STEP), (VOCAB, STEP)),
            staging=(per_token, per_token),
            collective_axes="wg",
        )
        def run(buffers: PyTree, staging: tuple[Ref, Ref]) -> None:
            wg = lax.axis_index("wg")

            def compute_tile(tile: Array) -> None:
                i, j = lax.rem(tile, jnp.int32(blocks)), lax.div(tile, jnp.int32(blocks))

                def write(raw_logits: Array) -> None:
                    logits = apply_soft_cap(raw_logits, cap)
                    largest = logits.max(axis=1)
                    sums = jnp.exp(logits - lax.broadcast_in_dim(largest, logits.shape, [0])).sum(axis=1)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    staging[0][wg], staging[1][wg] = largest, largest + jnp.log(sums)
                    plgpu.commit_smem()
                    tokens = pl.ds(i * TOKENS + wg * half, half)
                    for smem, gmem in zip(staging, out_refs, strict=True):
                        plgpu.copy_smem_to_gmem(smem.at[wg], gmem.at[j, tokens])

                _multiply_tile(x_ref, w_ref, i, j, buffers, write)

            _for_each(blocks * rows, compute_tile)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    out = jax.ShapeDtypeStruct((rows, len(x)), jnp.float32)
    return _make_kernel(body, (out, out))(x, w)


def compute_tile_d_logits(
    x: Array, w: Array, per_token: Array, schedule: TileSchedule, cap: float | None
) -> Array:
    """Compute the gradients of the raw logits of a round's tiles, [slots * 128, 256].

    `per_token` [4 c] has each token's logsumexp and its gradient, and the target's row and gradient."""
    blocks, half = len(x) // TOKENS, TOKENS // WARPGROUPS

    def body(x_ref: Ref, w_ref: Ref, per_token_ref: Ref, tiles_ref: Ref, used_ref: Ref, out_ref: Ref) -> None:
        @partial(
            pl.run_scoped,
            buffers=_allocate_buffers(x_ref, w_ref, (TOKENS, STEP), (VOCAB, STEP)),
            fetched=plgpu.Barrier(num_barriers=WARPGROUPS),
            per_token=plgpu.SMEM((WARPGROUPS, 4, half), jnp.float32),
            staging=plgpu.SMEM((WARPGROUPS, half, VOCAB), x.dtype, transforms=swizzle()),
            collective_axes="wg",
        )
        def run(buffers: PyTree, fetched: Barrier, per_token: AbstractRef, staging: Ref) -> None:
            wg = lax.axis_index("wg")

            def compute_tile(slot: Array) -> None:
                tile = tiles_ref[slot]
                i, j = lax.rem(tile, jnp.int32(blocks)), lax.div(tile, jnp.int32(blocks))

                def fetch() -> None:
                    tokens = pl.ds(i * TOKENS + wg * half, half)
                    plgpu.copy_gmem_to_smem(per_token_ref.at[:, tokens], per_token.at[wg], fetched.at[wg])

                def write(raw_logits: Array) -> None:
                    plgpu.barrier_wait(fetched.at[wg])
                    broadcast = lambda n: lax.broadcast_in_dim(
                        plgpu.load(per_token, (wg, n), layout=plgpu.Layout.WGMMA.reduce(1)),
                        raw_logits.shape,
                        [0],
                    )
                    logits = apply_soft_cap(raw_logits, cap)
                    d = broadcast(1) * jnp.exp(logits - broadcast(0))
                    columns = plgpu.broadcasted_iota(jnp.int32, d.shape, 1, layout=plgpu.Layout.WGMMA)
                    is_target = (columns + j * VOCAB).astype(jnp.float32) == broadcast(2)
                    d = jnp.where(is_target, d + broadcast(3), d)
                    if cap is not None:
                        d = d * soft_cap_slope(logits, cap)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    staging[wg] = d.astype(staging.dtype)
                    plgpu.commit_smem()
                    rows = pl.ds(slot * TOKENS + wg * half, half)
                    plgpu.copy_smem_to_gmem(staging.at[wg], out_ref.at[rows])

                _multiply_tile(x_ref, w_ref, i, j, buffers, write, fetch)

            _for_each(used_ref[0], compute_tile)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    out = jax.ShapeDtypeStruct((len(schedule.tiles) * TOKENS, VOCAB), x.dtype)
    return _make_kernel(body, out)(x, w, per_token, schedule.tiles, schedule.used[None])


def write_unembed_gradient(d_unembed_ref: Ref, d_logits: Array, x: Array, schedule: TileSchedule) -> None:
    """Write the rows of the matrix's gradient [v d] that belong to the rows of tiles of a round."""
    blocks, column_blocks, half = len(x) // TOKENS, x.shape[1] // UNEMBED_COLUMNS, VOCAB // WARPGROUPS
    list_shape = len(schedule.tiles) // LIST, LIST

    def body(d_ref: Ref, x_ref: Ref, tiles_ref: Ref, ends_ref: Ref, span_ref: Ref, out_ref: Ref) -> None:
        @partial(
            pl.run_scoped,
            buffers=_allocate_buffers(d_ref, x_ref, (STEP, VOCAB), (STEP, UNEMBED_COLUMNS)),
            fetched=plgpu.Barrier(),
            slot_tiles=plgpu.SMEM(list_shape, jnp.int32),
            staging=plgpu.SMEM((WARPGROUPS, half, STEP), out_ref.dtype, transforms=swizzle(out_ref.dtype)),
            collective_axes="wg",
        )
        def run(buffers: PyTree, fetched: Barrier, slot_tiles: Ref, staging: Ref) -> None:
            wg = lax.axis_index("wg")
            _fetch_lists([(tiles_ref, slot_tiles)], fetched)
            first_end = ends_ref[span_ref[0]]

            def compute_block(block: Array) -> None:
                j = span_ref[0] + lax.div(block, jnp.int32(column_blocks))
                column = lax.rem(block, jnp.int32(column_blocks))
                first_slot, end_slot = ends_ref[j] - first_end, ends_ref[j + 1] - first_end
                steps = TOKENS // STEP

                def x_block(k: Array) -> tuple[Array, Array]:
                    tile = _list_item(slot_tiles, first_slot + lax.div(k, jnp.int32(steps)))
                    tokens = lax.rem(tile, jnp.int32(blocks))
                    return tokens * steps + lax.rem(k, jnp.int32(steps)), column

                def write(sums: Array) -> None:
                    sums = sums.astype(staging.dtype)
                    for q in range(UNEMBED_COLUMNS // STEP):
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        staging[wg] = sums[:, q * STEP : (q + 1) * STEP]
                        plgpu.commit_smem()
                        rows = pl.ds(j * VOCAB + wg * half, half)
                        columns = pl.ds(column * UNEMBED_COLUMNS + q * STEP, STEP)
                        plgpu.copy_smem_to_gmem(staging.at[wg], out_ref.at[rows, columns])

                _multiply(
                    (end_slot - first_slot) * steps,
                    Operand(d_ref, (STEP, VOCAB), lambda k: (first_slot * steps + k, 0)),
                    Operand(x_ref, (STEP, UNEMBED_COLUMNS), x_block),
                    lambda d, x: (transpose(d.at[:, pl.ds(wg * half, half)]), x),
                    (half, UNEMBED_COLUMNS),
                    buffers,
                    write,
                )

            _for_each((span_ref[1] - span_ref[0]) * column_blocks, compute_block)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    tiles = schedule.tiles.reshape(list_shape)
    _make_kernel(body, ())(d_logits, x, tiles, schedule.row_ends, schedule.row_span, d_unembed_ref)


def add_hidden_gradient(
    high_ref: Ref, low_ref: Ref, d_logits: Array, w: Array, schedule: TileSchedule
) -> None:
    """Add a round to the gradient of the hidden states [c d].

    The sum is `high_ref` + `low_ref`, two numbers of 16 bits: the result, and the error of its rounding."""
    blocks, column_blocks = len(schedule.block_starts) - 1, w.shape[1] // HIDDEN_COLUMNS
    half, list_shape = TOKENS // WARPGROUPS, (len(schedule.tiles) // LIST, LIST)

    def body(
        d_ref: Ref, w_ref: Ref, rows_ref: Ref, slots_ref: Ref, starts_ref: Ref, high: Ref, low: Ref
    ) -> None:
        halves = plgpu.SMEM((WARPGROUPS, half, STEP), d_logits.dtype, transforms=swizzle())

        @partial(
            pl.run_scoped,
            buffers=_allocate_buffers(d_ref, w_ref, (TOKENS, STEP), (STEP, HIDDEN_COLUMNS)),
            fetched=plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS + 1),
            lists=(plgpu.SMEM(list_shape, jnp.int32),) * 2,
            staging=(halves, halves),
            collective_axes="wg",
        )
        def run(buffers: PyTree, fetched: Barrier, lists: tuple[Ref, Ref], staging: tuple[Ref, Ref]) -> None:
            wg = lax.axis_index("wg")
            steps = VOCAB // STEP
            slots, rows = lists
            _fetch_lists([(slots_ref, slots), (rows_ref, rows)], fetched.at[WARPGROUPS])

            def compute_block(block: Array) -> None:
                i = lax.div(block, jnp.int32(column_blocks))
                column = lax.rem(block, jnp.int32(column_blocks))
                start, end = starts_ref[i], starts_ref[i + 1]

                def d_block(k: Array) -> tuple[Array, Array]:
                    slot = _list_item(slots, start + lax.div(k, jnp.int32(steps)))
                    return slot, lax.rem(k, jnp.int32(steps))

                def w_block(k: Array) -> tuple[Array, Array]:
                    row = _list_item(rows, start + lax.div(k, jnp.int32(steps)))
                    return row * steps + lax.rem(k, jnp.int32(steps)), column

                def add(sums: Array) -> None:
                    for q in range(HIDDEN_COLUMNS // STEP):
                        tokens = pl.ds(i * TOKENS + wg * half, half)
                        place = tokens, pl.ds(column * HIDDEN_COLUMNS + q * STEP, STEP)
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        for smem, gmem in zip(staging, (high, low), strict=True):
                            plgpu.copy_gmem_to_smem(gmem.at[place], smem.at[wg], fetched.at[wg])
                        plgpu.barrier_wait(fetched.at[wg])
                        total = sums[:, q * STEP : (q + 1) * STEP]
                        for smem in staging:
                            part = plgpu.load(smem, (wg,), layout=plgpu.Layout.WGMMA)  # type: ignore[arg-type]
                            total += part.astype(jnp.float32)
                        rounded = total.astype(d_logits.dtype)
                        staging[0][wg] = rounded
                        staging[1][wg] = (total - rounded.astype(jnp.float32)).astype(d_logits.dtype)
                        plgpu.commit_smem()
                        for smem, gmem in zip(staging, (high, low), strict=True):
                            plgpu.copy_smem_to_gmem(smem.at[wg], gmem.at[place])

                @pl.when(end > start)
                def add_tiles() -> None:
                    _multiply(
                        (end - start) * steps,
                        Operand(d_ref, (TOKENS, STEP), d_block),
                        Operand(w_ref, (STEP, HIDDEN_COLUMNS), w_block),
                        lambda d, w: (d.at[pl.ds(wg * half, half)], w),
                        (half, HIDDEN_COLUMNS),
                        buffers,
                        add,
                    )

            _for_each(blocks * column_blocks, compute_block)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    rows = (schedule.tiles[schedule.slots_by_block] // blocks).reshape(list_shape)
    slots = schedule.slots_by_block.reshape(list_shape)
    _make_kernel(body, ())(d_logits, w, rows, slots, schedule.block_starts, high_ref, low_ref)


def _multiply_tile(
    x: Ref,
    w: Ref,
    i: Array,
    j: Array,
    buffers: PyTree,
    write: Callable[[Array], None],
    fetch: Callable[[], None] = lambda: None,
) -> None:
    """Compute the raw logits of tokens of block i and vocabulary of row j, half of the tokens in each
    warpgroup, which then calls `write` with them."""
    half = TOKENS // WARPGROUPS
    tokens = pl.ds(lax.axis_index("wg") * half, half)
    _multiply(
        x.shape[1] // STEP,
        Operand(x, (TOKENS, STEP), lambda k: (i, k)),
        Operand(w, (VOCAB, STEP), lambda k: (j, k)),
        lambda x, w: (x.at[tokens], transpose(w)),
        (half, VOCAB),
        buffers,
        write,
        fetch,
    )


def _multiply(
    steps: int | Array,
    a: Operand,
    b: Operand,
    select_half: Callable[[Ref, Ref], tuple[Ref, Ref]],
    shape: tuple[int, int],
    buffers: PyTree,
    write: Callable[[Array], None],
    fetch: Callable[[], None] = lambda: None,
) -> None:
    """Sum the products of `steps` blocks of both operands, in registers of shape `shape`.

    The third warpgroup loads blocks ahead. The others call `fetch`, multiply what `select_half` returns of
    each pair of blocks, and call `write` with their sums."""

    def context(run_loop: Callable[[Ref], Ref]) -> None:
        @partial(pl.run_scoped, sums=plgpu.ACC(shape, jnp.float32))
        def run(sums: Ref) -> None:
            fetch()
            run_loop(sums)
            write(sums[...])

    def multiply_blocks(_: tuple[Array, ...], a: Ref, b: Ref, sums: Ref) -> Ref:
        plgpu.wgmma(sums, *select_half(a, b))  # type: ignore[arg-type]
        plgpu.wgmma_wait(0)
        return sums

    specs = [block_spec(a.block, a.block_index), block_spec(b.block, b.block_index)]
    pipeline = make_pipeline(steps, specs, multiply_blocks, context, stages=STAGES)
    pipeline(a.ref, b.ref, allocations=buffers)


def _allocate_buffers(a: Ref, b: Ref, a_block: tuple[int, int], b_block: tuple[int, int]) -> PyTree:
    """Make the types of the buffers that a pipeline with blocks of these shapes needs."""
    do_nothing = lambda *_, **__: None
    specs = [block_spec(block, lambda k: (0, k)) for block in (a_block, b_block)]
    return make_pipeline(STAGES, specs, do_nothing, do_nothing, stages=STAGES).get_allocations(a, b)


def _list_item(items: Ref, n: Array) -> Array:
    """Read item n of a list that is stored in rows of `LIST`."""
    return items[lax.div(n, jnp.int32(LIST)), lax.rem(n, jnp.int32(LIST))]


def _fetch_lists(lists: list[tuple[Ref, Ref]], fetched: Barrier) -> None:
    """Copy lists that every step reads to shared memory: (from, to) each."""

    @pl.when(lax.axis_index("wg") == 0)
    def fetch() -> None:
        for gmem, smem in lists:
            plgpu.copy_gmem_to_smem(gmem, smem, fetched)  # type: ignore[arg-type]

    plgpu.barrier_wait(fetched)


def _for_each(count: int | Array, run: Callable[[Array], None]) -> None:
    """Distribute the items 0 to `count` - 1 to thread blocks, one of which is on each multiprocessor, and
    call `run` with each."""
    first, thread_blocks = lax.axis_index("sm"), lax.axis_size("sm")
    local_count = lax.div(jnp.int32(count) - first + thread_blocks - 1, jnp.int32(thread_blocks))

    @pl.loop(0, local_count)
    def run_item(n: Array) -> None:
        run(first + n * thread_blocks)


def _make_kernel(body: Callable[..., None], out: PyTree) -> Callable[..., PyTree]:
    """Make a kernel that runs `body` on every multiprocessor."""
    multiprocessors = getattr(jax.devices()[0], "core_count", None) or MULTIPROCESSORS
    mesh = plgpu.Mesh(
        grid=(multiprocessors,), grid_names=("sm",), num_threads=WARPGROUPS + 1, thread_name="wg"
    )
    return pl.kernel(body, out, mesh=mesh, compiler_params=plgpu.CompilerParams(approx_math=True))
