"""Soft cap: a bound on logits, attention scores or gates, which they approach by tanh (Gemma 2, arXiv
2408.00118)."""

import jax
import jax.numpy as jnp

Array = jax.Array


def apply_soft_cap(x: Array, cap: float | None) -> Array:
    """Bound x to (-cap, cap) by tanh. Without a cap x is returned as it is."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def soft_cap_slope(capped: Array, cap: float) -> Array:
    """Compute the derivative of `apply_soft_cap` from its result."""
    share = capped / cap
    return 1 - share * share
