"""Training that sees the model it will be stored as: the matrices of the layers in whole numbers of a few
bits. Either all weights learn, through the rounding (quantisation-aware training), or they are frozen in 8
bits each and two thin matrices learn what is added to them inside the rounding, and the scales with them
(LR-QAT, arXiv 2406.06385). What is learnt so is merged without a trace."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from headrace.low_precision import grid
from headrace.nn.module import Array, Axes
from headrace.nn.split_matrix import Declared, can_be_held, thin
from headrace.nn.linear import project

PLAIN = dict(bits=0, bits_group=0, bits_rank=0)
RATE = 0.01  # of the learning rate: how fast scales learn, 1e-5 beside 1e-3 as published
PRECISE = jax.lax.Precision.HIGHEST  # what is rounded must be the same wherever it is computed


@dataclass(frozen=True)
class Grid:
    """How a matrix is rounded. The first `inputs` of its own axes are those that are summed over."""

    bits: int
    group: int
    rank: int
    inputs: int

    def flat(self, w: Array) -> Array:
        """A matrix [inputs outputs] of one layer's weight."""
        return w.reshape(math.prod(w.shape[: self.inputs]), -1)


@partial(jax.tree_util.register_dataclass, data_fields=["fixed", "scale", "down", "up"], meta_fields=["grid"])
@dataclass(frozen=True)
class LowRank:
    """A weight whose multiples of its scale are frozen in fixed point, `bits` before the point and the rest
    of 8 after it, and what is added to them: `down` [inputs rank] times `up` [rank outputs], over the
    rank."""

    fixed: Any
    scale: Any
    down: Any
    up: Any
    grid: Grid

    def numbers(self) -> tuple[Array, Array]:
        """Of one layer: whole numbers [inputs outputs], and scales [groups outputs]."""
        its = self.grid
        down, up = its.flat(self.down), self.up.reshape(its.rank, -1)
        offset = jnp.matmul(down, up, precision=PRECISE) / its.rank
        base = its.flat(self.fixed).astype(jnp.float32) / 2 ** (8 - its.bits)
        return straight(its.bits, base + offset), stored_scale(self.scale.reshape(self.scale.shape[0], -1))

    def whole(self) -> Array:
        numbers, scales = self.numbers()
        return (numbers * grid.spread(scales, numbers.shape[0], self.grid.group)).reshape(self.fixed.shape)


