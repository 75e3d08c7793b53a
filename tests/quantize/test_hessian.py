"""The sweep over the inputs of a matrix, against the formulas of the paper in float64."""

import jax.numpy as jnp
import numpy as np

from headrace.quantize.hessian import cholesky_inverse, gptq_sweep, regularize
from tests.quantize.matrices import random_matrix


def test_the_factor_is_that_of_the_inverse_of_the_damped_hessian():
    hessian = random_matrix()[1]
    upper = np.asarray(cholesky_inverse(hessian), np.float64)
    damped = np.asarray(hessian, np.float64) + 0.01 * np.mean(np.diag(hessian)) * np.eye(64)
    np.testing.assert_allclose(np.tril(upper, -1), 0, atol=1e-6)
    np.testing.assert_allclose(upper.T @ upper @ damped, np.eye(64), atol=2e-3)


def test_a_sweep_is_the_plain_loop_of_the_paper():
    """Over more inputs than one block has, rounded to multiples of 0.5."""
    w, hessian = random_matrix(inputs=150, outputs=8)
    upper = cholesky_inverse(hessian)
    sweep = gptq_sweep(w, upper, lambda shared, per_input, weights: (jnp.round(2 * weights) / 2, weights))
    expected, factor = np.asarray(w, np.float64), np.asarray(upper, np.float64)
    for position in range(150):
        np.testing.assert_allclose(sweep.compensated[position], expected[position], atol=1e-3)
        error = (expected[position] - np.asarray(sweep.rounded[position])) / factor[position, position]
        expected[position + 1 :] -= np.outer(factor[position, position + 1 :], error)
    np.testing.assert_array_equal(sweep.codes, sweep.compensated)


def test_weights_of_inputs_that_are_always_0_become_0():
    w, hessian = random_matrix()
    hessian = hessian.at[5].set(0).at[:, 5].set(0)
    regular_w, regular_hessian = regularize(w, hessian)
    np.testing.assert_array_equal(regular_w, w.at[5].set(0))
    np.testing.assert_array_equal(regular_hessian, hessian.at[5, 5].set(1))
