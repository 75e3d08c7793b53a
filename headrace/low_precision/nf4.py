"""Weights that never move, in few bits, for adapters to learn beside: 4 bits as in QLoRA (arXiv 2305.14314),
of which each names one of 16 quantiles of a normal distribution (NF4), or 8 bits evenly. Inputs of an output
share a scale in groups of 64, of float16 where the paper quantises scales a second time: 4.25 bits a weight
for its 4.13. A layer's matrix is made whole where it meets an activation, and made again for the backward
pass."""

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from headrace.errors import UserError
from headrace.low_precision import grid
from headrace.nn.linear import project
from headrace.nn.module import Array
from headrace.nn.split_matrix import MatrixSpec

GROUP = 64

# Half of the quantiles below zero, zero itself, and the others above it, as a share of the largest.
NORMAL = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
MIDDLES = tuple((low + high) / 2 for low, high in itertools.pairwise(NORMAL))


@partial(jax.tree_util.register_dataclass, data_fields=["codes", "scale"], meta_fields=["bits", "inputs"])
@dataclass(frozen=True)
class NF4Weight:
    """A weight of one layer or of a stack. In 4 bits, two codes share a byte along the last of the inputs."""

    codes: Any
    scale: Any
    bits: int
    inputs: int

    def to_dense(self) -> Array:
        """Of one layer."""
        codes, last = self.codes, self.inputs - 1
        if self.bits == 4:
            pairs = jnp.stack([codes & 15, codes >> 4], axis=self.inputs)
            shape = (*codes.shape[:last], 2 * codes.shape[last], *codes.shape[last + 1 :])
            values = jnp.take(jnp.asarray(NORMAL, jnp.float32), pairs.reshape(shape).astype(jnp.int32))
        else:
            values = codes.astype(jnp.float32)
        flat = values.reshape(math.prod(values.shape[: self.inputs]), -1)
        scale = self.scale.astype(jnp.float32).reshape(self.scale.shape[0], -1)
        return (flat * grid.expand_scales(scale, flat.shape[0], GROUP)).reshape(values.shape)


@project.register
def _(w: NF4Weight, x: Array, spec: str) -> Array:
    return jax.checkpoint(lambda w, x: project(w.to_dense().astype(x.dtype), x, spec))(w, x)


def declare(matrix: MatrixSpec, bits: int) -> NF4Weight:
    (names, sizes), outs = matrix.inputs, matrix.outputs
    if bits == 4 and sizes[-1] % 2:
        raise UserError(
            f"lora.base_bits: found 4, expected 8, 16 or 0, since {matrix.path} has {sizes[-1]} along "
            f"{names[-1]}, and two weights share a byte"
        )
    held = names, ((*sizes[:-1], sizes[-1] // 2) if bits == 4 else sizes)
    groups = ("groups",), (grid.groups(math.prod(sizes), GROUP),)
    dtype = jnp.uint8 if bits == 4 else jnp.int8
    return NF4Weight(
        codes=matrix.part("codes", held, outs, frozen=True, keep_float32=True, dtype=dtype),
        scale=matrix.part(
            "scale", groups, outs, frozen=True, keep_float32=True, num_input_axes=0, dtype=jnp.float16
        ),
        bits=bits,
        inputs=matrix.axes.num_input_axes,
    )


def from_dense(w: Array, bits: int, inputs: int) -> NF4Weight:
    """Of a weight [layers ...]."""

    def one(w: Array) -> tuple[Array, Array]:
        flat = w.astype(jnp.float32).reshape(math.prod(w.shape[:inputs]), -1)
        if bits == 8:
            scale = grid.absmax_scales(flat, 8, GROUP)
            codes = grid.integers(flat / grid.expand_scales(scale, flat.shape[0], GROUP), 8).astype(jnp.int8)
            codes = codes.reshape(w.shape)
        else:
            scale = grid.store_scales(jnp.max(jnp.abs(grid.grouped(flat, GROUP)), axis=1))
            shares = flat / grid.expand_scales(scale, flat.shape[0], GROUP)
            nearest = jnp.searchsorted(jnp.asarray(MIDDLES), shares).astype(jnp.uint8).reshape(w.shape)
            low, high = (jax.lax.slice_in_dim(nearest, n, None, 2, axis=inputs - 1) for n in (0, 1))
            codes = low | high << 4
        return codes, scale.astype(jnp.float16).reshape(scale.shape[0], *w.shape[inputs:])

    codes, scale = jax.lax.map(one, w)
    return NF4Weight(codes, scale, bits, inputs)
