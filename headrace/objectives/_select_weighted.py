"""Gathering of the positions of a row that have a weight.

Masked tokens are a small share of a text, and the output head is a large share of a small model."""

import jax
import jax.numpy as jnp

from headrace.nn.module import Array


def gather_weighted(count: int, hidden: Array, targets: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Gather `count` positions [b count ...] of rows [b s ...]: all whose weight is not 0, and some others.

    No row may have more than `count` weights that are not 0."""
    rank = rank_by_weight(weights)
    order = jnp.argsort(rank, axis=1)[:, :count]
    targets, weights = (jnp.take_along_axis(x, order, axis=1) for x in (targets, weights))
    return _gather(hidden, order, rank), targets, weights


def scatter_back(x: Array, weights: Array) -> Array:
    """Put gathered values [b count] back in their positions [b s]. Other positions have arbitrary values."""
    return jnp.take_along_axis(x, jnp.minimum(rank_by_weight(weights), x.shape[1] - 1), axis=1)


def rank_by_weight(weights: Array) -> Array:
    """Rank positions: those with a weight first, in the order of the row, then the others."""
    has_weight = weights != 0
    rank = jnp.cumsum(has_weight, 1)
    rank_of_others = has_weight.sum(1, keepdims=True) + jnp.cumsum(~has_weight, 1)
    return jnp.where(has_weight, rank, rank_of_others) - 1


@jax.custom_vjp
def _gather(x: Array, order: Array, rank: Array) -> Array:
    return jnp.take_along_axis(x, order[..., None], axis=1)


def _gather_forward(x: Array, order: Array, rank: Array) -> tuple[Array, tuple[Array, Array]]:
    return _gather(x, order, rank), (order, rank)


def _gather_backward(residuals: tuple[Array, Array], d: Array) -> tuple[Array, None, None]:
    # A gather by each position's rank; the gradient that JAX derives is a scatter into zeros.
    order, rank = residuals
    count = order.shape[1]
    gradient = jnp.take_along_axis(d, jnp.minimum(rank, count - 1)[..., None], axis=1)
    return jnp.where((rank < count)[..., None], gradient, 0), None, None


_gather.defvjp(_gather_forward, _gather_backward)
