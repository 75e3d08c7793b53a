"""Norms against their definitions in float64, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.nn.norm import layer_norm, rms_norm, rms_norm_around_one

EPS = 1e-3  # large enough to matter


def centred(x):
    return x - x.mean(-1, keepdims=True)


def quotient(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)


NORMS = {
    rms_norm: lambda x, w: quotient(x) * w,
    rms_norm_around_one: lambda x, w: quotient(x) * (1 + w),
    layer_norm: lambda x, w: quotient(centred(x)) * w,
}


def differences(function, inputs, which, d):
    """The gradient of sum(d * function) with respect to one of its inputs, by central differences."""
    out = np.zeros_like(inputs[which])
    for place in np.ndindex(out.shape):
        up, down = ([x.copy() for x in inputs] for _ in range(2))
        up[which][place] += 1e-6
        down[which][place] -= 1e-6
        out[place] = (d * (function(*up) - function(*down))).sum() / 2e-6
    return out


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__name__)
def test_a_norm_is_its_definition_and_so_is_its_gradient(norm):
    rng = np.random.default_rng(0)
    x, w, d = rng.normal(0.5, 2, (2, 3, 8)), rng.normal(0, 1, 8), rng.normal(0, 1, (2, 3, 8))
    x[0, 0] *= 0.01  # where eps counts
    narrow = [jnp.asarray(value, jnp.float32) for value in (x, w)]
    found, pull = jax.vjp(lambda x, w: norm(x, w, EPS), *narrow)
    np.testing.assert_allclose(found, NORMS[norm](x, w), atol=1e-5)
    for which, gradient in enumerate(pull(jnp.asarray(d, jnp.float32))):
        wanted = differences(NORMS[norm], (x, w), which, d)
        np.testing.assert_allclose(gradient, wanted, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__name__)
def test_the_backward_pass_keeps_x_as_it_came(norm):
    x, weight = jnp.ones((2, 3, 64), jnp.bfloat16), jnp.ones(64)
    pull = jax.vjp(lambda x, w: norm(x * 2, w * 2, 1e-5), x, weight)[1]
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(pull) if leaf.ndim)
    assert held == x.nbytes + weight.nbytes
