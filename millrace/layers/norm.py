"""RMSNorm (arXiv 1910.07467): in float32, rounded to the activation's dtype, then times the weight."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    # f32: a bf16 mean of squares over 4096 entries keeps three digits. Llama rounds before the weight.
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight.astype(x.dtype)
