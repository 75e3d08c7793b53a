"""Attention: `attend`, the choice of a backend, and the contract that backends satisfy.

Backends are plugins of `attention.use`, one per file. Each computes attention on one device; `attend` splits
the work over a mesh. Files that begin with an underscore are no backends."""

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from headrace.errors import UserError
from headrace.nn import compile_target
from headrace.nn.attention_mask import Mask
from headrace.nn.compile_target import device
from headrace.nn.module import PyTree
from headrace.nn.sharding import (
    RULES,
    AnyMesh,
    context_chunk_order,
    current_mesh,
    from_balanced_order,
    partition_spec,
)
from headrace.nn.stack import AttentionConfig

if TYPE_CHECKING:
    from headrace.attention import band, blockwise, cudnn, hopper, splash, xla

Array = jax.Array
ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True)
class AttentionCall:
    """A call of attention on one device, as far as it is known when it is compiled."""

    q: jax.ShapeDtypeStruct  # [b s n h]: the queries, a chunk of each row if the sequence is split
    k: jax.ShapeDtypeStruct  # [b t k h]: the keys, always of entire rows; n is a multiple of k
    mask: Mask
    scale: float  # of the products of queries and keys
    soft_cap: float | None = None  # bound that a tanh keeps scores below
    has_segments: bool = False  # queries see only keys of their own document
    context: int = 1  # devices that the positions of a row are split over
    platform: str = field(default_factory=lambda: device().platform)


class Backend(Protocol[ConfigT]):
    """A backend's module."""

    Config: type[ConfigT]  # the keys that it adds to the recipe's `attention` section, all with defaults

    def attend(
        self,
        cfg: ConfigT,
        call: AttentionCall,
        q: Array,
        k: Array,
        v: Array,
        *,
        q_segments: Array | None,
        kv_segments: Array | None,
        offset: int | Array,
    ) -> Array:
        """Compute attention of q [b s n h] over k and v [b t k h], which have the shapes in `call`.

        Segments [b s] and [b t] number the documents of a row, either both or neither are None. `offset` is
        the position of the first query among the keys."""

    def unsupported_reason(self, cfg: ConfigT, call: AttentionCall) -> str | None:
        """Return why the backend cannot be used for a call, as the end of a sentence; None if it can."""


if TYPE_CHECKING:  # every backend satisfies the contract
    _BACKENDS: tuple[Backend[Any], ...] = (band, blockwise, cudnn, hopper, splash, xla)


@functools.cache
def load_backend(name: str) -> Backend[Any]:
    """Load the backend that `attention.use` names."""
    return cast(Backend[Any], importlib.import_module(f"headrace.attention.{name}"))


def attend(
    cfg: AttentionConfig,
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Mask,
    segments: Array | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    offset: int | Array | None = None,
) -> Array:
    """Compute attention of q [b s n h] over k and v [b t k h], n a multiple of k, with the backend of `cfg`.

    A query sees only keys of its own segment [b s]. Products are multiplied by `scale`, by default
    h ** -0.5. `offset`, the position of the first query among the keys, is for decoding with a cache. If a
    mesh splits the sequence, arrays are in the order of `sharding.to_balanced_order`."""
    assert q.shape[2] % k.shape[2] == 0 and k.shape == v.shape
    assert offset is not None or q.shape[1] == k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if offset is not None:
        assert segments is None
        xla, call = load_backend("xla"), AttentionCall(_shape(q), _shape(k), mask, scale, soft_cap)
        return xla.attend(xla.Config(), call, q, k, v, q_segments=None, kv_segments=None, offset=offset)
    mesh = current_mesh()
    if mesh is None:
        local_q, local_k, context = _shape(q), _shape(k), 1
    else:
        k, v = (_repeat_kv_heads(x, q.shape[2], mesh) for x in (k, v))
        local_q, local_k, context = _local_shapes(q, k, mesh)
    call = AttentionCall(local_q, local_k, mask, scale, soft_cap, segments is not None, context)
    name = choose_backend(cfg, call)
    attend_local = functools.partial(load_backend(name).attend, _settings(cfg, name), call)
    return attend_on_mesh(attend_local, q, k, v, segments=segments)


