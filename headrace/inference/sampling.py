"""Sampling of a token from logits: soft cap, temperature, top-k and top-p."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from headrace.errors import InvalidArgument
from headrace.nn.module import Array

MAX_TEMPERATURE = 100  # far below it, all tokens are about equally likely


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling. Temperature 0 takes the likeliest token; `top_k` and `top_p` rule out unlikely
    ones."""

    temperature: float = 0.8
    top_k: int = 50  # number of likeliest tokens to sample from; 0: all
    top_p: float = 1.0  # probability that the likeliest tokens to sample from have together
    seed: int = field(default=0, compare=False)  # not compared: compiled steps do not depend on it

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise InvalidArgument("seed", f"expected a number from 0 to {2**32 - 1}")
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise InvalidArgument("temperature", f"expected a number from 0 to {MAX_TEMPERATURE}")
        if not 0 <= self.top_k < 2**31:  # an int32 on devices
            raise InvalidArgument("top_k", f"expected a number from 0 to {2**31 - 1}")
        if not 0 < self.top_p <= 1:
            raise InvalidArgument("top_p", "expected a number above 0 and at most 1")


def sample_token(logits: Array, key: Array, sampling: Sampling) -> Array:
    """Sample one token from logits [v]: from the `top_k` likeliest, and of these from the fewest whose
    probabilities add up to `top_p`."""
    return sample_token_dynamic(logits, key, sampling.temperature, sampling.top_k, sampling.top_p)


@jax.jit
def sample_token_dynamic(
    logits: Array, key: Array, temperature: Array | float, top_k: Array | int, top_p: Array | float
) -> Array:
    """Like `sample_token`, with settings that are arguments of the compiled function, not constants in it: a
    server has others for every request."""

    def sample() -> Array:
        order = jnp.argsort(-logits)
        ordered = logits[order] / temperature
        ordered = jnp.where((jnp.arange(logits.size) < top_k) | (top_k == 0), ordered, -jnp.inf)
        probabilities = jax.nn.softmax(ordered)
        cumulative_before = jnp.cumsum(probabilities) - probabilities
        ordered = jnp.where((cumulative_before < top_p) | (top_p >= 1), ordered, -jnp.inf)
        # The default noise in float32 ends at 16: in a large vocabulary, unlikely tokens would never be
        # sampled (arXiv 2409.02908).
        return order[jax.random.categorical(key, ordered, mode="high")].astype(jnp.int32)

    return jax.lax.cond(temperature == 0, lambda: logits.argmax().astype(jnp.int32), sample)
