"""Splash attention, the Pallas kernel for TPUs that ships with JAX: it visits only the tiles the mask leaves
something of. Anywhere else it runs in the Pallas interpreter, which is for tests.

Windows and causality are known when compiling. Documents are not: the kernel itself compares their numbers
within each tile and visits all. But which tiles it visits is an array that it reads at run time, from which
`_skip` takes those in which no document of the queries is one of the keys. It serves all rows of the batch:
one of its own for each would run them one after the other."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from headrace.attention import blocks_sharing_documents, compile_error, first_last_true
from headrace.nn.attention_mask import Mask
from headrace.nn.compile_target import OLD_TPUS, device
from headrace.nn.remat import SAVED_ATTENTION

Array = jax.Array

LANES = 128  # a TPU register's width: sequences and tiles are multiples of it


# Sides of tiles. On a v6e kernels are planned to take 46 ms of a layer of Llama 3 8B with 512 (3 rows of
# 8,192 a chip), 36 ms with 1,024 (libtpu 0.0.51, 2026-11); heads of 256 then do not fit a v4's vector memory.
SIDE, SMALL_SIDE, WIDEST = 1024, 512, 128
# One kernel makes all gradients with 5 products of the scores where two make them with 7, and the compiler
# schedules 26 to 33 % fewer bundles of instructions for it. It gives the queries' in as many parts as there
# are tiles of keys in a row, to be summed: with 8, Llama 3 8B (rows of 8,192, v5p-32, full remat) is planned
# to take 3 % less time and 11 % more memory, so these have two kernels.
MOST_PARTS = 4


@dataclass(frozen=True)
class Config:
    block_q: int = 0  # queries in a tile; 0: the usual best [tokens]
    block_kv: int = 0  # keys in a tile; 0: the usual best [tokens]

    def __post_init__(self) -> None:
        for name in ("block_q", "block_kv"):
            if getattr(self, name) < 0 or getattr(self, name) % 128:
                raise ValueError(f"{name}: expected a multiple of 128, or 0 for what is usually best")


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
        assert s == t  # see `unsupported_reason`
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
            kernel = _kernel(cfg, whole, shards, q.shape[3], soft_cap=soft_cap, interpret=interpret)
            kernel = _shard(kernel, shards, offset // rows)
            return jax.vmap(kernel if ids is None else _skip(kernel, ids))(q, k, v, ids)

        return local

    heads_first = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    position = jnp.asarray(offset, jnp.int32)
    # Decided when lowering: a TPU slice may be compiled for on a machine that has none.
    out = jax.lax.platform_dependent(*heads_first, ids, position, tpu=run(False), default=run(True))
    return out.transpose(0, 2, 1, 3)[:, :s]


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
    if platform == "gpu":
        return "splash attention is a kernel for TPUs"
    if context > 1 and q.shape[1] % LANES:
        return f"each device's chunks of the sequence, of {q.shape[1]}, are not multiples of {LANES}"
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

    return compile_error(platform, run, q, k, k, *ids, jax.ShapeDtypeStruct((), jnp.int32))


def fuses(length: int, head_dim: int, block_kv: int = 0) -> bool:
    """Whether one kernel makes all gradients of rows of so many keys, a multiple of 128."""
    return length <= MOST_PARTS * _block(block_kv or _side(head_dim), length)


def _side(head_dim: int) -> int:
    return SIDE if head_dim <= WIDEST else SMALL_SIDE


def _mask(mask: Mask, rows: int, columns: int) -> masks.Mask:
    """The mask of the whole sequence; where all see all, and a query's place does not matter, of `rows`."""
    before, after = (None if far is None or far >= columns - 1 else far for far in mask.reach)
    if before is None and after is None:
        return masks.FullMask((rows, columns))
    if before is None and after == 0:
        return masks.CausalMask((columns, columns))
    return masks.LocalMask((columns, columns), window_size=(before, after), offset=0)