@project.register
def _(w: LowRank, x: Array, spec: str) -> Array:
    """The whole matrix is made again for the backward pass, so that of all layers there is one at a time."""
    return jax.checkpoint(lambda w, x: project(w.whole().astype(x.dtype), x, spec))(w, x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def straight(bits: int, x: Array) -> Array:
    """The nearest whole numbers of the grid. Gradients go straight through, but for what lies beyond its
    ends."""
    return grid.integers(x, bits)


def _forward(bits: int, x: Array) -> tuple[Array, Array]:
    low, high = grid.ends(bits)
    return straight(bits, x), (x >= low) & (x <= high)


def _backward(bits: int, within: Array, d: Array) -> tuple[Array]:
    return (jnp.where(within, d, 0.0),)


straight.defvjp(_forward, _backward)


@jax.custom_vjp
def stored_scale(scale: Array) -> Array:
    """As files have it, in float16: training sees it so, and learns in float32."""
    return grid.kept(scale)


stored_scale.defvjp(lambda scale: (stored_scale(scale), None), lambda _, d: (d,))


def has_bits(cfg: Any) -> bool:
    return getattr(cfg, "bits", 0) > 0


def is_low_rank(cfg: Any) -> bool:
    return has_bits(cfg) and cfg.bits_rank > 0


def takes(cfg: Any, axes: dict[str, Axes]) -> frozenset[str]:
    return frozenset(path for path, its in axes.items() if can_be_held(its))


def beside(cfg: Any, axes: Axes) -> Axes:
    """A weight that is not rounded."""
    return replace(axes, still=axes.still or is_low_rank(cfg))


def declared(cfg: Any, matrix: Declared, initialise: Any) -> Any:
    its = grid_of(cfg, matrix.axes)
    if not its.rank:
        return matrix.leaf(matrix.path, replace(matrix.axes, grid=its), matrix.shape, initialise)
    ins, outs = matrix.ins, matrix.outs
    groups, rank = (("groups",), (grid.groups(math.prod(ins[1]), its.group),)), (("rank",), (its.rank,))
    return LowRank(
        fixed=matrix.part("fixed", ins, outs, still=True, exact=True, dtype=jnp.int8),
        scale=matrix.part("scale", groups, outs, inputs=0, rate=RATE),
        down=matrix.part("down", ins, rank, exact=True),
        up=matrix.part("up", rank, outs, inputs=1, exact=True),
        grid=its,
    )


def grid_of(cfg: Any, axes: Axes) -> Grid:
    return Grid(cfg.bits, cfg.bits_group, cfg.bits_rank, axes.inputs)


def made(cfg: Any, axes: Axes, w: Array, key: Array) -> Any:
    """With low rank, rounding to nearest is what weights are at first."""
    return low_rank(w, grid_of(cfg, axes), key) if is_low_rank(cfg) else w


def whole(cfg: Any, axes: Axes, w: Any) -> Array:
    if isinstance(w, LowRank):
        return jax.lax.map(lambda one: one.whole(), w)
    return rounded(w, grid_of(cfg, axes))


def flops(family: Any, cfg: Any, sequence: int) -> float:
    """Those of the plain model: the gradient of a whole matrix is what its parts learn by."""
    return family.flops(cfg, sequence)


def low_rank(w: Array, its: Grid, key: Array) -> LowRank:
    """Of a weight [layers ...], one layer at a time: the scales are searched for in float32."""
    outs = w.shape[1 + its.inputs :]

    def one(w: Array) -> tuple[Array, Array]:
        flat = its.flat(w.astype(jnp.float32))
        scales = grid.searched(flat, its.bits, its.group)
        shares = flat / grid.spread(scales, flat.shape[0], its.group)
        return fixed_point(shares, its.bits).reshape(w.shape), scales.reshape(-1, *outs)

    fixed, scales = jax.lax.map(one, w)
    return LowRank(
        fixed=fixed,
        scale=scales,
        down=thin(key, w, its.inputs, its.rank),
        up=jnp.zeros((w.shape[0], its.rank, *outs)),
        grid=its,
    )


def fixed_point(x: Array, bits: int) -> Array:
    """x in 8 bits, of which `bits` are before the point. Within half a step of the number that it is nearest
    to: rounded twice, one in 32 of 4 bits would end at the next."""
    share = 2 ** (8 - bits)
    middle = grid.integers(x, bits) * share
    near = jnp.clip(jnp.round(x * share), middle - share / 2 + 1, middle + share / 2 - 1)
    return jnp.clip(near, -128, 127).astype(jnp.int8)


def rounded(w: Array, its: Grid) -> Array:
    """A weight [layers ...] that learns itself, rounded; the largest of each group sets its scale."""

    def one(w: Array) -> Array:
        numbers, scales = numbers_of(w, its)
        return (numbers * grid.spread(scales, numbers.shape[0], its.group)).reshape(w.shape)

    return jax.vmap(one)(w.astype(jnp.float32))


def numbers_of(w: Any, its: Grid) -> tuple[Array, Array]:
    """Of one layer's weight: whole numbers [inputs outputs] and scales [groups outputs]."""
    if isinstance(w, LowRank):
        return w.numbers()
    flat = its.flat(w)
    scales = jax.lax.stop_gradient(grid.largest(flat, its.bits, its.group))
    return straight(its.bits, flat / grid.spread(scales, flat.shape[0], its.group)), scales
