"""Masked diffusion (MDLM, arXiv 2406.07524; LLaDA, arXiv 2502.09992): a random share of each row is masked,
from almost nothing to all of it, and predicted from the rest.

A masked token weighs one over that share, and the sum is divided by the number of all tokens that could have
been masked, so that its mean over draws is an upper bound on a token's negative log likelihood, given the
special tokens. The model does not know the share. inference/diffusion.py generates text with such a model."""

from dataclasses import dataclass
from typing import cast

import jax.numpy as jnp

from headrace.errors import UserError
from headrace.nn.module import Array, PyTree
from headrace.objectives import Batch, Examples, LossOutput, TrainTask, segments_and_positions, token_loss
from headrace.objectives._masking import mask_by_level, maskable, sample_diffusion_mask

LOSS_NAME = "likelihood bound"
UNPREDICTED_TOKENS = ("bos", "eos")


@dataclass(frozen=True)
class Config:
    """The `objective` section of a recipe with `use: diffusion`."""

    # whether the mask token is excluded from predictions (MDLM); false: it keeps its logit (LLaDA)
    exclude_mask: bool = False


def max_targets(cfg: Config, length: int) -> int:
    """The most positions of a row that have a target."""
    return length


def prepare(task: TrainTask, batch: Batch, key: Array) -> Examples:
    """Make the examples of a batch, with a random share of each row masked."""
    is_maskable = maskable(task.special_tokens, batch)
    return _make_examples(task, batch, is_maskable, *sample_diffusion_mask(key, is_maskable))


def prepare_evaluation(task: TrainTask, batch: Batch, key: Array, level: Array) -> Examples:
    """Make examples with as many tokens masked as `level` [b] says, in [0, 1).

    Their loss has the same mean over levels as that of `prepare`, and varies less between draws."""
    is_maskable = maskable(task.special_tokens, batch)
    return _make_examples(task, batch, is_maskable, *mask_by_level(key, is_maskable, level))


def loss(task: TrainTask, model: PyTree, examples: Examples) -> LossOutput:
    """Compute the loss of the masked tokens."""
    exclude_mask = cast(Config, task.objective).exclude_mask
    without = task.special_tokens.mask if exclude_mask else None
    return token_loss(task, model, examples, without=without)


def _make_examples(
    task: TrainTask, batch: Batch, is_maskable: Array, is_masked: Array, weight: Array
) -> Examples:
    mask = task.special_tokens.mask
    if mask is None:
        raise UserError(
            "objective.use: diffusion needs a tokenizer with a mask token, and this data's has none"
        )
    segments, positions = segments_and_positions(task, batch)
    return Examples(
        inputs=jnp.where(is_masked, mask, batch.tokens),
        targets=batch.tokens,
        weights=jnp.where(is_masked, weight, 0.0),
        segments=segments,
        positions=positions,
        counts=is_maskable.astype(jnp.float32),
    )
