"""RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450) without biases, computed in float32.

Their backward passes save x in its own dtype; those that JAX derives would save it in float32, and the
normalized values too."""

from functools import partial

import jax
import jax.numpy as jnp

Array = jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Normalize x along its last axis, cast the result to x's dtype, then multiply by the weight, as in
    Llama."""
    return _normalize(x, eps)[0].astype(x.dtype) * weight.astype(x.dtype)


def _rms_forward(x: Array, weight: Array, eps: float) -> tuple[Array, tuple[Array, Array]]:
    return rms_norm(x, weight, eps), (x, weight)


def _rms_backward(eps: float, residuals: tuple[Array, Array], d: Array) -> tuple[Array, Array]:
    x, weight = residuals
    normal, scale = _normalize(x, eps)
    d = d.astype(jnp.float32)
    d_x = _normalize_gradient(normal, scale, d * weight.astype(jnp.float32))
    return d_x.astype(x.dtype), _sum_tokens(d * normal.astype(x.dtype)).astype(weight.dtype)


rms_norm.defvjp(_rms_forward, _rms_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm_around_one(x: Array, weight: Array, eps: float) -> Array:
    """Normalize x along its last axis, multiply by 1 + weight, then cast to x's dtype, as in Gemma: weights
    are around 0, where bfloat16 is more precise."""
    return (_normalize(x, eps)[0] * (1 + weight.astype(jnp.float32))).astype(x.dtype)


def _around_one_forward(x: Array, weight: Array, eps: float) -> tuple[Array, tuple[Array, Array]]:
    return rms_norm_around_one(x, weight, eps), (x, weight)


def _around_one_backward(eps: float, residuals: tuple[Array, Array], d: Array) -> tuple[Array, Array]:
    x, weight = residuals
    normal, scale = _normalize(x, eps)
    d = d.astype(jnp.float32)
    d_x = _normalize_gradient(normal, scale, d * (1 + weight.astype(jnp.float32)))
    return d_x.astype(x.dtype), _sum_tokens(d * normal).astype(weight.dtype)


rms_norm_around_one.defvjp(_around_one_forward, _around_one_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def layer_norm(x: Array, weight: Array, eps: float) -> Array:
    """Center and normalize x along its last axis, multiply by the weight, then cast to x's dtype."""
    return (_normalize(_center(x), eps)[0] * weight.astype(jnp.float32)).astype(x.dtype)


def _layer_forward(x: Array, weight: Array, eps: float) -> tuple[Array, tuple[Array, Array]]:
    return layer_norm(x, weight, eps), (x, weight)


def _layer_backward(eps: float, residuals: tuple[Array, Array], d: Array) -> tuple[Array, Array]:
    x, weight = residuals
    normal, scale = _normalize(_center(x), eps)
    d = d.astype(jnp.float32)
    d_x = _center(_normalize_gradient(normal, scale, d * weight.astype(jnp.float32)))
    return d_x.astype(x.dtype), _sum_tokens(d * normal).astype(weight.dtype)


layer_norm.defvjp(_layer_forward, _layer_backward)


def _normalize(x: Array, eps: float) -> tuple[Array, Array]:
    """Divide x by its root mean square. Returns the quotient and the reciprocal of the divisor."""
    # Float32: in bfloat16 a mean of squares over 4096 entries has three digits.
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide * scale, scale


def _center(x: Array) -> Array:
    wide = x.astype(jnp.float32)
    return wide - jnp.mean(wide, axis=-1, keepdims=True)


def _normalize_gradient(normal: Array, scale: Array, d: Array) -> Array:
    """The gradient of `_normalize`'s input from that of the quotient."""
    return scale * (d - normal * jnp.mean(d * normal, axis=-1, keepdims=True))


def _sum_tokens(d: Array) -> Array:
    """Sum over all tokens, in float32: a bfloat16 sum would lose small terms."""
    return jnp.sum(d, axis=tuple(range(d.ndim - 1)))
