"""Quantization-aware training: the forward pass uses the layers' matrices as they will be stored, rounded to
integers of a few bits.

Either all weights are trained through the rounding, or they are frozen in 8 bits, and two thin matrices that
are added inside the rounding are trained together with the scales (LR-QAT, arXiv 2406.06385). Both are merged
into a quantized matrix without any further error."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from headrace.config.wrappers import QATKeys
from headrace.low_precision import grid
from headrace.models import Family, ModelConfig
from headrace.nn.linear import project
from headrace.nn.module import Array, Axes, Initializer, PyTree
from headrace.nn.split_matrix import MatrixSpec, init_down, is_wrappable

SCALE_LR = 0.01  # learning rate of scales as a share of the other weights': 1e-5 and 1e-3 in the paper
PRECISE = jax.lax.Precision.HIGHEST  # rounding must give the same integers wherever it is computed


@dataclass(frozen=True)
class QuantGrid:
    """The format that a matrix is rounded to. `inputs` counts its own axes that a product sums over."""

    bits: int
    group: int  # inputs that share a scale; 0: all
    rank: int  # of LR-QAT's matrices; 0: the weights are trained themselves
    inputs: int

    def flat(self, w: Array) -> Array:
        """Reshape one layer's weight to a matrix [inputs outputs]."""
        return w.reshape(math.prod(w.shape[: self.inputs]), -1)

    def round(self, w: Array) -> Array:
        """Round a weight [layers ...]; the largest entry of each group sets its scale."""

        def round_layer(w: Array) -> Array:
            integers, scales = to_integers(w, self)
            return (integers * grid.expand_scales(scales, integers.shape[0], self.group)).reshape(w.shape)

        return jax.vmap(round_layer)(w.astype(jnp.float32))


@partial(jax.tree_util.register_dataclass, data_fields=["fixed", "scale", "down", "up"], meta_fields=["grid"])
@dataclass(frozen=True)
class LRQATWeight:
    """A matrix of LR-QAT: frozen fixed-point numbers `fixed`, in units of `scale`, with `bits` of their 8
    bits before the point, and the trained `down` [inputs rank] times `up` [rank outputs], divided by the
    rank."""

    fixed: Any
    scale: Any
    down: Any
    up: Any
    grid: QuantGrid

    def integers(self) -> tuple[Array, Array]:
        """The integers [inputs outputs] and scales [groups outputs] of one layer."""
        layout = self.grid
        down, up = layout.flat(self.down), self.up.reshape(layout.rank, -1)
        offset = jnp.matmul(down, up, precision=PRECISE) / layout.rank
        base = layout.flat(self.fixed).astype(jnp.float32) / 2 ** (8 - layout.bits)
        integers = round_ste(layout.bits, base + offset)
        return integers, float16_scale_ste(self.scale.reshape(self.scale.shape[0], -1))

    def to_dense(self) -> Array:
        """The rounded matrix of one layer."""
        integers, scales = self.integers()
        expanded = grid.expand_scales(scales, integers.shape[0], self.grid.group)
        return (integers * expanded).reshape(self.fixed.shape)


