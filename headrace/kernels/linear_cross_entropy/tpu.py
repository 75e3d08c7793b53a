"""The head and its loss by chunks of the vocabulary, in kernels for TPUs (Pallas' Mosaic): by_vocab.py
with both of its passes over a chunk's logits done on the chip.

Logits are made as [v c], tokens side by side: what belongs to a token is then a row that meets every row of
logits as it is, and sums over the vocabulary add whole registers. The first kernel keeps statistics of every
eighth row, which are put together at the end; the second writes the gradient of the logits, of which plain
products make those of the matrix and of the hidden states. A product is the only thing the matrix unit has to
wait for: what is made of the logits of some tokens is made while it multiplies the next. On a CPU the kernels
run in Pallas' interpreter, which is for tests."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from headrace.kernels.linear_cross_entropy import by_vocab
from headrace.kernels.linear_cross_entropy.by_vocab import Chunk, ChunkOps, Running, VocabShard
from headrace.kernels.linear_cross_entropy.stats import Array, HeadSharding, HeadSpec, LossTotals, Stats
from headrace.nn.compile_target import OLD_TPUS, compile_error, device

GROUP = 8  # rows of a register of 32 bits
LANES, ROWS = 128, 256  # of which blocks of tokens and width, and chunks of the vocabulary, are multiples
SIDE = 256  # tokens whose logits the vector unit works on while the matrix unit makes the next
WIDEST = 16_384  # the widest for which blocks have been compiled


class Blocks(NamedTuple):
    tokens: int
    vocab: int
    width: int

    @property
    def bytes(self) -> int:
        """What they take of VMEM in bf16: two of each input and output, and the sums of a width in parts."""
        tokens, vocab, width = self
        return 4 * width * (tokens + vocab) + 8 * tokens * vocab


# The most of a block, 0 being the whole width. Tokens stay where the width is whole, so that a block of n
# makes n FLOPs of a byte; in parts a x b make a b / (a + b). Chips need 210 (v5p) to 700 (v6e) to be busy.
SHAPES = (
    Blocks(1024, 512, 0),
    Blocks(1024, 256, 0),
    Blocks(2048, 1024, 512),
    Blocks(512, 256, 0),
    Blocks(1024, 1024, 512),
)
# A kernel may take 16 MiB, on a v6e 32; spills and the tokens' statistics want some of it.
EVEN = ("TPU v5", "TPU v5p")  # where plain JAX is as fast
ROOM, MORE_ROOM, ROOMY = 14 * 2**20, 28 * 2**20, ("TPU v6 lite", "TPU v6e")


def totals(
    head: HeadSpec, split: HeadSharding, hidden: Array, unembed: Array, targets: Array, weights: Array
) -> LossTotals:
    return by_vocab.totals_by(parts(), head, split, hidden, unembed, targets, weights)


def totals_and_gradients(
    head: HeadSpec, split: HeadSharding, hidden: Array, unembed: Array, targets: Array, weights: Array
) -> tuple[LossTotals, Array, Array]:
    return by_vocab.totals_and_gradients_by(parts(), head, split, hidden, unembed, targets, weights)


def is_faster_than_plain(width: int) -> bool:
    """Whether they are planned to be clearly faster than the same in plain JAX (docs/performance/loss.md): by
    8 % on v4 and v5e. On a v6e 2,304 columns take 54.0 ms instead of 52.7, and 4,096 less again; on a v5p a
    step of Llama 3 8B takes as long with them, and 0.24 GB more."""
    kind = device().device_kind
    return kind not in EVEN and (width >= 4096 or kind not in ROOMY)


def unsupported_reason(head: HeadSpec, split: HeadSharding, hidden: Any, unembed: Any) -> str | None:
    """Why these kernels cannot be used for one device's arrays, if they cannot."""
    tokens, width = hidden.shape[0] * hidden.shape[1], hidden.shape[2]
    if device().platform != "tpu":
        return "they are for TPUs"
    if device().device_kind in OLD_TPUS:
        return f"{device().device_kind} has no products of bfloat16 in kernels"
    if hidden.dtype != jnp.bfloat16:
        return f"they are for bfloat16, and the activations are {hidden.dtype}"
    if head.without is not None:
        return "they rule out no token"
    for size, name in ((tokens, "tokens"), (width, "columns")):
        if size % LANES:
            return f"{size} {name} are not a multiple of {LANES}"
    if width > WIDEST:
        return f"{width} columns are more than {WIDEST}"
    if head.chunk != "auto" and int(head.chunk) < ROWS:
        return f"loss.chunk_size is {head.chunk}, and they take {ROWS} rows at least"
    size = by_vocab.chunk_rows(parts(), head, len(unembed), tokens)
    rows = size if len(unembed) % size == 0 else size - 1  # one chunk, padded or not, like all the others
    return _try(head.soft_cap, tokens, rows, width, unembed.dtype)


