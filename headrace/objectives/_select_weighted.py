"""The few positions of a row that have a weight, put together: what is masked is a small part of a text, and
the head is a large part of a small model."""

import jax
import jax.numpy as jnp

from headrace.nn.module import Array


def weighted(most: int, hidden: Array, targets: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Of rows [b s ...] in which at most so many weights are not 0, those positions and some with weight 0,
    [b most ...]."""
    rank = ranks(weights)
    order = jnp.argsort(rank, axis=1)[:, :most]
    targets, weights = (jnp.take_along_axis(x, order, axis=1) for x in (targets, weights))
    return _pick(hidden, order, rank), targets, weights


def put_back(x: Array, weights: Array) -> Array:
    """The positions [b most] that `weighted` put together in their places [b s]; nothing of use in others."""
    return jnp.take_along_axis(x, jnp.minimum(ranks(weights), x.shape[1] - 1), axis=1)


def ranks(weights: Array) -> Array:
    """Those that count come first, each lot in its order."""
    counts = weights != 0
    return jnp.where(counts, jnp.cumsum(counts, 1), counts.sum(1, keepdims=True) + jnp.cumsum(~counts, 1)) - 1


@jax.custom_vjp
def _pick(x: Array, order: Array, rank: Array) -> Array:
    return jnp.take_along_axis(x, order[..., None], axis=1)


def _forward(x: Array, order: Array, rank: Array) -> tuple[Array, tuple[Array, Array]]:
    return _pick(x, order, rank), (order, rank)


def _backward(kept: tuple[Array, Array], d: Array) -> tuple[Array, None, None]:
    # Each position looks up what became of it; JAX's own rule would add into zeros.
    order, rank = kept
    most = order.shape[1]
    found = jnp.take_along_axis(d, jnp.minimum(rank, most - 1)[..., None], axis=1)
    return jnp.where((rank < most)[..., None], found, 0), None, None


_pick.defvjp(_forward, _backward)
