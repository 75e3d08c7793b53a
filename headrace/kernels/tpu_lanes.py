"""Heads side by side in the registers of a TPU, for kernels that read queries, keys and values as they lie in
memory. As many heads as fill a register come together; a factor of a product has zeros in the place of the
others, which costs nothing: a matrix unit sums over 128 in any case."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from headrace.nn.compile_target import OLD_TPUS

Array = jax.Array
LANES = 128  # of a register


def unfit(kind: str, q: Any, k: Any) -> str | None:
    """What keeps a kind of TPU from taking these queries and keys [b s n h] so."""
    heads, width = q.shape[2:]
    if kind in OLD_TPUS:
        return f"{kind} has no products of bfloat16 in kernels"
    if q.dtype != jnp.bfloat16:
        return f"its kernels are for bfloat16, and the activations are {q.dtype}"
    if LANES % width or heads * width % LANES:
        return f"{heads} heads of {width} do not fill registers of {LANES}"
    short = [x.shape[1] for x in (q, k) if x.shape[1] % LANES]
    return f"{short[0]} positions are not a multiple of {LANES}" if short else None


def heads_of(width: int) -> list[tuple[int, int]]:
    """The columns of each head in a register."""
    return [(start, start + width) for start in range(0, LANES, width)]


def only(mine: tuple[int, int], x: Array) -> Array:
    """With zeros in the place of other heads."""
    column = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where((column >= mine[0]) & (column < mine[1]), x, jnp.zeros_like(x))


def dot(a: Array, b: Array, of_a: int, of_b: int) -> Array:
    """Summed over these axes, in float32."""
    return lax.dot_general(a, b, (((of_a,), (of_b,)), ((), ())), preferred_element_type=jnp.float32)
