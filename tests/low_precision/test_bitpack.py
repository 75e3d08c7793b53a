"""Numbers of a few bits, packed into words."""

import jax.numpy as jnp
import numpy as np
import pytest

from headrace.low_precision import bitpack


@pytest.mark.parametrize("width", [2, 3, 4, 8, 12, 16, 18, 24, 32])
def test_packed_numbers_follow_each_other_without_gaps_and_are_unpacked(width):
    values = np.random.default_rng(width).integers(0, 2**width, (3, 37), dtype=np.uint64).astype(np.uint32)
    packed = bitpack.pack(values, width)
    assert packed.shape == (3, bitpack.num_words(37, width))
    text = "".join(format(int(word), "032b")[::-1] for word in packed[1])  # lowest bit first
    assert [int(text[n * width : (n + 1) * width][::-1], 2) for n in range(37)] == values[1].tolist()
    np.testing.assert_array_equal(bitpack.unpack(packed, width, 37), values)
    np.testing.assert_array_equal(bitpack.unpack(bitpack.pack(jnp.asarray(values), width), width, 37), values)