@project.register
def _(w: LRQATWeight, x: Array, spec: str) -> Array:
    # The backward pass computes the dense matrix again, so that only one layer's is in memory at a time.
    return jax.checkpoint(lambda w, x: project(w.to_dense().astype(x.dtype), x, spec))(w, x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def round_ste(bits: int, x: Array) -> Array:
    """Round to the grid's integers. Straight-through: the gradient passes unchanged, but is zero for entries
    outside of the grid's range."""
    return grid.round_to_grid(x, bits)


def _round_forward(bits: int, x: Array) -> tuple[Array, Array]:
    low, high = grid.limits(bits)
    return round_ste(bits, x), (x >= low) & (x <= high)


def _round_backward(bits: int, in_range: Array, d: Array) -> tuple[Array]:
    return (jnp.where(in_range, d, 0.0),)


round_ste.defvjp(_round_forward, _round_backward)


@jax.custom_vjp
def float16_scale_ste(scale: Array) -> Array:
    """Round scales to float16, as files store them. Straight-through: they are trained in float32."""
    return grid.round_scales(scale)


float16_scale_ste.defvjp(lambda scale: (float16_scale_ste(scale), None), lambda _, d: (d,))


def applies(cfg: ModelConfig) -> bool:
    """Whether the config asks for quantization-aware training."""
    return cfg.qat is not None


def unwrapped(cfg: ModelConfig) -> ModelConfig:
    """The config without quantization-aware training."""
    return replace(cfg, qat=None)


def _keys(cfg: ModelConfig) -> QATKeys:
    """The `qat` section of a config that has one."""
    assert cfg.qat is not None
    return cfg.qat


def is_low_rank(cfg: ModelConfig) -> bool:
    """Whether weights are frozen and low-rank matrices are trained (LR-QAT)."""
    return applies(cfg) and _keys(cfg).rank > 0


def selected_weights(cfg: ModelConfig, axes: dict[str, Axes]) -> frozenset[str]:
    """Paths of the matrices that are rounded."""
    return frozenset(path for path, leaf in axes.items() if is_wrappable(leaf))


def other_axes(cfg: ModelConfig, axes: Axes) -> Axes:
    """The axes of a weight that is not rounded: frozen with LR-QAT."""
    return replace(axes, frozen=axes.frozen or is_low_rank(cfg))


def declare(cfg: ModelConfig, matrix: MatrixSpec, init: Initializer) -> PyTree:
    """Make the leaves of a matrix: itself with a grid, or the parts of LR-QAT."""
    layout = make_grid(cfg, matrix.axes)
    if not layout.rank:
        return matrix.leaf(matrix.path, replace(matrix.axes, qat_grid=layout), matrix.shape, init)
    inputs, outputs = matrix.inputs, matrix.outputs
    groups = ("groups",), (grid.num_groups(math.prod(inputs[1]), layout.group),)
    rank = ("rank",), (layout.rank,)
    return LRQATWeight(
        fixed=matrix.part("fixed", inputs, outputs, frozen=True, keep_float32=True, dtype=jnp.int8),
        scale=matrix.part("scale", groups, outputs, num_input_axes=0, lr_scale=SCALE_LR),
        down=matrix.part("down", inputs, rank, keep_float32=True),
        up=matrix.part("up", rank, outputs, num_input_axes=1, keep_float32=True),
        grid=layout,
    )


def make_grid(cfg: ModelConfig, axes: Axes) -> QuantGrid:
    """The grid of a matrix with these axes."""
    return QuantGrid(_keys(cfg).bits, _keys(cfg).group_size, _keys(cfg).rank, axes.num_input_axes)


def from_dense(cfg: ModelConfig, axes: Axes, w: Array, key: Array) -> PyTree:
    """Wrap a matrix [layers ...]. With LR-QAT it starts as the nearest integers."""
    return to_low_rank(w, make_grid(cfg, axes), key) if is_low_rank(cfg) else w


def to_dense(cfg: ModelConfig, axes: Axes, w: PyTree) -> Array:
    """The rounded matrix [layers ...]."""
    if isinstance(w, LRQATWeight):
        return jax.lax.map(lambda layer: layer.to_dense(), w)
    return make_grid(cfg, axes).round(w)


def flops_per_token(family: Family, cfg: ModelConfig, sequence_length: int) -> float:
    """Forward and backward FLOPs: those of the plain model, since LR-QAT computes the gradient of the dense
    matrix."""
    return family.flops_per_token(cfg, sequence_length)


def to_low_rank(w: Array, layout: QuantGrid, key: Array) -> LRQATWeight:
    """Wrap a matrix [layers ...] for LR-QAT, one layer at a time: the search for scales needs float32."""
    output_shape = w.shape[1 + layout.inputs :]

    def quantize_layer(w: Array) -> tuple[Array, Array]:
        flat = layout.flat(w.astype(jnp.float32))
        scales = grid.search_scales(flat, layout.bits, layout.group)
        scaled = flat / grid.expand_scales(scales, flat.shape[0], layout.group)
        return to_fixed_point(scaled, layout.bits).reshape(w.shape), scales.reshape(-1, *output_shape)

    fixed, scales = jax.lax.map(quantize_layer, w)
    return LRQATWeight(
        fixed=fixed,
        scale=scales,
        down=init_down(key, w, layout.inputs, layout.rank),
        up=jnp.zeros((w.shape[0], layout.rank, *output_shape)),
        grid=layout,
    )


def to_fixed_point(x: Array, bits: int) -> Array:
    """Convert to 8-bit fixed point with `bits` before the point.

    The result stays within half a step of x's nearest integer: rounding to fixed point first and to an
    integer afterwards would give another integer for one number in 32 with 4 bits."""
    steps = 2 ** (8 - bits)
    nearest = grid.round_to_grid(x, bits) * steps
    fixed = jnp.clip(jnp.round(x * steps), nearest - steps / 2 + 1, nearest + steps / 2 - 1)
    return jnp.clip(fixed, -128, 127).astype(jnp.int8)


def to_integers(w: PyTree, layout: QuantGrid) -> tuple[Array, Array]:
    """The integers [inputs outputs] and scales [groups outputs] of one layer's weight."""
    if isinstance(w, LRQATWeight):
        return w.integers()
    flat = layout.flat(w)
    scales = jax.lax.stop_gradient(grid.absmax_scales(flat, layout.bits, layout.group))
    return round_ste(layout.bits, flat / grid.expand_scales(scales, flat.shape[0], layout.group)), scales
