"""RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450) without biases, in float32. Their backward
passes keep x as it came; JAX would keep it in float32, and the rounded quotient besides."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Rounded to the activation's dtype, then times the weight, as in Llama."""
    return _quotient(x, eps)[0].astype(x.dtype) * weight.astype(x.dtype)


def _forward(x: Array, weight: Array, eps: float) -> tuple[Array, Any]:
    return rms_norm(x, weight, eps), (x, weight)


def _backward(eps: float, kept: Any, d: Array) -> Any:
    x, weight = kept
    normal, scale = _quotient(x, eps)
    d = d.astype(jnp.float32)
    d_x = _pull(normal, scale, d * weight.astype(jnp.float32))
    return d_x.astype(x.dtype), _sum(d * normal.astype(x.dtype)).astype(weight.dtype)


rms_norm.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm_around_one(x: Array, weight: Array, eps: float) -> Array:
    """Times 1 + weight and then rounded, as in Gemma: weights are around 0, where bfloat16 is fine."""
    return (_quotient(x, eps)[0] * (1 + weight.astype(jnp.float32))).astype(x.dtype)


def _around_one_forward(x: Array, weight: Array, eps: float) -> tuple[Array, Any]:
    return rms_norm_around_one(x, weight, eps), (x, weight)


def _around_one_backward(eps: float, kept: Any, d: Array) -> Any:
    x, weight = kept
    normal, scale = _quotient(x, eps)
    d = d.astype(jnp.float32)
    d_x = _pull(normal, scale, d * (1 + weight.astype(jnp.float32)))
    return d_x.astype(x.dtype), _sum(d * normal).astype(weight.dtype)


rms_norm_around_one.defvjp(_around_one_forward, _around_one_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def layer_norm(x: Array, weight: Array, eps: float) -> Array:
    return (_quotient(_centred(x), eps)[0] * weight.astype(jnp.float32)).astype(x.dtype)


def _layer_forward(x: Array, weight: Array, eps: float) -> tuple[Array, Any]:
    return layer_norm(x, weight, eps), (x, weight)


def _layer_backward(eps: float, kept: Any, d: Array) -> Any:
    x, weight = kept
    normal, scale = _quotient(_centred(x), eps)
    d = d.astype(jnp.float32)
    d_x = _centred(_pull(normal, scale, d * weight.astype(jnp.float32)))
    return d_x.astype(x.dtype), _sum(d * normal).astype(weight.dtype)


layer_norm.defvjp(_layer_forward, _layer_backward)


def _quotient(x: Array, eps: float) -> tuple[Array, Array]:
    """x over its root mean square, and one over that."""
    # f32: a bf16 mean of squares over 4096 entries keeps three digits.
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide * scale, scale


def _centred(x: Array) -> Array:
    wide = x.astype(jnp.float32)
    return wide - jnp.mean(wide, axis=-1, keepdims=True)


def _pull(normal: Array, scale: Array, d: Array) -> Array:
    """The gradient of what was divided from that of the quotient."""
    return scale * (d - normal * jnp.mean(d * normal, axis=-1, keepdims=True))


def _sum(d: Array) -> Array:
    """Over all tokens, so in float32: in bf16 what comes late is lost."""
    return jnp.sum(d, axis=tuple(range(d.ndim - 1)))
