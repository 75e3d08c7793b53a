"""Masked diffusion (MDLM, arXiv 2406.07524; LLaDA, arXiv 2502.09992): of each row a random share is hidden,
almost nothing or all of it, and told from the rest. A hidden token weighs one over that share, and the sum is
divided by all tokens that could have been hidden, so that its mean over the draws is an upper bound on the
negative log likelihood of a token, special ones being given. The model is not told the share. The mask token
keeps its logit, as in LLaDA; MDLM rules it out, for a slightly lower bound. Samplers are not here."""

from dataclasses import dataclass

import jax.numpy as jnp

from millrace.corruption import choosable, diffuse
from millrace.errors import UserError
from millrace.module import Array
from millrace.objective import Batch, Examples, Task, seen, token_loss

loss = token_loss


@dataclass(frozen=True)
class Config:
    pass


def most(cfg: Config, length: int) -> int:
    return length


def prepare(task: Task, batch: Batch, key: Array) -> Examples:
    mask = task.vocabulary.mask
    if mask is None:
        raise UserError(
            "objective.use: diffusion needs a tokenizer with a mask token, and this data's has none"
        )
    may = choosable(task.vocabulary, batch)
    chosen, weight = diffuse(key, may)
    segments, positions = seen(task, batch)
    return Examples(
        inputs=jnp.where(chosen, mask, batch.tokens),
        targets=batch.tokens,
        weights=jnp.where(chosen, weight, 0.0),
        segments=segments,
        positions=positions,
        counts=may.astype(jnp.float32),
    )
