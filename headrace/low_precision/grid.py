"""Symmetric integer grids: the weights of a matrix [inputs outputs] as multiples of scales, each shared by a
group of inputs of one output.

Rounding to nearest, GPTQ and quantization-aware training share these functions, so that the model in training
is the one that is stored: scales have the precision of float16, as in files."""

from functools import partial

import jax
import jax.numpy as jnp

Array = jax.Array

CANDIDATES = 100  # shares of the largest weight that are tried as the end of the grid
MIN_SCALE = 2.0**-14  # the smallest number that float16 represents with all of its bits
# The exponent of the errors whose sum scales minimize, by bits: LR-QAT's for 4 bits, one it tries for others.
ERROR_EXPONENTS: dict[int, float] = {2: 2.4, 3: 3, 4: 4, 8: 5}  # whole numbers are multiplied out


def limits(bits: int) -> tuple[int, int]:
    """The smallest and the largest integer of the grid."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def num_groups(num_inputs: int, group_size: int) -> int:
    """The number of groups of `group_size` inputs, the last of which may be smaller; for 0 one group of
    all."""
    return -(-num_inputs // group_size) if group_size else 1


def split_groups(w: Array, group_size: int) -> Array:
    """Reshape [inputs outputs] to [groups, inputs of a group, outputs], with zeros after the last input."""
    count = num_groups(w.shape[0], group_size)
    size = group_size or w.shape[0]
    return jnp.pad(w, [(0, count * size - w.shape[0]), (0, 0)]).reshape(count, size, -1)


def expand_scales(scales: Array, num_inputs: int, group_size: int) -> Array:
    """Repeat scales [groups outputs] for each input of their group: [inputs outputs]."""
    size = group_size or num_inputs
    return jnp.repeat(scales, size, axis=0, total_repeat_length=scales.shape[0] * size)[:num_inputs]


def round_scales(scales: Array) -> Array:
    """Round scales to float16, in which they are stored. Returns them in float32."""
    return jnp.maximum(scales, MIN_SCALE).astype(jnp.float16).astype(jnp.float32)


def absmax_scales(w: Array, bits: int, group_size: int) -> Array:
    """Compute scales [groups outputs] that put the largest weight of each group at the end of the grid."""
    groups = split_groups(w.astype(jnp.float32), group_size)
    return round_scales(jnp.max(jnp.abs(groups), axis=1) / limits(bits)[1])


@partial(jax.jit, static_argnames=("bits", "group_size"))
def search_scales(w: Array, bits: int, group_size: int) -> Array:
    """Search scales [groups outputs] with the smallest rounding error, among shares of `absmax_scales`."""
    groups = split_groups(w.astype(jnp.float32), group_size)
    largest = jnp.max(jnp.abs(groups), axis=1) / limits(bits)[1]

    def try_share(number: int, best: tuple[Array, Array]) -> tuple[Array, Array]:
        scale = round_scales(largest * (number / CANDIDATES))
        error = jnp.abs(groups - scale[:, None] * round_to_grid(groups / scale[:, None], bits))
        error = jnp.sum(error ** ERROR_EXPONENTS[bits], axis=1)
        is_better = error < best[0]
        return jnp.where(is_better, error, best[0]), jnp.where(is_better, scale, best[1])

    start = jnp.full_like(largest, jnp.inf), round_scales(largest)
    return jax.lax.fori_loop(1, CANDIDATES + 1, try_share, start)[1]


def round_to_grid(x: Array, bits: int) -> Array:
    """Round weights, divided by their scales, to integers of the grid, in x's dtype."""
    return jnp.clip(jnp.round(x), *limits(bits))
