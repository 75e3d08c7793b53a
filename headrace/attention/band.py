"""What a window lets see, and nothing else: chunks of queries, each against the keys around it, in plain
products that every device has. The work grows with the length times the window (sliding chunks, as in
Longformer, arXiv 2004.05150). On TPUs, where such products move more than they compute, it has kernels."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from headrace.kernels import band_tpu
from headrace.nn.attention_mask import HIDDEN, Mask
from headrace.nn.compile_target import device
from headrace.nn.remat import SAVED_ATTENTION

Array = jax.Array

UNIT = 64  # keys that are gathered together
WIDEST = 512  # keys to both sides: the scores of a chunk are in memory, twice as many as are needed


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
    if device().platform == "tpu":
        out = band_tpu.attend(q, k, v, q_segments, reach=_reach(mask), scale=scale)
        return checkpoint_name(out, SAVED_ATTENTION)
    # Scores are made again in the backward pass: they are cheap, and large in memory.
    run = jax.checkpoint(_attend, static_argnums=(4, 5, 6))
    return checkpoint_name(run(q, k, v, q_segments, mask, soft_cap, scale), SAVED_ATTENTION)


def _attend(
    q: Array, k: Array, v: Array, segments: Array | None, mask: Mask, soft_cap: float | None, scale: float
) -> Array:
    b, s, n, h = q.shape
    kv = k.shape[2]
    before, after, units = _units(mask)
    chunk = units * UNIT
    count = -(-s // chunk)
    short = count * chunk - s

    def around(x: Array, fill: int) -> Array:
        """For each chunk the keys from `before` units before it to `after` units behind it."""
        wide = [(0, 0), (before * UNIT, after * UNIT + short)] + [(0, 0)] * (x.ndim - 2)
        padded = jnp.pad(x, wide, constant_values=fill)
        blocks = padded.reshape(b, -1, UNIT, *x.shape[2:])
        parts = [blocks[:, first : first + count * units : units] for first in range(before + units + after)]
        return jnp.concatenate(parts, axis=2)

    def apart(x: Array, fill: int) -> Array:
        padded = jnp.pad(x, [(0, 0), (0, short)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
        return padded.reshape(b, count, chunk, *x.shape[2:])

    grouped = apart(q, 0).reshape(b, count, chunk, kv, n // kv, h)
    scores = scale * jnp.einsum(
        "bcskgh,bctkh->bckgst", grouped, around(k, 0), preferred_element_type=jnp.float32
    )
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    # Padding is a document of its own, which no query is in.
    ids = jnp.ones((b, s), jnp.int32) if segments is None else segments
    places = jnp.arange(scores.shape[-1]) - before * UNIT
    seen = mask.allows(jnp.arange(chunk)[:, None], places[None, :])
    seen = seen & (apart(ids, -2)[..., :, None] == around(ids, -1)[..., None, :])
    weights = jax.nn.softmax(jnp.where(seen[:, :, None, None], scores, HIDDEN), axis=-1)
    mixed = jnp.einsum(
        "bckgst,bctkh->bcskgh", weights.astype(v.dtype), around(v, 0), preferred_element_type=jnp.float32
    )
    return mixed.reshape(b, count * chunk, n, h)[:, :s].astype(q.dtype)


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
    if mask.window is None:
        return "it is for windows, and these layers see all of the text"
    if sum(_reach(mask)) > WIDEST:
        return f"it is for windows of at most {WIDEST} keys, and this one is {mask.window}"
    if context > 1:
        return "it takes whole sequences, and mesh.context splits them"
    if platform != "tpu":
        return None
    if soft_cap is not None:
        return "its kernels have no soft cap"
    return band_tpu.unsupported_reason(q, k, _reach(mask), segments)


def is_cheaper(mask: Mask, length: int) -> bool:
    """Whether a row has fewer scores by chunks than all of its queries have with all of its keys."""
    if mask.window is None:
        return False
    before, after, units = _units(mask)
    queries = -(-length // (units * UNIT)) * units * UNIT
    return queries * (before + units + after) * UNIT < length**2


def _units(mask: Mask) -> tuple[int, int, int]:
    """Those of keys before a chunk and after it, and of queries in it: as many as of keys around them."""
    before, after = (-(-reach // UNIT) for reach in _reach(mask))
    return before, after, max(1, before + after)


def _reach(mask: Mask) -> tuple[int, int]:
    before, after = mask.reach
    assert before is not None and after is not None  # see `unsupported_reason`
    return before, after
