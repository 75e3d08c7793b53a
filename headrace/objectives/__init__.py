"""What every training objective works with: a batch, the examples made of it, and the task they belong to.
An objective is a file with `prepare`, which makes the examples, `loss`, and `most`: how many answers of a row
can have a weight. One whose weights are updated in turns has `TURNS` instead of a loss. One that tells a text
as a whole names the special tokens which it is `GIVEN`; one whose evaluation draws otherwise than its
training has `prepare_evaluation`. One that `READS` labels or pairs takes data that has them; one that tells
no tokens judges its evaluation itself (`judged`)."""

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from headrace.model_wrappers import (
    classification_head as classifier,
    recurrent_depth as depth,
    split_weights as matrices,
)
from headrace.nn import sharding as mesh
from headrace.errors import UserError
from headrace.nn.stack import Execution, default_unroll, products_of
from headrace.kernels.linear_cross_entropy.dispatch import bind, cut
from headrace.kernels.linear_cross_entropy.stats import Totals
from headrace.objectives._select_weighted import weighted
from headrace.nn.module import Array, module
from headrace.low_precision.support import multiplies


@module
class Batch:
    """Packed rows as the stream gives them, [b s] each: segments count documents from 1, 0 is padding; `loss`
    marks the tokens to be learnt, None means all; `labels` has a label's number plus one at the tokens that
    have one, None where the data has none."""

    tokens: Array
    segments: Array
    positions: Array
    loss: Array | None = None
    labels: Array | None = None


@module
class Examples:
    """What the model reads and what it must answer, [b s] each; answers with weight 0 do not count. A mean is
    the weighted sum divided by that of `counts`; None stands for the weights themselves."""

    inputs: Array
    targets: Array
    weights: Array
    segments: Array | None
    positions: Array
    counts: Array | None = None


@dataclass(frozen=True)
class Vocabulary:
    """The ids with a meaning of their own; None where the tokenizer has no such token."""

    size: int
    pad: int | None
    bos: int | None
    eos: int | None
    mask: int | None


@dataclass(frozen=True)
class Task:
    """Everything about a run that is fixed when its step is compiled, the optimizer aside."""

    model: Any
    objective: Any
    loss: Any
    how: Execution
    vocabulary: Vocabulary
    isolate: bool = True


@module
class Told:
    """A loss to be differentiated, sums to be told as means (divided by that of `count`), what the next turn
    reads in the place of the examples, and sums for evaluation alone, arrays of any size."""

    loss: Array
    sums: dict[str, Array]
    following: Any = None
    tallies: dict[str, Array] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """One of the updates of a step: its loss, the weights that are updated by it, and how they are put into
    the whole. Those of the next turn see them updated. Each turn clips its own gradients."""

    loss: Callable[[Task, Any, Any], Told]
    name: str = ""  # stands before the names of its means, as in discriminator_loss
    take: Callable[[Any], Any] = lambda whole: whole
    put: Callable[[Any, Any], Any] = lambda whole, own: own


def turns(task: Task) -> tuple[Turn, ...]:
    return getattr(file("objectives", task.objective), "TURNS", (Turn(_told),))


def _told(task: Task, model: Any, examples: Examples) -> Told:
    totals = file("objectives", task.objective).loss(task, model, examples)
    counts = examples.weights if examples.counts is None else examples.counts
    return Told(totals.loss, {"loss": totals.loss, "nll": totals.nll, "count": counts.sum()})


def make_task(run: Any, vocabulary: Vocabulary, device: Any = None) -> Task:
    """The task of a training recipe on devices such as this one; None stands for our own."""
    memory = run.memory
    unroll = default_unroll() if memory.unroll == "auto" else memory.unroll
    products = products_of(run)
    native = products != "compute" and multiplies(device or jax.local_devices()[0], products)
    how = Execution(run.attention, memory.compute, memory.remat, unroll, products, native)
    return Task(run.model, run.objective, run.loss, how, vocabulary, run.data.isolate)


def file(folder: str, cfg: Any) -> Any:
    """The module that a section's `use` names; a model's with recurrent depth, with a head for labels or with
    matrices that are held otherwise, where it has them."""
    found = importlib.import_module(f"headrace.{folder.replace('/', '.')}.{cfg.use}")
    if folder != "models":
        return found
    found = depth.family(found) if depth.is_recurrent(cfg) else found
    found = classifier.family(found) if classifier.has_labels(cfg) else found
    held = matrices.kind(cfg)
    return found if held is None else matrices.family(found, held)


def check_data(objective: Any, path: str, index: Any, key: str = "data.path") -> None:
    """Whether packed data, which `key` names, is for this objective; UserError where it is not."""
    reads = getattr(file("objectives", objective), "READS", "text")
    if index.pairs and reads != "pairs":
        raise UserError(
            f"{key}: {path} holds pairs of answers, which objective {objective.use} does not read; name "
            "other data, train with objective.use: dpo, or prepare the preferred ones with `column: chosen`"
        )
    if reads == "pairs" and not index.pairs:
        raise UserError(
            f"{key}: {path} holds no pairs of answers, which objective {objective.use} needs; prepare "
            "records that have `chosen` and `rejected`"
        )
    if reads == "labels" and not index.labels:
        raise UserError(
            f"{key}: {path} has no labels, which objective {objective.use} needs; prepare records that "
            "have a `label` beside their text, or `tags` beside their words"
        )


def token_loss(task: Task, model: Any, examples: Examples, *, without: int | None = None) -> Totals:
    """Predicts a token at every position that counts; head and loss in one kernel, without logits. The token
    `without` cannot be the answer."""
    examples = jax.tree.map(mesh.balance, examples)  # a sum over tokens is the same in any order
    hidden = model(
        task.model, examples.inputs, how=task.how, segments=examples.segments, positions=examples.positions
    )
    return head_loss(task, model, hidden, examples, without=without)


def head_loss(
    task: Task, model: Any, hidden: Array, examples: Examples, *, without: int | None = None
) -> Totals:
    hidden, targets, weights = that_count(task, hidden, examples.targets, examples.weights)
    cfg = task.loss
    per_token = bind(file("losses", cfg).per_token, cfg)
    how = dict(soft_cap=cfg.soft_cap, split=cfg.split, chunk=cfg.chunk, filter=cfg.filter)
    return cut(per_token, hidden, model.unembed, targets, weights, without=without, **how)


def that_count(task: Task, hidden: Array, targets: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Of rows [b s ...] the positions that can have a weight, where they are few and on one device."""
    most = file("objectives", task.objective).most(task.objective, targets.shape[1])
    if most < targets.shape[1] and mesh.parts_of_a_row() == 1:
        return weighted(most, hidden, targets, weights)
    return hidden, targets, weights


def flops(run: Any) -> float:
    """What a token of a recipe takes, forward and backward; the head multiplies only what is to be told."""
    model, length = run.model, run.data.sequence_length
    told = file("objectives", run.objective).most(run.objective, length) / length
    return file("models", model).flops(model, length) - 6 * (1 - told) * model.vocab * model.embed


def seen(task: Task, batch: Batch) -> tuple[Array | None, Array]:
    """Segments and positions as the model sees them: told apart by document, or the row as one text."""
    if task.isolate:
        return batch.segments, batch.positions
    return None, jnp.broadcast_to(jnp.arange(batch.tokens.shape[1], dtype=jnp.int32), batch.tokens.shape)
