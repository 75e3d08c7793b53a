"""Evaluation: mean loss a token over the held-out split, as perplexity and bits a byte."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from headrace.checkpoint.open_run import LoadedRun
from headrace.config import sections
from headrace.data.batch_order import BatchOrder
from headrace.data.dataset import Dataset
from headrace.errors import UserError
from headrace.model_wrappers import classification_head, load_family
from headrace.nn import module
from headrace.nn.sharding import row_sharding
from headrace.objectives import Batch, SpecialTokens, check_dataset_kind, load_objective
from headrace.training.metrics import read_scalars
from headrace.training.step import eval_step
from headrace.training.task import make_task

Judged = Callable[[dict[str, Any]], dict[str, Any]]


def evaluate(
    score: Callable[[Batch, int], Any],
    dataset: Dataset,
    mesh: Mesh,
    *,
    sequences: int,
    given: Sequence[str] | None,
    judged: Judged | None = None,
    batches: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """`score` is an eval_step with its weights. `batches` 0 takes the whole split. What an objective draws at
    random (which tokens to mask) depends only on the row's number, so that evaluations can be compared.
    `given` are the special tokens of a document that the objective does not tell, or None if it tells no text
    as a whole, of which there are no bits a byte; `judged` makes the result of the sums where no token is
    told. None if `stop` said so half-way."""
    rows = dataset.rows_per_epoch("evaluation")
    if not rows:
        raise UserError(
            "data.path: no document is held out for evaluation; pack again with pack.eval_fraction above 0"
        )
    order, every = dataset.eval_order(sequences), math.ceil(rows / sequences)
    totals: dict[str, Any] = {}
    for number in range(min(batches or every, every)):
        batch = device_batch(dataset, order, mesh, number)
        sums = read_scalars(score(batch, number * sequences))
        totals = {name: totals.get(name, 0.0) + value for name, value in sums.items()}
        if stop():
            return None
    if judged is not None:
        return judged(totals)
    loss = totals.get("nll", totals["loss"]) / max(totals["count"], 1.0)
    result = {"loss": loss}
    if "nll" in totals:  # or it is not tokens that are told
        entropy = dataset.index.unigram_entropy
        result |= {"unigram_entropy": entropy, "perplexity": math.exp(min(loss, 700.0))}
    for name, total in totals.items():  # of a second turn, or beside the loss
        turn, _, told = name.rpartition("_")
        if told not in ("count", "nll") and name != "loss":
            result[name] = total / max(totals[f"{turn}_count" if turn else "count"], 1.0)
    if given is not None and not dataset.has_loss_mask:  # of a chat, too, only a part is told
        result["bits_per_byte"] = loss / math.log(2) * targets_per_byte(dataset, given)
    return result


def targets_per_byte(dataset: Dataset, given: Sequence[str]) -> float:
    """How many tokens a model must tell for a byte of held-out text: all but those given with a document."""
    split = dataset.index.splits["evaluation"]
    free = sum(getattr(dataset.index.special, name) is not None for name in given) * split.documents
    return (split.tokens - free) / max(split.bytes, 1)


def unpredicted_tokens(objective: Any) -> Sequence[str] | None:
    return load_objective(objective).unpredicted_tokens


def eval_metrics_of(objective: Any) -> Judged | None:
    return load_objective(objective).eval_metrics


def with_label_lines(objective: Any, labels: Sequence[str], totals: dict[str, Any]) -> dict[str, Any]:
    """As judged, with a line for each label."""
    own = load_objective(objective)
    assert own.eval_metrics is not None and own.per_label_lines is not None
    return own.eval_metrics(totals) | {"labels": own.per_label_lines(totals, labels)}


def evaluate_run(run: LoadedRun) -> dict[str, Any]:
    """All held-out data of a run's recipe, through its newest weights."""
    cfg = run.recipe
    dataset = Dataset.open(
        cfg.data.path, sequence_length=cfg.data.sequence_length, tokenizer_sha256=run.tokenizer_sha256
    )
    check_dataset_kind(cfg.objective, cfg.data.path, dataset.index)
    task = make_task(cfg, special_tokens(dataset))
    axes = module.axes(load_family(cfg.model).Model, cfg.model)
    with jax.set_mesh(run.mesh):
        score = functools.partial(jax.jit(eval_step(task, axes, cfg.eval.repeats)), run.params)
        rows = cfg.batch.sequences // cfg.batch.microbatches
        given, judged = unpredicted_tokens(cfg.objective), eval_metrics_of(cfg.objective)
        if judged is not None:
            judged = functools.partial(with_label_lines, cfg.objective, dataset.index.labels)
        result = evaluate(score, dataset, run.mesh, sequences=rows, given=given, judged=judged)
    assert result is not None
    return result