def _kernel(
    cfg: Any, whole: masks.Mask, shards: int, head_dim: int, *, soft_cap: float | None, interpret: bool
) -> kernels.SplashAttentionKernel:
    block_q = _block(cfg.block_q or _side(head_dim), whole.shape[0] // shards)
    block_kv = _block(cfg.block_kv or _side(head_dim), whole.shape[1])
    # It visits all tiles, also those that a window hides.
    fused = fuses(whole.shape[1], head_dim, cfg.block_kv) and not isinstance(whole, masks.LocalMask)
    made = _described(whole, shards, block_q, block_kv, _layout(head_dim), fused)
    how = made.kwargs | dict(
        attn_logits_soft_cap=soft_cap, residual_checkpoint_name=SAVED_ATTENTION, interpret=interpret
    )
    return kernels.SplashAttentionKernel(made.fwd_mask_info, made.dq_mask_info, made.dkv_mask_info, **how)


def _layout(head_dim: int) -> kernels.QKVLayout:
    """What lies along the lanes of a register: where a head would leave some of them empty, in memory too,
    positions. EuroBERT-210m (heads of 64) then moves half as much around its kernels, which have as many
    bundles of instructions either way; with heads of 128 they have 2 to 5 % more of them (libtpu 0.0.51)."""
    layouts = kernels.QKVLayout
    return layouts.SEQ_MINOR if head_dim % LANES else layouts.HEAD_DIM_MINOR


@lru_cache
def _described(
    whole: masks.Mask, shards: int, block_q: int, block_kv: int, layout: kernels.QKVLayout, fused: bool
) -> kernels.SplashAttentionKernel:
    """A kernel for the sake of its description of the mask, which JAX makes by looking at all of it: in 1.3 s
    for 16,384 positions, in 5 s for twice as many. A step is traced several times, each for two platforms."""
    sizes = kernels.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_q_dq=None if fused else block_q,
        block_kv_dq=None if fused else block_kv,
        use_fused_bwd_kernel=fused,
        q_layout=layout,
        k_layout=layout,
        v_layout=layout,
    )

    def make() -> Any:
        one = masks.MultiHeadMask([whole])  # for all heads
        kernel = kernels.make_splash_mha(one, block_sizes=sizes, head_shards=1, q_seq_shards=shards)
        return jax.tree.map(np.asarray, kernel)

    # In a thread of its own, where no trace and no mesh turn its arrays into ones that must not be kept.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(make).result()


def _shard(whole: kernels.SplashAttentionKernel, shards: int, index: Array) -> kernels.SplashAttentionKernel:
    """The kernel for one of equal parts of the queries: the rows of the mask's description that are its."""
    if shards == 1:
        return whole

    def rows(x: Any, axis: int) -> Any:
        if x is None:
            return None
        size = x.shape[axis] // shards
        return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)

    def part(info: Any) -> Any:
        return info and info._replace(
            data_next=rows(info.data_next, 1),
            mask_next=rows(info.mask_next, 1),
            block_mask=rows(info.block_mask, 1),
            q_sequence=rows(info.q_sequence, 0),
        )

    infos = (part(info) for info in (whole.fwd_mask_info, whole.dq_mask_info, whole.dkv_mask_info))
    return kernels.SplashAttentionKernel(*infos, **whole.kwargs)


def _skip(kernel: kernels.SplashAttentionKernel, ids: kernels.SegmentIds) -> kernels.SplashAttentionKernel:
    """The kernel without the tiles in which no document of the queries is one of the keys."""
    sizes = kernel.kwargs["block_sizes"]
    rows, columns = (len(ids.q), -1, sizes.block_q), (len(ids.kv), -1, sizes.block_kv)
    meet = blocks_sharing_documents(
        ids.q.reshape(rows).swapaxes(0, 1), ids.kv.reshape(columns).swapaxes(0, 1)
    )

    def part(info: Any, axis: int) -> Any:
        """`data_next` says which tile of its row (axis 1 of the tiles) or column (axis 0) each one is, where
        `block_mask` is not 0; elsewhere which one to fetch: there none that was not fetched anyway."""
        if info is None:  # one kernel makes all gradients
            return None
        if info.block_mask is None:  # all see all
            place = jax.lax.broadcasted_iota(jnp.int32, meet.shape, axis)[None]
            info = info._replace(data_next=place, block_mask=jnp.full_like(place, 2))
        place = info.data_next.astype(jnp.int32)
        met = jnp.take_along_axis(meet[None], place, axis=axis + 1)
        first, last = (jnp.expand_dims(end, (0, axis + 1)) for end in first_last_true(meet, axis))
        return info._replace(
            data_next=jnp.clip(place, first, last).astype(info.data_next.dtype),
            block_mask=jnp.where(met, info.block_mask, 0),
        )

    infos = part(kernel.fwd_mask_info, 1), part(kernel.dq_mask_info, 1), part(kernel.dkv_mask_info, 0)
    return kernels.SplashAttentionKernel(*infos, **kernel.kwargs)


def _block(wanted: int, length: int) -> int:
    """The longest tile that is no longer than wanted and divides the length."""
    return max(size for size in range(LANES, min(wanted, length) + 1, LANES) if length % size == 0)
