"""One update: examples, gradients (in parts if the batch is split), clipping, optimizer, average."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from millrace import depth, execution
from millrace.mesh import constrain
from millrace.module import Array, Axes
from millrace.objective import Batch, Examples, Task, file
from millrace.schedule import Curves
from millrace.state import State

Metrics = dict[str, Array]


@dataclass(frozen=True)
class Update:
    """How gradients become new weights. `optimizer` is the recipe's section."""

    optimizer: Any
    tx: optax.GradientTransformation
    curves: Curves
    accumulate: int = 1


def train_step(task: Task, update: Update, axes: Any) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """The function that takes a state and a batch to the next state; to be jitted with the state donated."""

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        examples = file("objectives", task.objective).prepare(task, batch, key)
        its = replace(task, how=depth.drawn(task.how, task.model, key))
        grads, sums = gradients(its, axes, state.params, split(examples, update.accumulate))
        count = jnp.maximum(sums["count"], 1.0)
        grads = jax.tree.map(lambda g: g / count, grads)
        metrics = {
            "loss": sums["loss"] / count,
            "nll": sums["nll"] / count,
            "grad_norm": optax.tree.norm(grads),
        }
        return apply(update, axes, state, grads, metrics)

    return step


def eval_step(task: Task, axes: Any, draws: int = 1) -> Callable[[Any, Batch, Any], Metrics]:
    """Sums over one batch, weights untouched. `first` is the number of its first row in the split: each row
    draws by its own number (which tokens to mask), so that the size of the batch changes nothing. Each draws
    so often, and all the draws lie evenly over whatever the objective varies between them."""
    objective = file("objectives", task.objective)
    placed = getattr(objective, "prepare_evaluation", None)

    def step(params: Any, batch: Batch, first: Any) -> Metrics:
        def once(draw: Any) -> Metrics:
            def alone(row: Batch, number: Array) -> Examples:
                single = jax.tree.map(lambda x: x[None], row)
                key = jax.random.fold_in(jax.random.key(0), number * draws + draw)
                if placed is None:
                    examples = objective.prepare(task, single, key)
                else:
                    examples = placed(task, single, key, (draw + spread(number)[None]) / draws)
                return jax.tree.map(lambda x: x[0], examples)

            examples = jax.vmap(alone)(batch, first + jnp.arange(batch.tokens.shape[0]))
            return _sums(task, axes, params, examples)[1]

        if draws == 1:
            return once(0)
        sums = jax.lax.scan(lambda _, draw: (None, once(draw)), None, jnp.arange(draws))[1]
        return jax.tree.map(lambda each: each.sum(axis=0), sums)

    return step


def spread(number: Array) -> Array:
    """A place from 0 up to 1 for each number, such that those of numbers in a row lie evenly: the fractions
    of its multiples of the golden ratio."""
    return (jnp.asarray(number, jnp.uint32) * jnp.uint32(2654435769) >> 8) / jnp.float32(2**24)


def split(examples: Examples, parts: int) -> Examples:
    """Adds a leading axis of `parts`. Part i takes every parts-th row, so each device splits its own rows."""

    def one(x: Array) -> Array:
        rows = x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
        return constrain(rows, None, "batch", "sequence")

    return jax.tree.map(one, examples)


def gradients(task: Task, axes: Any, params: Any, parts: Examples) -> tuple[Any, Metrics]:
    """Sums of gradients and losses over all parts, one part in memory at a time. Sums, not means: parts that
    hold fewer tokens must weigh less, or the update would differ from that of the whole batch."""
    differentiate = jax.grad(lambda params, examples: _sums(task, axes, params, examples), has_aux=True)
    if jax.tree.leaves(parts)[0].shape[0] == 1:
        return differentiate(params, jax.tree.map(lambda x: x[0], parts))

    def add(total: Any, examples: Examples) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, differentiate(params, examples)), None

    shapes = jax.eval_shape(differentiate, params, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.scan(add, zeros, parts)[0]


def apply(update: Update, axes: Any, state: State, grads: Any, metrics: Metrics) -> tuple[State, Metrics]:
    cfg, norm = update.optimizer, metrics["grad_norm"]
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
    if cfg.clip is not None:
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, cfg.clip / (norm + 1e-6)), grads)
    direction, optimizer = update.tx.update(grads, state.optimizer, state.params)
    lr = cfg.learning_rate * update.curves.learning_rate(state.step)
    decay = cfg.weight_decay * update.curves.weight_decay(state.step)

    def move(axes: Axes, w: Array, d: Array) -> Array:
        return w - lr * (d + decay * w if axes.is_matrix else d)

    params = jax.tree.map(move, axes, state.params, direction, is_leaf=_is_axes)
    ema = state.ema
    if ema is not None:
        ema = jax.tree.map(lambda mean, w: cfg.ema * mean + (1 - cfg.ema) * w, ema, params)

    def keep(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

    streak = jnp.where(finite, 0, state.streak + 1)
    skipped = state.skipped + ~finite
    metrics = metrics | {"learning_rate": lr, "skipped": skipped, "streak": streak}
    new = State(
        step=state.step + 1,
        params=keep(params, state.params),
        optimizer=keep(optimizer, state.optimizer),
        ema=keep(ema, state.ema),
        key=state.key,
        skipped=skipped,
        streak=streak,
    )
    return new, metrics


def _sums(task: Task, axes: Any, params: Any, examples: Examples) -> tuple[Array, Metrics]:
    model = execution.cast(params, axes, task.how)
    totals = file("objectives", task.objective).loss(task, model, examples)
    counts = examples.weights if examples.counts is None else examples.counts
    return totals.loss, {"loss": totals.loss, "nll": totals.nll, "count": counts.sum()}


def _is_axes(node: Any) -> bool:
    return isinstance(node, Axes)
