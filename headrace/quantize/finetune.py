"""Codebooks fitted, indices as they are: those of a layer to what the layer gave before it was rounded
(VPTQ's layer-wise fine-tuning), and those of all layers together to the text (its end-to-end one)."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from headrace.low_precision.cast import cast
from headrace.model_formats.quantized_folder import Linear, with_layer, with_stacks
from headrace.model_formats.vptq import VPTQMatrix
from headrace.nn.module import Array
from headrace.objectives import Batch, TrainTask, load_objective, update_phases
from headrace.quantize.calibrate import CalibrationBatch, Layer

BOOKS = ("centroids", "residual", "outlier_centroids")
JUDGES = 8  # batches


def finetune_layer(
    layer: Layer,
    method: Any,
    found: list[Linear],
    made: dict[str, VPTQMatrix],
    rows: list[tuple[CalibrationBatch, np.ndarray]],
    put: Callable[[np.ndarray], Array],
) -> dict[str, Any]:
    """The matrices with codebooks that make the layer's output, on the texts and inputs of `rows`, more like
    that of the matrices they stand for. The result is taken only if it does, over all rows. Inputs and
    outputs lie in the host's memory, and come to the devices by `put`, a batch at a time."""
    books, matrices = {name: _books(stored) for name, stored in made.items()}, tuple(found)
    state, begun = _rule(method.tune_learning_rate, method.tune_steps).init(books), books
    wanted = [np.asarray(layer.out(layer.params, text, put(x))) for text, x in rows]
    batch = lambda at: (rows[at][0], put(rows[at][1]), put(wanted[at]))
    total = lambda books: sum(
        float(layer_error(matrices, layer, made, books, *batch(at))) for at in range(len(rows))
    )
    for number in range(method.tune_steps):
        moved = step(method, matrices, layer, made, books, state, *batch(number % len(rows)))
        # Waited for, or the batches of many steps would be on the devices at once.
        books, state = jax.block_until_ready(moved)
    books = jax.tree.map(lambda book: book.astype(jnp.float16).astype(jnp.float32), books)
    best = books if total(books) < total(begun) else begun
    return {name: replace(stored, **_halves(best[name])) for name, stored in made.items()}


# Of a layer's matrices and of the model nothing is closed over: one program does for every layer of a kind.
@partial(jax.jit, static_argnames="found")
def layer_error(
    found: tuple[Linear, ...],
    layer: Layer,
    made: Any,
    books: Any,
    text: CalibrationBatch,
    x: Array,
    wanted: Array,
) -> Array:
    """How far the layer's output is from the wanted one, squared, for a token."""
    fitted = {name: replace(stored, **books[name]) for name, stored in made.items()}
    model = with_layer(layer.params, found, fitted)
    apart = (layer.out(model, text, x) - wanted).astype(jnp.float32) * text.counts[..., None]
    return jnp.sum(apart**2) / jnp.maximum(text.counts.sum(), 1.0)


@partial(jax.jit, static_argnames=("method", "found"))
def step(
    method: Any,
    found: tuple[Linear, ...],
    layer: Layer,
    made: Any,
    books: Any,
    state: Any,
    text: CalibrationBatch,
    x: Array,
    wanted: Array,
) -> Any:
    slopes = jax.grad(layer_error, argnums=3)(found, layer, made, books, text, x, wanted)
    moves, state = _rule(method.tune_learning_rate, method.tune_steps).update(slopes, state)
    return optax.apply_updates(books, moves), state


def finetune_all(
    task: TrainTask,
    axes: Any,
    params: Any,
    method: Any,
    found: list[Linear],
    layers: list[dict[str, VPTQMatrix]],
    batch: Callable[[int], Batch],
) -> tuple[list[dict[str, Any]], str]:
    """The matrices of all layers with codebooks that have learnt by the loss of training, a batch a step, and
    what came of it. The result is taken only if the loss on the first batches, from which nothing is learnt,
    is lower."""
    stacks = {
        one.name: jax.tree.map(lambda *w: jnp.stack(w), *(each[one.name] for each in layers)) for one in found
    }
    begun = {name: _books(stack) for name, stack in stacks.items()}
    rule = _rule(method.finetune_learning_rate, method.finetune_steps)

    @jax.jit
    def loss(books: Any, params: Any, stacks: Any, batch: Batch, number: Any) -> Array:
        fitted = {name: replace(stack, **books[name]) for name, stack in stacks.items()}
        model = cast(with_stacks(params, found, fitted), axes, task.exec_opts)
        examples: Any = load_objective(task.objective).prepare(
            task, batch, jax.random.fold_in(jax.random.key(0), number)
        )
        total = jnp.zeros(())
        for turn in update_phases(task):
            told = turn.loss(task, model, examples)
            examples, total = told.carry, total + told.loss / jnp.maximum(told.sums["count"], 1.0)
        return total

    @jax.jit
    def learn(books: Any, state: Any, params: Any, stacks: Any, batch: Batch, number: Any) -> Any:
        moves, state = rule.update(jax.grad(loss)(books, params, stacks, batch, number), state)
        return optax.apply_updates(books, moves), state

    books, state = begun, rule.init(begun)
    for number in range(JUDGES, JUDGES + method.finetune_steps):
        books, state = jax.block_until_ready(learn(books, state, params, stacks, batch(number), number))
    books = jax.tree.map(lambda book: book.astype(jnp.float16).astype(jnp.float32), books)
    mean = lambda books: statistics.fmean(
        float(loss(books, params, stacks, batch(number), number)) for number in range(JUDGES)
    )
    before, after = mean(begun), mean(books)
    best = books if after < before else begun
    said = f"loss {before:.4f} to {after:.4f}" + ("" if after < before else ", which is not taken")
    made = {name: replace(stack, **_halves(best[name])) for name, stack in stacks.items()}
    return [jax.tree.map(lambda w, n=n: np.asarray(w[n]), made) for n in range(len(layers))], said


def _rule(rate: float, steps: int) -> optax.GradientTransformation:
    return optax.adam(optax.linear_schedule(rate, 0.0, steps))


def _books(stored: VPTQMatrix) -> dict[str, Array]:
    found = {name: getattr(stored, name) for name in BOOKS}
    return {name: jnp.asarray(book, jnp.float32) for name, book in found.items() if book is not None}


def _halves(books: dict[str, Array]) -> dict[str, Any]:
    return {name: book.astype(jnp.float16) for name, book in books.items()}
