"""Evaluation on the held-out split: loss per token, perplexity and bits per byte, or metrics of labels.

Random choices, such as which tokens to mask, depend only on the number of a row, so that evaluations can be
compared with each other."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from headrace.checkpoint.open_run import LoadedRun
from headrace.data.dataset import Dataset
from headrace.errors import UserError
from headrace.html_page import render_notebook_table
from headrace.nn import module
from headrace.objectives import Batch, Objective, ObjectiveConfig, check_dataset_kind, load_objective
from headrace.training.batch import device_batch, special_tokens
from headrace.training.step import Metrics, make_eval_step
from headrace.training.task import make_task

Score = Callable[[Batch, int], Metrics]  # a function of `make_eval_step`, with the weights
Totals = dict[str, np.ndarray]  # sums over the split, float64; arrays where an objective counts by label

# The metrics that `format_result` names first.
HEADLINE_METRICS = ("loss", "unigram_entropy", "perplexity", "bits_per_byte")


class Evaluation(dict[str, float]):
    """Metrics of the held-out split by name, such as `loss` and `perplexity`. A table in notebooks."""

    def __init__(self, metrics: Mapping[str, float], label_lines: Sequence[str] = ()) -> None:
        """`label_lines` are one for each label, if the objective predicts labels."""
        super().__init__(metrics)
        self.label_lines = tuple(label_lines)

    def _repr_html_(self) -> str:
        """Render the metrics as a table, for notebooks."""
        rows = {name.replace("_", " "): f"{value:,.4f}" for name, value in self.items()}
        rows |= {name: counts for name, _, counts in (line.partition(": ") for line in self.label_lines)}
        return render_notebook_table("evaluation", rows)


def evaluate_run(run: LoadedRun) -> Evaluation:
    """Evaluate the newest weights of a run on all held-out rows of its data."""
    recipe = run.recipe
    dataset = Dataset.open(
        recipe.data.path,
        sequence_length=recipe.data.sequence_length,
        tokenizer_sha256=run.tokenizer_sha256,
    )
    check_dataset_kind(recipe.objective, recipe.data.path, dataset.index)
    task = make_task(recipe, special_tokens(dataset))
    axes = module.axes(task.family.Model, task.model)
    batch_size = recipe.batch.sequences // recipe.batch.microbatches
    with jax.set_mesh(run.mesh):
        score = functools.partial(jax.jit(make_eval_step(task, axes, recipe.eval.repeats)), run.params)
        result = evaluate(score, dataset, run.mesh, recipe.objective, batch_size=batch_size)
    assert result is not None
    return result


def evaluate(
    score: Score,
    dataset: Dataset,
    mesh: Mesh,
    objective: ObjectiveConfig,
    *,
    batch_size: int,
    max_batches: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Evaluate on the held-out split, or its first `max_batches` if that is not 0.

    Returns None if `should_stop`, which is called after each batch, ended it early."""
    totals = sum_metrics(
        score, dataset, mesh, batch_size=batch_size, max_batches=max_batches, should_stop=should_stop
    )
    return None if totals is None else make_evaluation(dataset, load_objective(objective), totals)


def sum_metrics(
    score: Score,
    dataset: Dataset,
    mesh: Mesh,
    *,
    batch_size: int,
    max_batches: int,
    should_stop: Callable[[], bool],
) -> Totals | None:
    """Sum the metrics of all batches. Returns None if `should_stop` ended it early."""
    rows = dataset.rows_per_epoch("evaluation")
    if not rows:
        raise UserError(
            "data.path: no document is held out for evaluation; pack again with pack.eval_fraction above 0"
        )
    order, num_batches = dataset.eval_order(batch_size), math.ceil(rows / batch_size)
    totals: Totals = {}
    for index in range(min(max_batches or num_batches, num_batches)):
        batch = device_batch(dataset, order, mesh, index)
        sums = jax.device_get(score(batch, index * batch_size))
        totals = {name: totals.get(name, 0.0) + np.asarray(value, np.float64) for name, value in sums.items()}
        if should_stop():
            return None
    return totals


def make_evaluation(dataset: Dataset, objective: Objective, totals: Totals) -> Evaluation:
    """Compute the metrics of the split from the sums over it."""
    if objective.eval_metrics is None:
        return Evaluation(token_metrics(dataset, objective, totals))
    lines = objective.per_label_lines
    return Evaluation(
        objective.eval_metrics(totals), () if lines is None else lines(totals, dataset.index.labels)
    )


def token_metrics(dataset: Dataset, objective: Objective, totals: Totals) -> dict[str, float]:
    """Compute the metrics of an objective that predicts tokens: means over the tokens it counts."""
    loss = float(totals.get("nll", totals["loss"]) / max(totals["count"], 1.0))
    metrics = {"loss": loss}
    if "nll" in totals:  # the loss is a likelihood of tokens
        entropy = dataset.index.unigram_entropy
        metrics |= {"unigram_entropy": entropy, "perplexity": math.exp(min(loss, 700.0))}
    for name, total in totals.items():  # of another phase, or in addition to the loss
        phase, _, quantity = name.rpartition("_")
        if quantity not in ("count", "nll") and name != "loss":
            metrics[name] = float(total / max(totals[f"{phase}_count" if phase else "count"], 1.0))
    unpredicted = objective.unpredicted_tokens
    if unpredicted is not None and not dataset.has_loss_mask:  # of a chat, too, only a part is predicted
        metrics["bits_per_byte"] = loss / math.log(2) * targets_per_byte(dataset, unpredicted)
    return metrics


def targets_per_byte(dataset: Dataset, unpredicted: Sequence[str]) -> float:
    """Count the tokens to predict per byte of held-out text. The special tokens `unpredicted` of each
    document are not among them."""
    split, special = dataset.index.splits["evaluation"], dataset.index.special
    num_unpredicted = sum(getattr(special, name) is not None for name in unpredicted) * split.documents
    return (split.tokens - num_unpredicted) / max(split.bytes, 1)


def format_result(evaluation: Evaluation, objective: ObjectiveConfig) -> str:
    """Format the metrics of an evaluation as one line, followed by those of labels."""
    name = load_objective(objective).loss_name
    if "perplexity" not in evaluation:
        return "\n".join([_join_metrics(evaluation), *evaluation.label_lines])
    line = (
        f"{name} {evaluation['loss']:.4f} nats, unigram entropy {evaluation['unigram_entropy']:.4f}, "
        f"perplexity {evaluation['perplexity']:,.2f}"
    )
    if "bits_per_byte" in evaluation:
        line += f", {evaluation['bits_per_byte']:.3f} bits per byte"
    extra = {name: value for name, value in evaluation.items() if name not in HEADLINE_METRICS}
    return f"{line}, {_join_metrics(extra)}" if extra else line


def _join_metrics(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items())
