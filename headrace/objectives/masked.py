"""Masked language modelling (arXiv 1810.04805): some tokens are hidden, and told from those on both sides.
With `span: 3` several are hidden side by side (the n-grams of DeBERTa-V2, arXiv 2006.03654). With `masked: 0,
random: 1` it is replaced-token corruption: each chosen token is shown as another one, and the model tells
what stood there; finding where tokens were replaced is objective rtd."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from headrace.objectives._masking import choosable, choose, choose_spans, most_chosen, replace
from headrace.errors import UserError
from headrace.nn.module import Array
from headrace.objectives import Batch, Examples, Task, seen, token_loss

loss = token_loss


@dataclass(frozen=True)
class Config:
    rate: float = 0.5  # share of the tokens to be told
    masked: float = 1.0  # of those: shown as the mask token
    random: float = 0.0  # shown as some other token; the rest is shown as it is
    span: int = 1  # tokens chosen side by side at most; n of them with a probability proportional to 1/n

    def __post_init__(self):
        for name in ("rate", "masked", "random"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected a share from 0 to 1")
        if self.rate == 0:
            raise ValueError("rate: expected more than 0, or nothing is learnt")
        if self.masked + self.random > 1:
            raise ValueError("random: expected masked + random to be at most 1")
        if not 1 <= self.span <= 32:
            raise ValueError("span: expected a number of tokens from 1 to 32")


def most(cfg: Config, length: int) -> int:
    return most_chosen(length, rate=cfg.rate, longest=cfg.span)


def prepare(task: Task, batch: Batch, key: Array) -> Examples:
    cfg, vocabulary = task.objective, task.vocabulary
    if cfg.masked and vocabulary.mask is None:
        raise UserError("objective.use: masked needs a tokenizer with a mask token, and this data's has none")
    choice_key, shown_key = jax.random.split(key)
    may = choosable(vocabulary, batch)
    if cfg.span == 1:
        chosen = choose(choice_key, may, rate=cfg.rate)
    else:
        chosen = choose_spans(choice_key, may, segments=batch.segments, rate=cfg.rate, longest=cfg.span)
    inputs = replace(
        shown_key, batch.tokens, chosen=chosen, vocabulary=vocabulary, masked=cfg.masked, random=cfg.random
    )
    segments, positions = seen(task, batch)
    return Examples(inputs, batch.tokens, chosen.astype(jnp.float32), segments, positions)
