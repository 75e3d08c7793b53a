"""Linear cross entropy by chunks of the vocabulary, in Pallas kernels for TPUs: both passes over a chunk's
logits (by_vocab.py) happen on the chip.

Logits are computed as [v c], with tokens along the lanes: a token's statistics are then a row, which combines
with rows of logits as they are, and sums over the vocabulary add whole registers. The first kernel keeps
separate statistics for every eighth row, which are combined at the end. The second writes the gradient of the
logits, from which plain matmuls compute those of the matrix and of the hidden states. The matrix unit should
never wait for anything but matmuls: logits of some tokens are processed while it computes those of the next.
On a CPU the kernels run in Pallas' interpreter, for tests."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from headrace.kernels.linear_cross_entropy import by_vocab
from headrace.kernels.linear_cross_entropy.by_vocab import ChunkOps, RunningStats, VocabChunk, VocabShard
from headrace.kernels.linear_cross_entropy.stats import (
    Array,
    HeadInputs,
    HeadSharding,
    HeadSpec,
    LogitStats,
    LossAndGradients,
    LossTotals,
)
from headrace.nn.compile_target import OLD_TPUS, ArrayShape, compile_error, device
from headrace.nn.soft_cap import apply_soft_cap, soft_cap_slope

Ref = jax.Ref
TokenSlice = slice | pl.Slice  # of a block's tokens
BlockedArray = tuple[Array, pl.BlockSpec]
BlockedShape = tuple[jax.ShapeDtypeStruct, pl.BlockSpec]

SUBLANES = 8  # rows of a register of 32 bits
LANES = 128  # columns of a register; blocks of tokens and of the width are multiples
ROWS = 256  # chunks of the vocabulary, and blocks of them, are multiples
# Tokens whose logits the vector unit processes while the matrix unit computes the next.
TOKENS_PER_MATMUL = 256
MAX_WIDTH = 16_384  # the largest for which blocks have been compiled


class BlockShape(NamedTuple):
    """The sizes of the blocks that a kernel processes at a time."""

    tokens: int
    vocab: int
    width: int

    @property
    def vmem_bytes(self) -> int:
        """Bytes in VMEM, in bf16: two of each input and output, and the sums if the width is in parts."""
        tokens, vocab, width = self
        return 4 * width * (tokens + vocab) + 8 * tokens * vocab


# Largest blocks, in order of preference; a width of 0 is all of it. Tokens then stay on the chip, so that a
# block of n tokens has n FLOPs per byte; with the width in parts, a x b have a b / (a + b). Chips need 210
# (v5p) to 700 (v6e) to be busy.
BLOCK_SHAPES = (
    BlockShape(1024, 512, 0),
    BlockShape(1024, 256, 0),
    BlockShape(2048, 1024, 512),
    BlockShape(512, 256, 0),
    BlockShape(1024, 1024, 512),
)
# A kernel may use 16 MiB of VMEM, on a v6e 32; spills and the tokens' statistics need some of it.
VMEM_BYTES, LARGE_VMEM_BYTES = 14 * 2**20, 28 * 2**20
LARGE_VMEM_TPUS = ("TPU v6 lite", "TPU v6e")
NO_GAIN_TPUS = ("TPU v5", "TPU v5p")  # plain JAX is as fast


def compute_loss(head: HeadSpec, sharding: HeadSharding, inputs: HeadInputs) -> LossTotals:
    """Compute the totals over the tokens of all devices."""
    return by_vocab.compute_loss_by_chunks(make_chunk_ops(), head, sharding, inputs)


def compute_loss_and_gradients(
    head: HeadSpec, sharding: HeadSharding, inputs: HeadInputs
) -> LossAndGradients:
    """Compute the totals, and the gradients of this device's hidden states and matrix."""
    return by_vocab.compute_loss_and_gradients_by_chunks(make_chunk_ops(), head, sharding, inputs)


