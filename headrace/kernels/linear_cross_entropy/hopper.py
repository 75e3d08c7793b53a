"""The head and its loss by tiles of tokens and vocabulary (arXiv 2411.09009), in kernels for Hopper GPUs: the
logits live in registers.

The first kernel finds each token's logsumexp, and the highest logit of every tile. What follows goes in
rounds of as many tiles as there are slots for: the second kernel makes a tile's logits again and writes their
gradient to its slot, the third sums slots into rows of the vocabulary's gradient, the fourth into that of the
hidden states. Every part of a result is summed by one block of threads in a fixed order: no atomics,
and the same bits every time. With a filter, tiles without a target and without a probability that reaches it
are never made again. Pallas' interpreter cannot run these kernels: on a CPU they are only lowered."""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from headrace.kernels.linear_cross_entropy import stats
from headrace.kernels.linear_cross_entropy.stats import (
    Array,
    HeadSharding,
    HeadSpec,
    LossTotals,
    Stats,
    add_losses,
    psum,
    zero,
)
from headrace.nn.compile_target import compile_error

TOKENS, VOCAB, STEP = 128, 256, 64  # of a tile, and of the axis that a product sums over at a time
WIDE, NARROW = 256, 128  # columns of the results of the fourth and the third kernel
GROUPS = 2  # of threads that share a tile; a third feeds them
STAGES = 3
SLOTS = 384  # tiles of gradients in memory at least: 24 MiB
LIST = 128  # numbers in a row of a list: TMA moves at most 256
PROCESSORS = 132  # of an H100 or H200, where none is attached


class TileSchedule(NamedTuple):
    """One round. Tiles are numbered by vocabulary, then tokens: `tiles` [slots] are the first `used` slots'
    own. `span` are the first and the last row of tiles, and `ends` says for all rows where theirs end among
    those chosen. The slots of block i of the tokens are in `mine`, from first[i] to first[i + 1]."""

    tiles: Array
    used: Array
    span: Array
    ends: Array
    mine: Array
    first: Array


def totals(
    head: HeadSpec, split: HeadSharding, hidden: Array, unembed: Array, targets: Array, weights: Array
) -> LossTotals:
    x, y, w = (array.reshape(-1, *array.shape[2:]) for array in (hidden, targets, weights))
    matrix = unembed.astype(x.dtype)
    stats, _ = _stats(head, split, x, matrix, y, logsumexp(x, matrix, head.soft_cap)[1])
    return psum(add_losses(zero(), stats, head.per_token(stats), w), split.tokens)


