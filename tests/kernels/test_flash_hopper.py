"""Attention's kernels for Hopper GPUs, as far as a CPU can tell: that they are lowered for one, which keys
each tile visits, and what lies between the kernels, with plain JAX in the place of each. On a GPU:
python -m benchmarks.attention_gpu"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.attention import AttentionCall, attend, hopper
from headrace.kernels import flash_hopper
from headrace.kernels.flash_hopper import LOG2E, SIZES, TILE, Bounds, Shape
from headrace.nn.attention_mask import Mask

MASKS = [Mask(), Mask(causal=False), Mask(window=50), Mask(causal=False, window=70)]
XLA = SimpleNamespace(use="xla")


def documents(length: int) -> Any:
    """Rows of several documents, of one, and of documents with padding after them."""
    place = np.arange(length)
    several = np.searchsorted([1, 40, 129, length // 2, length - 3], place, side="right") + 1
    padded = np.where(place < length * 2 // 3, 1 + (place >= 77), 0)
    return jnp.asarray(np.stack([several, np.ones_like(place), padded]), jnp.int32)


def seen(bounds: Bounds, keys: int) -> Any:
    first, last = (np.asarray(x)[..., None] for x in bounds)
    return (np.arange(keys) >= first) & (np.arange(keys) < last)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("offset", [0, 128])
def test_a_query_sees_an_interval_of_the_keys(mask: Mask, packed: bool, offset: int) -> None:
    length, segments = 384, documents(384)
    queries = length - offset
    found = seen(hopper.key_bounds(mask, 3, queries, length, segments if packed else None, offset), length)
    place = jnp.arange(length)
    allowed = np.broadcast_to(mask.allows(offset + place[:queries, None], place), found.shape)
    if packed:
        allowed = allowed & np.asarray(segments[:, offset:, None] == segments[:, None, :])
    np.testing.assert_array_equal(found, allowed)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_tiles_visit_what_they_see_and_compare_only_at_its_edges(mask: Mask, packed: bool) -> None:
    length, block = 512, 64
    bounds = hopper.key_bounds(mask, 3, length, length, documents(length) if packed else None, 0)
    visible = seen(bounds, length)
    queries = flash_hopper._spans(bounds, TILE, block)
    keys = flash_hopper._spans_of_keys(bounds, block, length, TILE)
    for spans, tiles in ((queries, visible), (keys, visible.swapaxes(1, 2))):
        tiles = tiles.reshape(3, length // TILE, TILE, length // block, block)
        some, every = tiles.any((2, 4)), tiles.all((2, 4))
        spans = np.asarray(spans).reshape(3, -1, 4)
        number = np.arange(length // block)
        low, whole, until, high = (spans[..., n, None] for n in range(4))
        np.testing.assert_array_equal((number >= low) & (number < high), some)  # nothing else is visited
        np.testing.assert_array_equal((number >= whole) & (number < until), every)


def plain_scores(shape: Shape, q: Any, k: Any, bounds: Bounds) -> tuple[Any, Any]:
    """Scores in units of log 2, [b n s t], and which of them are seen."""
    scores = flash_hopper._scores(shape, jnp.einsum("bsnh,btnh->bnst", q, k))
    return scores, jnp.asarray(seen(bounds, shape.keys))[:, None]


def split(shape: Shape, q: Any, *of_keys: Any) -> list[Any]:
    """Heads of their own, keys repeated for each query head."""
    made = [q.reshape(shape.batch, shape.queries, shape.heads, shape.width)]
    for x in of_keys:
        x = x.reshape(shape.batch, shape.keys, shape.kv_heads, shape.width)
        made.append(jnp.repeat(x, shape.group, axis=2))
    return made


def forward(shape: Shape, q: Any, k: Any, v: Any, bounds: Bounds) -> Any:
    q4, k4, v4 = split(shape, q, k, v)
    scores, allowed = plain_scores(shape, q4, k4, bounds)
    scores = jnp.where(allowed, scores, -jnp.inf)
    sums = jax.nn.logsumexp(scores / LOG2E, axis=-1) * LOG2E
    out = jnp.einsum("bnst,btnh->bsnh", jnp.exp2(scores - sums[..., None]), v4)
    return out.reshape(q.shape), sums.ravel()


def d_scores(shape: Shape, q: Any, k: Any, v: Any, d: Any, sums: Any, shared: Any, bounds: Bounds) -> Any:
    q4, k4, v4 = split(shape, q, k, v)
    d4 = d.reshape(q4.shape)
    scores, allowed = plain_scores(shape, q4, k4, bounds)
    rows = [x.reshape(shape.batch, shape.heads, shape.queries, 1) for x in (sums, shared)]
    weights = jnp.where(allowed, jnp.exp2(scores - rows[0]), 0)
    d_weights = jnp.einsum("bsnh,btnh->bnst", d4, v4)
    return (
        weights,
        flash_hopper._uncapped(shape, scores, weights * (d_weights - rows[1])) * shape.scale,
        q4,
        k4,
    )


def of_queries(shape: Shape, q: Any, k: Any, v: Any, d: Any, sums: Any, shared: Any, bounds: Bounds) -> Any:
    _, made, _, k4 = d_scores(shape, q, k, v, d, sums, shared, bounds)
    return jnp.einsum("bnst,btnh->bsnh", made, k4).reshape(q.shape)


def of_keys(shape: Shape, q: Any, k: Any, v: Any, d: Any, sums: Any, shared: Any, bounds: Bounds) -> Any:
    weights, made, q4, _ = d_scores(shape, q, k, v, d, sums, shared, bounds)
    pairs = (made, q4), (weights, d.reshape(q4.shape))
    wide = (jnp.einsum("bnst,bsnh->btnh", *pair) for pair in pairs)
    parts = (shape.batch, shape.keys, shape.kv_heads, shape.group, shape.width)
    return tuple(x.reshape(parts).sum(3).reshape(k.shape) for x in wide)


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_what_lies_between_the_kernels(
    monkeypatch: pytest.MonkeyPatch, mask: Mask, soft_cap: float | None
) -> None:
    for name, plain in (
        ("forward", forward),
        ("gradient_of_queries", of_queries),
        ("gradient_of_keys", of_keys),
    ):
        monkeypatch.setattr(hopper, name, plain)
    length, segments = 256, documents(256)
    keys = jax.random.split(jax.random.key(0), 4)
    q, d = (jax.random.normal(key, (3, length, 4, 64)) for key in keys[:2])
    k, v = (jax.random.normal(key, (3, length, 2, 64)) for key in keys[2:])

    def ours(q: Any, k: Any, v: Any) -> Any:
        call = AttentionCall(q, k, mask, 0.2, soft_cap, has_segments=True)
        ids = dict(q_segments=segments, kv_segments=segments)
        return hopper.attend(hopper.Config(), call, q, k, v, **ids, offset=0)

    def theirs(q: Any, k: Any, v: Any) -> Any:
        return attend(XLA, q, k, v, mask=mask, segments=segments, soft_cap=soft_cap, scale=0.2)

    found, expected = (jax.vjp(f, q, k, v) for f in (ours, theirs))
    np.testing.assert_allclose(found[0], expected[0], atol=2e-5)
    for a, b in zip(found[1](d), expected[1](d), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("width", SIZES)
def test_the_kernels_are_lowered_for_a_gpu(width: int) -> None:
    q, k = (jax.ShapeDtypeStruct((2, 256, heads, width), jnp.bfloat16) for heads in (8, 2))
    ids = jax.ShapeDtypeStruct((2, 256), jnp.int32)

    def both(q: Any, k: Any, v: Any, ids: Any) -> Any:
        call = AttentionCall(q, k, Mask(window=100), 0.1, 50.0, has_segments=True)
        run = partial(hopper.attend, hopper.Config(), call, q_segments=ids, kv_segments=ids, offset=0)
        out, pull = jax.vjp(run, q, k, v)
        return out, pull(out)

    text = jax.jit(both).trace(q, k, k, ids).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 3
