"""Classification: the label of a text, told from what the model makes of it, or of each word. The head is
classifier.py's; how many labels there are, and of what, the data says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.kernels.linear_cross_entropy.stats import Stats
from headrace.nn.module import Array
from headrace.objectives import Batch, Examples, Task, Told, Turn, file, seen

READS = "labels"


@dataclass(frozen=True)
class Config:
    pass


def most(cfg: Config, length: int) -> int:
    return 0  # tokens are not told


def prepare(task: Task, batch: Batch, key: Array) -> Examples:
    assert batch.labels is not None
    segments, positions = seen(task, batch)
    weights = (batch.labels > 0).astype(jnp.float32)
    return Examples(batch.tokens, jnp.maximum(batch.labels - 1, 0), weights, segments, positions)


def tell(task: Task, model: Any, examples: Examples) -> Told:
    logits = model.tell(
        task.model, examples.inputs, how=task.how, segments=examples.segments, positions=examples.positions
    )
    lse = jax.nn.logsumexp(logits, axis=-1)
    target = jnp.take_along_axis(logits, examples.targets[..., None], axis=-1)[..., 0]
    per_text = file("losses", task.loss).per_token(task.loss, Stats(lse, target, logits.mean(axis=-1)))
    weights, said = examples.weights, logits.argmax(axis=-1)
    loss, nll = ((weights * each).sum() for each in (per_text, lse - target))
    right = (weights * (said == examples.targets)).sum()
    sums = {"loss": loss, "nll": jax.lax.stop_gradient(nll), "accuracy": right, "count": weights.sum()}
    each = lambda labels, of: jnp.bincount(labels.ravel(), of.ravel(), length=logits.shape[-1])
    hits = each(said, weights * (said == examples.targets))
    tallies = {"wanted": each(examples.targets, weights), "told": each(said, weights), "hits": hits}
    return Told(loss, sums, tallies=tallies)


TURNS = (Turn(tell),)


def judged(totals: Mapping[str, Any]) -> dict[str, float]:
    """What evaluation tells, from its sums: of each label, how often it was wanted, told, and both."""
    wanted, told, hits = (np.asarray(totals[name], np.float64) for name in ("wanted", "told", "hits"))
    count, right = wanted.sum(), hits.sum()
    met = wanted + told > 0  # labels that nobody wanted or told say nothing
    f1 = 2 * hits[met] / (wanted + told)[met]
    spread = np.sqrt((count**2 - told @ told) * (count**2 - wanted @ wanted))
    found = {
        "loss": totals["nll"] / max(count, 1.0),
        "accuracy": right / max(count, 1.0),
        "majority": wanted.max() / max(count, 1.0),  # what telling the commonest label would give
        "macro_f1": f1.mean() if met.any() else 0.0,
        "matthews": (right * count - wanted @ told) / spread if spread else 0.0,
    }
    return {name: float(value) for name, value in found.items()}


def by_label(totals: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """A line for each label."""
    counts = zip(names, totals["hits"], totals["wanted"], totals["told"], strict=True)
    return [
        f"{name}: {hits:.0f} of {wanted:.0f} right, told {told:.0f} times"
        for name, hits, wanted, told in counts
    ]
