"""Causal language modelling: at every position, the next token of the same document."""

from dataclasses import dataclass

import jax.numpy as jnp

from headrace.nn.module import Array
from headrace.objectives import Batch, Examples, Task, seen, token_loss

loss = token_loss
GIVEN = ("bos",)  # what begins a document has nothing before it to be told from


@dataclass(frozen=True)
class Config:
    pass


def most(cfg: Config, length: int) -> int:
    return length


def prepare(task: Task, batch: Batch, key: Array) -> Examples:
    segments, positions = seen(task, batch)
    targets = jnp.roll(batch.tokens, -1, axis=1)
    following = jnp.roll(batch.segments, -1, axis=1).at[:, -1].set(0)  # the row's last token has no next
    counts = (following == batch.segments) & (batch.segments > 0) if task.isolate else following > 0
    if batch.loss is not None:
        counts &= jnp.roll(batch.loss, -1, axis=1)
    return Examples(batch.tokens, targets, counts.astype(jnp.float32), segments, positions)
