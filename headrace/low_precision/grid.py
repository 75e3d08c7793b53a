"""A symmetric grid of whole numbers for a matrix [inputs outputs]: an output's weights, in groups of inputs,
are multiples of one scale. Rounding to it, GPTQ and training with few bits share it, and what training sees
is what is stored: scales are of float16, as files have them."""

from functools import partial

import jax
import jax.numpy as jnp

Array = jax.Array

CANDIDATES = 100  # shares of the largest weight that are tried as the end of the grid
LEAST = 2.0**-14  # of a scale: the smallest that float16 holds with all its bits
# The exponent of the error that scales are to make small: LR-QAT's for 4 bits, one it tries for others.
NORMS: dict[int, float] = {2: 2.4, 3: 3, 4: 4, 8: 5}  # whole ones are multiplied out


def ends(bits: int) -> tuple[int, int]:
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def groups(inputs: int, group: int) -> int:
    """How many there are of `group` inputs, the last of which may have fewer; 0 is one group of all."""
    return -(-inputs // group) if group else 1


def grouped(w: Array, group: int) -> Array:
    """[inputs outputs] to [groups, inputs of a group, outputs], with zeros after the last."""
    count = groups(w.shape[0], group)
    each = group or w.shape[0]
    return jnp.pad(w, [(0, count * each - w.shape[0]), (0, 0)]).reshape(count, each, -1)


def expand_scales(scales: Array, inputs: int, group: int) -> Array:
    """[groups outputs] for each of the inputs."""
    return jnp.repeat(
        scales, group or inputs, axis=0, total_repeat_length=scales.shape[0] * (group or inputs)
    )[:inputs]


def store_scales(scales: Array) -> Array:
    """As they are stored."""
    return jnp.maximum(scales, LEAST).astype(jnp.float16).astype(jnp.float32)


def absmax_scales(w: Array, bits: int, group: int) -> Array:
    """Scales [groups outputs] by which the largest weight of a group is at the end of the grid."""
    return store_scales(jnp.max(jnp.abs(grouped(w.astype(jnp.float32), group)), axis=1) / ends(bits)[1])


@partial(jax.jit, static_argnames=("bits", "group"))
def search_scales(w: Array, bits: int, group: int) -> Array:
    """Scales [groups outputs] with the smallest error among shares of the largest weight's."""
    parts = grouped(w.astype(jnp.float32), group)
    most = jnp.max(jnp.abs(parts), axis=1) / ends(bits)[1]

    def attempt(number: int, best: tuple[Array, Array]) -> tuple[Array, Array]:
        scale = store_scales(most * (number / CANDIDATES))
        error = jnp.abs(parts - scale[:, None] * integers(parts / scale[:, None], bits))
        error = jnp.sum(error ** NORMS[bits], axis=1)
        better = error < best[0]
        return jnp.where(better, error, best[0]), jnp.where(better, scale, best[1])

    begin = jnp.full_like(most, jnp.inf), store_scales(most)
    return jax.lax.fori_loop(1, CANDIDATES + 1, attempt, begin)[1]


def integers(x: Array, bits: int) -> Array:
    """The nearest of the grid, still of x's dtype."""
    return jnp.clip(jnp.round(x), *ends(bits))
