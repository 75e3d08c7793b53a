"""One update: examples, gradients (in parts if the batch is split), clipping, optimizer, average. Most
objectives take one turn at it; where there are several, the weights of a turn see those before it updated."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from headrace.checkpoint.state import State
from headrace.config.durations import Ramp
from headrace.low_precision.cast import cast, stop_frozen_gradients
from headrace.model_wrappers import recurrent_depth
from headrace.nn import module
from headrace.nn.module import Array, Axes, path_name
from headrace.nn.sharding import constrain
from headrace.objectives import Batch, Examples, TrainTask, UpdatePhase, load_objective, update_phases
from headrace.schedules import Curves
from headrace.training import loss_spikes

Metrics = dict[str, Array]


@dataclass(frozen=True)
class OptimizerStep:
    """How gradients become new weights. `optimizer` is the recipe's section."""

    config: Any
    tx: optax.GradientTransformation
    curves: Curves
    microbatches: int = 1
    ramp: Ramp | None = None  # by which the batch grows to that
    frozen: frozenset[str] = frozenset()  # weights that stay as they are
    guarded_metrics: tuple[str, ...] = ("loss", "grad_norm")  # metrics, as `State.recent` has them


def train_step(
    task: TrainTask, update: OptimizerStep, axes: Any
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """The function that takes a state and a batch to the next state; to be jitted with the state donated."""

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        parts: Any = to_microbatches(
            load_objective(task.objective).prepare(task, batch, key), update.microbatches
        )
        growing = None if update.ramp is None else microbatches_at(update.ramp, state.step)
        its = replace(task, exec_opts=recurrent_depth.sample_rounds(task.exec_opts, task.model, key))
        params, metrics, together = state.params, Metrics(), update_phases(task)
        trains, stay = module.trainable_mask(axes, update.frozen), frozen_mask(params, update.frozen)
        grads = jax.tree.map(lambda still, w: None if still else jnp.zeros_like(w), stay, params)
        for turn in together:
            own, sums, parts = accumulate_phase_gradients(
                its, turn, axes, params, parts, is_frozen=stay, active=growing
            )
            count = jnp.maximum(sums.pop("count"), 1.0)
            own = jax.tree.map(lambda g, count=count: g / count, own)
            own, norm = clip_by_global_norm(update.config.max_grad_norm, turn.select(trains), own)
            metrics |= {turn.name + name: total / count for name, total in sums.items()}
            metrics |= {turn.name + "grad_norm": norm}
            grads = turn.merge(grads, own)
            if turn is not together[-1]:  # the next sees what becomes of these; of its own it is not computed
                new = apply_update(update, axes, state, grads, metrics, model=task.model)[0].params
                params = turn.merge(params, turn.select(new))
        by_name = dict(module.named_leaves(grads))  # of those that are not frozen
        ruled = {
            name: its.update_rule
            for name, its in module.named_leaves(axes)
            if its.update_rule and name in by_name
        }
        metrics |= {rule.name: rule.measure(by_name[name]) for name, rule in ruled.items()}
        return apply_update(update, axes, state, grads, metrics, model=task.model)

    return step


def eval_step(task: TrainTask, axes: Any, draws: int = 1) -> Callable[[Any, Batch, Any], Metrics]:
    """Sums over one batch, weights untouched. `first` is the number of its first row in the split: each row
    draws by its own number (which tokens to mask), so that the size of the batch changes nothing. Each draws
    so often, and all the draws lie evenly over whatever the objective varies between them."""
    objective = load_objective(task.objective)
    placed = objective.prepare_evaluation

    def step(params: Any, batch: Batch, first: Any) -> Metrics:
        model = cast(params, axes, task.exec_opts)

        def once(draw: Any) -> Metrics:
            def alone(row: Batch, number: Array) -> Examples:
                single = jax.tree.map(lambda x: x[None], row)
                key = jax.random.fold_in(jax.random.key(0), number * draws + draw)
                if placed is None:
                    examples = objective.prepare(task, single, key)
                else:
                    examples = placed(task, single, key, (draw + low_discrepancy(number)[None]) / draws)
                return jax.tree.map(lambda x: x[0], examples)

            examples: Any = jax.vmap(alone)(batch, first + jnp.arange(batch.tokens.shape[0]))
            sums = Metrics()
            for turn in update_phases(task):
                told = turn.loss(task, model, examples)
                examples = told.carry
                sums |= {turn.name + name: total for name, total in (told.sums | told.eval_sums).items()}
            return sums

        if draws == 1:
            return once(0)
        sums = jax.lax.scan(lambda _, draw: (None, once(draw)), None, jnp.arange(draws))[1]
        return jax.tree.map(lambda each: each.sum(axis=0), sums)

    return step


def low_discrepancy(number: Array) -> Array:
    """A place from 0 up to 1 for each number, such that those of numbers in a row lie evenly: the fractions
    of its multiples of the golden ratio."""
    return (jnp.asarray(number, jnp.uint32) * jnp.uint32(2654435769) >> 8) / jnp.float32(2**24)


def to_microbatches(examples: Examples, parts: int) -> Examples:
    """Adds a leading axis of `parts`. Part i takes every parts-th row, so each device splits its own rows."""

    def one(x: Array) -> Array:
        rows = x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
        return constrain(rows, None, "batch", "sequence")

    return jax.tree.map(one, examples)


def accumulate_gradients(task: TrainTask, axes: Any, params: Any, parts: Examples) -> tuple[Any, Metrics]:
    """Sums of gradients and losses of an objective that takes one turn."""
    (turn,) = update_phases(task)
    return accumulate_phase_gradients(
        task, turn, axes, params, parts, is_frozen=frozen_mask(params, frozenset())
    )[:2]


def accumulate_phase_gradients(
    task: TrainTask,
    phase: UpdatePhase,
    axes: Any,
    params: Any,
    microbatches: Any,
    *,
    is_frozen: Any,
    active: Array | None = None,
) -> tuple[Any, Metrics, Any]:
    """Sums of gradients and losses over all parts, one part in memory at a time, and the parts for the next
    turn. Sums, not means: parts that hold fewer tokens must weigh less, or the update would differ from that
    of the whole batch. Weights are cast once for all parts; each part's gradients are summed as the weights
    are kept, not as they are cast. Weights that stay have None. With `first`, only so many of the parts
    count."""
    mine, still = phase.select(params), phase.select(is_frozen)
    fixed, free = (jax.tree.map(lambda s, w, of=of: w if s == of else None, still, mine) for of in (1, 0))
    others = phase.merge(jax.tree.map(lambda _: True, is_frozen), still)

    def made(free: Any) -> Any:
        own = jax.tree.map(lambda s, old, w: old if s else w, still, fixed, free)
        return cast(phase.merge(params, own), axes, task.exec_opts)

    def loss(model: Any, examples: Any) -> tuple[Array, Any]:
        told = phase.loss(task, stop_frozen_gradients(model, axes, others), examples)
        return told.loss, (told.sums, told.carry)

    model, pull = jax.vjp(made, free)

    def differentiate(examples: Any) -> tuple[Any, Any]:
        grads, told = jax.grad(loss, has_aux=True, allow_int=True)(model, examples)
        return pull(grads)[0], told

    count = jax.tree.leaves(microbatches)[0].shape[0]
    if count == 1:
        grads, (sums, following) = differentiate(jax.tree.map(lambda x: x[0], microbatches))
        return grads, sums, jax.tree.map(lambda x: x[None], following)

    def add(total: Any, examples: Any) -> tuple[Any, Any]:
        grads, (sums, following) = differentiate(examples)
        return jax.tree.map(jnp.add, total, (grads, sums)), following

    shapes = jax.eval_shape(differentiate, jax.tree.map(lambda x: x[0], microbatches))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (shapes[0], shapes[1][0]))
    if active is None:
        (grads, sums), following = jax.lax.scan(add, zeros, microbatches)
        return grads, sums, following

    def one(n: Array, carry: Any) -> Any:
        part = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, n, keepdims=False), microbatches)
        total, made = add(carry[0], part)
        place = lambda all, new: jax.lax.dynamic_update_index_in_dim(all, new, n, 0)
        return total, jax.tree.map(place, carry[1], made)

    later = jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), shapes[1][1])
    with jax.named_scope(f"at_most_{count}_times"):  # by which `plan` knows it
        (grads, sums), following = jax.lax.fori_loop(0, active, one, (zeros, later))
    return grads, sums, following


