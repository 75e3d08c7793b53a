"""Causal language modeling: predict the next token of the same document at every position."""

from dataclasses import dataclass

import jax.numpy as jnp

from headrace.nn.module import Array
from headrace.objectives import Batch, Examples, TrainTask, segments_and_positions, token_loss

loss = token_loss
UNPREDICTED_TOKENS = ("bos",)  # nothing comes before a document's first token


@dataclass(frozen=True)
class Config:
    """The `objective` section of a recipe with `use: causal`."""


def max_targets(cfg: Config, length: int) -> int:
    """The most positions of a row that have a target."""
    return length


def prepare(task: TrainTask, batch: Batch, key: Array) -> Examples:
    """Make the examples of a batch."""
    segments, positions = segments_and_positions(task, batch)
    targets = jnp.roll(batch.tokens, -1, axis=1)
    next_segment = jnp.roll(batch.segments, -1, axis=1).at[:, -1].set(0)  # a row's last token has no next
    if task.isolate_documents:
        has_target = (next_segment == batch.segments) & (batch.segments > 0)
    else:
        has_target = next_segment > 0
    if batch.loss_mask is not None:
        has_target &= jnp.roll(batch.loss_mask, -1, axis=1)
    return Examples(batch.tokens, targets, has_target.astype(jnp.float32), segments, positions)
