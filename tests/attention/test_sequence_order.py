"""The order in which a mesh that splits the sequence holds its positions."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.attention import blockwise, splash
from headrace.nn import sharding
from headrace.nn.attention_mask import Mask

SPLASH = SimpleNamespace(use="splash", block_q=128, block_kv=128)


def test_what_a_mesh_orders_it_restores() -> None:
    x = jnp.broadcast_to(jnp.arange(32), (2, 32))
    with jax.set_mesh(sharding.make_mesh(dict(data=1, fsdp=2, tensor=1, context=4))):
        there = jax.jit(sharding.to_balanced_order)(x)
        np.testing.assert_array_equal(jax.jit(sharding.from_balanced_order)(there), x)
        assert sharding.context_chunk_order(32) == (0, 7, 1, 6, 2, 5, 3, 4)
        assert sharding.context_chunk_order(36) == (0,)  # no two equal parts for each of four: as it is
    held = {shard.index[1].start: shard.data[0].tolist() for shard in there.addressable_shards}
    assert held[8] == [4, 5, 6, 7, 24, 25, 26, 27]


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_the_order_of_a_mesh_gives_every_device_as_many_tiles(devices: int) -> None:
    """In the order of the text the last device has nearly twice its share, and the others wait for it."""
    tiles = 4 * devices  # in a row of the sequence, causal
    length, mask, offsets = 128 * tiles, Mask(), np.arange(2 * devices) * 2 * 128

    def blockwise_tiles(offset: int) -> int:
        spans = [
            blockwise._block_range(first, first + 127, *mask.reach, size=128, count=tiles)
            for first in (offset, offset + 128)
        ]
        return sum(int(high - low) for low, high in spans)

    def splash_tiles(offset: int) -> int:
        shards = 2 * devices
        whole = splash._make_mask(mask, 256, length)
        kernel = splash._make_kernel(SPLASH, whole, shards, 64, soft_cap=None, interpret=True)
        info = splash._select_shard(kernel, shards, jnp.int32(offset // 256)).fwd_mask_info
        return int((info.block_mask > 0).sum())

    with jax.set_mesh(sharding.make_mesh(dict(data=1, fsdp=8 // devices, tensor=1, context=devices))):
        order = sharding.context_chunk_order(length)
    every = tiles * (tiles + 1) // 2
    for count in (blockwise_tiles, splash_tiles):
        of_chunk = np.array([count(int(offset)) for offset in offsets])
        assert of_chunk.sum() == every
        np.testing.assert_array_equal(of_chunk.reshape(devices, 2).sum(1), 10 + 16 * np.arange(devices))
        np.testing.assert_array_equal(of_chunk[list(order)].reshape(devices, 2).sum(1), every // devices)
