"""RMSNorm (arXiv 1910.07467): in float32, rounded to the activation's dtype, then times the weight."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return _normalise(x, weight, eps)


def _normalise(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    # f32: a bf16 mean of squares over 4096 entries keeps three digits. Llama rounds before the weight.
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight.astype(x.dtype)


# The backward pass keeps x as it came; JAX would keep it in float32, and the rounded quotient besides.
def _forward(x: jax.Array, weight: jax.Array, eps: float) -> tuple[jax.Array, Any]:
    return _normalise(x, weight, eps), (x, weight)


def _backward(eps: float, kept: Any, d: jax.Array) -> Any:
    x, weight = kept
    wide, d = x.astype(jnp.float32), d.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    normal = wide * scale
    scaled = d * weight.astype(jnp.float32)
    d_x = scale * (scaled - normal * jnp.mean(scaled * normal, axis=-1, keepdims=True))
    # Summed over all tokens, so in float32: in bf16 what comes late is lost.
    d_weight = jnp.sum(d * normal.astype(x.dtype), axis=tuple(range(x.ndim - 1)))
    return d_x.astype(x.dtype), d_weight.astype(weight.dtype)


rms_norm.defvjp(_forward, _backward)
