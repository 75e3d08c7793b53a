"""Numbers of a few bits packed into words of 32 bits, as in the files of GPTQ and VPTQ.

Numbers follow each other without gaps, lowest bit first. 32 numbers of 3 bits fill 3 words, and some of them
lie in two words. For arrays of NumPy and of JAX."""

import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

WORD_BITS = 32
ArrayT = TypeVar("ArrayT", np.ndarray, jax.Array)


def num_words(count: int, bits: int) -> int:
    """The number of words that hold `count` numbers of this many bits."""
    return math.ceil(count * bits / WORD_BITS)


def pack(values: ArrayT, bits: int) -> ArrayT:
    """Pack numbers below 2 ** bits along the last axis. Returns words of uint32."""
    xp = _array_module(values)
    count, numbers, words = values.shape[-1], *_period(bits)
    leading = values.shape[:-1]
    padded = xp.pad(values.astype(xp.uint32), [(0, 0)] * len(leading) + [(0, -count % numbers)])
    periods = padded.reshape(*leading, -1, numbers)
    packed = [xp.zeros(periods.shape[:-1], xp.uint32) for _ in range(words)]
    for index in range(numbers):
        word, shift = divmod(index * bits, WORD_BITS)
        packed[word] |= periods[..., index] << xp.uint32(shift)
        if shift + bits > WORD_BITS:
            packed[word + 1] |= periods[..., index] >> xp.uint32(WORD_BITS - shift)
    return xp.stack(packed, axis=-1).reshape(*leading, -1)[..., : num_words(count, bits)]


def unpack(packed: ArrayT, bits: int, count: int) -> ArrayT:
    """Unpack the first `count` numbers of the words along the last axis, as uint32."""
    xp = _array_module(packed)
    numbers, words = _period(bits)
    leading = packed.shape[:-1]
    padded = xp.pad(packed.astype(xp.uint32), [(0, 0)] * len(leading) + [(0, -packed.shape[-1] % words)])
    periods, mask = padded.reshape(*leading, -1, words), xp.uint32(2**bits - 1)
    values = []
    for index in range(numbers):
        word, shift = divmod(index * bits, WORD_BITS)
        value = periods[..., word] >> xp.uint32(shift)
        if shift + bits > WORD_BITS:
            value = value | periods[..., word + 1] << xp.uint32(WORD_BITS - shift)
        values.append(value & mask)
    return xp.stack(values, axis=-1).reshape(*leading, -1)[..., :count]


def numbers_per_period(bits: int) -> int:
    """The smallest count of numbers that fills words without a remainder."""
    return _period(bits)[0]


def _period(bits: int) -> tuple[int, int]:
    """The count of numbers, and of words, after which a number begins at the first bit of a word again."""
    period_bits = math.lcm(WORD_BITS, bits)
    return period_bits // bits, period_bits // WORD_BITS


def _array_module(array: np.ndarray | jax.Array) -> Any:
    return jnp if isinstance(array, jax.Array) else np
