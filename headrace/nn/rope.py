"""Rotary positions (arXiv 2104.09864) in the rotate-half form of Hugging Face, and the ways to stretch them:
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
    """`factor` stretches a context that was `original` tokens long in training."""

    theta: float
    scaling: Scaling = "none"
    factor: float = 1.0
    original: int = 8192


# Frequencies that turn less than LOW times within `original` are stretched, those that turn more than HIGH
# times are kept, the ones between are mixed. Every published model uses these bounds.
LOW = 1.0
HIGH = {"llama3": 4.0, "yarn": 32.0}


def rotate(x: jax.Array, positions: jax.Array, rope: Rope) -> jax.Array:
    """Turns each pair (i, i + h/2) of x [b s n h] by its position [b s]."""
    frequencies, magnitude = inverse_frequencies(x.shape[-1], rope)
    # f32 throughout: bf16 rounds position 257 to 256.
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    # Cast by halves: the gradient comes in halves too, and a TPU's compiler writes no copy of it in float32.
    return jnp.concatenate([half.astype(x.dtype) for half in turned], -1)


def inverse_frequencies(head_dim: int, rope: Rope) -> tuple[np.ndarray, float]:
    """One frequency a pair, and the factor by which YaRN also stretches the magnitudes."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    plain = rope.theta**-exponents
    magnitude = 1.0
    if rope.scaling == "linear":
        plain = plain / rope.factor
    elif rope.scaling == "ntk":
        plain = (rope.theta * rope.factor ** (head_dim / (head_dim - 2))) ** -exponents
    elif rope.scaling == "yarn":
        keep = _yarn_kept(head_dim, rope)
        plain = plain / rope.factor * (1 - keep) + plain * keep
        magnitude = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    elif rope.scaling == "llama3":
        turns = rope.original * plain / (2 * math.pi)
        keep = np.clip((turns - LOW) / (HIGH["llama3"] - LOW), 0.0, 1.0)
        plain = plain / rope.factor * (1 - keep) + plain * keep
    return plain.astype(np.float32), magnitude


def _yarn_kept(head_dim: int, rope: Rope) -> np.ndarray:
    """How much of each frequency YaRN keeps: 1 of those that turn often within `original`, 0 of the slow."""

    def pair(turns: float) -> float:
        return head_dim * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first = max(math.floor(pair(HIGH["yarn"])), 0)
    last = min(math.ceil(pair(LOW)), head_dim - 1)
    ramp = (np.arange(head_dim // 2) - first) / max(last - first, 0.001)
    return 1 - np.clip(ramp, 0, 1)
