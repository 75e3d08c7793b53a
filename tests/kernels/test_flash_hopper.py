"""The attention kernels for Hopper GPUs, as far as a CPU can test them: they are lowered for one, tiles visit
the right keys, and the code around them is right, with plain JAX in the place of each. On a GPU:
python -m benchmarks.attention_gpu"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.attention import AttentionCall, attend, hopper
from headrace.kernels import flash_tiles
from headrace.kernels.flash_tiles import BLOCK_SIZES, LOG2E, TILE, FlashShape, KeyBounds
from headrace.nn.attention_mask import Mask

MASKS = [Mask(), Mask(causal=False), Mask(window=50), Mask(causal=False, window=70)]
XLA = SimpleNamespace(use="xla")


def documents(length: int) -> Any:
    """Rows of several documents, of one, and of documents with padding after them."""
    position = np.arange(length)
    several = np.searchsorted([1, 40, 129, length // 2, length - 3], position, side="right") + 1
    padded = np.where(position < length * 2 // 3, 1 + (position >= 77), 0)
    return jnp.asarray(np.stack([several, np.ones_like(position), padded]), jnp.int32)


def visible_mask(bounds: KeyBounds, keys: int) -> Any:
    start, end = (np.asarray(x)[..., None] for x in bounds)
    return (np.arange(keys) >= start) & (np.arange(keys) < end)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("offset", [0, 128])
def test_a_query_sees_an_interval_of_the_keys(mask: Mask, packed: bool, offset: int) -> None:
    length, segments = 384, documents(384)
    queries = length - offset
    bounds = hopper.key_bounds(mask, 3, queries, length, segments if packed else None, offset)
    position = jnp.arange(length)
    expected = np.asarray(mask.allows(offset + position[:queries, None], position))[None]
    if packed:
        expected = expected & np.asarray(segments[:, offset:, None] == segments[:, None, :])
    visible = visible_mask(bounds, length)
    np.testing.assert_array_equal(visible, np.broadcast_to(expected, visible.shape))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_tiles_visit_blocks_that_they_see_and_mask_only_those_at_the_edges(mask: Mask, packed: bool) -> None:
    length, block = 512, 64
    bounds = hopper.key_bounds(mask, 3, length, length, documents(length) if packed else None, 0)
    visible = visible_mask(bounds, length)
    queries = flash_tiles.find_key_blocks(bounds, TILE, block)
    keys = flash_tiles.find_query_blocks(bounds, TILE, block, length)
    for spans, tiles in ((queries, visible), (keys, visible.swapaxes(1, 2))):
        tiles = tiles.reshape(3, length // TILE, TILE, length // block, block)
        is_seen, is_full = tiles.any((2, 4)), tiles.all((2, 4))
        spans = np.asarray(spans).reshape(3, -1, 4)
        number = np.arange(length // block)
        start, full_start, full_end, end = (spans[..., n, None] for n in range(4))
        np.testing.assert_array_equal((number >= start) & (number < end), is_seen)
        np.testing.assert_array_equal((number >= full_start) & (number < full_end), is_full)


def plain_scores(shape: FlashShape, q: Any, k: Any, bounds: KeyBounds) -> tuple[Any, Any]:
    """Compute scores in units of log 2, [b n s t], and the mask of the visible ones."""
    scores = flash_tiles.to_scores(shape, jnp.einsum("bsnh,btnh->bnst", q, k))
    return scores, jnp.asarray(visible_mask(bounds, shape.keys))[:, None]


def split_heads(shape: FlashShape, q: Any, *of_keys: Any) -> list[Any]:
    """Give heads an axis, and repeat keys for each query head."""
    arrays = [q.reshape(shape.batch, shape.queries, shape.heads, shape.head_dim)]
    for x in of_keys:
        x = x.reshape(shape.batch, shape.keys, shape.kv_heads, shape.head_dim)
        arrays.append(jnp.repeat(x, shape.group, axis=2))
    return arrays


def compute_output_and_log_sums(shape: FlashShape, q: Any, k: Any, v: Any, bounds: KeyBounds) -> Any:
    q4, k4, v4 = split_heads(shape, q, k, v)
    scores, visible = plain_scores(shape, q4, k4, bounds)
    scores = jnp.where(visible, scores, -jnp.inf)
    log_sums = jax.nn.logsumexp(scores / LOG2E, axis=-1) * LOG2E
    out = jnp.einsum("bnst,btnh->bsnh", jnp.exp2(scores - log_sums[..., None]), v4)
    return out.reshape(q.shape), log_sums.ravel()


def weights_and_gradient(
    shape: FlashShape, q: Any, k: Any, v: Any, d_out: Any, log_sums: Any, means: Any, bounds: KeyBounds
) -> Any:
    """Compute the weights, and the gradient of products of queries and keys."""
    q4, k4, v4 = split_heads(shape, q, k, v)
    scores, visible = plain_scores(shape, q4, k4, bounds)
    log_sums, means = (x.reshape(shape.batch, shape.heads, shape.queries, 1) for x in (log_sums, means))
    weights = jnp.where(visible, jnp.exp2(scores - log_sums), 0)
    d_weights = jnp.einsum("bsnh,btnh->bnst", d_out.reshape(q4.shape), v4)
    d_products = flash_tiles.to_d_products(shape, scores, weights * (d_weights - means))
    return weights, d_products * shape.scale


def compute_query_gradient(shape: FlashShape, q: Any, k: Any, *arrays: Any) -> Any:
    d_products = weights_and_gradient(shape, q, k, *arrays)[1]
    return jnp.einsum("bnst,btnh->bsnh", d_products, split_heads(shape, q, k)[1]).reshape(q.shape)


def compute_key_value_gradients(shape: FlashShape, q: Any, k: Any, v: Any, d_out: Any, *arrays: Any) -> Any:
    weights, d_products = weights_and_gradient(shape, q, k, v, d_out, *arrays)
    q4 = split_heads(shape, q)[0]
    pairs = (d_products, q4), (weights, d_out.reshape(q4.shape))
    by_head = (jnp.einsum("bnst,bsnh->btnh", *pair) for pair in pairs)
    groups = (shape.batch, shape.keys, shape.kv_heads, shape.group, shape.head_dim)
    return tuple(x.reshape(groups).sum(3).reshape(k.shape) for x in by_head)


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_attention_around_the_kernels_is_that_of_the_definition(
    monkeypatch: pytest.MonkeyPatch, mask: Mask, soft_cap: float | None
) -> None:
    for function in (compute_output_and_log_sums, compute_query_gradient, compute_key_value_gradients):
        monkeypatch.setattr(hopper, function.__name__, function)
    length, segments = 256, documents(256)
    keys = jax.random.split(jax.random.key(0), 4)
    q, d_out = (jax.random.normal(key, (3, length, 4, 64)) for key in keys[:2])
    k, v = (jax.random.normal(key, (3, length, 2, 64)) for key in keys[2:])

    def with_kernels(q: Any, k: Any, v: Any) -> Any:
        call = AttentionCall(q, k, mask, 0.2, soft_cap, has_segments=True)
        ids = dict(q_segments=segments, kv_segments=segments)
        return hopper.attend(hopper.Config(), call, q, k, v, **ids, offset=0)

    def definition(q: Any, k: Any, v: Any) -> Any:
        return attend(XLA, q, k, v, mask=mask, segments=segments, soft_cap=soft_cap, scale=0.2)

    (out, pull), (expected, pull_expected) = (jax.vjp(f, q, k, v) for f in (with_kernels, definition))
    np.testing.assert_allclose(out, expected, atol=2e-5)
    for gradient, value in zip(pull(d_out), pull_expected(d_out), strict=True):
        np.testing.assert_allclose(gradient, value, atol=1e-4)


@pytest.mark.parametrize("head_dim", BLOCK_SIZES)
def test_the_kernels_are_lowered_for_a_gpu(head_dim: int) -> None:
    q, k = (jax.ShapeDtypeStruct((2, 256, heads, head_dim), jnp.bfloat16) for heads in (8, 2))
    ids = jax.ShapeDtypeStruct((2, 256), jnp.int32)

    def run(q: Any, k: Any, v: Any, ids: Any) -> Any:
        call = AttentionCall(q, k, Mask(window=100), 0.1, 50.0, has_segments=True)
        attend = partial(hopper.attend, hopper.Config(), call, q_segments=ids, kv_segments=ids, offset=0)
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(out)

    text = jax.jit(run).trace(q, k, k, ids).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 3
