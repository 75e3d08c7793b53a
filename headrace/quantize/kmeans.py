"""Weighted k-means over the vectors of a matrix: v outputs of one input, with the weight of that input."""

from functools import partial

import jax
import jax.numpy as jnp

from headrace.nn.module import Array

MAX_ITERATIONS = 100
TOLERANCE = 1e-5  # relative change of the centroids at which the iteration ends
MAX_DISTANCES = 2**26  # in memory at a time
PRECISE = jax.lax.Precision.HIGHEST


def find_nearest(centroids: Array, vectors: Array) -> Array:
    """The index of the nearest of the centroids [k v] for each of the vectors [... v]."""
    products = jnp.einsum("...v,kv->...k", vectors, centroids, precision=PRECISE)
    return jnp.argmin(jnp.sum(centroids**2, axis=1) - 2 * products, axis=-1).astype(jnp.int32)


@partial(jax.jit, static_argnames="num_centroids")
def fit_centroids(key: Array, vectors: Array, input_weights: Array, num_centroids: int) -> Array:
    """Fit `num_centroids` centroids [k v] to vectors [inputs n v], with a weight for each input.

    A centroid that is nearest to no vector is moved to one that is far from its own centroid: with at least
    as many centroids as distinct vectors, the fit is exact."""
    inputs, per_input, length = vectors.shape
    flat = vectors.reshape(-1, length)
    initial = jax.random.choice(key, flat.shape[0], (num_centroids,), replace=flat.shape[0] < num_centroids)
    chunk_inputs = max(1, min(inputs, MAX_DISTANCES // (per_input * num_centroids)))
    padding = -inputs % chunk_inputs
    padded = jnp.pad(vectors, [(0, padding), (0, 0), (0, 0)])
    chunks = (
        padded.reshape(-1, chunk_inputs, per_input, length),
        jnp.pad(input_weights, (0, padding)).reshape(-1, chunk_inputs),
    )

    def iterate(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        centroids, iteration, _ = state
        moved = _move_centroids(centroids, flat, chunks)
        change = jnp.sum((moved - centroids) ** 2) / jnp.maximum(jnp.sum(centroids**2), 1e-30)
        return moved, iteration + 1, change

    def is_unfinished(state: tuple[Array, Array, Array]) -> Array:
        _, iteration, change = state
        return (iteration < MAX_ITERATIONS) & (change > TOLERANCE**2)

    start = flat[initial], jnp.zeros((), jnp.int32), jnp.asarray(jnp.inf, flat.dtype)
    return jax.lax.while_loop(is_unfinished, iterate, start)[0]


def _move_centroids(centroids: Array, flat: Array, chunks: tuple[Array, Array]) -> Array:
    """Move each centroid to the mean of its vectors. `flat` are all vectors, `chunks` are the same with their
    weights, and with padding at the end."""
    sums = jnp.zeros_like(centroids), jnp.zeros(len(centroids), centroids.dtype)
    (totals, total_weights), distances = jax.lax.scan(partial(_sum_chunk, centroids), sums, chunks)
    is_empty = total_weights <= 0
    moved = totals / jnp.where(is_empty, 1.0, total_weights)[:, None]
    return jax.lax.cond(jnp.any(is_empty), _refill, lambda moved, *_: moved, moved, is_empty, flat, distances)


def _sum_chunk(
    centroids: Array, sums: tuple[Array, Array], chunk: tuple[Array, Array]
) -> tuple[tuple[Array, Array], Array]:
    """Add a chunk's vectors to the sums of their nearest centroids. Returns their weighted distances too."""
    vectors, weights = chunk
    nearest = find_nearest(centroids, vectors)
    totals = (
        sums[0]
        .at[nearest.reshape(-1)]
        .add((vectors * weights[:, None, None]).reshape(-1, centroids.shape[1]))
    )
    vector_weights = jnp.broadcast_to(weights[:, None], nearest.shape)
    total_weights = sums[1].at[nearest.reshape(-1)].add(vector_weights.reshape(-1))
    distances = jnp.sum((vectors - centroids[nearest]) ** 2, axis=-1) * weights[:, None]
    return (totals, total_weights), distances


def _refill(centroids: Array, is_empty: Array, flat: Array, distances: Array) -> Array:
    """Move centroids without vectors to the vectors with the largest distances, one each."""
    candidates = min(len(centroids), len(flat))
    farthest = jax.lax.top_k(distances.reshape(-1)[: len(flat)], candidates)[1]
    rank = jnp.clip(jnp.cumsum(is_empty) - 1, 0, candidates - 1)
    return jnp.where(is_empty[:, None], flat[farthest[rank]], centroids)
