"""Rotary positions (arXiv 2104.09864) in Hugging Face's rotate-half form, and ways to stretch the context:
linear (arXiv 2306.15595), NTK, YaRN (arXiv 2309.00071) and Llama 3.1's."""

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

Scaling = Literal["none", "linear", "ntk", "yarn", "llama3"]


@dataclass(frozen=True)
class Rope:
    """Rotary frequencies: their base, and how they are stretched for a longer context than in training."""

    theta: float
    scaling: Scaling = "none"
    factor: float = 1.0  # by how much the context is stretched
    original: int = 8192  # tokens of context before stretching


# Frequencies with fewer than LOW rotations within `original` are stretched, those with more than HIGH are
# not, and those between are interpolated. All published models have these bounds.
LOW = 1.0
HIGH = {"llama3": 4.0, "yarn": 32.0}


def rotate(x: jax.Array, positions: jax.Array, rope: Rope) -> jax.Array:
    """Rotate each pair of features (i, i + h/2) of x [b s n h] by its position [b s]."""
    frequencies, magnitude = inverse_frequencies(x.shape[-1], rope)
    # Float32 throughout: bfloat16 rounds position 257 to 256.
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = first * cos - second * sin, second * cos + first * sin
    # Cast by halves: the gradient has halves too, and a TPU's compiler then writes no copy of it in float32.
    return jnp.concatenate([half.astype(x.dtype) for half in rotated], -1)


def inverse_frequencies(head_dim: int, rope: Rope) -> tuple[np.ndarray, float]:
    """The frequency of each pair, and the factor by which YaRN scales magnitudes (else 1)."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequencies = rope.theta**-exponents
    magnitude = 1.0
    if rope.scaling == "linear":
        frequencies = frequencies / rope.factor
    elif rope.scaling == "ntk":
        frequencies = (rope.theta * rope.factor ** (head_dim / (head_dim - 2))) ** -exponents
    elif rope.scaling == "yarn":
        unstretched = _yarn_unstretched_share(head_dim, rope)
        frequencies = frequencies / rope.factor * (1 - unstretched) + frequencies * unstretched
        magnitude = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    elif rope.scaling == "llama3":
        rotations = rope.original * frequencies / (2 * math.pi)
        unstretched = np.clip((rotations - LOW) / (HIGH["llama3"] - LOW), 0.0, 1.0)
        frequencies = frequencies / rope.factor * (1 - unstretched) + frequencies * unstretched
    return frequencies.astype(np.float32), magnitude


def _yarn_unstretched_share(head_dim: int, rope: Rope) -> np.ndarray:
    """The share of each frequency that YaRN does not stretch: 1 for high frequencies, 0 for low ones."""

    def pair_with(rotations: float) -> float:
        return head_dim * math.log(rope.original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    first = max(math.floor(pair_with(HIGH["yarn"])), 0)
    last = min(math.ceil(pair_with(LOW)), head_dim - 1)
    ramp = (np.arange(head_dim // 2) - first) / max(last - first, 0.001)
    return 1 - np.clip(ramp, 0, 1)
