"""Attention on a mesh: the results of one device, and the order in which positions are split."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.attention import blockwise, splash
from headrace.nn import sharding
from headrace.nn.attention_mask import Mask
from tests.attention.reference import (
    BACKENDS,
    BLOCKWISE,
    CASES,
    SPLASH,
    assert_equals_definition,
    random_inputs,
)

MESHES = {
    "data 2, fsdp 2, tensor 2": dict(data=2, fsdp=2, tensor=2, context=1),
    "context 2": dict(data=1, fsdp=2, tensor=2, context=2),
    "context 4": dict(data=2, fsdp=1, tensor=1, context=4),
    "tensor 4 with 2 kv heads": dict(data=2, fsdp=1, tensor=4, context=1),
    "heads that do not divide": dict(data=1, fsdp=1, tensor=8, context=1),
    "a batch that does not divide": dict(data=1, fsdp=8, tensor=1, context=1),
}


@pytest.mark.thin(5)
@pytest.mark.parametrize("name", ["packed", "soft cap, packed window"])
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES.keys())
@pytest.mark.parametrize("cfg", BACKENDS[:2])
def test_a_mesh_changes_neither_output_nor_gradients(cfg: Any, sizes: dict[str, int], name: str) -> None:
    with jax.set_mesh(sharding.make_mesh(sizes)):
        assert_equals_definition(cfg, random_inputs(batch=4), CASES[name])


@pytest.mark.thin(5)
@pytest.mark.parametrize(
    "name", ["packed", "bidirectional", "causal window", "window wider than the sequence"]
)
@pytest.mark.parametrize(
    "sizes", [dict(data=1, fsdp=2, tensor=2, context=2), dict(data=1, fsdp=1, tensor=4, context=2)]
)
def test_splash_knows_the_positions_of_a_split_sequence(sizes: dict[str, int], name: str) -> None:
    with jax.set_mesh(sharding.make_mesh(sizes)):
        assert_equals_definition(SPLASH, random_inputs(length=512), CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bidirectional", "causal window", "packed", "packed bidirectional"])
def test_blockwise_on_a_sequence_split_over_eight_devices(name: str) -> None:
    with jax.set_mesh(sharding.make_mesh(dict(data=1, fsdp=1, tensor=1, context=8))):
        assert_equals_definition(BLOCKWISE, random_inputs(batch=1), CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packed", "packed bidirectional", "causal window"])
def test_splash_on_a_sequence_split_over_four_devices(name: str) -> None:
    with jax.set_mesh(sharding.make_mesh(dict(data=1, fsdp=1, tensor=1, context=4), jax.devices()[:4])):
        assert_equals_definition(SPLASH, random_inputs(length=1024, batch=1), CASES[name])


def test_the_balanced_order_of_positions_is_undone() -> None:
    x = jnp.broadcast_to(jnp.arange(32), (2, 32))
    with jax.set_mesh(sharding.make_mesh(dict(data=1, fsdp=2, tensor=1, context=4))):
        balanced = jax.jit(sharding.to_balanced_order)(x)
        np.testing.assert_array_equal(jax.jit(sharding.from_balanced_order)(balanced), x)
        assert sharding.context_chunk_order(32) == (0, 7, 1, 6, 2, 5, 3, 4)
        assert sharding.context_chunk_order(36) == (0,)  # not two equal chunks for each of four
    shards = {shard.index[1].start: shard.data[0].tolist() for shard in balanced.addressable_shards}
    assert shards[8] == [4, 5, 6, 7, 24, 25, 26, 27]


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_the_balanced_order_gives_every_device_equally_many_tiles(devices: int) -> None:
    """In the order of the text the last device has nearly twice its share, and the others wait for it."""
    tiles = 4 * devices  # along a row, whose mask is causal
    length, mask, offsets = 128 * tiles, Mask(), np.arange(2 * devices) * 2 * 128

    def blockwise_tiles(offset: int) -> int:
        ranges = [
            blockwise._block_range(first, first + 127, *mask.reach, size=128, count=tiles)
            for first in (offset, offset + 128)
        ]
        return sum(int(high - low) for low, high in ranges)

    def splash_tiles(offset: int) -> int:
        shards, cfg = 2 * devices, splash.Config(block_q=128, block_kv=128)
        full_mask = splash._make_mask(mask, 256, length)
        kernel = splash._make_kernel(cfg, full_mask, shards, 64, soft_cap=None, interpret=True)
        info = splash._select_shard(kernel, shards, jnp.int32(offset // 256)).fwd_mask_info
        return int((info.block_mask > 0).sum())

    with jax.set_mesh(sharding.make_mesh(dict(data=1, fsdp=8 // devices, tensor=1, context=devices))):
        order = sharding.context_chunk_order(length)
    total = tiles * (tiles + 1) // 2
    for count in (blockwise_tiles, splash_tiles):
        by_chunk = np.array([count(int(offset)) for offset in offsets])
        assert by_chunk.sum() == total
        np.testing.assert_array_equal(by_chunk.reshape(devices, 2).sum(1), 10 + 16 * np.arange(devices))
        np.testing.assert_array_equal(by_chunk[list(order)].reshape(devices, 2).sum(1), total // devices)
