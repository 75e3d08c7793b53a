"""Tiles of attention for the kernels in flash_hopper.py: their sizes, the blocks that they visit, and
operations on scores in registers."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.ref import AbstractRef

from headrace.kernels.hopper_pipeline import WARPGROUPS, Ref, swizzle

Array = jax.Array

ROWS = 64  # of a tile, per warpgroup: what one instruction multiplies
TILE = WARPGROUPS * ROWS
MAX_SPLIT_HEAD_DIM = 128  # larger heads leave no registers for two sums of ROWS
MASKED_SCORE = -1e30  # score of a key that is not seen; finite, so that differences of two are numbers
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


def find_key_blocks(bounds: KeyBounds, tile: int, block: int) -> Array:
    """Find the blocks of keys that each tile of queries visits. Returns an array with the numbers of a
    `BlockSpan` for each tile."""
    starts, ends = (x.reshape(x.shape[0], -1, tile) for x in bounds)
    start, end = starts.min(-1) // block, -(-ends.max(-1) // block)
    full_start, full_end = -(-starts.max(-1) // block), ends.min(-1) // block
    full_start = jnp.clip(full_start, start, end)
    span = start, full_start, jnp.clip(full_end, full_start, end), end
    return jnp.stack(span, -1).astype(jnp.int32).ravel()


def find_query_blocks(bounds: KeyBounds, tile: int, block: int, keys: int) -> Array:
    """Find the blocks of queries that each tile of the keys visits, in the form of `find_key_blocks`.

    They are intervals too, since bounds do not decrease from one query to the next."""
    starts, ends = (x.reshape(x.shape[0], 1, -1, block) for x in bounds)
    tile_start = jnp.arange(0, keys, tile)[None, :, None]
    tile_end = tile_start + tile
    count = lambda mask: mask.sum(-1, dtype=jnp.int32)
    start, end = count(ends.max(-1) <= tile_start), count(starts.min(-1) < tile_end)
    full_start, full_end = count(ends.min(-1) < tile_end), count(starts.max(-1) <= tile_start)
    full_start = jnp.clip(full_start, start, end)
    return jnp.stack([start, full_start, jnp.clip(full_end, full_start, end), end], -1).ravel()


def read_span(spans_ref: Ref, tile: Array) -> BlockSpan:
    """Read the span of a tile from what `find_key_blocks` or `find_query_blocks` returned."""
    return BlockSpan(*(spans_ref[tile * 4 + n] for n in range(4)))


def bounds_to_floats(bounds: KeyBounds) -> Array:
    """Stack bounds [2 b*s] as floats, to be compared with positions in floats: exact up to 2**24."""
    return jnp.stack([bounds.start.ravel(), bounds.end.ravel()]).astype(jnp.float32)


def to_scores(shape: FlashShape, products: Array) -> Array:
    """Scale and cap products of queries and keys. Scores are in units of log 2, which saves a multiplication
    in every exponential."""
    if shape.soft_cap is None:
        return products * (shape.scale * LOG2E)
    return shape.soft_cap * LOG2E * jnp.tanh(products * (shape.scale / shape.soft_cap))


def to_d_products(shape: FlashShape, scores: Array, d_scores: Array) -> Array:
    """Convert the gradient of scores to that of products, but for the factor `shape.scale`, by the derivative
    of the soft cap."""
    if shape.soft_cap is None:
        return d_scores
    share = scores * (1 / (shape.soft_cap * LOG2E))
    return d_scores * (1 - share * share)


def mask_keys(
    scores: Array, bounds: AbstractRef, block_number: Array, block_size: int, span: BlockSpan
) -> Array:
    """Mask scores [queries keys] of a tile of queries and a block of keys, outside of `bounds`, which has a
    first and an end key for each query."""

    def mask(scores: Array) -> Array:
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        keys = (column + block_number * block_size).astype(jnp.float32)
        start, end = (broadcast_per_row(load_per_row(bounds, n), scores.shape) for n in range(2))
        return jnp.where((keys >= start) & (keys < end), scores, MASKED_SCORE)

    is_full = (block_number >= span.full_start) & (block_number < span.full_end)
    return lax.cond(is_full, lambda scores: scores, mask, scores)


def mask_queries(
    scores: Array, per_query: AbstractRef, block_number: Array, first_key: Array, span: BlockSpan
) -> Array:
    """Mask scores [keys queries] of a tile of keys from `first_key` on and a block of queries.

    Rows 2 and 3 of `per_query` have the first and the end key of each query."""

    def mask(scores: Array) -> Array:
        row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
        keys = (row + first_key).astype(jnp.float32)
        start, end = (broadcast_per_column(load_per_column(per_query, n), scores.shape) for n in (2, 3))
        return jnp.where((keys >= start) & (keys < end), scores, MASKED_SCORE)

    is_full = (block_number >= span.full_start) & (block_number < span.full_end)
    return lax.cond(is_full, lambda scores: scores, mask, scores)


def multiply(a: Ref, b: Ref, shape: tuple[int, int]) -> Array:
    """Multiply two matrices in shared memory. Returns a matrix of this shape, in registers."""

    def run(sums: Ref) -> Array:
        plgpu.wgmma(sums, a, b)  # type: ignore[arg-type]
        return sums[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def add_product(sums: Array, a: Array, b: Ref) -> Array:
    """Add the product of a matrix in registers and one in shared memory to `sums`."""
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(sums))


def smem_matrix(*shape: int) -> pl.MemoryRef:
    """Make the type of a bfloat16 matrix in shared memory."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=swizzle())


def fill_matrix(shape: tuple[int, int], value: float) -> Array:
    """Make a constant matrix in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), plgpu.Layout.WGMMA)


def fill_per_row(value: float) -> Array:
    """Make a vector in registers that has `value` for each row of a matrix."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def load_per_row(ref: AbstractRef, index: int) -> Array:
    """Load vector `index` of `ref`, which has a number for each row of a matrix."""
    return plgpu.load(ref, (index,), layout=plgpu.Layout.WGMMA.reduce(1))


def load_per_column(ref: AbstractRef, index: int) -> Array:
    """Load vector `index` of `ref`, which has a number for each column of a matrix."""
    return plgpu.load(ref, (index,), layout=plgpu.Layout.WGMMA.reduce(0))


def broadcast_per_row(x: Array, shape: tuple[int, ...]) -> Array:
    """Expand a vector with a number for each row to a matrix."""
    return lax.broadcast_in_dim(x, shape, [0])


def broadcast_per_column(x: Array, shape: tuple[int, ...]) -> Array:
    """Expand a vector with a number for each column to a matrix."""
    return lax.broadcast_in_dim(x, shape, [1])
