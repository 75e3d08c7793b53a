"""Masked language modeling (arXiv 1810.04805): some tokens are masked and predicted from both sides.

With `span: 3` up to three neighbors are masked together (the n-grams of DeBERTa-V2, arXiv 2006.03654). With
`masked: 0, random: 1` tokens are replaced by others, and the model predicts the originals; to detect which
tokens were replaced is objective rtd."""

from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp

from headrace.errors import UserError
from headrace.nn.module import Array
from headrace.objectives import Batch, Examples, TrainTask, segments_and_positions, token_loss
from headrace.objectives._masking import (
    corrupt_tokens,
    maskable,
    max_selected,
    sample_positions,
    sample_spans,
)

loss = token_loss


@dataclass(frozen=True)
class Config:
    """The `objective` section of a recipe with `use: masked`."""

    mask_rate: float = 0.5  # share of the tokens to predict
    mask_token_share: float = 1.0  # share of those tokens that are replaced by the mask token
    # share of those tokens that are replaced by a random token; the rest is left as it is
    random_token_share: float = 0.0
    # longest run of tokens selected together; runs of n are drawn with a probability proportional to 1/n
    # [tokens]
    max_span: int = 1

    def __post_init__(self) -> None:
        for name, share in (
            ("mask_rate", self.mask_rate),
            ("mask_token_share", self.mask_token_share),
            ("random_token_share", self.random_token_share),
        ):
            if not 0 <= share <= 1:
                raise ValueError(f"{name}: expected a share from 0 to 1")
        if self.mask_rate == 0:
            raise ValueError("mask_rate: expected more than 0, or nothing is trained")
        if self.mask_token_share + self.random_token_share > 1:
            raise ValueError(
                "random_token_share: expected mask_token_share + random_token_share to be at most 1"
            )
        if not 1 <= self.max_span <= 32:
            raise ValueError("max_span: expected a number of tokens from 1 to 32")


def max_targets(cfg: Config, length: int) -> int:
    """The most positions of a row that have a target."""
    return max_selected(length, rate=cfg.mask_rate, max_span=cfg.max_span)


def prepare(task: TrainTask, batch: Batch, key: Array) -> Examples:
    """Make the examples of a batch, with tokens masked or replaced at random."""
    cfg, special_tokens = cast(Config, task.objective), task.special_tokens
    if cfg.mask_token_share and special_tokens.mask is None:
        raise UserError("objective.use: masked needs a tokenizer with a mask token, and this data's has none")
    selection_key, corruption_key = jax.random.split(key)
    is_maskable = maskable(special_tokens, batch)
    if cfg.max_span == 1:
        selected = sample_positions(selection_key, is_maskable, rate=cfg.mask_rate)
    else:
        selected = sample_spans(
            selection_key, is_maskable, segments=batch.segments, rate=cfg.mask_rate, max_span=cfg.max_span
        )
    inputs = corrupt_tokens(
        corruption_key,
        batch.tokens,
        selected=selected,
        special_tokens=special_tokens,
        masked=cfg.mask_token_share,
        random=cfg.random_token_share,
    )
    segments, positions = segments_and_positions(task, batch)
    return Examples(inputs, batch.tokens, selected.astype(jnp.float32), segments, positions)
