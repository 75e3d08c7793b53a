"""One update: examples, gradients (in parts if the batch is split), clipping, optimizer, average."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from millrace import execution, module
from millrace.mesh import constrain
from millrace.module import Array, Axes, dotted
from millrace.objective import Batch, Examples, Task, file
from millrace.schedule import Curves, Ramp
from millrace.state import State

Metrics = dict[str, Array]


@dataclass(frozen=True)
class Update:
    """How gradients become new weights. `optimizer` is the recipe's section."""

    optimizer: Any
    tx: optax.GradientTransformation
    curves: Curves
    accumulate: int = 1
    ramp: Ramp | None = None  # by which the batch grows to that
    frozen: frozenset[str] = frozenset()  # weights that stay as they are


def train_step(task: Task, update: Update, axes: Any) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """The function that takes a state and a batch to the next state; to be jitted with the state donated."""

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        examples = file("objectives", task.objective).prepare(task, batch, key)
        parts = split(examples, update.accumulate)
        growing = None if update.ramp is None else growth(update.ramp, state.step)
        grads, sums = gradients(task, axes, state.params, parts, frozen=update.frozen, first=growing)
        count = jnp.maximum(sums["count"], 1.0)
        grads = jax.tree.map(lambda g: g / count, grads)
        metrics = {
            "loss": sums["loss"] / count,
            "nll": sums["nll"] / count,
            "grad_norm": optax.tree.norm(jax.tree.map(_if, module.trained(axes, update.frozen), grads)),
        }
        by_name = dict(module.named(grads))  # of those that are not frozen
        ruled = {name: its.rule for name, its in module.named(axes) if its.rule and name in by_name}
        metrics |= {rule.name: rule.measure(by_name[name]) for name, rule in ruled.items()}
        return apply(update, axes, state, grads, metrics, model=task.model)

    return step


def eval_step(task: Task, axes: Any) -> Callable[[Any, Batch, Any], Metrics]:
    """Sums over one batch, weights untouched. `first` is the number of its first row in the split: each row
    draws by its own number (which tokens to mask), so that the size of the batch changes nothing."""
    prepare = file("objectives", task.objective).prepare

    def step(params: Any, batch: Batch, first: Any) -> Metrics:
        def alone(row: Batch, number: Array) -> Examples:
            single = jax.tree.map(lambda x: x[None], row)
            examples = prepare(task, single, jax.random.fold_in(jax.random.key(0), number))
            return jax.tree.map(lambda x: x[0], examples)

        examples = jax.vmap(alone)(batch, first + jnp.arange(batch.tokens.shape[0]))
        return _sums(task, axes, params, examples)[1]

    return step


def split(examples: Examples, parts: int) -> Examples:
    """Adds a leading axis of `parts`. Part i takes every parts-th row, so each device splits its own rows."""

    def one(x: Array) -> Array:
        rows = x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
        return constrain(rows, None, "batch", "sequence")

    return jax.tree.map(one, examples)


def gradients(
    task: Task,
    axes: Any,
    params: Any,
    parts: Examples,
    *,
    frozen: frozenset[str] = frozenset(),
    first: Array | None = None,
) -> tuple[Any, Metrics]:
    """Sums of gradients and losses over all parts, one part in memory at a time. Sums, not means: parts that
    hold fewer tokens must weigh less, or the update would differ from that of the whole batch. Frozen weights
    have None. With `first`, only so many of the parts count."""
    stay = jax.tree_util.tree_map_with_path(lambda path, w: dotted(path) in frozen, params)
    fixed, params = (jax.tree.map(lambda s, w, of=of: w if s == of else None, stay, params) for of in (1, 0))

    def whole(params: Any, examples: Examples) -> tuple[Array, Metrics]:
        both = jax.tree.map(lambda s, old, w: old if s else w, stay, fixed, params)
        return _sums(task, axes, both, examples)

    differentiate = jax.grad(whole, has_aux=True)
    if jax.tree.leaves(parts)[0].shape[0] == 1:
        return differentiate(params, jax.tree.map(lambda x: x[0], parts))

    def add(total: Any, examples: Examples) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, differentiate(params, examples)), None

    shapes = jax.eval_shape(differentiate, params, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    if first is None:
        return jax.lax.scan(add, zeros, parts)[0]
    count = jax.tree.leaves(parts)[0].shape[0]
    with jax.named_scope(f"at_most_{count}_times"):  # by which `plan` knows it
        one = lambda n: jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, n, keepdims=False), parts)
        return jax.lax.fori_loop(0, first, lambda n, total: add(total, one(n))[0], zeros)


def growth(ramp: Ramp, step: Array) -> Array:
    """How many parts the batch has at a step."""
    return jnp.minimum(ramp.first + step // ramp.each, ramp.last)


def apply(
    update: Update, axes: Any, state: State, grads: Any, metrics: Metrics, *, model: Any = None
) -> tuple[State, Metrics]:
    """`model` is the section that weights with a rule of their own go by."""
    cfg, norm = update.optimizer, metrics["grad_norm"]
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(norm)
    clipped = grads
    if cfg.clip is not None:
        clipped = jax.tree.map(lambda g: g * jnp.minimum(1.0, cfg.clip / (norm + 1e-6)), grads)
    direction, optimizer = update.tx.update(clipped, state.optimizer, state.params)
    lr = cfg.learning_rate * update.curves.learning_rate(state.step)
    decay = cfg.weight_decay * update.curves.weight_decay(state.step)

    def move(axes: Axes, w: Array, d: Array | None, g: Array | None) -> Array:
        if d is None or g is None:
            return w
        if axes.rule is not None:
            return axes.rule.move(model, w, g)
        return w - lr * (d + decay * w if axes.is_matrix else d)

    params = jax.tree.map(move, axes, state.params, direction, grads, is_leaf=_is_axes)
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


def _if(wanted: bool, leaf: Any) -> Any:
    return leaf if wanted else None


def _is_axes(node: Any) -> bool:
    return isinstance(node, Axes)
