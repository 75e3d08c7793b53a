"""One update: examples, gradients (in parts if the batch is split), clipping, optimizer, average. Most
objectives take one turn at it; where there are several, the weights of a turn see those before it updated."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from millrace import execution, module
from millrace.errors import UserError
from millrace.mesh import constrain
from millrace.module import Array, Axes, dotted
from millrace.objective import Batch, Examples, Task, Turn, file, turns
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
    together = turns(task)
    if update.ramp is not None and len(together) > 1:
        raise UserError("batch.ramp: expected nothing, since this objective takes its parts more than once")

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        parts: Any = split(file("objectives", task.objective).prepare(task, batch, key), update.accumulate)
        params, metrics = state.params, Metrics()
        still, trains = frozen(params, update.frozen), module.trained(axes, update.frozen)
        grads = jax.tree.map(lambda stays, w: None if stays else jnp.zeros_like(w), still, params)
        growing = None if update.ramp is None else growth(update.ramp, state.step)
        for turn in together:
            own, sums, parts = turn_gradients(
                task, turn, axes, params, parts, stay=update.frozen, first=growing
            )
            count = jnp.maximum(sums.pop("count"), 1.0)
            own = jax.tree.map(lambda g, count=count: g / count, own)
            norm = optax.tree.norm(jax.tree.map(_if, turn.take(trains), own))
            metrics |= {turn.name + name: total / count for name, total in sums.items()}
            metrics |= {turn.name + "grad_norm": norm}
            small = clipped(update.optimizer.clip, own, norm)
            # What a rule moves is no gradient to be clipped.
            own = jax.tree.map(lambda is_trained, c, g: c if is_trained else g, turn.take(trains), small, own)
            grads = turn.put(grads, own)
            if turn is not together[-1]:  # the next sees what becomes of these; of its own it is not computed
                new = apply(update, axes, state, grads, metrics, model=task.model)[0].params
                params = turn.put(params, turn.take(new))
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

        examples: Any = jax.vmap(alone)(batch, first + jnp.arange(batch.tokens.shape[0]))
        model, sums = execution.cast(params, axes, task.how), Metrics()
        for turn in turns(task):
            told = turn.loss(task, model, examples)
            examples = told.following
            sums |= {turn.name + name: total for name, total in told.sums.items()}
        return sums

    return step


def split(examples: Examples, parts: int) -> Examples:
    """Adds a leading axis of `parts`. Part i takes every parts-th row, so each device splits its own rows."""

    def one(x: Array) -> Array:
        rows = x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
        return constrain(rows, None, "batch", "sequence")

    return jax.tree.map(one, examples)


def gradients(task: Task, axes: Any, params: Any, parts: Examples) -> tuple[Any, Metrics]:
    """Sums of gradients and losses of an objective that takes one turn."""
    (turn,) = turns(task)
    return turn_gradients(task, turn, axes, params, parts)[:2]


def turn_gradients(
    task: Task,
    turn: Turn,
    axes: Any,
    params: Any,
    parts: Any,
    *,
    stay: frozenset[str] = frozenset(),
    first: Array | None = None,
) -> tuple[Any, Metrics, Any]:
    """Sums of gradients and losses over all parts, one part in memory at a time, and the parts for the next
    turn. Sums, not means: parts that hold fewer tokens must weigh less, or the update would differ from that
    of the whole batch. The weights named by `stay` have None. With `first`, only so many parts count."""
    still, whole = turn.take(frozen(params, stay)), turn.take(params)
    own = jax.tree.map(lambda stays, w: None if stays else w, still, whole)

    def loss(own: Any, examples: Any) -> tuple[Array, Any]:
        both = jax.tree.map(lambda stays, w, moved: w if stays else moved, still, whole, own)
        told = turn.loss(task, execution.cast(turn.put(params, both), axes, task.how), examples)
        return told.loss, (told.sums, told.following)

    differentiate = jax.grad(loss, has_aux=True)
    if jax.tree.leaves(parts)[0].shape[0] == 1:
        grads, (sums, following) = differentiate(own, jax.tree.map(lambda x: x[0], parts))
        return grads, sums, jax.tree.map(lambda x: x[None], following)

    def add(total: Any, examples: Any) -> tuple[Any, Any]:
        grads, (sums, following) = differentiate(own, examples)
        return jax.tree.map(jnp.add, total, (grads, sums)), following

    shapes = jax.eval_shape(differentiate, own, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (shapes[0], shapes[1][0]))
    if first is None:
        (grads, sums), following = jax.lax.scan(add, zeros, parts)
        return grads, sums, following
    count = jax.tree.leaves(parts)[0].shape[0]
    with jax.named_scope(f"at_most_{count}_times"):  # by which `plan` knows it
        one = lambda n: jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, n, keepdims=False), parts)
        grads, sums = jax.lax.fori_loop(0, first, lambda n, total: add(total, one(n))[0], zeros)
    return grads, sums, None


def growth(ramp: Ramp, step: Array) -> Array:
    """How many parts the batch has at a step."""
    return jnp.minimum(ramp.first + step // ramp.each, ramp.last)


def frozen(params: Any, names: frozenset[str]) -> Any:
    """For every weight, whether it is among these."""
    return jax.tree_util.tree_map_with_path(lambda path, w: dotted(path) in names, params)


def clipped(clip: float | None, grads: Any, norm: Array) -> Any:
    if clip is None:
        return grads
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, clip / (norm + 1e-6)), grads)


def apply(
    update: Update, axes: Any, state: State, grads: Any, metrics: Metrics, *, model: Any = None
) -> tuple[State, Metrics]:
    """`model` is the section that weights with a rule of their own go by."""
    cfg = update.optimizer
    watched = [value for name, value in metrics.items() if name.endswith(("loss", "grad_norm"))]
    finite = jnp.isfinite(jnp.stack(watched)).all()
    direction, optimizer = update.tx.update(grads, state.optimizer, state.params)
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


def _if(wanted: bool, leaf: Any) -> Any:
    return leaf if wanted else None


def _is_axes(node: Any) -> bool:
    return isinstance(node, Axes)
