"""Direct preference optimization (arXiv 2305.18290): of two answers to a prompt, the one that people chose
gains probability over the one they rejected, relative to a frozen reference model.

In a row documents come in pairs, the chosen answer first; `Batch.loss_mask` marks the tokens of answers. With
LoRA the reference is the base of the model, and takes no further memory; otherwise it is a frozen copy
(`objective.reference`)."""

from dataclasses import dataclass
from typing import Literal, cast

import jax
import jax.numpy as jnp

from headrace.kernels.linear_cross_entropy.dispatch import (
    compute_negative_log_likelihoods,
    fused_cross_entropy,
)
from headrace.kernels.linear_cross_entropy.stats import negative_log_likelihood
from headrace.model_wrappers import frozen_reference
from headrace.nn import sharding
from headrace.nn.module import Array, PyTree
from headrace.objectives import Examples, LossOutput, TrainTask, causal

prepare = causal.prepare
max_targets = causal.max_targets
LOSS_NAME = "preference loss"
DATA_KIND = "pairs"


@dataclass(frozen=True)
class Config:
    """The `objective` section of a recipe with `use: dpo`."""

    beta: float = 0.1  # strength of the pull towards the reference model
    # model that probabilities are compared with: the frozen weights under lora (base), or a frozen copy of
    # the initial weights (copy)
    reference: Literal["base", "copy"] = "base"

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError("beta: expected a number above 0")


def loss(task: TrainTask, model: PyTree, examples: Examples) -> LossOutput:
    """Compute the preference loss.

    A pair's part of the gradient depends on its answers as a whole. So their likelihoods are computed twice:
    first without gradients, then with gradients and each token weighted by its pair's slope."""
    beta = cast(Config, task.objective).beta
    examples = jax.tree.map(sharding.to_balanced_order, examples)
    assert examples.segments is not None
    segments = examples.segments
    reference = jax.lax.stop_gradient(frozen_reference.reference_model(model))
    hidden, targets = _run(task, model, examples), jnp.where(examples.weights == 0, 0, examples.targets)
    reference_likelihoods = _log_likelihoods(task, reference, _run(task, reference, examples), targets)
    gains = reference_likelihoods - _log_likelihoods(task, model, hidden, targets)
    sums = sum_by_document(gains * examples.weights, segments)
    answers = sum_by_document(examples.weights, segments)
    is_pair = (answers[:, 0::2] > 0) & (answers[:, 1::2] > 0)
    margin = beta * (sums[:, 0::2] - sums[:, 1::2])
    losses = -jax.nn.log_sigmoid(margin)
    # The slope of a token's negative log likelihood: down for the chosen answer, up for the rejected one.
    slopes = jnp.where(is_pair, beta * jax.nn.sigmoid(-margin), 0.0)
    signed = jnp.stack([slopes, -slopes], axis=2).reshape(slopes.shape[0], -1)
    document = jnp.clip(segments - 1, 0, signed.shape[1] - 1)
    weights = examples.weights * jnp.take_along_axis(signed, document, axis=1)
    surrogate = fused_cross_entropy(
        negative_log_likelihood,
        hidden,
        model.unembed,
        targets,
        weights,
        soft_cap=task.loss.soft_cap,
        backend=task.loss.backend,
        chunk_size=task.loss.chunk_size,
    ).loss
    total = jnp.sum(jnp.where(is_pair, losses, 0.0))
    metrics = {
        "loss": total,
        "accuracy": jnp.sum(is_pair & (margin > 0)),
        "margin": jnp.sum(jnp.where(is_pair, margin, 0.0)),
        "count": jnp.sum(is_pair),
    }
    metrics = {name: value.astype(jnp.float32) for name, value in metrics.items()}
    # The value of the loss with the gradient of the surrogate.
    return LossOutput(surrogate + jax.lax.stop_gradient(total - surrogate), metrics)


def _run(task: TrainTask, model: PyTree, examples: Examples) -> Array:
    return model(
        task.model,
        examples.inputs,
        exec_opts=task.exec_opts,
        segments=examples.segments,
        positions=examples.positions,
    )


def _log_likelihoods(task: TrainTask, model: PyTree, hidden: Array, targets: Array) -> Array:
    return compute_negative_log_likelihoods(
        hidden, model.unembed, targets, soft_cap=task.loss.soft_cap, chunk_size=task.loss.chunk_size
    )


def sum_by_document(x: Array, segments: Array) -> Array:
    """Sum over the documents of each row [b s]. Returns [b, an even number]: a document has two tokens or
    more."""
    max_documents = segments.shape[1] // 4 * 2 + 2
    sum_row = lambda x, ids: jax.ops.segment_sum(x, ids, num_segments=max_documents + 1)[1:]
    return jax.vmap(sum_row)(x, segments)
