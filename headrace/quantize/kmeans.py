"""Weighted k-means over the vectors of a matrix: v outputs of one input, all with that input's weight."""

from functools import partial

import jax
import jax.numpy as jnp

Array = jax.Array

ITERATIONS = 100
ENOUGH = 1e-5  # relative change of the centroids at which it ends
MOST = 2**26  # distances that are held at a time
PRECISE = jax.lax.Precision.HIGHEST


def nearest(centroids: Array, vectors: Array) -> Array:
    """The index of the nearest centroid [k v] for each vector [... v]."""
    products = jnp.einsum("...v,kv->...k", vectors, centroids, precision=PRECISE)
    return jnp.argmin(jnp.sum(centroids**2, axis=1) - 2 * products, axis=-1).astype(jnp.int32)


@partial(jax.jit, static_argnames="count")
def cluster(key: Array, vectors: Array, weights: Array, count: int) -> Array:
    """So many centroids [count v] for vectors [inputs n v] with a weight for each input. A centroid that
    nobody is nearest to goes to a vector that is far from its own, so that with enough centroids the vectors
    are met."""
    inputs, each, length = vectors.shape
    flat = vectors.reshape(-1, length)
    chosen = jax.random.choice(key, flat.shape[0], (count,), replace=flat.shape[0] < count)
    rows = max(1, min(inputs, MOST // (each * count)))
    padded = -inputs % rows
    parts = jnp.pad(vectors, [(0, padded), (0, 0), (0, 0)]).reshape(-1, rows, each, length)
    shares = jnp.pad(weights, (0, padded)).reshape(-1, rows)
    spare = min(count, flat.shape[0])

    def refilled(moved: Array, empty: Array, far: Array) -> Array:
        worst = jax.lax.top_k(far.reshape(-1)[: flat.shape[0]], spare)[1]
        turn = jnp.clip(jnp.cumsum(empty) - 1, 0, spare - 1)
        return jnp.where(empty[:, None], flat[worst[turn]], moved)

    def once(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        centroids, number, _ = state

        def part(total: tuple[Array, Array], given: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
            own, share = given
            index = nearest(centroids, own)
            each_share = jnp.broadcast_to(share[:, None], index.shape)
            sums = total[0].at[index.reshape(-1)].add((own * share[:, None, None]).reshape(-1, length))
            held = total[1].at[index.reshape(-1)].add(each_share.reshape(-1))
            far = jnp.sum((own - centroids[index]) ** 2, axis=-1) * share[:, None]
            return (sums, held), far

        begin = jnp.zeros_like(centroids), jnp.zeros(count, centroids.dtype)
        (sums, held), far = jax.lax.scan(part, begin, (parts, shares))
        empty = held <= 0
        moved = sums / jnp.where(empty, 1.0, held)[:, None]
        moved = jax.lax.cond(jnp.any(empty), refilled, lambda moved, *_: moved, moved, empty, far)
        change = jnp.sum((moved - centroids) ** 2) / jnp.maximum(jnp.sum(centroids**2), 1e-30)
        return moved, number + 1, change

    def unfinished(state: tuple[Array, Array, Array]) -> Array:
        return (state[1] < ITERATIONS) & (state[2] > ENOUGH**2)

    start = flat[chosen], jnp.zeros((), jnp.int32), jnp.asarray(jnp.inf, flat.dtype)
    return jax.lax.while_loop(unfinished, once, start)[0]
