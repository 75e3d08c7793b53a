"""Numbers of a few bits in words of 32, one after the other and lowest bit first: how the files of GPTQ and
of VPTQ both have them. Of 3 bits, 32 numbers fill 3 words, and some lie in two. For arrays of NumPy and of
JAX."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

WORD = 32


def words(count: int, bits: int) -> int:
    """How many hold so many numbers."""
    return math.ceil(count * bits / WORD)


def pack(values: Any, bits: int) -> Any:
    """Numbers below 2 ** bits along the last axis to words of uint32."""
    xp = jnp if isinstance(values, jnp.ndarray) else np
    count, numbers, period = values.shape[-1], *_period(bits)
    lead = values.shape[:-1]
    whole = xp.pad(values.astype(xp.uint32), [(0, 0)] * len(lead) + [(0, -count % numbers)])
    turns = whole.reshape(*lead, -1, numbers)
    made = [xp.zeros(turns.shape[:-1], xp.uint32) for _ in range(period)]
    for number in range(numbers):
        word, shift = divmod(number * bits, WORD)
        made[word] |= turns[..., number] << xp.uint32(shift)
        if shift + bits > WORD:
            made[word + 1] |= turns[..., number] >> xp.uint32(WORD - shift)
    return xp.stack(made, axis=-1).reshape(*lead, -1)[..., : words(count, bits)]


def unpack(packed: Any, bits: int, count: int) -> Any:
    """The first `count` numbers of the words along the last axis, as uint32."""
    xp = jnp if isinstance(packed, jnp.ndarray) else np
    numbers, period = _period(bits)
    lead = packed.shape[:-1]
    whole = xp.pad(packed.astype(xp.uint32), [(0, 0)] * len(lead) + [(0, -packed.shape[-1] % period)])
    turns, mask = whole.reshape(*lead, -1, period), xp.uint32(2**bits - 1)
    made = []
    for number in range(numbers):
        word, shift = divmod(number * bits, WORD)
        value = turns[..., word] >> xp.uint32(shift)
        if shift + bits > WORD:
            value = value | turns[..., word + 1] << xp.uint32(WORD - shift)
        made.append(value & mask)
    return xp.stack(made, axis=-1).reshape(*lead, -1)[..., :count]


def turn(bits: int) -> int:
    """How many numbers fill whole words."""
    return _period(bits)[0]


def _period(bits: int) -> tuple[int, int]:
    """After how many numbers, and how many words, a number begins a word again."""
    whole = math.lcm(WORD, bits)
    return whole // bits, whole // WORD