def microbatches_at(ramp: Ramp, step: Array) -> Array:
    """How many parts the batch has at a step."""
    return jnp.minimum(ramp.first + step // ramp.each, ramp.last)


def frozen_mask(params: Any, names: frozenset[str]) -> Any:
    """For every weight, whether it is one of these."""
    return jax.tree_util.tree_map_with_path(lambda path, w: path_name(path) in names, params)


def clip_by_global_norm(clip: float | None, trains: Any, grads: Any) -> tuple[Any, Array]:
    """Gradients of the weights that they move, at most so long together, and how long they are; what moves
    others is left as it is."""
    norm = optax.tree.norm(jax.tree.map(lambda moves, g: g if moves else None, trains, grads))
    if clip is None:
        return grads, norm
    share = jnp.minimum(1.0, clip / (norm + 1e-6))
    return jax.tree.map(lambda moves, g: g * share if moves else g, trains, grads), norm


def apply_update(
    update: OptimizerStep, axes: Any, state: State, grads: Any, metrics: Metrics, *, model: Any = None
) -> tuple[State, Metrics]:
    """`model` is the section that weights with a rule of their own go by."""
    cfg = update.config
    watched = {name: value for name, value in metrics.items() if name.endswith(("loss", "grad_norm"))}
    usable = jnp.isfinite(jnp.stack(list(watched.values()))).all()
    now = jnp.stack([jnp.float32(watched.get(name, jnp.nan)) for name in update.guarded_metrics])
    if cfg.spike_threshold:
        usable &= ~loss_spikes.is_spike(state.recent, now, cfg.spike_threshold)
    direction, optimizer = update.tx.update(grads, state.optimizer, state.params)
    lr = cfg.learning_rate * update.curves.learning_rate(state.step)
    decay = cfg.weight_decay * update.curves.weight_decay(state.step)

    def move(axes: Axes, w: Array, d: Array | None, g: Array | None) -> Array:
        if d is None or g is None:
            return w
        if axes.update_rule is not None:
            return axes.update_rule.move(model, w, g)
        return w - axes.lr_scale * lr * (d + decay * w if axes.is_matrix else d)

    params = jax.tree.map(move, axes, state.params, direction, grads, is_leaf=_is_axes)
    ema = state.ema
    if ema is not None:
        ema = jax.tree.map(lambda mean, w: cfg.ema_decay * mean + (1 - cfg.ema_decay) * w, ema, params)

    def keep(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda n, o: jnp.where(usable, n, o), new, old)

    recent = loss_spikes.record(state.recent, state.step, now, ~usable)
    skipped = state.skipped + ~usable
    metrics = (
        metrics | {"learning_rate": lr, "skipped": skipped} | loss_spikes.skip_counts(recent, state.step)
    )
    new = State(
        step=state.step + 1,
        params=keep(params, state.params),
        optimizer=keep(optimizer, state.optimizer),
        ema=keep(ema, state.ema),
        key=state.key,
        skipped=skipped,
        recent=recent,
    )
    return new, metrics


def _is_axes(node: Any) -> bool:
    return isinstance(node, Axes)
