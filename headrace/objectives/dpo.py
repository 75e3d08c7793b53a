"""Direct preference optimisation (arXiv 2305.18290): of two answers to a prompt, the one that people chose is
to gain more probability over a reference, the model as it was, than the one they rejected. In a row documents
come in twos: of each pair first the chosen, then the rejected; `Batch.loss` marks their answers. With
adapters the reference is the model without them, and takes no memory of its own; else it is a copy
(`model.reference`)."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from headrace.nn import sharding as mesh
from headrace.model_wrappers import frozen_reference as reference
from headrace.kernels.linear_cross_entropy.dispatch import cut, each, likelihood
from headrace.nn.module import Array
from headrace.objectives import Examples, Task, Told, Turn
from headrace.objectives import causal

prepare = causal.prepare
most = causal.most
LOSS = "preference loss"  # what evaluation calls it
READS = "pairs"


@dataclass(frozen=True)
class Config:
    beta: float = 0.1  # how dear it is to move away from the reference

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError("beta: expected a number above 0")


def told(task: Task, model: Any, examples: Examples) -> Told:
    """What a pair adds to the gradient depends on its answers as a whole. So they are told once, without
    gradients; then once more with them, each token with its pair's weight."""
    examples = jax.tree.map(mesh.balance, examples)
    before = jax.lax.stop_gradient(reference.before(model))
    read = lambda model: model(
        task.model, examples.inputs, how=task.how, segments=examples.segments, positions=examples.positions
    )
    how: dict[str, Any] = dict(soft_cap=task.loss.soft_cap, chunk=task.loss.chunk)
    hidden, targets = read(model), jnp.where(examples.weights == 0, 0, examples.targets)
    gained = each(read(before), before.unembed, targets, **how) - each(hidden, model.unembed, targets, **how)
    assert examples.segments is not None
    sums = by_document(gained * examples.weights, examples.segments)
    answers = by_document(examples.weights, examples.segments)
    counts = (answers[:, 0::2] > 0) & (answers[:, 1::2] > 0)
    margin = task.objective.beta * (sums[:, 0::2] - sums[:, 1::2])
    losses = -jax.nn.log_sigmoid(margin)
    # Of a token's negative log likelihood: down for the chosen, up for the rejected.
    slopes = jnp.where(counts, task.objective.beta * jax.nn.sigmoid(-margin), 0.0)
    signed = jnp.stack([slopes, -slopes], axis=2).reshape(slopes.shape[0], -1)
    place = jnp.clip(examples.segments - 1, 0, signed.shape[1] - 1)
    weights = examples.weights * jnp.take_along_axis(signed, place, axis=1)
    moved = cut(likelihood, hidden, model.unembed, targets, weights, split=task.loss.split, **how).loss
    total = jnp.sum(jnp.where(counts, losses, 0.0))
    means = {
        "loss": total,
        "accuracy": jnp.sum(counts & (margin > 0)),
        "margin": jnp.sum(jnp.where(counts, margin, 0.0)),
        "count": jnp.sum(counts),
    }
    means = {name: value.astype(jnp.float32) for name, value in means.items()}
    return Told(moved + jax.lax.stop_gradient(total - moved), means)


def by_document(x: Array, segments: Array) -> Array:
    """Sums [b, an even number] over the documents of each row [b s]; a document has two tokens or more."""
    most = segments.shape[1] // 4 * 2 + 2
    add = lambda x, ids: jax.ops.segment_sum(x, ids, num_segments=most + 1)[1:]
    return jax.vmap(add)(x, segments)


TURNS = (Turn(told),)