def is_faster_than_plain(head: HeadSpec, sharding: HeadSharding, width: int) -> bool:
    """Whether the kernels are planned to be clearly faster than plain JAX (docs/performance/loss.md).

    They compete with chunks of the vocabulary, which are used if the width of the matrix is split. On v4 and
    v5e they are 8 % faster. On a v6e 2,304 columns take 54.0 ms instead of 52.7, and 4,096 less again; on a
    v5p a step of Llama 3 8B takes as long, and 0.24 GB more."""
    kind = device().device_kind
    if not sharding.width_axes or kind in NO_GAIN_TPUS:
        return False
    return width >= 4096 or kind not in LARGE_VMEM_TPUS


def unsupported_reason(
    head: HeadSpec, sharding: HeadSharding, hidden: ArrayShape, unembed: ArrayShape
) -> str | None:
    """Return why these kernels cannot run on one device's arrays; None if they can."""
    tokens, width = hidden.shape[0] * hidden.shape[1], hidden.shape[2]
    if device().platform != "tpu":
        return "they are for TPUs"
    if device().device_kind in OLD_TPUS:
        return f"{device().device_kind} has no bfloat16 matmuls in kernels"
    if hidden.dtype != jnp.bfloat16:
        return f"they are for bfloat16, and the activations are {hidden.dtype}"
    if head.excluded_token is not None:
        return "they cannot exclude a token"
    for size, name in ((tokens, "tokens"), (width, "columns")):
        if size % LANES:
            return f"{size} {name} are not a multiple of {LANES}"
    if width > MAX_WIDTH:
        return f"{width} columns are more than {MAX_WIDTH}"
    if head.chunk_size != "auto" and int(head.chunk_size) < ROWS:
        return f"loss.chunk_size is {head.chunk_size}, and they take {ROWS} rows at least"
    size = by_vocab.rows_per_chunk(make_chunk_ops(), head, len(unembed), tokens)
    rows = size if len(unembed) % size == 0 else size - 1  # one chunk, padded or not, like all others
    return _try_to_compile(head.soft_cap, tokens, rows, width, unembed.dtype)