def choose_backend(cfg: AttentionConfig, call: AttentionCall) -> str:
    """Choose the backend for a call, by name: the one that `attention.use` names, or for `auto` the first
    candidate that supports the call. Raises UserError if the named one does not."""
    names = _auto_candidates(call) if cfg.use == "auto" else (cfg.use,)
    reason = None
    for name in names:
        reason = load_backend(name).unsupported_reason(_settings(cfg, name), call)
        if reason is None:
            return name
    raise UserError(f"attention.use: {names[-1]} cannot be used here: {reason}. Set attention.use to auto")


def attend_on_mesh(
    attend_local: Callable[..., Array], q: Array, k: Array, v: Array, *tables: Array, segments: Array | None
) -> Array:
    """Run `attend_local` on every device's shard of q, with the keys and values of entire rows.

    It is called as `attend_local(q, k, v, *tables, q_segments=, kv_segments=, offset=)`. Tables [r n h] are
    split by heads only. Without a mesh it is called once, with all."""
    mesh = current_mesh()
    if mesh is None:
        return attend_local(q, k, v, *tables, q_segments=segments, kv_segments=segments, offset=0)
    q_spec, kv_spec = _partition_specs(q, k, mesh)
    # Keys and values arrive split like queries; `_attend_shard` gathers them.
    split_kv_spec = PartitionSpec(kv_spec[0], q_spec[1], *kv_spec[2:])
    q_segments_spec = PartitionSpec(kv_spec[0], q_spec[1])
    kv_segments_spec = PartitionSpec(kv_spec[0], None)
    table_spec = PartitionSpec(None, q_spec[2], None)
    return jax.shard_map(
        functools.partial(_attend_shard, attend_local, q_spec[1]),
        in_specs=(
            q_spec,
            split_kv_spec,
            split_kv_spec,
            q_segments_spec,
            kv_segments_spec,
            *(table_spec for _ in tables),
        ),
        out_specs=q_spec,
        # The loops of the backends start from plain zeros, which this check would call a change of type.
        check_vma=False,
    )(q, k, v, segments, segments, *tables)


def blocks_sharing_documents(q_blocks: Array, kv_blocks: Array) -> Array:
    """Find the blocks of queries and keys that may have a document in common, in any row of the batch.

    From the segments of each block, [i b s] and [j b t], makes booleans [i j]. Along a row, segments rise
    and padding, 0 or less, comes last, so a block holds the segments from its lowest to its highest. In
    another order more blocks would seem to share documents, never fewer."""
    last = jnp.iinfo(jnp.int32).max
    q_blocks, kv_blocks = (jnp.where(segments <= 0, last, segments) for segments in (q_blocks, kv_blocks))
    starts_by_end = kv_blocks.min(-1) <= q_blocks.max(-1)[:, None]
    ends_before = kv_blocks.max(-1) < q_blocks.min(-1)[:, None]
    return (starts_by_end & ~ends_before).any(-1)


def first_last_true(is_true: Array, axis: int) -> tuple[Array, Array]:
    """The first and the last index along an axis that is True; those of its ends where none is."""
    first = jnp.argmax(is_true, axis)
    return first, is_true.shape[axis] - 1 - jnp.argmax(jnp.flip(is_true, axis), axis)


def gradient_compile_error(
    platform: str, attend: Callable[..., Array], *arguments: jax.ShapeDtypeStruct | None
) -> str | None:
    """Compile `attend` and its gradients with respect to its first three arguments, which are given as
    shapes. Returns the compiler's message if it fails, or None."""

    def run_both(q: Array, k: Array, v: Array, *segments_and_offset: Array | None) -> PyTree:
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, *segments_and_offset), q, k, v)
        return attend(q, k, v, *segments_and_offset), pull(out)

    return compile_target.compile_error(platform, run_both, *arguments)


