"""A token drawn from logits: by temperature, among the likeliest."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from headrace.errors import UserError
from headrace.nn.module import Array

HOTTEST = 100  # the highest temperature; long before, every token is as likely as any other


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 takes the likeliest token; `top_k` and `top_p` leave the unlikely ones out."""

    temperature: float = 0.8
    top_k: int = 50  # 0: all
    top_p: float = 1.0
    seed: int = field(default=0, compare=False)  # no part of what is compiled

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed: expected a number from 0 to {2**32 - 1}")
        if not 0 <= self.temperature <= HOTTEST:
            raise UserError(f"--temperature: expected a number from 0 to {HOTTEST}")
        if not 0 <= self.top_k < 2**31:  # a device holds it in 32 bits
            raise UserError(f"--top-k: expected a number from 0 to {2**31 - 1}")
        if not 0 < self.top_p <= 1:
            raise UserError("--top-p: expected a number above 0 and at most 1")


def sample_token(logits: Array, key: Array, sampling: Sampling) -> Array:
    """One token from logits [v]: of the `top_k` likeliest, the fewest whose chances reach `top_p`."""
    return sample_token_dynamic(logits, key, sampling.temperature, sampling.top_k, sampling.top_p)


@jax.jit
def sample_token_dynamic(logits: Array, key: Array, temperature: Any, top_k: Any, top_p: Any) -> Array:
    """The same by numbers, which are no part of what is compiled: a server has others with every request."""

    def by_chance() -> Array:
        order = jnp.argsort(-logits)
        ordered = logits[order] / temperature
        ordered = jnp.where((jnp.arange(logits.size) < top_k) | (top_k == 0), ordered, -jnp.inf)
        chances = jax.nn.softmax(ordered)
        before = jnp.cumsum(chances) - chances
        ordered = jnp.where((before < top_p) | (top_p >= 1), ordered, -jnp.inf)
        # Float32's plain noise goes no higher than 16: of a large vocabulary the unlikely would never come
        # (arXiv 2409.02908).
        return order[jax.random.categorical(key, ordered, mode="high")].astype(jnp.int32)

    return jax.lax.cond(temperature == 0, lambda: logits.argmax().astype(jnp.int32), by_chance)
