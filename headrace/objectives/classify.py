"""Classification: predict the label of a text, or of each of its tokens.

The head is that of model_wrappers/classification_head.py. The data determines how many labels there are, and
whether they are of texts or of tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.kernels.linear_cross_entropy.stats import LogitStats
from headrace.losses import load_loss
from headrace.nn.module import Array, PyTree
from headrace.objectives import (
    Batch,
    Examples,
    LossOutput,
    TrainTask,
    segments_and_positions,
)

DATA_KIND = "labels"


@dataclass(frozen=True)
class Config:
    """The `objective` section of a recipe with `use: classify`."""


def max_targets(cfg: Config, length: int) -> int:
    """The most positions of a row that have a token as target: none."""
    return 0


def prepare(task: TrainTask, batch: Batch, key: Array) -> Examples:
    """Make the examples of a batch: the targets are labels."""
    assert batch.labels is not None
    segments, positions = segments_and_positions(task, batch)
    weights = (batch.labels > 0).astype(jnp.float32)
    return Examples(batch.tokens, jnp.maximum(batch.labels - 1, 0), weights, segments, positions)


def loss(task: TrainTask, model: PyTree, examples: Examples) -> LossOutput:
    """Compute the loss of the labels, the accuracy, and counts per label for evaluation."""
    logits = model.predict_labels(
        task.model,
        examples.inputs,
        exec_opts=task.exec_opts,
        segments=examples.segments,
        positions=examples.positions,
    )
    lse = jax.nn.logsumexp(logits, axis=-1)
    target = jnp.take_along_axis(logits, examples.targets[..., None], axis=-1)[..., 0]
    per_label = load_loss(task.loss).per_token(task.loss, LogitStats(lse, target, logits.mean(axis=-1)))
    weights, predicted = examples.weights, logits.argmax(axis=-1)
    loss, nll = ((weights * values).sum() for values in (per_label, lse - target))
    correct = (weights * (predicted == examples.targets)).sum()
    sums = {"loss": loss, "nll": jax.lax.stop_gradient(nll), "accuracy": correct, "count": weights.sum()}
    count_by_label = lambda labels, weights: jnp.bincount(
        labels.ravel(), weights.ravel(), length=logits.shape[-1]
    )
    hits = count_by_label(predicted, weights * (predicted == examples.targets))
    counts = {
        "wanted": count_by_label(examples.targets, weights),
        "told": count_by_label(predicted, weights),
        "hits": hits,
    }
    return LossOutput(loss, sums, eval_sums=counts)


def eval_metrics(totals: Mapping[str, Any]) -> dict[str, float]:
    """Evaluation metrics from the counts of each label: `wanted` (targets), `told` (predictions), `hits`."""
    targets, predictions, hits = (np.asarray(totals[name], np.float64) for name in ("wanted", "told", "hits"))
    count, correct = targets.sum(), hits.sum()
    occurs = targets + predictions > 0  # other labels have no F1
    f1 = 2 * hits[occurs] / (targets + predictions)[occurs]
    deviation = np.sqrt((count**2 - predictions @ predictions) * (count**2 - targets @ targets))
    metrics = {
        "loss": totals["nll"] / max(count, 1.0),
        "accuracy": correct / max(count, 1.0),
        "majority": targets.max() / max(count, 1.0),  # accuracy of always predicting the most frequent label
        "macro_f1": f1.mean() if occurs.any() else 0.0,
        "matthews": (correct * count - targets @ predictions) / deviation if deviation else 0.0,
    }
    return {name: float(value) for name, value in metrics.items()}


def per_label_lines(totals: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Format the counts of each label as a line."""
    counts = zip(names, totals["hits"], totals["wanted"], totals["told"], strict=True)
    return [
        f"{name}: {hits:.0f} of {targets:.0f} right, predicted {predictions:.0f} times"
        for name, hits, targets, predictions in counts
    ]
