"""Rounding a matrix column by column while the columns that are left make up for it, as OBS would have them
(GPTQ, arXiv 2210.17323): what rounding changes of a layer's outputs is small, not what it changes of the
weights. VPTQ rounds to codebooks in the same order (arXiv 2409.17066). A "column" of these papers is an
input: here a row of the matrix [inputs outputs]. Outputs are independent of each other, so that they can be
spread over devices."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array

DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it
BLOCK = 128  # inputs after which the others are updated, all at once
PRECISE = jax.lax.Precision.HIGHEST


@jax.jit
def regularize(w: Array, hessian: Array) -> tuple[Array, Array]:
    """Inputs that were never seen, whose weights can be anything, are made 0."""
    dead = jnp.diag(hessian) == 0
    hessian = hessian + jnp.diag(jnp.where(dead, 1.0, 0.0))
    return jnp.where(dead[:, None], 0.0, w), hessian


@jax.jit
def cholesky_inverse(hessian: Array) -> Array:
    """The upper triangle U with UᵀU the inverse of the damped Hessian. By one Cholesky factor of the Hessian
    read backwards: turned around again it is upper, and its inverse is U."""
    size = hessian.shape[0]
    damped = hessian + DAMPING * jnp.mean(jnp.diag(hessian)) * jnp.eye(size)
    upper = jnp.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    return jax.scipy.linalg.solve_triangular(upper, jnp.eye(size), lower=False)


@partial(jax.jit, static_argnames=("nearest",))
def gptq_sweep(w: Array, upper: Array, nearest: Callable[..., Any], given: Any, rows: Any = None) -> Any:
    """Goes over the inputs of w. `nearest(given, row, weights)` rounds the weights of one input: it returns
    them rounded, and whatever is to be kept of it (codes). `rows` has something for each input. Returns what
    is kept [inputs ...], the rounded matrix, and the weights as they were when their turn came."""
    inputs, _outputs = w.shape
    padded = -inputs % BLOCK
    w = jnp.pad(w, [(0, padded), (0, 0)])
    upper = jnp.pad(upper, [(0, padded), (0, padded)])
    upper = upper + jnp.diag((jnp.arange(inputs + padded) >= inputs).astype(upper.dtype))
    rows = jax.tree.map(lambda x: jnp.pad(x, [(0, padded)] + [(0, 0)] * (x.ndim - 1), mode="edge"), rows)
    everyone = jnp.arange(inputs + padded)

    def block(w: Array, number: Array) -> tuple[Array, Any]:
        start = number * BLOCK
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start, BLOCK)
        factors = cut(upper)
        within = jax.lax.dynamic_slice_in_dim(factors, start, BLOCK, axis=1)

        def one(own: Array, turn: Any) -> tuple[Array, Any]:
            place, factor, row = turn
            now = own[place]
            rounded, kept = nearest(given, row, now)
            error = (now - rounded) / factor[place]
            later = jnp.where(jnp.arange(BLOCK) > place, factor, 0.0)
            return own - later[:, None] * error, (kept, rounded, now, error)

        own, turns = cut(w), (jnp.arange(BLOCK), within, jax.tree.map(cut, rows))
        _, (kept, rounded, now, errors) = jax.lax.scan(one, own, turns)
        rest = jnp.where(everyone >= start + BLOCK, factors, 0.0)
        return w - jnp.matmul(rest.T, errors, precision=PRECISE), (kept, rounded, now)

    _, made = jax.lax.scan(block, w, jnp.arange((inputs + padded) // BLOCK))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:inputs], made)


def proxy_error(w: Array, rounded: Array, hessian: Array) -> Array:
    """What rounding changes of the outputs, squared and summed over the calibration set, as a share of
    them."""
    of = lambda x: jnp.sum(jnp.matmul(hessian, x, precision=PRECISE) * x)
    return of(w - rounded) / of(w)
