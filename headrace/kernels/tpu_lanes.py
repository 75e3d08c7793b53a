"""Several heads in one register of a TPU, for kernels that read queries, keys and values in the layout that
they have in memory, [positions, heads x head_dim].

Heads that fill a register are loaded together. One factor of a matmul has zeros in the columns of the other
heads, at no cost: the matrix unit sums over 128 columns anyway."""

import jax
import jax.numpy as jnp
from jax import lax

from headrace.nn.compile_target import OLD_TPUS, ArrayShape

Array = jax.Array

LANES = 128  # columns of a register


def layout_unsupported_reason(device_kind: str, q: ArrayShape, k: ArrayShape) -> str | None:
    """Return why kernels on this kind of TPU cannot read these queries and keys [b s n h] in their own
    layout; None if they can."""
    heads, head_dim = q.shape[2:]
    if device_kind in OLD_TPUS:
        return f"{device_kind} has no bfloat16 matmuls in kernels"
    if q.dtype != jnp.bfloat16:
        return f"its kernels are for bfloat16, and the activations are {q.dtype}"
    if LANES % head_dim or heads * head_dim % LANES:
        return f"{heads} heads of {head_dim} do not fill registers of {LANES}"
    odd_lengths = [x.shape[1] for x in (q, k) if x.shape[1] % LANES]
    return f"{odd_lengths[0]} positions are not a multiple of {LANES}" if odd_lengths else None


def head_columns(head_dim: int) -> list[tuple[int, int]]:
    """List the columns (start, end) of each head in a register."""
    return [(start, start + head_dim) for start in range(0, LANES, head_dim)]


def keep_columns(columns: tuple[int, int], x: Array) -> Array:
    """Replace all but the columns from start to end by zeros."""
    column = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where((column >= columns[0]) & (column < columns[1]), x, jnp.zeros_like(x))


def contract(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """Multiply two matrices, summing over one axis of each, in float32."""
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=jnp.float32)
