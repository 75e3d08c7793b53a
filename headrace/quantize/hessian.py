"""Rounding a matrix input by input so that the layer's outputs change little, rather than its weights (GPTQ,
arXiv 2210.17323): the inputs that are not rounded yet compensate for the error of each one that is, as in
Optimal Brain Surgeon. VPTQ rounds to codebooks in the same order (arXiv 2409.17066).

Matrices are [inputs outputs]: an input is a row here, and a column in these papers. Outputs are independent
of each other and may be sharded over devices. The Hessian [inputs inputs] is the mean of x xᵀ."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from headrace.nn.module import Array, PyTree

DAMPING = 0.01  # added to the Hessian's diagonal, as a share of its mean
BLOCK = 128  # inputs after which the error is passed on to those outside of the block, all at once
PRECISE = jax.lax.Precision.HIGHEST

# (shared, what belongs to this input, its weights [outputs]) -> (rounded weights, codes)
RoundInput = Callable[[PyTree, PyTree, Array], tuple[Array, PyTree]]


class SweepResult(NamedTuple):
    """The result of `gptq_sweep`, with a leading axis of inputs."""

    codes: PyTree  # as returned by `round_input`
    rounded: Array
    compensated: Array  # weights before they were rounded, with the compensation for earlier inputs


@jax.jit
def regularize(w: Array, hessian: Array) -> tuple[Array, Array]:
    """Make the Hessian regular where inputs were always 0. Their weights, which have no effect, become 0."""
    is_dead = jnp.diag(hessian) == 0
    hessian = hessian + jnp.diag(jnp.where(is_dead, 1.0, 0.0))
    return jnp.where(is_dead[:, None], 0.0, w), hessian


@jax.jit
def cholesky_inverse(hessian: Array) -> Array:
    """The upper triangular U with UᵀU the inverse of the damped Hessian.

    Computed from one Cholesky factor, of the Hessian with its axes reversed: reversed again it is upper
    triangular, and its inverse is U."""
    size = hessian.shape[0]
    damped = hessian + DAMPING * jnp.mean(jnp.diag(hessian)) * jnp.eye(size)
    upper = jnp.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    return jax.scipy.linalg.solve_triangular(upper, jnp.eye(size), lower=False)


@partial(jax.jit, static_argnames=("round_input",))
def gptq_sweep(
    w: Array, upper: Array, round_input: RoundInput, shared: PyTree = None, per_input: PyTree = None
) -> SweepResult:
    """Round the inputs of w one after the other, each with the compensation for those before it.

    `upper` is the `cholesky_inverse` of the Hessian. `round_input` gets `shared`, one input of `per_input`
    and its weights."""
    inputs = w.shape[0]
    padding = -inputs % BLOCK
    w = jnp.pad(w, [(0, padding), (0, 0)])
    upper = jnp.pad(upper, [(0, padding), (0, padding)])
    upper = upper + jnp.diag((jnp.arange(inputs + padding) >= inputs).astype(upper.dtype))
    per_input = jax.tree.map(
        lambda x: jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1), mode="edge"), per_input
    )
    sweep_block = partial(_sweep_block, partial(round_input, shared), upper, per_input)
    _, blocks = jax.lax.scan(sweep_block, w, jnp.arange((inputs + padding) // BLOCK))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:inputs], blocks)


def _sweep_block(
    round_weights: Callable[[PyTree, Array], tuple[Array, PyTree]],
    upper: Array,
    per_input: PyTree,
    w: Array,
    index: Array,
) -> tuple[Array, SweepResult]:
    start = index * BLOCK
    of_block = lambda x: jax.lax.dynamic_slice_in_dim(x, start, BLOCK)
    factors = of_block(upper)
    factors_within = jax.lax.dynamic_slice_in_dim(factors, start, BLOCK, axis=1)
    rows = jnp.arange(BLOCK), factors_within, jax.tree.map(of_block, per_input)
    _, (result, errors) = jax.lax.scan(partial(_sweep_input, round_weights), of_block(w), rows)
    later_factors = jnp.where(jnp.arange(w.shape[0]) >= start + BLOCK, factors, 0.0)
    return w - jnp.matmul(later_factors.T, errors, precision=PRECISE), result


def _sweep_input(
    round_weights: Callable[[PyTree, Array], tuple[Array, PyTree]],
    block: Array,
    row: tuple[Array, Array, PyTree],
) -> tuple[Array, tuple[SweepResult, Array]]:
    position, factors, extra = row
    weights = block[position]
    rounded, codes = round_weights(extra, weights)
    error = (weights - rounded) / factors[position]
    later_factors = jnp.where(jnp.arange(BLOCK) > position, factors, 0.0)
    return block - later_factors[:, None] * error, (SweepResult(codes, rounded, weights), error)


def proxy_error(w: Array, rounded: Array, hessian: Array) -> Array:
    """The squared error of the outputs on the calibration data, relative to the squared outputs."""
    squared_outputs = lambda x: jnp.sum(jnp.matmul(hessian, x, precision=PRECISE) * x)
    return squared_outputs(w - rounded) / squared_outputs(w)
