"""LoRA: all weights are frozen, and two thin matrices per matrix of the layers learn what is added to it
(arXiv 2106.09685). With DoRA the norm of each output's weights learns as well (arXiv 2402.09353). The frozen
matrices may be stored in few bits (QLoRA, low_precision/nf4.py).

The wrapped model starts with the output of the plain one. After training the adapters are merged into the
matrices, or exported without them (convert/peft.py)."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from headrace.config.wrappers import LoRAKeys
from headrace.low_precision import nf4
from headrace.low_precision.nf4 import NF4Weight
from headrace.models import Family, ModelConfig
from headrace.nn import module
from headrace.nn.linear import project
from headrace.nn.module import Array, Axes, Initializer, PyTree
from headrace.nn.split_matrix import MatrixSpec, init_down, is_wrappable

PRECISE = jax.lax.Precision.HIGHEST  # merged weights must equal those that training used
RANK = "R"  # the rank's letter in einsums; docs/letters.md has the others, all lower-case


@dataclass(frozen=True)
class LoRAShape:
    """The sizes of a matrix's adapter. `inputs` counts the matrix's own axes that a product sums over; the
    product of the thin matrices is multiplied by `scale`."""

    inputs: int
    rank: int
    scale: float


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["base", "down", "up", "magnitude"],
    meta_fields=["sizes"],
)
@dataclass(frozen=True)
class LoRAWeight:
    """A frozen matrix `base` and its adapter: `down` [inputs rank] times `up` [rank outputs], and for DoRA
    `magnitude` [outputs], else None."""

    base: Any
    down: Any
    up: Any
    magnitude: Any
    sizes: LoRAShape

    def base_plus_delta(self) -> Array:
        """The sum of frozen matrix and adapter of one layer, in float32."""
        base = self.base.to_dense() if isinstance(self.base, NF4Weight) else self.base.astype(jnp.float32)
        delta = jnp.tensordot(self.down, self.up, axes=1, precision=PRECISE)
        return base + self.sizes.scale * delta.reshape(base.shape)

    def dora_scale(self) -> Array:
        """The factor [outputs] that gives each output's weights their learned norm. As in the paper, no
        gradient flows through the norm of the sum."""
        input_axes = tuple(range(self.sizes.inputs))
        return self.magnitude / jax.lax.stop_gradient(column_norm(self.base_plus_delta(), input_axes))

    def to_dense(self) -> Array:
        """The merged matrix of one layer."""
        merged = self.base_plus_delta()
        return merged if self.magnitude is None else merged * self.dora_scale()


@project.register
def _(w: LoRAWeight, x: Array, spec: str) -> Array:
    x_axes, w_axes, out_axes = spec.replace("->", ",").split(",")
    input_axes, output_axes = w_axes[: w.sizes.inputs], w_axes[w.sizes.inputs :]
    if not set(input_axes).isdisjoint(out_axes):  # each head has a matrix of its own
        return project(w.to_dense().astype(x.dtype), x, spec)
    low_rank_axes = x_axes.translate({ord(letter): None for letter in input_axes}) + RANK
    low_rank = project(w.down, x, f"{x_axes},{input_axes}{RANK}->{low_rank_axes}")
    delta = project(w.up, low_rank, f"{low_rank_axes},{RANK}{output_axes}->{out_axes}")
    out = project(w.base, x, spec) + (w.sizes.scale * delta).astype(x.dtype)
    if w.magnitude is None:
        return out
    return jnp.einsum(f"{out_axes},{output_axes}->{out_axes}", out, w.dora_scale().astype(x.dtype))


def column_norm(w: Array, axes: tuple[int, ...]) -> Array:
    """The Euclidean norm along `axes`."""
    return jnp.sqrt(jnp.sum(jnp.square(w), axis=axes))


def applies(cfg: ModelConfig) -> bool:
    """Whether the config asks for adapters."""
    return cfg.lora is not None


def unwrapped(cfg: ModelConfig) -> ModelConfig:
    """The config without adapters."""
    return replace(cfg, lora=None)


def frozen_base(model: PyTree) -> PyTree:
    """The model without its adapters; its matrices stay in the format they are stored in."""
    base = lambda node: node.base if isinstance(node, LoRAWeight) else node
    return jax.tree.map(base, model, is_leaf=lambda node: isinstance(node, LoRAWeight))


def _keys(cfg: ModelConfig) -> LoRAKeys:
    """The `lora` section of a config that has one."""
    assert cfg.lora is not None
    return cfg.lora


def selected_weights(cfg: ModelConfig, axes: dict[str, Axes]) -> frozenset[str]:
    """Paths of the matrices that have adapters."""
    wrappable = frozenset(path for path, leaf in axes.items() if is_wrappable(leaf))
    targets = _keys(cfg).targets
    return wrappable if targets is None else module.select_weights("lora.targets", targets, wrappable)


def other_axes(cfg: ModelConfig, axes: Axes) -> Axes:
    """The axes of a weight without an adapter: frozen, and a matrix (embedding, head) is stored in bfloat16
    if the base has few bits."""
    is_half = _keys(cfg).base_bits and axes.is_matrix and not axes.keep_float32
    return replace(axes, frozen=True, dtype=jnp.bfloat16 if is_half else axes.dtype)


def declare(cfg: ModelConfig, matrix: MatrixSpec, init: Initializer) -> LoRAWeight:
    """Make the leaves of a wrapped matrix."""
    inputs, outputs, sizes = matrix.inputs, matrix.outputs, sizes_of(cfg, matrix.axes)
    rank = ("rank",), (sizes.rank,)
    if _keys(cfg).base_bits in (4, 8):
        base = nf4.declare(replace(matrix, path=f"{matrix.path}.base"), _keys(cfg).base_bits)
    else:
        dtype = jnp.bfloat16 if _keys(cfg).base_bits else None
        base = matrix.part("base", inputs, outputs, frozen=True, dtype=dtype)
    magnitude = None
    down = matrix.part("down", inputs, rank, keep_float32=True)
    up = matrix.part("up", rank, outputs, num_input_axes=1, keep_float32=True)
    if _keys(cfg).dora:
        magnitude = matrix.part("magnitude", outputs, num_input_axes=0, keep_float32=True)
    return LoRAWeight(base, down, up, magnitude, sizes)


def sizes_of(cfg: ModelConfig, axes: Axes) -> LoRAShape:
    """The sizes of the adapter of a matrix with these axes."""
    keys = _keys(cfg)
    alpha = 2.0 * keys.rank if keys.alpha is None else keys.alpha
    return LoRAShape(axes.num_input_axes, keys.rank, alpha / keys.rank)


def from_dense(cfg: ModelConfig, axes: Axes, w: Array, key: Array) -> LoRAWeight:
    """Wrap a matrix [layers ...]. `up` is zero, so the adapter adds nothing yet."""
    sizes = sizes_of(cfg, axes)
    base: Array | NF4Weight = w
    if _keys(cfg).base_bits in (4, 8):
        base = nf4.from_dense(w, _keys(cfg).base_bits, axes.num_input_axes)
    elif _keys(cfg).base_bits:
        base = w.astype(jnp.bfloat16)
    wrapped = LoRAWeight(
        base=base,
        down=init_down(key, w, axes.num_input_axes, sizes.rank),
        up=jnp.zeros((w.shape[0], sizes.rank, *w.shape[1 + axes.num_input_axes :])),
        magnitude=None,
        sizes=sizes,
    )
    if not _keys(cfg).dora:
        return wrapped
    input_axes = tuple(range(axes.num_input_axes))
    norm = lambda layer: column_norm(layer.base_plus_delta(), input_axes)
    return replace(wrapped, magnitude=jax.lax.map(norm, wrapped))


def to_dense(cfg: ModelConfig, axes: Axes, w: LoRAWeight) -> Array:
    """Merge a wrapped matrix [layers ...] back into one array."""
    return jax.lax.map(lambda layer: layer.to_dense(), w)


def flops_per_token(family: Family, cfg: ModelConfig, sequence_length: int) -> float:
    """Forward and backward FLOPs. A frozen matrix has no gradient, which saves one product of three."""
    axes = dict(module.named_leaves(module.axes(family.Model, cfg)))
    shapes = dict(module.named_leaves(module.shapes(family.Model, cfg)))
    frozen = sum(shapes[path].size for path, leaf in axes.items() if is_wrappable(leaf))
    trained = 0
    for path in selected_weights(cfg, axes):
        layers, *shape = shapes[path].shape
        inputs = axes[path].num_input_axes
        trained += layers * _keys(cfg).rank * (math.prod(shape[:inputs]) + math.prod(shape[inputs:]))
    return family.flops_per_token(cfg, sequence_length) - 2 * frozen + 6 * trained