@lru_cache
def _try(soft_cap: float | None, tokens: int, rows: int, width: int, dtype: Any) -> str | None:
    shapes = [
        jax.ShapeDtypeStruct((1, tokens, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((rows, width), dtype),
        jax.ShapeDtypeStruct((1, tokens), jnp.int32),
        jax.ShapeDtypeStruct((1, tokens), jnp.float32),
    ]
    head = HeadSpec(lambda stats: stats.lse - stats.target - stats.mean, soft_cap, rows)
    return compile_error("tpu", partial(totals_and_gradients, head, HeadSharding()), *shapes)


def parts() -> ChunkOps:
    return ChunkOps(add_statistics, d_logits, groups=GROUP, multiple=ROWS, held=2)


def blocks(tokens: int, rows: int, width: int) -> Blocks:
    """The first of the shapes that fits the chip, made to divide the arrays."""
    room = MORE_ROOM if device().device_kind in ROOMY else ROOM
    most = (shape._replace(width=shape.width or width) for shape in SHAPES)
    largest = next((shape for shape in most if shape.bytes <= room), SHAPES[-1])
    # Two blocks of tokens at least, where a device has two cores that share them.
    shared = tokens // 2 if tokens % (2 * LANES) == 0 else tokens
    return Blocks(
        _block(shared, largest.tokens, LANES),
        _block(rows, largest.vocab, ROWS),
        _block(width, largest.width, LANES),
    )


def _block(size: int, most: int, unit: int) -> int:
    return max((block for block in range(unit, most + 1, unit) if size % block == 0), default=size)


def add_statistics(cut: VocabShard, chunk: Chunk, running: Running) -> Running:
    cap, padded = cut.head.soft_cap, chunk.padded(cut)

    def body(start: Any, x: Any, w: Any, own: Any, before: Any, after: Any, *sums: Any) -> None:
        first = pl.program_id(1) * w.shape[0] + start[0]

        @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
        def begin() -> None:
            after[...] = before[...]

        def end(product: Array, here: Any) -> None:
            rows = _capped(product, cap).reshape(-1, GROUP, product.shape[1])
            of_group, in_group = (lax.broadcasted_iota(jnp.int32, rows.shape, axis) for axis in (0, 1))
            numbers = first + GROUP * of_group + in_group
            shown = jnp.where(numbers < cut.rows, rows, -jnp.inf) if padded else rows
            real = jnp.where(numbers < cut.rows, rows, 0) if padded else rows
            old = after[0, :, here]
            top = jnp.maximum(old, shown.max(axis=0))
            after[0, :, here] = top
            after[1, :, here] = after[1, :, here] * jnp.exp(old - top) + jnp.exp(shown - top).sum(axis=0)
            after[2, :, here] += jnp.where(numbers == own[:, here], real, 0).sum(axis=0)
            after[3, :, here] += real.sum(axis=0)

        _product(x, w, sums, end)

    state = jnp.stack(running)
    tokens = _blocks(cut, chunk).tokens
    spec = pl.BlockSpec((*state.shape[:2], tokens), lambda i, j, k, start: (0, 0, i))
    out = jax.ShapeDtypeStruct(state.shape, state.dtype)
    return Running(*_call("add_statistics", body, cut, chunk, (state, spec), (out, spec), aliases={4: 0}))


def d_logits(cut: VocabShard, chunk: Chunk, stats: Stats, d_stats: Stats) -> Array:
    cap, padded = cut.head.soft_cap, chunk.padded(cut)

    def body(start: Any, x: Any, w: Any, own: Any, known: Any, out: Any, *sums: Any) -> None:
        first = pl.program_id(1) * w.shape[0] + start[0]

        def end(product: Array, here: Any) -> None:
            lse, d_lse, d_target, d_each = (known[n : n + 1, here] for n in range(4))
            rows = _capped(product, cap)
            numbers = first + lax.broadcasted_iota(jnp.int32, rows.shape, 0)
            d = d_lse * jnp.exp(rows - lse) + d_each + jnp.where(numbers == own[:, here], d_target, 0)
            if cap is not None:
                d *= 1 - (rows / cap) * (rows / cap)
            out[:, here] = (jnp.where(numbers < cut.rows, d, 0) if padded else d).astype(out.dtype)

        _product(x, w, sums, end)

    tiles = _blocks(cut, chunk)
    known = jnp.stack([stats.lse, d_stats.lse, d_stats.target, d_stats.mean / cut.vocab])
    given = known, pl.BlockSpec((len(known), tiles.tokens), lambda i, j, k, start: (0, i))
    out = jax.ShapeDtypeStruct((len(chunk.matrix), len(cut.x)), cut.x.dtype)
    spec = pl.BlockSpec((tiles.vocab, tiles.tokens), lambda i, j, k, start: (j, i))
    return _call("d_logits", body, cut, chunk, given, (out, spec))


def _product(x: Any, w: Any, sums: tuple[Any, ...], end: Callable[[Array, Any], None]) -> None:
    """Products [v c] of some of the tokens after the other, handed to `end` when all of the width is in."""
    size = _block(x.shape[0], SIDE, min(LANES, x.shape[0]))
    places = [pl.ds(start, size) for start in range(0, x.shape[0], size)]

    def product(here: Any) -> Array:
        across = (((1,), (1,)), ((), ()))
        return lax.dot_general(w[...], x[here, :], across, preferred_element_type=jnp.float32)

    if not sums:
        for here in places:
            end(product(here), here)
        return
    (total,), k = sums, pl.program_id(2)

    @pl.when(k == 0)
    def clear() -> None:
        total[...] = jnp.zeros(total.shape, total.dtype)

    for here in places:
        total[:, here] += product(here)

    @pl.when(k == pl.num_programs(2) - 1)
    def all_in() -> None:
        for here in places:
            end(total[:, here], here)


def _call(
    name: str,
    body: Any,
    cut: VocabShard,
    chunk: Chunk,
    given: tuple[Array, Any],
    result: tuple[Any, Any],
    aliases: dict[int, int] | None = None,
) -> Any:
    """One of the kernels over all blocks of tokens, vocabulary and width, in this order."""
    (tokens, width), rows, tiles = cut.x.shape, len(chunk.matrix), _blocks(cut, chunk)
    grid = tokens // tiles.tokens, rows // tiles.vocab, width // tiles.width
    inputs = [
        (cut.x, pl.BlockSpec((tiles.tokens, tiles.width), lambda i, j, k, start: (i, k))),
        (chunk.matrix, pl.BlockSpec((tiles.vocab, tiles.width), lambda i, j, k, start: (j, k))),
        (cut.own[None], pl.BlockSpec((1, tiles.tokens), lambda i, j, k, start: (0, i))),
        given,
    ]
    sums = [pltpu.VMEM((tiles.vocab, tiles.tokens), jnp.float32)] if grid[2] > 1 else []
    # Blocks of tokens are read again for each of the vocabulary only if they are in parts.
    read = cut.x.nbytes * (grid[1] if grid[2] > 1 else 1) + chunk.matrix.nbytes * grid[0]
    stored = [given[0], result[0]]
    cost = pl.CostEstimate(
        flops=2 * tokens * rows * width,
        transcendentals=tokens * rows,
        bytes_accessed=read + sum(array.size * array.dtype.itemsize for array in stored),
    )

    def run(interpret: bool) -> Callable[..., Array]:
        return pl.pallas_call(
            body,
            result[0],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=grid,
                in_specs=[spec for _, spec in inputs],
                out_specs=result[1],
                scratch_shapes=sums,
            ),
            input_output_aliases=aliases or {},
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
            cost_estimate=cost,
            metadata={"tiles": str(grid[0] * grid[1] * grid[2])},  # for headrace/plan/instruction_cost.py
            interpret=interpret,
            name=name,
        )

    # Decided when lowering: a TPU slice may be compiled for on a machine that has none.
    arrays = jnp.reshape(chunk.start, 1), *(array for array, _ in inputs)
    return lax.platform_dependent(*arrays, tpu=run(False), default=run(True))


def _blocks(cut: VocabShard, chunk: Chunk) -> Blocks:
    return blocks(len(cut.x), *chunk.matrix.shape)


def _capped(scores: Array, cap: float | None) -> Array:
    return scores if cap is None else cap * jnp.tanh(scores / cap)
