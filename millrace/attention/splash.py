"""Splash attention, the Pallas kernel for TPUs that ships with JAX: it visits only the tiles the mask leaves
something of. Anywhere else it runs in the Pallas interpreter, which is for tests."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from millrace.layers.attention import Mask, complaint
from millrace.probe import OLD_TPUS, device

Array = jax.Array

LANES = 128  # a TPU register's width: sequences and tiles are multiples of it


@dataclass(frozen=True)
class Config:
    block_q: int = 512
    block_kv: int = 512

    def __post_init__(self) -> None:
        for name in ("block_q", "block_kv"):
            if getattr(self, name) < 128 or getattr(self, name) % 128:
                raise ValueError(f"{name}: expected a multiple of 128")


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
    s, t = q.shape[1], k.shape[1]
    padding = -s % LANES
    ids = None
    if q_segments is not None and kv_segments is not None:
        ids = kernels.SegmentIds(q_segments, kv_segments)
    if padding:
        assert s == t  # see `refuses`
        q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k, v))
        plain = jnp.zeros((len(q), s), jnp.int32) if q_segments is None else q_segments
        # No document has the number -1: what is padded here is seen by nothing else.
        padded = jnp.pad(plain, ((0, 0), (0, padding)), constant_values=-1)
        ids = kernels.SegmentIds(padded, padded)
    q = (scale * q.astype(jnp.float32)).astype(q.dtype)

    def run(interpret: bool) -> Callable[..., Any]:
        def local(q: Array, k: Array, v: Array, ids: Any, offset: Array) -> Any:
            rows, columns = q.shape[2], k.shape[2]
            whole = _mask(mask, rows, columns)
            shards = whole.shape[0] // rows
            kernel = _kernel(cfg, whole, shards, soft_cap=soft_cap, interpret=interpret)
            return jax.vmap(_shard(kernel, shards, offset // rows))(q, k, v, ids)

        return local

    heads_first = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    position = jnp.asarray(offset, jnp.int32)
    # Decided when lowering: a TPU slice may be compiled for on a machine that has none.
    out = jax.lax.platform_dependent(*heads_first, ids, position, tpu=run(False), default=run(True))
    return out.transpose(0, 2, 1, 3)[:, :s]


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
    if platform == "gpu":
        return "splash attention is a kernel for TPUs"
    if context > 1 and q.shape[1] % LANES:
        return f"each device's part of the sequence, {q.shape[1]}, is not a multiple of {LANES}"
    if platform != "tpu":
        return None
    if device().device_kind in OLD_TPUS:
        return f"{device().device_kind} has no products of bfloat16 in kernels"
    return _try(Config(cfg.block_q, cfg.block_kv), platform, q, k, mask, segments, soft_cap)


@lru_cache
def _try(
    cfg: Config, platform: str, q: Any, k: Any, mask: Mask, segments: bool, soft_cap: float | None
) -> str | None:
    ids = [jax.ShapeDtypeStruct(x.shape[:2], jnp.int32) if segments else None for x in (q, k)]

    def run(q: Array, k: Array, v: Array, q_ids: Array | None, kv_ids: Array | None, offset: Array) -> Array:
        how: dict[str, Any] = dict(mask=mask, soft_cap=soft_cap, scale=1.0, offset=offset)
        return attend(cfg, q, k, v, q_segments=q_ids, kv_segments=kv_ids, **how)

    return complaint(platform, run, q, k, k, *ids, jax.ShapeDtypeStruct((), jnp.int32))


def _mask(mask: Mask, rows: int, columns: int) -> masks.Mask:
    """The mask of the whole sequence; where all see all, and a query's place does not matter, of `rows`."""
    before, after = (None if far is None or far >= columns - 1 else far for far in mask.reach)
    if before is None and after is None:
        return masks.FullMask((rows, columns))
    if before is None and after == 0:
        return masks.CausalMask((columns, columns))
    return masks.LocalMask((columns, columns), window_size=(before, after), offset=0)


def _kernel(
    cfg: Any, whole: masks.Mask, shards: int, *, soft_cap: float | None, interpret: bool
) -> kernels.SplashAttentionKernel:
    block_q, block_kv = _block(cfg.block_q, whole.shape[0] // shards), _block(cfg.block_kv, whole.shape[1])
    sizes = kernels.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_q_dq=block_q,
        block_kv_dq=block_kv,
    )
    return kernels.make_splash_mha(
        masks.MultiHeadMask([whole]),  # one for all heads
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=shards,
        attn_logits_soft_cap=soft_cap,
        interpret=interpret,
    )


def _shard(whole: kernels.SplashAttentionKernel, shards: int, index: Array) -> kernels.SplashAttentionKernel:
    """The kernel for one of equal parts of the queries: the rows of the mask's description that are its."""
    if shards == 1:
        return whole

    def rows(x: Any, axis: int) -> Any:
        if x is None:
            return None
        size = x.shape[axis] // shards
        return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)

    def part(info: Any) -> MaskInfo:
        return info._replace(
            data_next=rows(info.data_next, 1),
            mask_next=rows(info.mask_next, 1),
            block_mask=rows(info.block_mask, 1),
            q_sequence=rows(info.q_sequence, 0),
        )

    infos = (part(info) for info in (whole.fwd_mask_info, whole.dq_mask_info, whole.dkv_mask_info))
    return kernels.SplashAttentionKernel(*infos, **whole.kwargs)


def _block(wanted: int, length: int) -> int:
    """The longest tile that is no longer than wanted and divides the length."""
    return max(size for size in range(LANES, min(wanted, length) + 1, LANES) if length % size == 0)
