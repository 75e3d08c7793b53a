"""Splash attention, the Pallas kernel for TPUs that ships with JAX.

It visits only tiles that the mask does not hide. On other platforms it runs in the Pallas interpreter, which
is for tests. Windows and causality are known at compile time. Documents are not: the kernel compares segments
within each tile, and by itself visits all tiles. But it reads at run time which tiles to visit, and
`_skip_tiles` removes those in which queries and keys have no document in common. All rows of the batch share
this list of tiles: lists of their own would run them one after the other."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from headrace.attention import (
    AttentionCall,
    blocks_sharing_documents,
    first_last_true,
    gradient_compile_error,
)
from headrace.nn.attention_mask import Mask
from headrace.nn.compile_target import OLD_TPUS, device
from headrace.nn.remat import SAVED_ATTENTION

Array = jax.Array
MaskInfo = kernels.mask_info_lib.MaskInfo  # the tables of one kernel that describe its mask

LANES = 128  # a TPU register's width: sequences and tiles are multiples of it

# Sides of tiles. On a v6e kernels are planned to take 46 ms of a layer of Llama 3 8B with 512 (3 rows of
# 8,192 a chip), 36 ms with 1,024 (libtpu 0.0.51, 2026-11); heads of 256 then do not fit a v4's vector memory.
SIDE, WIDE_HEAD_SIDE, WIDE_HEAD = 1024, 512, 128  # the second for heads wider than the third
# One kernel computes all gradients with 5 products of the scores, two kernels with 7, and the compiler
# schedules 26 to 33 % fewer bundles of instructions for the one. It writes the queries' gradients in as many
# parts as a row has tiles of keys, to be summed: with 8, Llama 3 8B (rows of 8,192, v5p-32, full remat) is
# planned to take 3 % less time and 11 % more memory, so there are two kernels.
MAX_PARTS = 4


@dataclass(frozen=True)
class Config:
    """The keys that `use: splash` adds to the `attention` section of a recipe."""

    block_q: int = 0  # queries in a tile; 0: the usual best [tokens]
    block_kv: int = 0  # keys in a tile; 0: the usual best [tokens]

    def __post_init__(self) -> None:
        for name in ("block_q", "block_kv"):
            if getattr(self, name) < 0 or getattr(self, name) % 128:
                raise ValueError(f"{name}: expected a multiple of 128, or 0 for what is usually best")


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
    """Compute attention. Rows that are not split over devices are padded to a multiple of 128."""
    s, t = q.shape[1], k.shape[1]
    padding = -s % LANES
    segments = None
    if q_segments is not None and kv_segments is not None:
        segments = kernels.SegmentIds(q_segments, kv_segments)
    if padding:
        assert s == t  # see `unsupported_reason`
        q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k, v))
        ids = jnp.zeros((len(q), s), jnp.int32) if q_segments is None else q_segments
        # No document has the number -1, so padding is visible to padding only.
        padded = jnp.pad(ids, ((0, 0), (0, padding)), constant_values=-1)
        segments = kernels.SegmentIds(padded, padded)
    q = (call.scale * q.astype(jnp.float32)).astype(q.dtype)
    heads_first = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    first = jnp.asarray(offset, jnp.int32)
    run = partial(_run_kernel, cfg, call.mask, call.soft_cap)
    # Decided when lowering: a TPU slice may be compiled for on a machine that has none.
    out = jax.lax.platform_dependent(
        *heads_first, segments, first, tpu=partial(run, False), default=partial(run, True)
    )
    return out.transpose(0, 2, 1, 3)[:, :s]


def _run_kernel(
    cfg: Config,
    mask: Mask,
    soft_cap: float | None,
    interpret: bool,
    q: Array,
    k: Array,
    v: Array,
    segments: kernels.SegmentIds | None,
    offset: Array,
) -> Array:
    """Run the kernel on q [b n s h], k and v [b k t h], for queries that begin at position `offset`."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    full_mask = _make_mask(mask, num_queries, num_keys)
    shards = full_mask.shape[0] // num_queries
    kernel = _make_kernel(cfg, full_mask, shards, q.shape[3], soft_cap=soft_cap, interpret=interpret)
    kernel = _select_shard(kernel, shards, offset // num_queries)
    if segments is not None:
        kernel = _skip_tiles(kernel, segments)
    return cast(Array, jax.vmap(kernel)(q, k, v, segments))  # without residuals


def unsupported_reason(cfg: Config, call: AttentionCall) -> str | None:
    """Return why the kernel cannot compute the call; None if it can."""
    if call.platform == "gpu":
        return "splash attention is a kernel for TPUs"
    length = call.q.shape[1]
    if call.context > 1 and length % LANES:
        return f"each device's chunks of the sequence, of {length}, are not multiples of {LANES}"
    if call.platform != "tpu":
        return None
    if device().device_kind in OLD_TPUS:
        return f"{device().device_kind} has no products of bfloat16 in kernels"
    return _compile_error(Config(cfg.block_q, cfg.block_kv), call)


@lru_cache
def _compile_error(cfg: Config, call: AttentionCall) -> str | None:
    ids = [
        jax.ShapeDtypeStruct(x.shape[:2], jnp.int32) if call.has_segments else None for x in (call.q, call.k)
    ]

    def run(q: Array, k: Array, v: Array, q_ids: Array | None, kv_ids: Array | None, offset: Array) -> Array:
        return attend(cfg, call, q, k, v, q_segments=q_ids, kv_segments=kv_ids, offset=offset)

    offset = jax.ShapeDtypeStruct((), jnp.int32)
    return gradient_compile_error(call.platform, run, call.q, call.k, call.k, *ids, offset)


def has_fused_gradients(length: int, head_dim: int, block_kv: int = 0) -> bool:
    """Whether one kernel computes all gradients of rows of `length` keys, a multiple of 128."""
    return length <= MAX_PARTS * _block_size(block_kv or _default_side(head_dim), length)


def _default_side(head_dim: int) -> int:
    return SIDE if head_dim <= WIDE_HEAD else WIDE_HEAD_SIDE


def _make_mask(mask: Mask, num_queries: int, num_keys: int) -> masks.Mask:
    """The mask of all positions of a row; only of `num_queries` queries if they all see the same keys."""
    before, after = (None if reach is None or reach >= num_keys - 1 else reach for reach in mask.reach)
    if before is None and after is None:
        return masks.FullMask((num_queries, num_keys))
    if before is None and after == 0:
        return masks.CausalMask((num_keys, num_keys))
    return masks.LocalMask((num_keys, num_keys), window_size=(before, after), offset=0)


def _make_kernel(
    cfg: Config, mask: masks.Mask, shards: int, head_dim: int, *, soft_cap: float | None, interpret: bool
) -> kernels.SplashAttentionKernel:
    """Make the kernel for a mask whose queries come in `shards` equal parts."""
    block_q = _block_size(cfg.block_q or _default_side(head_dim), mask.shape[0] // shards)
    block_kv = _block_size(cfg.block_kv or _default_side(head_dim), mask.shape[1])
    # The fused kernel visits all tiles, also those that a window hides.
    is_fused = has_fused_gradients(mask.shape[1], head_dim, cfg.block_kv) and not isinstance(
        mask, masks.LocalMask
    )
    kernel = _kernel_without_options(mask, shards, block_q, block_kv, _layout(head_dim), is_fused)
    options = kernel.kwargs | dict(
        attn_logits_soft_cap=soft_cap, residual_checkpoint_name=SAVED_ATTENTION, interpret=interpret
    )
    return kernels.SplashAttentionKernel(
        kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info, **options
    )


def _layout(head_dim: int) -> kernels.QKVLayout:
    """The dimension along the lanes of a register: the head's, or positions where a head would leave some
    lanes empty, in memory too.

    EuroBERT-210m (heads of 64) then moves half as much around its kernels, which have as many bundles of
    instructions either way; with heads of 128 they have 2 to 5 % more of them (libtpu 0.0.51)."""
    layouts = kernels.QKVLayout
    return layouts.SEQ_MINOR if head_dim % LANES else layouts.HEAD_DIM_MINOR


@lru_cache
def _kernel_without_options(
    mask: masks.Mask, shards: int, block_q: int, block_kv: int, layout: kernels.QKVLayout, is_fused: bool
) -> kernels.SplashAttentionKernel:
    """Make a kernel for the tables that describe its mask.

    JAX makes them by evaluating the entire mask, in 1.3 s for 16,384 positions, in 5 s for twice as many. A
    step is traced several times, each for two platforms, so they are cached."""
    sizes = kernels.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_q_dq=None if is_fused else block_q,
        block_kv_dq=None if is_fused else block_kv,
        use_fused_bwd_kernel=is_fused,
        q_layout=layout,
        k_layout=layout,
        v_layout=layout,
    )

    def make() -> kernels.SplashAttentionKernel:
        for_all_heads = masks.MultiHeadMask([mask])
        kernel = kernels.make_splash_mha(for_all_heads, block_sizes=sizes, head_shards=1, q_seq_shards=shards)
        return jax.tree.map(np.asarray, kernel)

    # In a thread of its own, without the caller's trace and mesh, whose arrays must not be cached.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(make).result()


def _select_shard(
    kernel: kernels.SplashAttentionKernel, shards: int, index: Array
) -> kernels.SplashAttentionKernel:
    """The kernel for one of `shards` equal parts of the queries, with that part's rows of the tables."""
    if shards == 1:
        return kernel

    def rows(table: np.ndarray | Array | None, axis: int) -> Any:
        if table is None:
            return None
        size = table.shape[axis] // shards
        return jax.lax.dynamic_slice_in_dim(table, index * size, size, axis)

    def select(info: MaskInfo) -> MaskInfo:
        return info._replace(
            data_next=rows(info.data_next, 1),
            mask_next=rows(info.mask_next, 1),
            block_mask=rows(info.block_mask, 1),
            q_sequence=rows(info.q_sequence, 0),
        )

    forward, dq, dkv = kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info
    return kernels.SplashAttentionKernel(
        select(forward), dq and select(dq), dkv and select(dkv), **kernel.kwargs
    )


def _skip_tiles(
    kernel: kernels.SplashAttentionKernel, segments: kernels.SegmentIds
) -> kernels.SplashAttentionKernel:
    """The kernel without tiles in which queries and keys have no document in common."""
    sizes = kernel.kwargs["block_sizes"]
    q_shape, kv_shape = (len(segments.q), -1, sizes.block_q), (len(segments.kv), -1, sizes.block_kv)
    share_documents = blocks_sharing_documents(
        segments.q.reshape(q_shape).swapaxes(0, 1), segments.kv.reshape(kv_shape).swapaxes(0, 1)
    )

    def skip(info: MaskInfo, axis: int) -> MaskInfo:
        """Update the tables of one kernel, whose tiles go along rows (axis 1) or columns (axis 0).

        Where `block_mask` is not 0, `data_next` is the index of the tile. Elsewhere it is the tile to fetch
        ahead, here one that is fetched anyway."""
        if info.block_mask is None:  # nothing is masked
            every_index = jax.lax.broadcasted_iota(jnp.int32, share_documents.shape, axis)[None]
            info = info._replace(data_next=every_index, block_mask=jnp.full_like(every_index, 2))
        assert info.data_next is not None and info.block_mask is not None
        index = info.data_next.astype(jnp.int32)
        is_needed = jnp.take_along_axis(share_documents[None], index, axis=axis + 1)
        first, last = (jnp.expand_dims(end, (0, axis + 1)) for end in first_last_true(share_documents, axis))
        return info._replace(
            data_next=jnp.clip(index, first, last).astype(info.data_next.dtype),
            block_mask=jnp.where(is_needed, info.block_mask, 0),
        )

    # Without `dq`, the kernel of `dkv` computes all gradients.
    forward, dq, dkv = kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info
    return kernels.SplashAttentionKernel(
        skip(forward, 1), dq and skip(dq, 1), dkv and skip(dkv, 0), **kernel.kwargs
    )


def _block_size(largest: int, length: int) -> int:
    """The largest multiple of 128 up to `largest` that divides the length."""
    return max(size for size in range(LANES, min(largest, length) + 1, LANES) if length % size == 0)
