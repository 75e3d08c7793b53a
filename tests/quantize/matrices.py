"""Random matrices with Hessians, for the tests of quantization."""

import jax
import jax.numpy as jnp
import numpy as np

KEY = jax.random.key(0)


def random_matrix(inputs: int = 64, outputs: int = 32, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Weights [inputs outputs] and a Hessian of correlated inputs of unequal size."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((512, inputs)) @ rng.standard_normal((inputs, inputs))
    x *= np.exp(rng.standard_normal(inputs) / 2)
    hessian = x.T @ x / 512
    w = rng.standard_normal((inputs, outputs))
    return jnp.asarray(w, jnp.float32), jnp.asarray(hessian / np.mean(np.diag(hessian)), jnp.float32)


def gptq_bits(inputs: int, outputs: int, *, bits: int, group_size: int) -> int:
    """The bits of a matrix in GPTQ's files: its integers, a scale and a zero per group, and each input's
    group."""
    groups = -(-inputs // group_size) if group_size else 1
    return bits * inputs * outputs + groups * outputs * (16 + bits) + 32 * inputs