HEADLINE_METRICS = ("loss", "unigram_entropy", "perplexity", "bits_per_byte")


def format_result(result: dict[str, Any], objective: Any) -> str:
    name = load_objective(objective).loss_name
    if "perplexity" not in result:
        numbers = {name.replace("_", " "): value for name, value in result.items() if name != "labels"}
        line = ", ".join(f"{name} {value:.4f}" for name, value in numbers.items())
        return "\n".join([line, *result.get("labels", [])])
    said = (
        f"{name} {result['loss']:.4f} nats, unigram entropy {result['unigram_entropy']:.4f}, "
        f"perplexity {result['perplexity']:,.2f}"
    )
    said += f", {result['bits_per_byte']:.3f} bits a byte" if "bits_per_byte" in result else ""
    more = [name for name in result if name not in HEADLINE_METRICS]
    return said + "".join(f", {name.replace('_', ' ')} {result[name]:.4f}" for name in more)


def fill_model_sizes(cfg: sections.TrainRecipe, dataset: Dataset) -> sections.TrainRecipe:
    """The vocabulary comes from the data unless the recipe names one, and so do labels."""
    check_dataset_kind(cfg.objective, cfg.data.path, dataset.index)
    model = cfg.model
    if load_objective(cfg.objective).data_kind == "labels":
        model = classification_head.with_label_count(model, len(dataset.index.labels), dataset.index.labelled)
    if not model.vocab:
        model = dataclasses.replace(model, vocab=dataset.vocab)
    return cfg if model is cfg.model else dataclasses.replace(cfg, model=model)


def special_tokens(dataset: Dataset) -> SpecialTokens:
    special = dataset.index.special
    return SpecialTokens(dataset.vocab, dataset.pad_id, special.bos, special.eos, special.mask)


def device_batch(dataset: Dataset, order: BatchOrder, mesh: Mesh, step: int) -> Batch:
    """The batch at a step, on the devices. Each host reads just the rows that its devices hold. While the
    batch grows, of each `ramp.last` rows in a row the last ones are padding: those of parts that step.py,
    which takes its parts from such rows in turn, leaves out."""
    sequences, ramp = order.batch_size, order.ramp
    shape = (sequences, dataset.sequence_length)
    sharding = row_sharding(mesh, shape)
    mine = sharding.addressable_devices_indices_map(shape).values()
    held = [index[0].indices(sequences) for index in mine if index is not None]
    first, last = min(start for start, _, _ in held), max(stop for _, stop, _ in held)
    now = ramp.microbatches_at(step)
    packed = dataset.batch(order, step, slice(first * now // ramp.last, last * now // ramp.last))

    def put(rows: Any) -> jax.Array:
        rows = pad_ramp(rows, now, ramp.last)

        def part(index: Any) -> Any:
            start, stop, _ = index[0].indices(sequences)
            return rows[start - first : stop - first, index[1]]

        return jax.make_array_from_callback(shape, sharding, part)

    loss = None if packed.loss_mask is None else put(packed.loss_mask)
    labels = None if packed.labels is None else put(packed.labels)
    return Batch(put(packed.tokens), put(packed.segments), put(packed.positions), loss, labels)


def pad_ramp(rows: np.ndarray, now: int, last: int) -> np.ndarray:
    """Rows of which `now` belong together, and zeros after each such group to make it `last`."""
    grouped = rows.reshape(-1, now, *rows.shape[1:])
    return np.pad(grouped, [(0, 0), (0, last - now), (0, 0)]).reshape(-1, *rows.shape[1:])
