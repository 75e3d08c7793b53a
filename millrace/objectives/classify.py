"""Classification: the label of a text, told from what the model makes of it, or of each word. The head is
classifier.py's; how many labels there are, and of what, the data says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millrace.kernels.head import Stats
from millrace.module import Array
from millrace.objective import Batch, Examples, Task, Told, Turn, file, seen

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
    pairs = examples.targets * logits.shape[-1] + said  # which was wanted, and which was told
    confusion = jnp.bincount(pairs.ravel(), weights.ravel(), length=logits.shape[-1] ** 2)
    sums = {"loss": loss, "nll": jax.lax.stop_gradient(nll), "accuracy": right, "count": weights.sum()}
    return Told(loss, sums, tallies={"confusion": confusion})


TURNS = (Turn(tell),)


def judged(totals: Mapping[str, Any]) -> dict[str, Any]:
    """What evaluation tells, from its sums."""
    classes = round(len(totals["confusion"]) ** 0.5)
    table = np.asarray(totals["confusion"], np.float64).reshape(classes, classes)  # [wanted told]
    count, right = table.sum(), table.trace()
    wanted, told, hits = table.sum(axis=1), table.sum(axis=0), np.diag(table)
    met = wanted + told > 0  # labels that nobody wanted or told say nothing
    f1 = 2 * hits[met] / (wanted + told)[met]
    spread = np.sqrt((count**2 - told @ told) * (count**2 - wanted @ wanted))
    return {
        "loss": totals["nll"] / max(count, 1.0),
        "accuracy": right / max(count, 1.0),
        "majority": wanted.max() / max(count, 1.0),
        "macro_f1": f1.mean() if met.any() else 0.0,
        "matthews": (right * count - wanted @ told) / spread if spread else 0.0,
    }


def tabled(totals: Mapping[str, Any], names: tuple[str, ...]) -> list[str]:
    """A line for each label: how many there are, and how many of them were told right."""
    classes = len(names)
    table = np.asarray(totals["confusion"], np.float64).reshape(classes, classes)
    return [f"{name}: {table[n, n]:.0f} of {table[n].sum():.0f}" for n, name in enumerate(names)]
