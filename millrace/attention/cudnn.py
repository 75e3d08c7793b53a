"""The flash attention of NVIDIA's cuDNN. Packed documents can go in as a list of where each begins and ends
(`LISTS`), so that nothing outside of a document is visited. Short rows, rows of more documents than there is
memory for, windows that look both ways and GPUs before Hopper get an explicit mask instead, which is of the
length squared in memory (no heads in it) and hides what it does not skip."""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

# jax.nn.dot_product_attention, the public way in, has no argument for packed documents.
from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

from millrace.attention import blockwise
from millrace.layers.attention import Mask, complaint
from millrace.probe import device

Array = jax.Array
Form = Literal["plain", "packed", "masked"]

LARGEST_MASK = 2**32  # bytes
SHORT = 4096  # tokens of a row up to which a mask, then of 32 MiB, is taken
# In the backward pass cuDNN sums the gradient of q in float32, once for each document that a row has room
# for, as if each were as long as the row (XLA does not tell it that they share one). So room costs memory.
LARGEST_SUM = 2**33  # bytes
MOST_DOCUMENTS = 64  # in a row
LISTS = False  # right on an H200, but not shown to be faster: python -m benchmarks.attention_gpu long
SHARES_KEYS = (0, 11, 2)  # before this JAX, documents of grouped heads were looked for at the wrong place


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
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k)]
    form = _form(device().platform, shapes[0], shapes[1], mask, q_segments is not None)
    if form == "packed" and q_segments is not None:
        return packed(q, k, v, q_segments, mask=mask, scale=scale, most=room(q))
    return masked(q, k, v, q_segments, mask=mask, scale=scale)


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
    if q.size >= 2**31:
        return f"cuDNN is not known to count past 2**31, and the queries are {q.size:,} numbers"
    form = _form(platform, q, k, mask, segments)
    if form == "packed":
        return None
    size = _mask_bytes(q, k)
    if form == "masked" and size > LARGEST_MASK:
        return f"the mask that says who sees whom would take {size / 2**30:.0f} GiB"
    return _try(platform, q, k, mask, segments, form)


def room(q: Any) -> int:
    """For how many documents in a row there is memory. Padding counts as one."""
    return min(MOST_DOCUMENTS, LARGEST_SUM // (4 * q.size))


def packed(q: Array, k: Array, v: Array, segments: Array, *, mask: Mask, scale: float, most: int) -> Array:
    """With room for so many documents in a row; where a row of the batch has more, another way is taken."""
    lengths, begins, counts = documents(segments, most)
    if jax.__version_info__ < SHARES_KEYS:
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))

    def short(q: Array, k: Array, v: Array, segments: Array) -> Array:
        return dot_product_attention(
            q,
            k,
            v,
            q_seqlen=lengths,
            kv_seqlen=lengths,
            q_offsets=begins,
            kv_offsets=begins,
            scale=scale,
            mask_type=MaskType.PADDING_CAUSAL if mask.causal else MaskType.NO_MASK,
            sliding_window_length=mask.window,
        )

    def long(q: Array, k: Array, v: Array, segments: Array) -> Array:
        if _mask_bytes(q, k) <= LARGEST_MASK:
            return masked(q, k, v, segments, mask=mask, scale=scale)
        same: dict[str, Any] = dict(q_segments=segments, kv_segments=segments, offset=0)
        return blockwise.attend(blockwise.Config(), q, k, v, mask=mask, soft_cap=None, scale=scale, **same)

    # What the backward pass of either way needs is kept, empty where it is not taken: of `long` no mask.
    return jax.lax.cond((counts <= most).all(), short, jax.checkpoint(long), q, k, v, segments)


def documents(segments: Array, most: int) -> tuple[Array, Array, Array]:
    """Of each row the lengths [b m] of its first documents and where they begin [b m+1], -1 where there is
    none, and how many there are in all [b]. Padding is a document too, so that every output is written."""
    starts = segments != jnp.roll(segments, 1, axis=1)
    number = jnp.cumsum(starts.at[:, 0].set(False), axis=1)
    lengths = (number[:, :, None] == jnp.arange(most)).sum(1, dtype=jnp.int32)
    begins = jnp.where(lengths > 0, jnp.cumsum(lengths, axis=1) - lengths, -1)
    ended = jnp.full((len(segments), 1), -1, jnp.int32)
    begins = jnp.concatenate([begins.astype(jnp.int32), ended], axis=1)
    return jnp.where(lengths > 0, lengths, -1), begins, number[:, -1] + 1


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


def _form(platform: str, q: Any, k: Any, mask: Mask, segments: bool) -> Form:
    both_ways = mask.window is not None and not mask.causal
    if not segments:
        return "masked" if both_ways else "plain"
    # JAX takes room for one document as no list at all.
    listed = LISTS and q.shape[1] > SHORT and not both_ways and room(q) > 1
    if not listed or _try(platform, q, k, mask, segments, "packed") is not None:
        return "masked"
    return "packed"


@lru_cache
def _try(platform: str, q: Any, k: Any, mask: Mask, segments: bool, form: Form) -> str | None:
    ids = jax.ShapeDtypeStruct(q.shape[:2], jnp.int32) if segments else None
    way = partial(packed, most=room(q)) if form == "packed" else masked

    def run(q: Array, k: Array, v: Array, ids: Any) -> Array:
        return way(q, k, v, ids, mask=mask, scale=1.0)

    return complaint(platform, run, q, k, k, ids)


def _mask_bytes(q: Any, k: Any) -> int:
    return q.shape[0] * q.shape[1] * k.shape[1] * q.dtype.itemsize