@lru_cache
def _try_to_compile(
    soft_cap: float | None, tokens: int, rows: int, width: int, unembed_dtype: jnp.dtype
) -> str | None:
    """Compile both kernels for these sizes. Returns the compiler's message if it fails, or None."""
    shapes = (
        jax.ShapeDtypeStruct((1, tokens, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((rows, width), unembed_dtype),
        jax.ShapeDtypeStruct((1, tokens), jnp.int32),
        jax.ShapeDtypeStruct((1, tokens), jnp.float32),
    )
    head = HeadSpec(lambda stats: stats.lse - stats.target - stats.mean, soft_cap, rows)
    compute = partial(compute_loss_and_gradients, head, HeadSharding())
    return compile_error("tpu", lambda *arrays: compute(HeadInputs(*arrays)), *shapes)


def make_chunk_ops() -> ChunkOps:
    """Make the `ChunkOps` that run the kernels."""
    return ChunkOps(add_statistics, compute_d_logits, groups=SUBLANES, row_multiple=ROWS, logit_bytes=2)


def pick_block_shape(tokens: int, rows: int, width: int) -> BlockShape:
    """Pick the blocks for a chunk of the vocabulary with this many rows: the first of `BLOCK_SHAPES` that
    fits the chip, reduced to divide the arrays."""
    vmem_bytes = LARGE_VMEM_BYTES if device().device_kind in LARGE_VMEM_TPUS else VMEM_BYTES
    shapes = (shape._replace(width=shape.width or width) for shape in BLOCK_SHAPES)
    largest = next((shape for shape in shapes if shape.vmem_bytes <= vmem_bytes), BLOCK_SHAPES[-1])
    # At least two blocks of tokens, in case that a device has two cores, which share them.
    shared = tokens // 2 if tokens % (2 * LANES) == 0 else tokens
    return BlockShape(
        _largest_divisor(shared, largest.tokens, LANES),
        _largest_divisor(rows, largest.vocab, ROWS),
        _largest_divisor(width, largest.width, LANES),
    )


def _largest_divisor(size: int, limit: int, multiple: int) -> int:
    """The largest divisor of `size` up to `limit` that is a multiple of `multiple`, or else `size`."""
    return max((block for block in range(multiple, limit + 1, multiple) if size % block == 0), default=size)


def add_statistics(shard: VocabShard, chunk: VocabChunk, running: RunningStats) -> RunningStats:
    """Update the statistics with a chunk's logits."""
    cap, is_padded = shard.head.soft_cap, chunk.is_padded(shard)

    def body(start: Ref, x: Ref, w: Ref, targets: Ref, before: Ref, after: Ref, *sums: Ref) -> None:
        first_row = pl.program_id(1) * w.shape[0] + start[0]

        @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
        def copy_statistics() -> None:
            after[...] = before[...]

        def add(raw_logits: Array, tokens: TokenSlice) -> None:
            logits = apply_soft_cap(raw_logits, cap).reshape(-1, SUBLANES, raw_logits.shape[1])
            register, sublane = (lax.broadcasted_iota(jnp.int32, logits.shape, axis) for axis in (0, 1))
            row = first_row + SUBLANES * register + sublane
            for_max = jnp.where(row < shard.rows, logits, -jnp.inf) if is_padded else logits
            for_sum = jnp.where(row < shard.rows, logits, 0) if is_padded else logits
            old_max = after[0, :, tokens]
            new_max = jnp.maximum(old_max, for_max.max(axis=0))
            after[0, :, tokens] = new_max
            rescaled = after[1, :, tokens] * jnp.exp(old_max - new_max)
            after[1, :, tokens] = rescaled + jnp.exp(for_max - new_max).sum(axis=0)
            after[2, :, tokens] += jnp.where(row == targets[:, tokens], for_sum, 0).sum(axis=0)
            after[3, :, tokens] += for_sum.sum(axis=0)

        _multiply(x, w, sums, add)

    state = jnp.stack(running)
    tokens = _pick_block_shape(shard, chunk).tokens
    spec = pl.BlockSpec((*state.shape[:2], tokens), lambda i, j, k, start: (0, 0, i))
    result = jax.ShapeDtypeStruct(state.shape, state.dtype)
    inputs, output = (state, spec), (result, spec)
    return RunningStats(*_run("add_statistics", body, shard, chunk, inputs, output, aliases={4: 0}))


def compute_d_logits(shard: VocabShard, chunk: VocabChunk, stats: LogitStats, d_stats: LogitStats) -> Array:
    """Compute the gradient of a chunk's raw logits, [v c] in the dtype of the hidden states."""
    cap, is_padded = shard.head.soft_cap, chunk.is_padded(shard)

    def body(start: Ref, x: Ref, w: Ref, targets: Ref, stats: Ref, out: Ref, *sums: Ref) -> None:
        first_row = pl.program_id(1) * w.shape[0] + start[0]

        def write(raw_logits: Array, tokens: TokenSlice) -> None:
            lse, d_lse, d_target, d_mean = (stats[n : n + 1, tokens] for n in range(4))
            logits = apply_soft_cap(raw_logits, cap)
            row = first_row + lax.broadcasted_iota(jnp.int32, logits.shape, 0)
            d = d_lse * jnp.exp(logits - lse) + d_mean + jnp.where(row == targets[:, tokens], d_target, 0)
            if cap is not None:
                d *= soft_cap_slope(logits, cap)
            out[:, tokens] = (jnp.where(row < shard.rows, d, 0) if is_padded else d).astype(out.dtype)

        _multiply(x, w, sums, write)

    blocks = _pick_block_shape(shard, chunk)
    # The gradient of the mean is the same for each logit.
    per_token = jnp.stack([stats.lse, d_stats.lse, d_stats.target, d_stats.mean / shard.vocab])
    inputs = per_token, pl.BlockSpec((len(per_token), blocks.tokens), lambda i, j, k, start: (0, i))
    result = jax.ShapeDtypeStruct((len(chunk.unembed), len(shard.hidden)), shard.hidden.dtype)
    output = result, pl.BlockSpec((blocks.vocab, blocks.tokens), lambda i, j, k, start: (j, i))
    return _run("d_logits", body, shard, chunk, inputs, output)


def _multiply(x: Ref, w: Ref, sums: tuple[Ref, ...], process: Callable[[Array, TokenSlice], None]) -> None:
    """Multiply a block of tokens by a block of the matrix, some tokens at a time, and call
    `process(raw logits [v c], tokens)` for each when the whole width is summed.

    `sums` is one float32 ref [v c] if the width is in parts, and else empty."""
    size = _largest_divisor(x.shape[0], TOKENS_PER_MATMUL, min(LANES, x.shape[0]))
    slices = [pl.ds(start, size) for start in range(0, x.shape[0], size)]

    def multiply(tokens: TokenSlice) -> Array:
        over_width = (((1,), (1,)), ((), ()))
        return lax.dot_general(w[...], x[tokens, :], over_width, preferred_element_type=jnp.float32)

    if not sums:
        for tokens in slices:
            process(multiply(tokens), tokens)
        return
    (total,), k = sums, pl.program_id(2)

    @pl.when(k == 0)
    def clear() -> None:
        total[...] = jnp.zeros(total.shape, total.dtype)

    for tokens in slices:
        total[:, tokens] += multiply(tokens)

    @pl.when(k == pl.num_programs(2) - 1)
    def process_all() -> None:
        for tokens in slices:
            process(total[:, tokens], tokens)


def _run(
    name: str,
    body: Callable[..., None],
    shard: VocabShard,
    chunk: VocabChunk,
    extra_input: BlockedArray,
    output: BlockedShape,
    aliases: dict[int, int] | None = None,
) -> Array:
    """Run a kernel over all blocks of tokens, vocabulary and width, nested in this order.

    The body gets refs of the chunk's first row, hidden states, matrix, targets, `extra_input` and `output`,
    and of sums if the width is in parts."""
    (tokens, width), rows, blocks = shard.hidden.shape, len(chunk.unembed), _pick_block_shape(shard, chunk)
    grid = tokens // blocks.tokens, rows // blocks.vocab, width // blocks.width
    inputs: list[BlockedArray] = [
        (shard.hidden, pl.BlockSpec((blocks.tokens, blocks.width), lambda i, j, k, start: (i, k))),
        (chunk.unembed, pl.BlockSpec((blocks.vocab, blocks.width), lambda i, j, k, start: (j, k))),
        (shard.local_targets[None], pl.BlockSpec((1, blocks.tokens), lambda i, j, k, start: (0, i))),
        extra_input,
    ]
    sums = [pltpu.VMEM((blocks.vocab, blocks.tokens), jnp.float32)] if grid[2] > 1 else []
    # Blocks of tokens are read again for each block of the vocabulary only if their width is in parts.
    bytes_read = shard.hidden.nbytes * (grid[1] if grid[2] > 1 else 1) + chunk.unembed.nbytes * grid[0]
    stored: list[ArrayShape] = [extra_input[0], output[0]]
    cost = pl.CostEstimate(
        flops=2 * tokens * rows * width,
        transcendentals=tokens * rows,
        bytes_accessed=bytes_read + sum(array.size * array.dtype.itemsize for array in stored),
    )

    def make_kernel(interpret: bool) -> Callable[..., Array]:
        return pl.pallas_call(
            body,
            output[0],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=grid,
                in_specs=[spec for _, spec in inputs],
                out_specs=output[1],
                scratch_shapes=sums,
            ),
            input_output_aliases=aliases or {},
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
            cost_estimate=cost,
            metadata={"tiles": str(grid[0] * grid[1] * grid[2])},  # for headrace/plan/instruction_cost.py
            interpret=interpret,
            name=name,
        )

    arrays = jnp.reshape(chunk.start, 1), *(array for array, _ in inputs)
    # The platform is known only when lowering: a TPU slice may be compiled for on a machine without TPUs.
    return lax.platform_dependent(*arrays, tpu=make_kernel(False), default=make_kernel(True))


def _pick_block_shape(shard: VocabShard, chunk: VocabChunk) -> BlockShape:
    return pick_block_shape(len(shard.hidden), *chunk.unembed.shape)
