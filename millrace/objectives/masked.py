"""Masked language modelling (arXiv 1810.04805): some tokens are hidden, and told from those on both sides."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from millrace.errors import UserError
from millrace.module import Array
from millrace.objective import Batch, Examples, Task, seen, token_loss

loss = token_loss


@dataclass(frozen=True)
class Config:
    rate: float = 0.5  # share of the tokens to be told
    masked: float = 1.0  # of those: shown as the mask token
    random: float = 0.0  # shown as some other token; the rest is shown as it is

    def __post_init__(self):
        for name in ("rate", "masked", "random"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected a share from 0 to 1")
        if self.rate == 0:
            raise ValueError("rate: expected more than 0, or nothing is learnt")
        if self.masked + self.random > 1:
            raise ValueError("random: expected masked + random to be at most 1")


def prepare(task: Task, batch: Batch, key: Array) -> Examples:
    cfg, vocabulary = task.objective, task.vocabulary
    if vocabulary.mask is None:
        raise UserError("objective.use: masked needs a tokenizer with a mask token, and this data's has none")
    choose, change, draw = (jax.random.uniform(k, batch.tokens.shape) for k in jax.random.split(key, 3))
    plain = batch.segments > 0
    for special in (vocabulary.bos, vocabulary.eos, vocabulary.pad):
        if special is not None:
            plain &= batch.tokens != special
    chosen = plain & (choose < cfg.rate)
    others = (draw * vocabulary.size).astype(batch.tokens.dtype)
    inputs = jnp.where(chosen & (change < cfg.masked), vocabulary.mask, batch.tokens)
    swapped = chosen & (change >= cfg.masked) & (change < cfg.masked + cfg.random)
    inputs = jnp.where(swapped, others, inputs)
    segments, positions = seen(task, batch)
    return Examples(inputs, batch.tokens, chosen.astype(jnp.float32), segments, positions)
