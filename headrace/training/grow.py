"""Weights of a model from those of a smaller one of its family, as ModernBERT-large was initialized (arXiv
2412.13663, after Phi and Gopher, arXiv 2112.11446).

Along every axis the smaller weight is centered and repeated to both sides. Each layer is repeated in place.
Along the vocabulary each token has the row of the same token."""

import jax.numpy as jnp
import numpy as np

from headrace.nn.module import Array, Axes


def grow_weight(
    weight: Array,
    axes: Axes,
    shape: tuple[int, ...],
    num_layers: tuple[int, int],
    vocab_rows: np.ndarray | None = None,
) -> Array:
    """Grow a weight to a larger shape. `num_layers` are those of the smaller and of the larger model.

    `vocab_rows` has the smaller model's row for each token, -1 for new tokens; None: all keep their rows."""
    for axis, (old_size, new_size) in enumerate(zip(weight.shape, shape, strict=True)):
        if axes.names[axis] == "vocab":
            if vocab_rows is not None:
                weight = remap_rows(weight, axis, vocab_rows)
            continue
        if axis < axes.stacked and axes.names[axis] != "experts":
            indices = source_layers(old_size, new_size, num_layers)
        else:
            indices = (np.arange(new_size) - (new_size - old_size) // 2) % old_size
        if old_size != new_size:
            weight = jnp.take(weight, indices, axis=axis)
    return weight


def source_layers(old_size: int, new_size: int, num_layers: tuple[int, int]) -> np.ndarray:
    """Find the layer of the smaller stack that each layer of the larger one is a copy of.

    A stack may lack the first layers of the model, which have no such weight."""
    old_layers, new_layers = num_layers
    layers = np.arange(new_layers - new_size, new_layers)
    sources = np.rint(layers * old_layers / new_layers).astype(int) - (old_layers - old_size)
    return np.clip(sources, 0, old_size - 1)


def remap_rows(weight: Array, axis: int, rows: np.ndarray) -> Array:
    """Take these rows along an axis. Where a number is -1, the new row is the mean of all rows."""
    copied = jnp.take(weight, np.maximum(rows, 0), axis=axis)
    is_new = (rows < 0).reshape([-1 if dim == axis else 1 for dim in range(weight.ndim)])
    return jnp.where(is_new, weight.mean(axis=axis, keepdims=True), copied)
