"""Training objectives: plugins of `objective.use`, one per file, and the types that they share.

An objective's file defines `Config`; `prepare`, which makes the examples of a batch; `max_targets`; and
either `loss` or, if a step has several updates, `UPDATE_PHASES`. The other members that
`Objective.from_module` reads are optional."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from headrace.data.shards import Index
from headrace.errors import UserError
from headrace.kernels.linear_cross_entropy.dispatch import add_z_loss, fused_cross_entropy
from headrace.kernels.linear_cross_entropy.stats import LossTotals
from headrace.losses import LossConfig, load_loss
from headrace.models import Family, ModelConfig
from headrace.nn import sharding
from headrace.nn.module import Array, PyTree, module
from headrace.nn.stack import Execution
from headrace.objectives._select_weighted import gather_weighted


class ObjectiveConfig(Protocol):
    """The `objective` section of a recipe. Each objective adds keys of its own."""

    @property
    def use(self) -> str: ...


@module
class Batch:
    """Packed rows of token ids [b s], as the dataset stores them."""

    tokens: Array
    segments: Array  # numbers the documents of a row from 1; 0 is padding
    positions: Array  # of each token in its document
    loss_mask: Array | None = None  # True for tokens that the model learns to predict; None: all
    labels: Array | None = None  # a label's number plus one, 0 at tokens without; None: data without labels


@module
class Examples:
    """Inputs and targets of the model, [b s] each."""

    inputs: Array
    targets: Array
    weights: Array  # of each position's loss; 0: not predicted
    segments: Array | None  # None: the whole row is one document
    positions: Array
    counts: Array | None = None  # means divide by their sum; None: by the sum of `weights`


@dataclass(frozen=True)
class SpecialTokens:
    """The vocabulary's size and the ids of its special tokens; None where the tokenizer has none."""

    size: int
    pad: int | None
    bos: int | None
    eos: int | None
    mask: int | None


@dataclass(frozen=True)
class TrainTask:
    """Everything about a run that is fixed when its step is compiled, except for the optimizer."""

    model: ModelConfig
    objective: ObjectiveConfig
    loss: LossConfig
    exec_opts: Execution
    special_tokens: SpecialTokens
    isolate_documents: bool = True  # tokens attend only within their document
    family: Family = dataclasses.field(kw_only=True)  # of `model`


@module
class LossOutput:
    """The result of a phase's loss function."""

    loss: Array  # is differentiated
    sums: dict[str, Array]  # are logged, each divided by the sum named `count`
    carry: Any = None  # the next phase's input
    eval_sums: dict[str, Array] = dataclasses.field(default_factory=dict)  # any shape; for evaluation only


PhaseLoss = Callable[[TrainTask, Any, Any], LossOutput]  # (task, model, examples)


@dataclass(frozen=True)
class UpdatePhase:
    """One of the sequential updates of a training step: a loss, and which weights it trains.

    Later phases see earlier phases' updates. Gradients are clipped per phase."""

    loss: PhaseLoss
    name: str = ""  # prefix of its metrics, as in discriminator_loss
    select: Callable[[PyTree], PyTree] = lambda params: params  # params -> those that the phase trains
    merge: Callable[[PyTree, PyTree], PyTree] = lambda params, trained: trained  # puts them back


@dataclass(frozen=True, eq=False)
class Objective:
    """A training objective, made from its plugin."""

    # (task, batch, key) -> examples; draws masks and the like from the key
    prepare: Callable[[TrainTask, Batch, Array], Any]
    # (objective config, sequence length) -> the most positions of a row whose weight is not 0
    max_targets: Callable[[Any, int], int]
    phases: tuple[UpdatePhase, ...]
    # Like `prepare`, with a noise level in [0, 1) for each row; None: evaluation draws as training does.
    prepare_evaluation: Callable[[TrainTask, Batch, Array, Array], Any] | None
    # Special tokens that the model does not have to predict; None: likelihoods of texts are not defined.
    unpredicted_tokens: tuple[str, ...] | None
    # Evaluation metrics from the sums over all data; None: means of the sums.
    eval_metrics: Callable[[Mapping[str, Any]], dict[str, float]] | None
    # A line for each label, from the same sums and the labels' names.
    per_label_lines: Callable[[Mapping[str, Any], Sequence[str]], list[str]] | None
    loss_name: str  # in the output of evaluation
    data_kind: Literal["text", "pairs", "labels"]

    @classmethod
    def from_module(cls, plugin: ModuleType) -> "Objective":
        """Make an objective from the members of its plugin's module."""
        members = vars(plugin)
        return cls(
            prepare=plugin.prepare,
            max_targets=plugin.max_targets,
            phases=members.get("UPDATE_PHASES") or (UpdatePhase(plugin.loss),),
            prepare_evaluation=members.get("prepare_evaluation"),
            unpredicted_tokens=members.get("UNPREDICTED_TOKENS"),
            eval_metrics=members.get("eval_metrics"),
            per_label_lines=members.get("per_label_lines"),
            loss_name=members.get("LOSS_NAME", "evaluation loss"),
            data_kind=members.get("DATA_KIND", "text"),
        )


