"""A matrix that a model holds in several parts, some of them thin: which matrices can be held so, and how a
part is declared by the axes of the matrix that it belongs to."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from headrace.nn.module import Array, Axes

Leaf = Callable[[str, Axes, tuple[int, ...], Callable[[Array], Array]], Any]
Side = tuple[tuple[str, ...], tuple[int, ...]]  # names and sizes of some axes


@dataclass(frozen=True)
class Declared:
    """A matrix of a stack of layers as its family declares it, and the function that takes the place of
    module.build's `leaf`."""

    path: str
    axes: Axes
    shape: tuple[int, ...]
    leaf: Leaf

    @property
    def ins(self) -> Side:
        return self._side(slice(1, 1 + self.axes.inputs))

    @property
    def outs(self) -> Side:
        return self._side(slice(1 + self.axes.inputs, None))

    def _side(self, which: slice) -> Side:
        return self.axes.names[which], self.shape[which]

    def part(self, name: str, *sides: Side, **more: Any) -> Any:
        """One of the parts, with these axes after that of the layers."""
        names = sum((side[0] for side in sides), self.axes.names[:1])
        shape = sum((side[1] for side in sides), self.shape[:1])
        return self.leaf(f"{self.path}.{name}", replace(self.axes, names=names, **more), shape, _missing)


def can_be_held(axes: Axes) -> bool:
    """A matrix of a stack of layers, of which each layer has one."""
    return axes.is_hidden_matrix and axes.stacked == 1 and not axes.exact


def thin(key: Array, w: Any, inputs: int, rank: int) -> Array:
    """The first of two thin matrices beside a weight [layers ...], as LoRA draws it: uniform, by Kaiming with
    sqrt(5) for its slope."""
    ins = w.shape[1 : 1 + inputs]
    bound = 1 / math.sqrt(math.prod(ins))
    return jax.random.uniform(key, (w.shape[0], *ins, rank), jnp.float32, -bound, bound)


def _missing(key: Array) -> Array:
    raise AssertionError("parts of a matrix are made of the matrix, by matrices.of_plain")
