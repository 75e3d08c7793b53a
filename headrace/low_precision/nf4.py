"""Frozen weights in few bits, for LoRA to train adapters on: 4 bits as in QLoRA (arXiv 2305.14314), or 8.

In 4 bits a code is the index of one of 16 quantiles of a normal distribution (NF4), in 8 bits an integer.
Groups of 64 inputs of an output share a scale in float16, where the paper quantizes scales a second time:
4.25 bits a weight instead of 4.13. A layer's matrix is made dense when it meets an activation, and again in
the backward pass."""

import itertools
import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from headrace.errors import UserError
from headrace.low_precision import grid
from headrace.nn.linear import project
from headrace.nn.module import Array
from headrace.nn.split_matrix import MatrixSpec

GROUP_SIZE = 64

# Half of the quantiles below zero, zero itself, and the others above it, as a share of the largest.
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
MIDPOINTS = tuple((low + high) / 2 for low, high in itertools.pairwise(LEVELS))


@partial(
    jax.tree_util.register_dataclass, data_fields=["codes", "scale"], meta_fields=["bits", "num_input_axes"]
)
@dataclass(frozen=True)
class NF4Weight:
    """A frozen weight in 4 or 8 bits, of one layer or of a stack.

    In 4 bits, two codes share a byte along the last input axis."""

    codes: Array
    scale: Array
    bits: int
    num_input_axes: int

    def to_dense(self) -> Array:
        """Make the dense matrix of one layer, in float32."""
        codes, last = self.codes, self.num_input_axes - 1
        if self.bits == 4:
            pairs = jnp.stack([codes & 15, codes >> 4], axis=self.num_input_axes)
            shape = (*codes.shape[:last], 2 * codes.shape[last], *codes.shape[last + 1 :])
            values = jnp.take(jnp.asarray(LEVELS, jnp.float32), pairs.reshape(shape).astype(jnp.int32))
        else:
            values = codes.astype(jnp.float32)
        flat = values.reshape(math.prod(values.shape[: self.num_input_axes]), -1)
        scale = self.scale.astype(jnp.float32).reshape(self.scale.shape[0], -1)
        return (flat * grid.expand_scales(scale, flat.shape[0], GROUP_SIZE)).reshape(values.shape)


@project.register
def _(w: NF4Weight, x: Array, spec: str) -> Array:
    return jax.checkpoint(lambda w, x: project(w.to_dense().astype(x.dtype), x, spec))(w, x)


def declare(matrix: MatrixSpec, bits: int) -> NF4Weight:
    """Declare the parts of a matrix. Raises UserError if its last input axis is odd and `bits` is 4."""
    (names, sizes), outputs = matrix.inputs, matrix.outputs
    if bits == 4 and sizes[-1] % 2:
        raise UserError(
            f"lora.base_bits: found 4, expected 8, 16 or 0, since {matrix.path} has {sizes[-1]} along "
            f"{names[-1]}, and two weights share a byte"
        )
    code_inputs = names, ((*sizes[:-1], sizes[-1] // 2) if bits == 4 else sizes)
    groups = ("groups",), (grid.num_groups(math.prod(sizes), GROUP_SIZE),)
    dtype = jnp.uint8 if bits == 4 else jnp.int8
    return NF4Weight(
        codes=matrix.part("codes", code_inputs, outputs, frozen=True, keep_float32=True, dtype=dtype),
        scale=matrix.part(
            "scale", groups, outputs, frozen=True, keep_float32=True, num_input_axes=0, dtype=jnp.float16
        ),
        bits=bits,
        num_input_axes=matrix.axes.num_input_axes,
    )


def from_dense(w: Array, bits: int, num_input_axes: int) -> NF4Weight:
    """Quantize a dense weight [layers ...], whose first axes after the layers' are its input axes."""
    codes, scale = jax.lax.map(partial(_quantize_layer, bits, num_input_axes), w)
    return NF4Weight(codes, scale, bits, num_input_axes)


def _quantize_layer(bits: int, num_input_axes: int, w: Array) -> tuple[Array, Array]:
    flat = w.astype(jnp.float32).reshape(math.prod(w.shape[:num_input_axes]), -1)
    if bits == 8:
        scale = grid.absmax_scales(flat, 8, GROUP_SIZE)
        scaled = flat / grid.expand_scales(scale, flat.shape[0], GROUP_SIZE)
        codes = grid.round_to_grid(scaled, 8).astype(jnp.int8).reshape(w.shape)
    else:
        scale = grid.round_scales(jnp.max(jnp.abs(grid.split_groups(flat, GROUP_SIZE)), axis=1))
        scaled = flat / grid.expand_scales(scale, flat.shape[0], GROUP_SIZE)
        nearest = jnp.searchsorted(jnp.asarray(MIDPOINTS), scaled).astype(jnp.uint8).reshape(w.shape)
        low, high = (jax.lax.slice_in_dim(nearest, n, None, 2, axis=num_input_axes - 1) for n in (0, 1))
        codes = low | high << 4
    return codes, scale.astype(jnp.float16).reshape(scale.shape[0], *w.shape[num_input_axes:])