def load_objective(cfg: ObjectiveConfig) -> Objective:
    """Load the objective that `objective.use` names."""
    return _load_objective(cfg.use)


@functools.cache
def _load_objective(name: str) -> Objective:
    return Objective.from_module(importlib.import_module(f"headrace.objectives.{name}"))


def update_phases(task: TrainTask) -> tuple[UpdatePhase, ...]:
    """The sequential updates of a training step."""
    return load_objective(task.objective).phases


def check_dataset_kind(cfg: ObjectiveConfig, path: str, index: Index, key: str = "data.path") -> None:
    """Check that the packed data at `path`, which the recipe's `key` names, is of the kind that the objective
    reads. Raises UserError if it is not."""
    kind = load_objective(cfg).data_kind
    if index.pairs and kind != "pairs":
        raise UserError(
            f"{key}: {path} holds pairs of answers, which objective {cfg.use} does not read; use other data, "
            "train with objective.use: dpo, or prepare the preferred answers with `text_column: chosen`"
        )
    if kind == "pairs" and not index.pairs:
        raise UserError(
            f"{key}: {path} holds no pairs of answers, which objective {cfg.use} needs; prepare records that "
            "have `chosen` and `rejected`"
        )
    if kind == "labels" and not index.labels:
        raise UserError(
            f"{key}: {path} has no labels, which objective {cfg.use} needs; prepare records that have a "
            "`label` for their text, or `tags` for its words"
        )


def token_loss(
    task: TrainTask, model: PyTree, examples: Examples, *, without: int | None = None
) -> LossOutput:
    """Compute the loss of predicting a token at every position with a weight.

    The token `without` gets no probability."""
    # A sum over tokens is the same in any order.
    balanced = jax.tree.map(sharding.to_balanced_order, examples)
    hidden = model(
        task.model,
        balanced.inputs,
        exec_opts=task.exec_opts,
        segments=balanced.segments,
        positions=balanced.positions,
    )
    totals = head_loss(task, model, hidden, balanced, without=without)
    counts = examples.weights if examples.counts is None else examples.counts
    return LossOutput(totals.loss, {"loss": totals.loss, "nll": totals.nll, "count": counts.sum()})


def head_loss(
    task: TrainTask, model: PyTree, hidden: Array, examples: Examples, *, without: int | None = None
) -> LossTotals:
    """Compute the loss from the last hidden states [b s d]. Head and loss are fused, so that the logits of
    all tokens are never in compute."""
    hidden, targets, weights = select_weighted(task, hidden, examples.targets, examples.weights)
    cfg = task.loss
    per_token_loss = add_z_loss(functools.partial(load_loss(cfg).per_token, cfg), cfg.z_loss)
    return fused_cross_entropy(
        per_token_loss,
        hidden,
        model.unembed,
        targets,
        weights,
        soft_cap=cfg.soft_cap,
        backend=cfg.backend,
        chunk_size=cfg.chunk_size,
        filter_eps=cfg.filter_eps,
        excluded_token=without,
    )


def select_weighted(
    task: TrainTask, hidden: Array, targets: Array, weights: Array
) -> tuple[Array, Array, Array]:
    """Drop positions of rows [b s ...] that have no weight, if the objective has few targets and rows are not
    split over devices."""
    max_targets = load_objective(task.objective).max_targets(task.objective, targets.shape[1])
    if max_targets < targets.shape[1] and sharding.context_size() == 1:
        return gather_weighted(max_targets, hidden, targets, weights)
    return hidden, targets, weights


def segments_and_positions(task: TrainTask, batch: Batch) -> tuple[Array | None, Array]:
    """Segment ids and positions for the model. Without `data.isolate_documents` a row is one document: no
    segments, and positions 0 to s - 1."""
    if task.isolate_documents:
        return batch.segments, batch.positions
    return None, jnp.broadcast_to(jnp.arange(batch.tokens.shape[1], dtype=jnp.int32), batch.tokens.shape)
