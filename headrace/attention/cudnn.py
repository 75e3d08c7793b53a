"""The flash attention of NVIDIA's cuDNN. Packed documents and windows that look both ways get an explicit
mask, which is of the length squared in memory (no heads in it) and hides what it does not skip."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from headrace.attention import compile_error
from headrace.nn.attention_mask import Mask

Array = jax.Array

LARGEST_MASK = 2**32  # bytes


@dataclass(frozen=True)
class Config:
    pass


def attend(
    cfg: Any,
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Mask,
    q_segments: Array | None,
    kv_segments: Array | None,
    soft_cap: float | None,
    scale: float,
    offset: int | Array,
) -> Array:
    assert soft_cap is None  # see `unsupported_reason`; there too: no offset
    return masked(q, k, v, q_segments, mask=mask, scale=scale)


def unsupported_reason(
    cfg: Any,
    platform: str,
    q: Any,
    k: Any,
    *,
    mask: Mask,
    segments: bool,
    soft_cap: float | None,
    context: int,
) -> str | None:
    if platform != "gpu":
        return f"cuDNN needs an NVIDIA GPU, and this is a {platform.upper()}"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN takes bfloat16 and float16, and these activations are {q.dtype}"
    if soft_cap is not None:
        return "cuDNN has no soft cap on the scores"
    if context > 1:
        return "cuDNN takes whole sequences, and mesh.context splits them"
    if q.size >= 2**31:
        return f"cuDNN is not known to count past 2**31, and the queries are {q.size:,} numbers"
    size = q.shape[0] * q.shape[1] * k.shape[1] * q.dtype.itemsize
    hidden = segments or (mask.window is not None and not mask.causal)
    if hidden and size > LARGEST_MASK:
        return f"the mask that says who sees whom would take {size / 2**30:.0f} GiB"
    return _try(platform, q, k, mask, segments)


def masked(q: Array, k: Array, v: Array, segments: Array | None, *, mask: Mask, scale: float) -> Array:
    """With a mask of who sees whom, if cuDNN cannot be told otherwise."""
    seen, window = None, None
    if segments is not None:
        seen = (segments[:, :, None] == segments[:, None, :])[:, None]
    if mask.window is not None and (seen is not None or not mask.causal):
        # cuDNN's own window looks back only, and goes without a mask.
        positions = jnp.arange(q.shape[1])
        near = mask.allows(positions[:, None], positions[None, :])[None, None]
        seen = near if seen is None else seen & near
    elif mask.window is not None:
        window = (mask.window - 1, 0)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=seen,
        scale=scale,
        is_causal=mask.causal,
        local_window_size=window,
        implementation="cudnn",
    )


@lru_cache
def _try(platform: str, q: Any, k: Any, mask: Mask, segments: bool) -> str | None:
    ids = jax.ShapeDtypeStruct(q.shape[:2], jnp.int32) if segments else None
    return compile_error(platform, lambda *arrays: masked(*arrays, mask=mask, scale=1.0), q, k, k, ids)
