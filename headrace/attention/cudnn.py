"""The flash attention of NVIDIA's cuDNN.

Packed documents, and windows that look both ways, get an explicit mask. It takes memory of the length squared
(but not for each head), and cuDNN computes the scores that it hides."""

from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp

from headrace.attention import AttentionCall, gradient_compile_error
from headrace.nn.attention_mask import Mask

Array = jax.Array

LARGEST_MASK = 2**32  # bytes


@dataclass(frozen=True)
class Config:
    """`use: cudnn` adds no keys to the `attention` section of a recipe."""


def attend(
    cfg: Config,
    call: AttentionCall,
    q: Array,
    k: Array,
    v: Array,
    *,
    q_segments: Array | None,
    kv_segments: Array | None,
    offset: int | Array,
) -> Array:
    """Compute attention of entire rows without a soft cap; `offset` is 0."""
    assert call.soft_cap is None  # see `unsupported_reason`
    return _attend_masked(call.mask, call.scale, q, k, v, q_segments)


def unsupported_reason(cfg: Config, call: AttentionCall) -> str | None:
    """Return why cuDNN cannot compute the call; None if it can."""
    q, k, mask = call.q, call.k, call.mask
    if call.platform != "gpu":
        return f"cuDNN needs an NVIDIA GPU, and this is a {call.platform.upper()}"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN supports bfloat16 and float16, and these activations are {q.dtype}"
    if call.soft_cap is not None:
        return "cuDNN has no soft cap on the scores"
    if call.context > 1:
        return "cuDNN needs entire sequences, and mesh.context splits them"
    if q.size >= 2**31:
        return f"cuDNN is not known to count past 2**31, and the queries are {q.size:,} numbers"
    size = q.shape[0] * q.shape[1] * k.shape[1] * q.dtype.itemsize
    needs_mask = call.has_segments or (mask.window is not None and not mask.causal)
    if needs_mask and size > LARGEST_MASK:
        return f"its mask of visible keys would take {size / 2**30:.0f} GiB"
    return _compile_error(call)


def _attend_masked(mask: Mask, scale: float, q: Array, k: Array, v: Array, segments: Array | None) -> Array:
    """Compute attention, with an explicit mask where cuDNN has no option for what is visible."""
    is_visible, window = None, None
    if segments is not None:
        is_visible = (segments[:, :, None] == segments[:, None, :])[:, None]
    if mask.window is not None and (is_visible is not None or not mask.causal):
        # cuDNN's own window looks back only, and cannot be combined with a mask.
        positions = jnp.arange(q.shape[1])
        is_near = mask.allows(positions[:, None], positions[None, :])[None, None]
        is_visible = is_near if is_visible is None else is_visible & is_near
    elif mask.window is not None:
        window = (mask.window - 1, 0)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=is_visible,
        scale=scale,
        is_causal=mask.causal,
        local_window_size=window,
        implementation="cudnn",
    )


@lru_cache
def _compile_error(call: AttentionCall) -> str | None:
    ids = jax.ShapeDtypeStruct(call.q.shape[:2], jnp.int32) if call.has_segments else None
    run = lambda q, k, v, segments: _attend_masked(call.mask, call.scale, q, k, v, segments)
    return gradient_compile_error(call.platform, run, call.q, call.k, call.k, ids)
