"""The weights of a model from those of a smaller one of its family: along every axis they are repeated to
both sides of their middle, and layers are repeated in place, as ModernBERT-large was begun (arXiv 2412.13663,
after Phi and Gopher, arXiv 2112.11446). Along the vocabulary each token has its own row."""

import jax.numpy as jnp
import numpy as np

from headrace.nn.module import Array, Axes


def grow_weight(
    weight: Array,
    axes: Axes,
    shape: tuple[int, ...],
    depths: tuple[int, int],
    rows: np.ndarray | None = None,
) -> Array:
    """One weight at its larger shape; `depths` are the layers of both models. Along the vocabulary it has
    these `rows` of the smaller one, and their mean where they are -1."""
    for axis, (old, new) in enumerate(zip(weight.shape, shape, strict=True)):
        if axes.names[axis] == "vocab":
            if rows is not None:
                weight = remap_rows(weight, axis, rows)
            continue
        if axis < axes.stacked and axes.names[axis] != "experts":
            # A stack may lack the first layers, which have no such weight.
            layers = np.arange(depths[1] - new, depths[1])
            found = np.rint(layers * depths[0] / depths[1]).astype(int) - (depths[0] - old)
            source = np.clip(found, 0, old - 1)
        else:
            source = (np.arange(new) - (new - old) // 2) % old
        if old != new:
            weight = jnp.take(weight, source, axis=axis)
    return weight


def remap_rows(weight: Array, axis: int, rows: np.ndarray) -> Array:
    """The weight with these rows along an axis; new ones, -1, are the mean of all that were there."""
    found = jnp.take(weight, np.maximum(rows, 0), axis=axis)
    new = (rows < 0).reshape([-1 if dim == axis else 1 for dim in range(weight.ndim)])
    return jnp.where(new, weight.mean(axis=axis, keepdims=True), found)