def _auto_candidates(call: AttentionCall) -> tuple[str, ...]:
    """The backends that `use: auto` tries, in this order. The last one supports every call."""
    has_window, length = call.mask.window is not None, call.k.shape[1]
    if call.platform == "tpu":
        return ("band", "splash", "blockwise") if has_window else ("splash", "blockwise")
    if call.platform == "gpu":
        # cuDNN skips what lies outside of a window that looks back. Documents, and a window that looks both
        # ways, it masks: on an H200 it takes 4 to 5 times as long as kernels that skip (2026-11).
        if has_window and not call.mask.causal:
            return "hopper", "band", "cudnn", "blockwise"
        return ("hopper", "cudnn", "blockwise") if call.has_segments else ("cudnn", "hopper", "blockwise")
    default = "xla" if length <= 1024 else "blockwise"
    if has_window:
        from headrace.attention import band  # here, since it imports this module

        if band.is_cheaper(call.mask, length):
            return "band", default
    return (default,)


def _attend_shard(
    attend_local: Callable[..., Array],
    context_axes: str | tuple[str, ...] | None,
    q: Array,
    k: Array,
    v: Array,
    q_segments: Array | None,
    kv_segments: Array | None,
    *tables: Array,
) -> Array:
    """Run `attend_local` on one device's arrays, in which `context_axes` of the mesh split the positions of
    q, k, v and q_segments, but not of kv_segments."""
    if context_axes is None:
        return attend_local(q, k, v, *tables, q_segments=q_segments, kv_segments=kv_segments, offset=0)
    # Explicitly: the compiler would gather the hidden states, which are wider, and project keys and values
    # from them on every device.
    k, v = (jax.lax.all_gather(x, context_axes, axis=1, tiled=True) for x in (k, v))
    order, device_index = context_chunk_order(k.shape[1]), jax.lax.axis_index(context_axes)
    if len(order) == 1:
        offset = device_index * q.shape[1]
        return attend_local(q, k, v, *tables, q_segments=q_segments, kv_segments=kv_segments, offset=offset)
    k, v = from_balanced_order(k), from_balanced_order(v)
    kv_segments = None if kv_segments is None else from_balanced_order(kv_segments)
    offsets = jnp.asarray(order).reshape(-1, 2)[device_index] * (q.shape[1] // 2)
    chunk_segments = [None, None] if q_segments is None else jnp.split(q_segments, 2, axis=1)
    chunks = zip(jnp.split(q, 2, axis=1), chunk_segments, offsets, strict=True)
    outputs = [
        attend_local(chunk, k, v, *tables, q_segments=ids, kv_segments=kv_segments, offset=offset)
        for chunk, ids, offset in chunks
    ]
    return jnp.concatenate(outputs, axis=1)


def _partition_specs(q: Array, k: Array, mesh: AnyMesh) -> tuple[PartitionSpec, PartitionSpec]:
    """The specs by which a mesh splits queries, and keys after those of each row are gathered."""
    q_spec = partition_spec(("batch", "sequence", "heads", None), q.shape, mesh)
    return q_spec, partition_spec(("batch", None, "kv_heads", None), k.shape, mesh)


def _repeat_kv_heads(x: Array, heads: int, mesh: AnyMesh) -> Array:
    """Repeat keys or values as often as needed to split them like the query heads, if those are split.

    The result divides the query heads, which are then a multiple of both the kv heads and the devices."""
    devices = math.prod(mesh.shape[axis] for axis in RULES["kv_heads"])
    if heads % devices:
        return x
    return jnp.repeat(x, math.lcm(x.shape[2], devices) // x.shape[2], axis=2)


def _local_shapes(
    q: Array, k: Array, mesh: AnyMesh
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, int]:
    """The shapes of q and k in one call on one device, and the number of devices that rows are split over."""
    (b, s, n, h), kv_shape = (
        NamedSharding(mesh, spec).shard_shape(x.shape)
        for x, spec in zip((q, k), _partition_specs(q, k, mesh), strict=True)
    )
    chunks = min(len(context_chunk_order(q.shape[1])), 2)  # per device, with a call for each
    local_q = jax.ShapeDtypeStruct((b, s // chunks, n, h), q.dtype)
    return local_q, jax.ShapeDtypeStruct(kv_shape, k.dtype), q.shape[1] // s


def _shape(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _settings(cfg: AttentionConfig, name: str) -> object:
    """The settings of the backend `name`: from the recipe if it names that backend, else its defaults."""
    return load_backend(name).Config() if cfg.use == "auto" else cfg
