"""Masked diffusion (MDLM, arXiv 2406.07524; LLaDA, arXiv 2502.09992): of each row a random share is hidden,
almost nothing or all of it, and told from the rest. A hidden token weighs one over that share, and the sum is
divided by all tokens that could have been hidden, so that its mean over the draws is an upper bound on the
negative log likelihood of a token, special ones being given. The model is not told the share. diffuse.py
makes text with such a model."""

from dataclasses import dataclass

import jax.numpy as jnp

from headrace.objectives._masking import choosable, choose_number, diffuse
from headrace.errors import UserError
from headrace.kernels.linear_cross_entropy.stats import Totals
from headrace.nn.module import Array
from headrace.objectives import Batch, Examples, Task, seen, token_loss

LOSS = "likelihood bound"  # what evaluation calls it
GIVEN = ("bos", "eos")


@dataclass(frozen=True)
class Config:
    exclude_mask: bool = False  # the mask token is never an answer (MDLM); else it keeps its logit (LLaDA)


def most(cfg: Config, length: int) -> int:
    return length


def prepare(task: Task, batch: Batch, key: Array) -> Examples:
    may = choosable(task.vocabulary, batch)
    return _examples(task, batch, may, *diffuse(key, may))


def prepare_evaluation(task: Task, batch: Batch, key: Array, place: Array) -> Examples:
    """For the same bound, but so that draws differ less: as many tokens are hidden as `place` says, [b]."""
    may = choosable(task.vocabulary, batch)
    return _examples(task, batch, may, *choose_number(key, may, place))


def loss(task: Task, model: object, examples: Examples) -> Totals:
    without = task.vocabulary.mask if task.objective.exclude_mask else None
    return token_loss(task, model, examples, without=without)


def _examples(task: Task, batch: Batch, may: Array, chosen: Array, weight: Array) -> Examples:
    mask = task.vocabulary.mask
    if mask is None:
        raise UserError(
            "objective.use: diffusion needs a tokenizer with a mask token, and this data's has none"
        )
    segments, positions = seen(task, batch)
    return Examples(
        inputs=jnp.where(chosen, mask, batch.tokens),
        targets=batch.tokens,
        weights=jnp.where(chosen, weight, 0.0),
        segments=segments,
        positions=positions,
        counts=may.astype(jnp.float32),
    )
