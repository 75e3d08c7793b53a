"""Scores by relative distance, aligned with positions in the registers of a TPU and back.

Such scores run along diagonals: in a block of 128 rows, row i has to move by i columns. One instruction moves
each row to the right by another distance (a strided roll). None moves them to the left: the way back first
reverses the order of the rows, by a matmul with a permutation matrix; then row i has to move by 128 - i."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from headrace.kernels.tpu_lanes import LANES, contract

Array = jax.Array


def to_positions(by_distance: Array, has_strided_roll: bool) -> Array:
    """Align scores by distance [128 l+128] to positions [128 l]: row i is the part from column 128 - i on."""
    length = by_distance.shape[1] - LANES
    return roll_rows(by_distance, length, has_strided_roll)[:, :length]


def to_distances(by_position: Array, has_strided_roll: bool) -> Array:
    """Do the inverse of `to_positions`, with zeros in the gaps, and reverse the order of the rows: [128 l] to
    [128 l+128]."""
    reversed_rows = reverse_rows(by_position).astype(jnp.float32)
    wide = jnp.concatenate([reversed_rows, jnp.zeros((LANES, LANES), jnp.float32)], 1)
    return roll_rows(wide, 1, has_strided_roll).astype(by_position.dtype)


def roll_rows(x: Array, first: int, has_strided_roll: bool) -> Array:
    """Roll row i of [128 l] by `first` + i columns to the right. A chip without a strided roll does it by
    several rolls of whole registers."""
    if has_strided_roll:
        return pltpu.roll(x, first, 1, stride=1, stride_axis=0)
    # Rows of a register by 0 to 7, bit by bit, and registers by multiples of 8.
    row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    for bit in (1, 2, 4):
        x = jnp.where((row & bit) > 0, pltpu.roll(x, bit, 1), x)
    shifts = [(first + start) % x.shape[1] for start in range(0, LANES, 8)]
    return jnp.concatenate([pltpu.roll(x[8 * n : 8 * n + 8], shift, 1) for n, shift in enumerate(shifts)])


def reverse_rows(x: Array) -> Array:
    """Reverse the order of 128 rows by a matmul, which is exact since every sum has one term."""
    row, column = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
    return contract((row + column == LANES - 1).astype(x.dtype), x, 1, 0).astype(x.dtype)


def reverse_rows_float32(x: Array) -> Array:
    """Reverse the order of 128 rows of float32, as a sum of two bfloat16: with an error of 2^-17."""
    high = x.astype(jnp.bfloat16)
    low = (x - high.astype(jnp.float32)).astype(jnp.bfloat16)
    return reverse_rows(high).astype(jnp.float32) + reverse_rows(low).astype(jnp.float32)
