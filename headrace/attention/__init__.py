"""Attention behind one function: `attend` looks at the shapes and the devices, takes the backend that
`attention.use` names (one file each in headrace/attention/), and runs it on every device's own part."""

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from headrace.errors import UserError
from headrace.nn import compile_target
from headrace.nn.attention_mask import Mask
from headrace.nn.compile_target import device
from headrace.nn.sharding import RULES, context_chunk_order, current_mesh, from_balanced_order, partition_spec

Array = jax.Array

# What `use: auto` tries, in this order; the last of each refuses nothing.
ORDER = {"gpu": ("cudnn", "hopper", "blockwise"), "tpu": ("splash", "blockwise")}


def attend(
    cfg: Any,
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
    """Attention of q [b s n h] over k and v [b t k h], n a multiple of k. A query sees only keys of its own
    segment [b s]. `offset`, the position of the first query among the keys, is for decoding with a cache.
    Where a mesh splits the sequence, positions come and go in the order of `mesh.balance`."""
    assert q.shape[2] % k.shape[2] == 0 and k.shape == v.shape
    assert offset is not None or q.shape[1] == k.shape[1]
    how = dict(mask=mask, soft_cap=soft_cap, scale=q.shape[-1] ** -0.5 if scale is None else scale)
    if offset is not None:
        assert segments is None
        return _backend("xla").attend(cfg, q, k, v, q_segments=None, kv_segments=None, offset=offset, **how)
    mesh = current_mesh()
    seen: dict[str, Any] = dict(mask=mask, segments=segments is not None, soft_cap=soft_cap)
    if mesh is None:
        name = choose(cfg, q, k, **seen)
    else:
        k, v = (_spread(x, q.shape[2], mesh) for x in (k, v))
        queries, keys = _layouts(q, k, mesh)
        mine, theirs = _part(q, queries, mesh), _part(k, keys, mesh)
        context = q.shape[1] // mine.shape[1]
        if len(context_chunk_order(q.shape[1])) > 1:  # two on each device, one after the other
            mine = jax.ShapeDtypeStruct((mine.shape[0], mine.shape[1] // 2, *mine.shape[2:]), mine.dtype)
        name = choose(cfg, mine, theirs, context=context, **seen)
    return over_mesh(partial(_backend(name).attend, _settings(cfg, name), **how), q, k, v, segments=segments)


def over_mesh(
    one: Callable[..., Array], q: Array, k: Array, v: Array, *tables: Array, segments: Array | None
) -> Array:
    """Runs `one(q, k, v, *tables, q_segments=, kv_segments=, offset=)` on every device's own part, each with
    the keys of whole rows. Tables [r n h] are split by heads alone."""
    mesh = current_mesh()
    if mesh is None:
        return one(q, k, v, *tables, q_segments=segments, kv_segments=segments, offset=0)
    queries, keys = _layouts(q, k, mesh)
    whole = jax.sharding.PartitionSpec(keys[0], None)
    split = jax.sharding.PartitionSpec(keys[0], queries[1])
    held = jax.sharding.PartitionSpec(keys[0], queries[1], *keys[2:])
    of_heads = jax.sharding.PartitionSpec(None, queries[2], None)
    return jax.shard_map(
        _local(one, queries[1]),
        in_specs=(queries, held, held, split, whole, *(of_heads for _ in tables)),
        out_specs=queries,
        # The loops of the backends start from plain zeros, which this check would call a change of type.
        check_vma=False,
    )(q, k, v, segments, segments, *tables)


def choose(
    cfg: Any,
    q: Any,
    k: Any,
    *,
    mask: Mask,
    segments: bool = False,
    soft_cap: float | None = None,
    context: int = 1,
    platform: str | None = None,
) -> str:
    """The backend for one device's q and k (arrays or shapes) when the sequence is split over `context`
    devices, and q one of its chunks. Raises UserError when the one that `attention.use` names cannot do
    it."""
    platform = platform or device().platform
    names = _order(platform, k.shape[1], mask, segments) if cfg.use == "auto" else (cfg.use,)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k)]
    reason = None
    for name in names:
        settings = _settings(cfg, name)
        reason = _backend(name).unsupported_reason(
            settings, platform, *shapes, mask=mask, segments=segments, soft_cap=soft_cap, context=context
        )
        if reason is None:
            return name
    raise UserError(f"attention.use: {names[-1]} cannot be used here: {reason}. Set attention.use to auto")


def blocks_sharing_documents(queries: Array, keys: Array) -> Array:
    """Which blocks of queries may have a document in common with which blocks of keys, in any row of the
    batch: [i j], from the segments of each, [i b s] and [j b t]. Documents lie in a row in the order of their
    numbers and padding, 0 or less, after them, so a block holds the numbers from its lowest to its highest.
    In another order more would seem to meet, never less."""
    last = jnp.iinfo(jnp.int32).max
    queries, keys = (jnp.where(ids <= 0, last, ids) for ids in (queries, keys))
    begun = keys.min(-1) <= queries.max(-1)[:, None]
    ended = keys.max(-1) < queries.min(-1)[:, None]
    return (begun & ~ended).any(-1)


def first_last_true(meet: Array, axis: int) -> tuple[Array, Array]:
    """The first and the last along an axis that is met; all of it where none is."""
    return jnp.argmax(meet, axis), meet.shape[axis] - 1 - jnp.argmax(jnp.flip(meet, axis), axis)


def compile_error(platform: str, function: Callable[..., Array], *arguments: Any) -> str | None:
    """What the compiler of `platform` says against `function` and its gradient with respect to the first
    three arguments (given as shapes), or None if it takes them."""

    def both(q: Array, k: Array, v: Array, *rest: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: function(q, k, v, *rest), q, k, v)
        return function(q, k, v, *rest), pull(out)

    return compile_target.compile_error(platform, both, *arguments)


def _order(platform: str, length: int, mask: Mask, segments: bool) -> tuple[str, ...]:
    """What `auto` tries."""
    windowed = mask.window is not None
    if platform == "gpu":
        # cuDNN skips what lies outside of a window that looks back. Documents, and a window that looks both
        # ways, it masks: on an H200 it takes 4 to 5 times as long as kernels that skip (2026-11).
        both_ways = windowed and not mask.causal
        first = ("hopper",) * (segments or both_ways) + ("band",) * both_ways
        return tuple(dict.fromkeys((*first, *ORDER["gpu"])))
    plain = ORDER.get(platform, ("xla",) if length <= 1024 else ("blockwise",))
    narrow = windowed if platform == "tpu" else _backend("band").is_cheaper(mask, length)
    return ("band",) * narrow + plain


def _local(one: Callable[..., Array], rows: Any) -> Callable[..., Array]:
    """`one` on a device's arrays, whose queries are split over the mesh axes `rows`."""

    def local(
        q: Array, k: Array, v: Array, q_segments: Array | None, kv_segments: Array | None, *tables: Array
    ) -> Array:
        if rows is None:
            return one(q, k, v, *tables, q_segments=q_segments, kv_segments=kv_segments, offset=0)
        # By hand: the compiler would gather the states, which are wider, and make keys of them everywhere.
        k, v = (jax.lax.all_gather(x, rows, axis=1, tiled=True) for x in (k, v))
        order, device = context_chunk_order(k.shape[1]), jax.lax.axis_index(rows)
        if len(order) == 1:
            first = device * q.shape[1]
            return one(q, k, v, *tables, q_segments=q_segments, kv_segments=kv_segments, offset=first)
        k, v = from_balanced_order(k), from_balanced_order(v)
        kv_segments = None if kv_segments is None else from_balanced_order(kv_segments)
        held = jnp.asarray(order).reshape(-1, 2)[device] * (q.shape[1] // 2)
        halves = [None, None] if q_segments is None else jnp.split(q_segments, 2, axis=1)
        parts = zip(jnp.split(q, 2, axis=1), halves, held, strict=True)
        made = [
            one(q, k, v, *tables, q_segments=ids, kv_segments=kv_segments, offset=first)
            for q, ids, first in parts
        ]
        return jnp.concatenate(made, axis=1)

    return local


def _layouts(q: Array, k: Array, mesh: Any) -> tuple[Any, Any]:
    """How queries are split, and keys once each device has all of its rows."""
    queries = partition_spec(("batch", "sequence", "heads", None), q.shape, mesh)
    return queries, partition_spec(("batch", None, "kv_heads", None), k.shape, mesh)


def _spread(x: Array, heads: int, mesh: Any) -> Array:
    """Repeats kv heads just often enough to be split like the query heads, where those are split. It comes
    out even: the query heads are then a multiple both of the kv heads and of the devices."""
    devices = math.prod(mesh.shape[axis] for axis in RULES["kv_heads"])
    if heads % devices:
        return x
    return jnp.repeat(x, math.lcm(x.shape[2], devices) // x.shape[2], axis=2)


def _part(x: Array, split: Any, mesh: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(NamedSharding(mesh, split).shard_shape(x.shape), x.dtype)


def _settings(cfg: Any, name: str) -> Any:
    return _backend(name).Config() if cfg.use == "auto" else cfg


def _backend(name: str) -> Any:
    return importlib.import_module(f"headrace.attention.{name}")
