"""A weight matrix stored as several arrays (base, down, up, scale): which matrices can be stored so, and how
the axes of each array follow from the matrix's."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from headrace.nn.module import Array, Axes, MakeLeaf, PyTree

NamedSizes = tuple[tuple[str, ...], tuple[int, ...]]  # names and sizes of some axes


@dataclass(frozen=True)
class MatrixSpec:
    """A matrix of stacked layers as its family declares it, and the function that makes leaves."""

    path: str
    axes: Axes
    shape: tuple[int, ...]
    leaf: MakeLeaf

    @property
    def inputs(self) -> NamedSizes:
        """The axes that a product with an activation sums over."""
        return self._named_sizes(slice(1, 1 + self.axes.num_input_axes))

    @property
    def outputs(self) -> NamedSizes:
        """The other axes, without that of the layers."""
        return self._named_sizes(slice(1 + self.axes.num_input_axes, None))

    def _named_sizes(self, which: slice) -> NamedSizes:
        return self.axes.names[which], self.shape[which]

    def part(self, name: str, *axes: NamedSizes, **changes: Any) -> PyTree:
        """Make the leaf of one part. It has the layers' axis, then `axes`; `changes` are fields of `Axes` in
        which it differs from the matrix."""
        names = sum((group[0] for group in axes), self.axes.names[:1])
        shape = sum((group[1] for group in axes), self.shape[:1])
        return self.leaf(
            f"{self.path}.{name}", replace(self.axes, names=names, **changes), shape, _no_initializer
        )


def is_wrappable(axes: Axes) -> bool:
    """Whether a weight is a matrix of stacked layers, with exactly one per layer."""
    return axes.is_hidden_matrix and axes.stacked == 1 and not axes.keep_float32


def init_down(key: Array, w: Array, inputs: int, rank: int) -> Array:
    """Initialize the `down` part of a matrix w [layers ...] as LoRA does: Kaiming-uniform with slope sqrt(5).
    `inputs` counts w's input axes."""
    input_shape = w.shape[1 : 1 + inputs]
    bound = 1 / math.sqrt(math.prod(input_shape))
    return jax.random.uniform(key, (w.shape[0], *input_shape, rank), jnp.float32, -bound, bound)


def _no_initializer(key: Array) -> Array:
    raise AssertionError("parts of a matrix are initialized from the matrix, by model_wrappers.wrap_params")
