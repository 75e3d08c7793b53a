"""The flash attention of NVIDIA's cuDNN, through jax.nn.dot_product_attention. Packed documents and windows
that look both ways go in as an explicit mask, which is of the length squared in memory (no heads in it)."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from millrace.layers.attention import Mask, complaint

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
    assert soft_cap is None  # see `refuses`; there too: no offset
    seen, window = None, None
    if q_segments is not None and kv_segments is not None:
        seen = (q_segments[:, :, None] == kv_segments[:, None, :])[:, None]
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


def refuses(
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
    size = q.shape[0] * q.shape[1] * k.shape[1] * q.dtype.itemsize
    if segments and size > LARGEST_MASK:
        return f"the mask that keeps packed documents apart would take {size / 2**30:.0f} GiB"
    return _try(platform, q, k, mask, segments)


@lru_cache
def _try(platform: str, q: Any, k: Any, mask: Mask, segments: bool) -> str | None:
    ids = jax.ShapeDtypeStruct(q.shape[:2], jnp.int32) if segments else None

    def run(q: Array, k: Array, v: Array, ids: Array | None) -> Array:
        how: dict[str, Any] = dict(mask=mask, soft_cap=None, scale=1.0, offset=0)
        return attend(Config(), q, k, v, q_segments=ids, kv_segments=ids, **how)

    return complaint(platform, run, q, k, k, ids)