def totals_and_gradients(
    head: HeadSpec, split: HeadSharding, hidden: Array, unembed: Array, targets: Array, weights: Array
) -> tuple[LossTotals, Array, Array]:
    x, y, w = (array.reshape(-1, *array.shape[2:]) for array in (hidden, targets, weights))
    matrix = unembed.astype(x.dtype)
    top, lse = logsumexp(x, matrix, head.soft_cap)
    stats, own = _stats(head, split, x, matrix, y, lse)
    losses, pull = jax.vjp(head.per_token, stats)
    d_stats = pull(w)[0]
    rows = jnp.stack([stats.lse, d_stats.lse, own.astype(jnp.float32), d_stats.target])
    chosen = _chosen(head, top, stats, d_stats, own)
    tiles, blocks = chosen.shape
    ends = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(chosen.sum(1, dtype=jnp.int32))])
    slots = max(SLOTS, -(-blocks // LIST) * LIST)
    numbers = jnp.nonzero(chosen.ravel(), size=chosen.size + slots, fill_value=0)[0].astype(jnp.int32)

    def step(carry: Any) -> Any:
        start, *sums = carry
        work = _round(numbers, ends, start, slots, blocks)
        d = d_logits(x, matrix, rows, work, head.soft_cap)
        d_unembed, high, low = (jax.new_ref(array) for array in sums)
        write_unembed(d_unembed, d, x, work)
        add_to_hidden(high, low, d, matrix, work)
        return work.span[1], *(jax.freeze(ref) for ref in (d_unembed, high, low))

    start = jnp.int32(0), jnp.zeros_like(unembed), jnp.zeros_like(x), jnp.zeros_like(x)
    _, d_unembed, d_x, low = lax.while_loop(lambda carry: carry[0] < tiles, step, start)
    smoothed = _uses_mean(head)
    if split.vocab or smoothed:
        d_x = psum(d_x.astype(jnp.float32) + low, split.vocab)
        if smoothed:
            row, vocab = _average(matrix, split)
            d_x += d_stats.mean[:, None] * row
            of_each = (d_stats.mean[:, None] * x).sum(0) / vocab
            d_unembed = (d_unembed + of_each).astype(d_unembed.dtype)
        d_x = d_x.astype(x.dtype)
    sums = psum(add_losses(zero(), stats, losses, w), split.tokens)
    return sums, d_x.reshape(hidden.shape), psum(d_unembed, split.tokens)


def unsupported_reason(head: HeadSpec, split: HeadSharding, hidden: Any, unembed: Any) -> str | None:
    """Why the kernels cannot be used for one device's arrays, if they cannot."""
    device, (rows, width) = jax.devices()[0], unembed.shape
    if device.platform != "gpu" or not str(getattr(device, "compute_capability", "")).startswith("9."):
        return "they are for Hopper GPUs"
    if hidden.dtype != jnp.bfloat16:
        return f"they are for bfloat16, and the activations are {hidden.dtype}"
    if head.without is not None:
        return "they rule out no token"
    if split.width:
        return "mesh.fsdp splits the vocabulary's matrix"
    sizes = (math.prod(hidden.shape[:-1]), "tokens", TOKENS), (rows, "rows", VOCAB), (width, "columns", WIDE)
    for size, name, tile in sizes:
        if size % tile:
            return f"{size} {name} are not a multiple of {tile}"
    if head.soft_cap is not None and _uses_mean(head):
        return "they do not know the mean of capped logits, which label smoothing needs"
    return _try(head.soft_cap, width, unembed.dtype)


@lru_cache
def _try(soft_cap: float | None, width: int, dtype: Any) -> str | None:
    """What the compiler says of the least that the kernels do."""
    shapes = [
        jax.ShapeDtypeStruct((1, TOKENS, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((VOCAB, width), dtype),
        jax.ShapeDtypeStruct((1, TOKENS), jnp.int32),
        jax.ShapeDtypeStruct((1, TOKENS), jnp.float32),
    ]
    head = HeadSpec(lambda stats: stats.lse - stats.target, soft_cap)
    return compile_error("gpu", partial(totals_and_gradients, head, HeadSharding()), *shapes)


def _uses_mean(head: HeadSpec) -> bool:
    number = jnp.zeros((), jnp.float32)
    jaxpr = jax.make_jaxpr(head.per_token)(Stats(number, number, number)).jaxpr
    mean = jaxpr.invars[2]
    return any(mean in equation.invars for equation in jaxpr.eqns) or mean in jaxpr.outvars


def _stats(
    head: HeadSpec, split: HeadSharding, x: Array, matrix: Array, targets: Array, lse: Array
) -> tuple[Stats, Array]:
    """Of the tiles' logsumexp; and the numbers of the targets among our own rows of the vocabulary. The mean
    of logits that are not capped is the product with the vocabulary's average row: no kernel need know it."""
    lse = jax.nn.logsumexp(lse, axis=0)
    own = targets - stats.first_column(len(matrix), split)
    here = (own >= 0) & (own < len(matrix))
    target = jnp.einsum("cd,cd->c", x, matrix[jnp.where(here, own, 0)], preferred_element_type=jnp.float32)
    target = jnp.where(here, _capped(target, head.soft_cap), 0)
    if split.vocab:
        highest = lax.pmax(lse, split.vocab)
        lse = highest + jnp.log(psum(jnp.exp(lse - highest), split.vocab))
        target = psum(target, split.vocab)
    mean = (x * _average(matrix, split)[0]).sum(1) if _uses_mean(head) else jnp.zeros_like(lse)
    return Stats(lse, target, mean), own


def _average(matrix: Array, split: HeadSharding) -> tuple[Array, Any]:
    """Of all rows of the vocabulary, and how many they are."""
    vocab = len(matrix) * psum(1, split.vocab)
    return psum(matrix.sum(0, dtype=jnp.float32), split.vocab) / vocab, vocab


def _chosen(head: HeadSpec, top: Array, stats: Stats, d_stats: Stats, own: Array) -> Array:
    """The tiles [t i] that are to be made again. The first of each row always is, so that all rows of the
    gradient are written."""
    tiles, tokens = top.shape
    shape = tiles, tokens // TOKENS, TOKENS
    if not head.filter:
        return jnp.ones(shape[:2], bool)
    likely = (jnp.exp(top - stats.lse) >= head.filter) & (d_stats.lse != 0)
    target = (own // VOCAB == jnp.arange(tiles)[:, None]) & (d_stats.target != 0)
    return (likely | target).reshape(shape).any(2).at[:, 0].set(True)


def _round(numbers: Array, ends: Array, start: Array, slots: int, blocks: int) -> TileSchedule:
    """As many whole rows of tiles from `start` on as there are slots for."""
    until = (ends <= ends[start] + slots).sum(dtype=jnp.int32) - 1
    count = ends[until] - ends[start]
    tiles = lax.dynamic_slice(numbers, (ends[start],), (slots,))
    block = jnp.where(jnp.arange(slots) < count, tiles % blocks, blocks)
    mine = jnp.argsort(block, stable=True).astype(jnp.int32)
    first = (block[None] < jnp.arange(blocks + 1)[:, None]).sum(1, dtype=jnp.int32)
    return TileSchedule(tiles, count, jnp.stack([start, until]), ends, mine, first)


def logsumexp(x: Array, w: Array, soft_cap: float | None) -> tuple[Array, Array]:
    """The highest logit and the logsumexp of each tile's row, [V / 256, N]."""
    blocks, tiles, half = len(x) // TOKENS, len(w) // VOCAB, TOKENS // GROUPS
    row = plgpu.SMEM((GROUPS, half), jnp.float32)

    def body(x_ref: Any, w_ref: Any, *refs: Any) -> None:
        @partial(
            pl.run_scoped,
            feed=_buffers(x_ref, w_ref, (TOKENS, STEP), (VOCAB, STEP)),
            out=(row, row),
            collective_axes="wg",
        )
        def scope(feed: Any, out: Any) -> None:
            wg = lax.axis_index("wg")

            def tile(item: Array) -> None:
                i, j = lax.rem(item, jnp.int32(blocks)), lax.div(item, jnp.int32(blocks))

                def end(acc: Array) -> None:
                    scores = _capped(acc, soft_cap)
                    top = scores.max(axis=1)
                    sums = jnp.exp(scores - lax.broadcast_in_dim(top, scores.shape, [0])).sum(axis=1)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    out[0][wg], out[1][wg] = top, top + jnp.log(sums)
                    plgpu.commit_smem()
                    rows = pl.ds(i * TOKENS + wg * half, half)
                    for smem, gmem in zip(out, refs, strict=True):
                        plgpu.copy_smem_to_gmem(smem.at[wg], gmem.at[j, rows])

                _tile(x_ref, w_ref, i, j, feed, end)

            _each(blocks * tiles, tile)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    out = jax.ShapeDtypeStruct((tiles, len(x)), jnp.float32)
    return _kernel(body, (out, out))(x, w)


def d_logits(x: Array, w: Array, rows: Array, work: TileSchedule, soft_cap: float | None) -> Array:
    """Gradients of the logits of a round's tiles, [slots * 128, 256]. `rows` are [4 N]: logsumexp, its
    gradient, the target's number and gradient."""
    blocks, half = len(x) // TOKENS, TOKENS // GROUPS

    def body(x_ref: Any, w_ref: Any, rows_ref: Any, tiles_ref: Any, count_ref: Any, out_ref: Any) -> None:
        @partial(
            pl.run_scoped,
            feed=_buffers(x_ref, w_ref, (TOKENS, STEP), (VOCAB, STEP)),
            known=plgpu.SMEM((GROUPS, 4, half), jnp.float32),
            out=plgpu.SMEM((GROUPS, half, VOCAB), x.dtype, transforms=_swizzled()),
            here=plgpu.Barrier(num_barriers=GROUPS),
            collective_axes="wg",
        )
        def scope(feed: Any, known: Any, out: Any, here: Any) -> None:
            wg = lax.axis_index("wg")

            def tile(slot: Array) -> None:
                number = tiles_ref[slot]
                i, j = lax.rem(number, jnp.int32(blocks)), lax.div(number, jnp.int32(blocks))

                def begin() -> None:
                    mine = pl.ds(i * TOKENS + wg * half, half)
                    plgpu.copy_gmem_to_smem(rows_ref.at[:, mine], known.at[wg], here.at[wg])

                def end(acc: Array) -> None:
                    plgpu.barrier_wait(here.at[wg])
                    wide = lambda n: lax.broadcast_in_dim(
                        plgpu.load(known, (wg, n), layout=plgpu.Layout.WGMMA.reduce(1)), acc.shape, [0]
                    )
                    scores = _capped(acc, soft_cap)
                    d = wide(1) * jnp.exp(scores - wide(0))
                    columns = plgpu.broadcasted_iota(jnp.int32, acc.shape, 1, layout=plgpu.Layout.WGMMA)
                    d = jnp.where((columns + j * VOCAB).astype(jnp.float32) == wide(2), d + wide(3), d)
                    if soft_cap is not None:
                        d = d * (1 - (scores / soft_cap) * (scores / soft_cap))
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    out[wg] = d.astype(out.dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(out.at[wg], out_ref.at[pl.ds(slot * TOKENS + wg * half, half)])

                _tile(x_ref, w_ref, i, j, feed, end, begin)

            _each(count_ref[0], tile)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    out = jax.ShapeDtypeStruct((len(work.tiles) * TOKENS, VOCAB), x.dtype)
    return _kernel(body, out)(x, w, rows, work.tiles, work.used[None])


def write_unembed(d_ref: Any, d: Array, x: Array, work: TileSchedule) -> None:
    """Writes the round's rows of the vocabulary's gradient."""
    blocks, across, half = len(x) // TOKENS, x.shape[1] // NARROW, VOCAB // GROUPS
    lists = len(work.tiles) // LIST, LIST

    def body(d_in: Any, x_ref: Any, tiles_ref: Any, ends_ref: Any, span_ref: Any, out_ref: Any) -> None:
        @partial(
            pl.run_scoped,
            feed=_buffers(d_in, x_ref, (STEP, VOCAB), (STEP, NARROW)),
            out=plgpu.SMEM((GROUPS, half, STEP), out_ref.dtype, transforms=_swizzled(out_ref.dtype)),
            near=plgpu.SMEM(lists, jnp.int32),
            here=plgpu.Barrier(),
            collective_axes="wg",
        )
        def scope(feed: Any, out: Any, near: Any, here: Any) -> None:
            wg = lax.axis_index("wg")
            _bring([(tiles_ref, near)], here)
            start = ends_ref[span_ref[0]]

            def tile(item: Array) -> None:
                j, c = span_ref[0] + lax.div(item, jnp.int32(across)), lax.rem(item, jnp.int32(across))
                low, high = ends_ref[j] - start, ends_ref[j + 1] - start
                parts = TOKENS // STEP

                def tokens(k: Array) -> tuple[Array, Array]:
                    block = lax.rem(_entry(near, low + lax.div(k, jnp.int32(parts))), jnp.int32(blocks))
                    return block * parts + lax.rem(k, jnp.int32(parts)), c

                def end(acc: Array) -> None:
                    acc = acc.astype(out.dtype)
                    for q in range(NARROW // STEP):
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        out[wg] = acc[:, q * STEP : (q + 1) * STEP]
                        plgpu.commit_smem()
                        here = (pl.ds(j * VOCAB + wg * half, half), pl.ds(c * NARROW + q * STEP, STEP))
                        plgpu.copy_smem_to_gmem(out.at[wg], out_ref.at[here])

                _product(
                    (high - low) * parts,
                    [(d_in, (STEP, VOCAB), lambda k: (low * parts + k, 0)), (x_ref, (STEP, NARROW), tokens)],
                    lambda a, b: (_turned(a.at[:, pl.ds(wg * half, half)]), b),
                    (half, NARROW),
                    feed,
                    end,
                )

            _each((span_ref[1] - span_ref[0]) * across, tile)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    _kernel(body, ())(d, x, work.tiles.reshape(lists), work.ends, work.span, d_ref)


def add_to_hidden(high_ref: Any, low_ref: Any, d: Array, w: Array, work: TileSchedule) -> None:
    """Adds a round to the gradient of the hidden states, which is kept as the sum of two numbers of 16 bits:
    the one that is asked for, and what it leaves out."""
    blocks, across, half = len(work.first) - 1, w.shape[1] // WIDE, TOKENS // GROUPS
    lists = len(work.tiles) // LIST, LIST

    def body(
        d_in: Any, w_ref: Any, tiles_ref: Any, mine_ref: Any, first_ref: Any, high: Any, low: Any
    ) -> None:
        part = plgpu.SMEM((GROUPS, half, STEP), d.dtype, transforms=_swizzled())

        @partial(
            pl.run_scoped,
            feed=_buffers(d_in, w_ref, (TOKENS, STEP), (STEP, WIDE)),
            out=(part, part),
            near=(plgpu.SMEM(lists, jnp.int32),) * 2,
            here=plgpu.Barrier(num_arrivals=2, num_barriers=GROUPS + 1),
            collective_axes="wg",
        )
        def scope(feed: Any, out: Any, near: Any, here: Any) -> None:
            wg = lax.axis_index("wg")
            parts = VOCAB // STEP
            _bring([(mine_ref, near[0]), (tiles_ref, near[1])], here.at[GROUPS])

            def tile(item: Array) -> None:
                i, c = lax.div(item, jnp.int32(across)), lax.rem(item, jnp.int32(across))
                begin, end_ = first_ref[i], first_ref[i + 1]

                def rows(k: Array) -> tuple[Array, Array]:
                    return _entry(near[0], begin + lax.div(k, jnp.int32(parts))), lax.rem(k, jnp.int32(parts))

                def words(k: Array) -> tuple[Array, Array]:
                    tile_ = _entry(near[1], begin + lax.div(k, jnp.int32(parts)))
                    return tile_ * parts + lax.rem(k, jnp.int32(parts)), c

                def end(acc: Array) -> None:
                    for q in range(WIDE // STEP):
                        place = (pl.ds(i * TOKENS + wg * half, half), pl.ds(c * WIDE + q * STEP, STEP))
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        for smem, gmem in zip(out, (high, low), strict=True):
                            plgpu.copy_gmem_to_smem(gmem.at[place], smem.at[wg], here.at[wg])
                        plgpu.barrier_wait(here.at[wg])
                        new = acc[:, q * STEP : (q + 1) * STEP]
                        for smem in out:
                            new += plgpu.load(smem, (wg,), layout=plgpu.Layout.WGMMA).astype(jnp.float32)
                        kept = new.astype(d.dtype)
                        out[0][wg] = kept
                        out[1][wg] = (new - kept.astype(jnp.float32)).astype(d.dtype)
                        plgpu.commit_smem()
                        for smem, gmem in zip(out, (high, low), strict=True):
                            plgpu.copy_smem_to_gmem(smem.at[wg], gmem.at[place])

                @pl.when(end_ > begin)
                def some() -> None:
                    _product(
                        (end_ - begin) * parts,
                        [(d_in, (TOKENS, STEP), rows), (w_ref, (STEP, WIDE), words)],
                        lambda a, b: (a.at[pl.ds(wg * half, half)], b),
                        (half, WIDE),
                        feed,
                        end,
                    )

            _each(blocks * across, tile)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    words, mine = (work.tiles[work.mine] // blocks).reshape(lists), work.mine.reshape(lists)
    _kernel(body, ())(d, w, words, mine, work.first, high_ref, low_ref)


def _tile(
    x: Any,
    w: Any,
    i: Array,
    j: Array,
    feed: Any,
    end: Callable[[Array], None],
    begin: Callable[[], None] = lambda: None,
) -> None:
    """The logits of tile [i j], half of its tokens for each of two groups of threads."""
    half = TOKENS // GROUPS
    mine = pl.ds(lax.axis_index("wg") * half, half)
    _product(
        x.shape[1] // STEP,
        [(x, (TOKENS, STEP), lambda k: (i, k)), (w, (VOCAB, STEP), lambda k: (j, k))],
        lambda a, b: (a.at[mine], _turned(b)),
        (half, VOCAB),
        feed,
        end,
        begin,
    )


def _product(
    steps: Any,
    operands: list[tuple[Any, tuple[int, int], Callable[[Array], tuple[Any, Any]]]],
    halves: Callable[[Any, Any], tuple[Any, Any]],
    shape: tuple[int, int],
    feed: Any,
    end: Callable[[Array], None],
    begin: Callable[[], None] = lambda: None,
) -> None:
    """Sums the products of so many blocks of both operands, fetched ahead by the third group of threads, in
    the registers of the other two, each of which then does `end` with its half."""

    def context(run: Callable[[Any], Any]) -> None:
        @partial(pl.run_scoped, acc=plgpu.ACC(shape, jnp.float32))
        def sums(acc: Any) -> None:
            begin()
            run(acc)
            end(acc[...])

    def multiply(_: Any, a: Any, b: Any, acc: Any) -> Any:
        plgpu.wgmma(acc, *halves(a, b))
        plgpu.wgmma_wait(0)
        return acc

    _pipeline(steps, [operand[1:] for operand in operands], multiply, context)(
        *(operand[0] for operand in operands), allocations=feed
    )


def _pipeline(steps: Any, specs: Any, body: Any, context: Any) -> Any:
    return plgpu.emit_pipeline_warp_specialized(
        body,
        grid=(steps,),
        memory_registers=40,
        in_specs=[
            plgpu.BlockSpec(block, index, transforms=_swizzled(), memory_space=plgpu.SMEM)
            for block, index in specs
        ],
        wg_axis="wg",
        num_compute_wgs=GROUPS,
        max_concurrent_steps=STAGES,
        compute_context=context,
    )


def _buffers(a: Any, b: Any, of_a: tuple[int, int], of_b: tuple[int, int]) -> Any:
    nothing = lambda *_, **__: None
    specs = [(of_a, lambda k: (0, k)), (of_b, lambda k: (0, k))]
    return _pipeline(STAGES, specs, nothing, nothing).get_allocations(a, b)


def _entry(near: Any, n: Array) -> Array:
    return near[lax.div(n, jnp.int32(LIST)), lax.rem(n, jnp.int32(LIST))]


def _bring(lists: list[tuple[Any, Any]], here: Any) -> None:
    """Lists that are looked into at every step, into the memory of the multiprocessor."""

    @pl.when(lax.axis_index("wg") == 0)
    def fetch() -> None:
        for far, near in lists:
            plgpu.copy_gmem_to_smem(far, near, here)

    plgpu.barrier_wait(here)


def _each(items: Any, work: Callable[[Array], None]) -> None:
    """Shares out items to the blocks of threads, of which there is one for each multiprocessor."""
    first, blocks = lax.axis_index("sm"), lax.axis_size("sm")
    mine = lax.div(jnp.int32(items) - first + blocks - 1, jnp.int32(blocks))

    @pl.loop(0, mine)
    def one(n: Array) -> None:
        work(first + n * blocks)


def _kernel(body: Callable[..., None], out: Any) -> Callable[..., Any]:
    processors = getattr(jax.devices()[0], "core_count", None) or PROCESSORS
    mesh = plgpu.Mesh(grid=(processors,), grid_names=("sm",), num_threads=GROUPS + 1, thread_name="wg")
    return pl.kernel(body, out, mesh=mesh, compiler_params=plgpu.CompilerParams(approx_math=True))


def _swizzled(dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


def _turned(ref: Any) -> Any:
    return plgpu.transpose_ref(ref, (1, 0))


def _capped(scores: Array, soft_cap: float | None) -> Array:
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
