"""Evaluation: mean loss a token over the held-out split, as perplexity and bits a byte."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from headrace.model_wrappers import classification_head as classifier
from headrace.nn import module
from headrace.config import sections
from headrace.data.dataset import Dataset
from headrace.errors import UserError
from headrace.checkpoint.open_run import Opened
from headrace.nn.sharding import row_sharding
from headrace.training.metrics import fetch
from headrace.objectives import Batch, Vocabulary, check_data, file, make_task
from headrace.config.durations import Ramp
from headrace.training.step import eval_step

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
    rows = dataset.rows("evaluation")
    if not rows:
        raise UserError(
            "data.path: no document is held out for evaluation; pack again with pack.evaluation above 0"
        )
    every = math.ceil(rows / sequences)
    totals: dict[str, Any] = {}
    for number in range(min(batches or every, every)):
        batch = place(dataset, mesh, number, split="evaluation", sequences=sequences, seed=0)
        sums = fetch(score(batch, number * sequences))
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
    if given is not None and not dataset.has_loss:  # of a chat, too, only a part is told
        result["bits_per_byte"] = loss / math.log(2) * answers_per_byte(dataset, given)
    return result


def answers_per_byte(dataset: Dataset, given: Sequence[str]) -> float:
    """How many tokens a model must tell for a byte of held-out text: all but those given with a document."""
    split = dataset.index.splits["evaluation"]
    free = sum(getattr(dataset, name) is not None for name in given) * split.documents
    return (split.tokens - free) / max(split.bytes, 1)


def given_to(objective: Any) -> Sequence[str] | None:
    return getattr(file("objectives", objective), "GIVEN", None)


def judged_by(objective: Any) -> Judged | None:
    return getattr(file("objectives", objective), "judged", None)


def in_detail(objective: Any, labels: Sequence[str], totals: dict[str, Any]) -> dict[str, Any]:
    """As judged, with a line for each label."""
    own = file("objectives", objective)
    return own.judged(totals) | {"labels": own.by_label(totals, labels)}


def evaluate_run(run: Opened) -> dict[str, Any]:
    """All held-out data of a run's recipe, through its newest weights."""
    cfg = run.cfg
    dataset = Dataset.open(
        cfg.data.path, sequence_length=cfg.data.sequence_length, tokenizer_sha256=run.tokenizer_sha256
    )
    check_data(cfg.objective, cfg.data.path, dataset.index)
    task = make_task(cfg, vocabulary(dataset))
    axes = module.axes(file("models", cfg.model).Model, cfg.model)
    with jax.set_mesh(run.devices):
        score = functools.partial(jax.jit(eval_step(task, axes, cfg.eval.draws)), run.params)
        rows = cfg.batch.sequences // cfg.batch.accumulate
        given, judged = given_to(cfg.objective), judged_by(cfg.objective)
        if judged is not None:
            judged = functools.partial(in_detail, cfg.objective, dataset.index.labels)
        result = evaluate(score, dataset, run.devices, sequences=rows, given=given, judged=judged)
    assert result is not None
    return result


SAID = ("loss", "unigram_entropy", "perplexity", "bits_per_byte")


def spoken(result: dict[str, Any], objective: Any) -> str:
    name = getattr(file("objectives", objective), "LOSS", "evaluation loss")
    if "perplexity" not in result:
        numbers = {name.replace("_", " "): value for name, value in result.items() if name != "labels"}
        line = ", ".join(f"{name} {value:.4f}" for name, value in numbers.items())
        return "\n".join([line, *result.get("labels", [])])
    said = (
        f"{name} {result['loss']:.4f} nats, unigram entropy {result['unigram_entropy']:.4f}, "
        f"perplexity {result['perplexity']:,.2f}"
    )
    said += f", {result['bits_per_byte']:.3f} bits a byte" if "bits_per_byte" in result else ""
    more = [name for name in result if name not in SAID]
    return said + "".join(f", {name.replace('_', ' ')} {result[name]:.4f}" for name in more)


def with_vocabulary(cfg: sections.Run, dataset: Dataset) -> sections.Run:
    """The vocabulary comes from the data unless the recipe names one, and so do labels."""
    check_data(cfg.objective, cfg.data.path, dataset.index)
    model = cfg.model
    if getattr(file("objectives", cfg.objective), "READS", "text") == "labels":
        model = classifier.resolved(model, len(dataset.index.labels), dataset.index.labelled)
    if not model.vocab:
        model = dataclasses.replace(model, vocab=dataset.vocab)
    return cfg if model is cfg.model else dataclasses.replace(cfg, model=model)


def vocabulary(dataset: Dataset) -> Vocabulary:
    return Vocabulary(dataset.vocab, dataset.pad, dataset.bos, dataset.eos, dataset.mask)


def place(
    dataset: Dataset,
    mesh: Mesh,
    step: int,
    *,
    split: str,
    sequences: int,
    seed: int,
    ramp: Ramp | None = None,
) -> Batch:
    """The batch at a step, on the devices. Each host reads just the rows that its devices hold. While the
    batch grows, of each `ramp.last` rows in a row the last ones are padding: those of parts that step.py,
    which takes its parts from such rows in turn, leaves out."""
    shape = (sequences, dataset.sequence_length)
    sharding = row_sharding(mesh, shape)
    mine = sharding.addressable_devices_indices_map(shape).values()
    held = [index[0].indices(sequences) for index in mine if index is not None]
    first, last = min(start for start, _, _ in held), max(stop for _, stop, _ in held)
    ramp = ramp or Ramp(1, 1)
    each, now, before = sequences // ramp.last, ramp.parts(step), ramp.before(step)
    packed = dataset.batch(
        step,
        split=split,
        sequences=each * now,
        seed=seed,
        rows=slice(first * now // ramp.last, last * now // ramp.last),
        before=each * before,
    )

    def put(rows: Any) -> jax.Array:
        rows = spread(rows, now, ramp.last)

        def part(index: Any) -> Any:
            start, stop, _ = index[0].indices(sequences)
            return rows[start - first : stop - first, index[1]]

        return jax.make_array_from_callback(shape, sharding, part)

    loss = None if packed.loss is None else put(packed.loss)
    labels = None if packed.labels is None else put(packed.labels)
    return Batch(put(packed.tokens), put(packed.segments), put(packed.positions), loss, labels)


def spread(rows: np.ndarray, now: int, last: int) -> np.ndarray:
    """Rows of which `now` belong together, and zeros after each such group to make it `last`."""
    grouped = rows.reshape(-1, now, *rows.shape[1:])
    return np.pad(grouped, [(0, 0), (0, last - now), (0, 0)]).reshape(-1, *rows.shape[1:])
