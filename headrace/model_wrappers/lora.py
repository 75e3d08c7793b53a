"""Adapters: all weights are frozen, and beside each matrix of the layers two thin ones learn what is added to
it (LoRA, arXiv 2106.09685), and with them the length of what an output's weights are together (DoRA, arXiv
2402.09353). The frozen matrices may be held in few bits (QLoRA, compress/frozen.py). At first all is as it
was; in the end it is merged, or handed over beside the model (export/adapter.py)."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from headrace.nn import module
from headrace.low_precision import nf4 as frozen
from headrace.low_precision.nf4 import Frozen
from headrace.nn.module import Array, Axes
from headrace.nn.split_matrix import Declared, can_be_held, thin
from headrace.nn.linear import project

PLAIN = dict(lora_rank=0, lora_alpha=None, lora_on=None, lora_dora=False, lora_bits=0)
PRECISE = jax.lax.Precision.HIGHEST  # what is merged must be what was used
RANK = "R"  # in einsums; other letters are those of docs/letters.md, which are small


@dataclass(frozen=True)
class Sizes:
    """Of a matrix's adapter. The first `inputs` of its own axes are those that are summed over; what is added
    is multiplied by `scale`."""

    inputs: int
    rank: int
    scale: float


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["base", "down", "up", "magnitude"],
    meta_fields=["sizes"],
)
@dataclass(frozen=True)
class Adapted:
    """A weight that is frozen, `down` [inputs rank] times `up` [rank outputs] beside it, and with DoRA the
    `magnitude` [outputs]."""

    base: Any
    down: Any
    up: Any
    magnitude: Any
    sizes: Sizes

    def sum(self) -> Array:
        """Of one layer: what is frozen and what is added, in float32."""
        base = self.base.whole() if isinstance(self.base, Frozen) else self.base.astype(jnp.float32)
        added = jnp.tensordot(self.down, self.up, axes=1, precision=PRECISE)
        return base + self.sizes.scale * added.reshape(base.shape)

    def stretch(self) -> Array:
        """By how much each output is longer than the sum's, [outputs]. No gradient goes through the length of
        the sum, as published."""
        summed = tuple(range(self.sizes.inputs))
        return self.magnitude / jax.lax.stop_gradient(length(self.sum(), summed))

    def whole(self) -> Array:
        return self.sum() if self.magnitude is None else self.sum() * self.stretch()


@project.register
def _(w: Adapted, x: Array, spec: str) -> Array:
    given, ours, out = spec.replace("->", ",").split(",")
    ins, outs = ours[: w.sizes.inputs], ours[w.sizes.inputs :]
    if not set(ins).isdisjoint(out):  # a matrix for each head
        return project(w.whole().astype(x.dtype), x, spec)
    between = given.translate({ord(letter): None for letter in ins}) + RANK
    added = project(
        w.up, project(w.down, x, f"{given},{ins}{RANK}->{between}"), f"{between},{RANK}{outs}->{out}"
    )
    made = project(w.base, x, spec) + (w.sizes.scale * added).astype(x.dtype)
    if w.magnitude is None:
        return made
    return jnp.einsum(f"{out},{outs}->{out}", made, w.stretch().astype(x.dtype))


def length(w: Array, axes: tuple[int, ...]) -> Array:
    return jnp.sqrt(jnp.sum(jnp.square(w), axis=axes))


def has_adapters(cfg: Any) -> bool:
    return getattr(cfg, "lora_rank", 0) > 0


def without(model: Any) -> Any:
    """The model that is frozen, in the form in which it is held."""
    bare = lambda node: node.base if isinstance(node, Adapted) else node
    return jax.tree.map(bare, model, is_leaf=lambda node: isinstance(node, Adapted))


def takes(cfg: Any, axes: dict[str, Axes]) -> frozenset[str]:
    """The matrices that have adapters."""
    every = frozenset(path for path, its in axes.items() if can_be_held(its))
    return every if cfg.lora_on is None else module.matching("model.lora_on", cfg.lora_on, every)


def beside(cfg: Any, axes: Axes) -> Axes:
    """A weight without an adapter. Where matrices are held in few bits, the large ones that are left
    (embeddings, the head) are held in 16."""
    small = cfg.lora_bits and axes.is_matrix and not axes.exact
    return replace(axes, still=True, dtype=jnp.bfloat16 if small else axes.dtype)


def declared(cfg: Any, matrix: Declared, initialise: Any) -> Adapted:
    ins, outs, sizes = matrix.ins, matrix.outs, sizes_of(cfg, matrix.axes)
    rank = ("rank",), (sizes.rank,)
    if cfg.lora_bits in (4, 8):
        named = replace(matrix, path=f"{matrix.path}.base")
        base = frozen.declared(named, cfg.lora_bits)
    else:
        base = matrix.part("base", ins, outs, still=True, dtype=jnp.bfloat16 if cfg.lora_bits else None)
    return Adapted(
        base=base,
        down=matrix.part("down", ins, rank, exact=True),
        up=matrix.part("up", rank, outs, inputs=1, exact=True),
        magnitude=matrix.part("magnitude", outs, inputs=0, exact=True) if cfg.lora_dora else None,
        sizes=sizes,
    )


def sizes_of(cfg: Any, axes: Axes) -> Sizes:
    alpha = 2.0 * cfg.lora_rank if cfg.lora_alpha is None else cfg.lora_alpha
    return Sizes(axes.inputs, cfg.lora_rank, alpha / cfg.lora_rank)


def made(cfg: Any, axes: Axes, w: Array, key: Array) -> Adapted:
    """Of a weight [layers ...]: nothing is added yet."""
    sizes = sizes_of(cfg, axes)
    base: Any = w
    if cfg.lora_bits:
        few = cfg.lora_bits in (4, 8)
        base = frozen.made(w, cfg.lora_bits, axes.inputs) if few else w.astype(jnp.bfloat16)
    fresh = Adapted(
        base=base,
        down=thin(key, w, axes.inputs, sizes.rank),
        up=jnp.zeros((w.shape[0], sizes.rank, *w.shape[1 + axes.inputs :])),
        magnitude=None,
        sizes=sizes,
    )
    if not cfg.lora_dora:
        return fresh
    summed = tuple(range(axes.inputs))
    return replace(fresh, magnitude=jax.lax.map(lambda one: length(one.sum(), summed), fresh))


def whole(cfg: Any, axes: Axes, w: Adapted) -> Array:
    return jax.lax.map(lambda one: one.whole(), w)


def flops(family: Any, cfg: Any, sequence: int) -> float:
    """Frozen matrices have no gradient, which is one product of three."""
    names = dict(module.named(module.axes(family.Model, cfg)))
    shapes = dict(module.named(module.shapes(family.Model, cfg)))
    still = sum(shapes[path].size for path, its in names.items() if can_be_held(its))
    learns = 0
    for path in takes(cfg, names):
        layers, *own = shapes[path].shape
        inputs = names[path].inputs
        learns += layers * cfg.lora_rank * (math.prod(own[:inputs]) + math.prod(own[inputs:]))
    return family.flops(cfg, sequence) - 2 * still + 6 * learns
