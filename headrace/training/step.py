"""The training step that XLA compiles: gradients over microbatches, clipping, optimizer, weight average.

Most objectives update all weights in one phase. Replaced-token detection needs two: first the generator is
updated, then the discriminator is trained on top of the generator's new weights."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import optax

from headrace.checkpoint.state import State
from headrace.config.durations import Ramp
from headrace.config.sections import OptimizerKeys
from headrace.low_precision.cast import cast, stop_frozen_gradients
from headrace.model_wrappers import recurrent_depth
from headrace.models import ModelConfig
from headrace.nn import module
from headrace.nn.module import Array, Axes, PyTree
from headrace.nn.sharding import constrain
from headrace.objectives import (
    Batch,
    Examples,
    LossOutput,
    TrainTask,
    UpdatePhase,
    load_objective,
    update_phases,
)
from headrace.schedules import Curves
from headrace.training import loss_spikes

Metrics = dict[str, Array]
TrainStep = Callable[[State, Batch], tuple[State, Metrics]]
EvalStep = Callable[[PyTree, Batch, int], Metrics]  # (params, batch, number of its first row) -> sums
# What a loop over microbatches calls: (sums so far, microbatch) -> (sums, microbatch of the next phase)
Accumulate = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]


@dataclass(frozen=True)
class OptimizerStep:
    """The parts that turn gradients into new weights."""

    config: OptimizerKeys  # the recipe's `optimizer` section
    tx: optax.GradientTransformation
    curves: Curves  # multipliers of learning rate and weight decay, by step
    microbatches: int = 1
    ramp: Ramp | None = None  # batch-size ramp: how many of the microbatches a step uses
    frozen: frozenset[str] = frozenset()  # paths of weights that are never updated
    guarded_metrics: tuple[str, ...] = ("loss", "grad_norm")  # checked for spikes, ordered as in State.recent


def make_train_step(task: TrainTask, update: OptimizerStep, axes: PyTree) -> TrainStep:
    """Make the function (state, batch) -> (next state, metrics). Jit it with the state donated."""
    objective, phases = load_objective(task.objective), update_phases(task)

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        # All that is random in a step: masks and the like, and the rounds of recurrent depth.
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        microbatches = to_microbatches(objective.prepare(task, batch, key), update.microbatches)
        active = None if update.ramp is None else microbatches_at(update.ramp, state.step)
        step_task = task
        if task.model.recurrence is not None:
            exec_opts = recurrent_depth.sample_rounds(task.exec_opts, task.model, key)
            step_task = replace(task, exec_opts=exec_opts)

        params, metrics = state.params, Metrics()
        is_frozen = frozen_mask(params, update.frozen)
        is_trained = module.trainable_mask(axes, update.frozen)
        grads = jax.tree.map(lambda f, w: None if f else jnp.zeros_like(w), is_frozen, params)

        # Mean gradients of each phase, clipped. Most objectives have one phase, which trains all weights.
        for phase in phases:
            phase_grads, sums, microbatches = accumulate_phase_gradients(
                step_task, phase, axes, params, microbatches, is_frozen=is_frozen, active=active
            )
            count = jnp.maximum(sums.pop("count"), 1.0)
            phase_grads = jax.tree.map(lambda g, count=count: g / count, phase_grads)
            phase_grads, norm = clip_by_global_norm(
                phase_grads, update.config.max_grad_norm, phase.select(is_trained)
            )
            metrics |= {phase.name + name: total / count for name, total in sums.items()}
            metrics |= {phase.name + "grad_norm": norm}
            grads = phase.merge(grads, phase_grads)
            if phase is not phases[-1]:
                # The next phase reads this phase's new weights. XLA drops the rest of this update.
                updated, _ = apply_update(update, axes, state, grads, metrics, model=task.model)
                params = phase.merge(params, phase.select(updated.params))

        # New weights, unless the loss or the gradient norm is out of bounds.
        metrics |= update_rule_metrics(axes, grads)
        return apply_update(update, axes, state, grads, metrics, model=task.model)

    return step


def to_microbatches(examples: Examples, count: int) -> Examples:
    """Reshape rows [b ...] to [count, b / count, ...]. Microbatch i takes every count-th row, so that each
    device splits its own rows and none has to move."""

    def split(x: Array) -> Array:
        rows = x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)
        return constrain(rows, None, "batch", "sequence")

    return jax.tree.map(split, examples)


def microbatches_at(ramp: Ramp, step: Array) -> Array:
    """Compute how many microbatches a batch-size ramp uses at `step`."""
    return jnp.minimum(ramp.first + step // ramp.each, ramp.last)


def frozen_mask(params: PyTree, frozen: frozenset[str]) -> PyTree:
    """Make a tree like `params`: True where the weight's path is in `frozen`."""
    return jax.tree_util.tree_map_with_path(lambda path, w: module.path_name(path) in frozen, params)


def accumulate_phase_gradients(
    task: TrainTask,
    phase: UpdatePhase,
    axes: PyTree,
    params: PyTree,
    microbatches: PyTree,
    *,
    is_frozen: PyTree,
    active: Array | None = None,
) -> tuple[PyTree, Metrics, PyTree]:
    """Sum one phase's gradients and metrics over the microbatches, one of them in memory at a time.

    Returns (grads, sums, microbatches for the next phase). Gradients of frozen weights are None. `active`
    limits the sum to the first microbatches, for a batch-size ramp.

    Sums, not means: a microbatch with fewer targets must weigh less, or the update would differ from that of
    the undivided batch. Weights are cast once, before the loop; gradients are summed in the dtype that the
    weights are stored in, not the one they are cast to."""
    phase_params, phase_frozen = phase.select(params), phase.select(is_frozen)
    trainable = jax.tree.map(lambda f, w: None if f else w, phase_frozen, phase_params)
    # Weights of other phases get no gradient either.
    no_gradient = phase.merge(jax.tree.map(lambda _: True, is_frozen), phase_frozen)

    def cast_with(trainable: PyTree) -> PyTree:
        merged = jax.tree.map(lambda f, w, t: w if f else t, phase_frozen, phase_params, trainable)
        return cast(phase.merge(params, merged), axes, task.exec_opts)

    model, cast_gradients = jax.vjp(cast_with, trainable)
    loss_gradients = functools.partial(
        jax.grad(phase_loss, has_aux=True, allow_int=True), model, task, phase, axes, no_gradient
    )

    def accumulate(total: PyTree, examples: PyTree) -> tuple[PyTree, PyTree]:
        grads, output = loss_gradients(examples)
        return jax.tree.map(jnp.add, total, (cast_gradients(grads)[0], output.sums)), output.carry

    first = jax.tree.map(lambda x: x[0], microbatches)
    if jax.tree.leaves(microbatches)[0].shape[0] == 1:
        grads, output = loss_gradients(first)
        return cast_gradients(grads)[0], output.sums, jax.tree.map(lambda x: x[None], output.carry)

    _, output = jax.eval_shape(loss_gradients, first)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (trainable, output.sums))
    if active is None:
        (grads, sums), carry = jax.lax.scan(accumulate, zeros, microbatches)
    else:
        (grads, sums), carry = scan_first(active, accumulate, zeros, microbatches)
    return grads, sums, carry


def phase_loss(
    model: PyTree, task: TrainTask, phase: UpdatePhase, axes: PyTree, no_gradient: PyTree, examples: PyTree
) -> tuple[Array, LossOutput]:
    """Compute the loss that is differentiated, and everything else that the phase returns."""
    output = phase.loss(task, stop_frozen_gradients(model, axes, no_gradient), examples)
    return output.loss, output


def scan_first(
    active: Array, accumulate: Accumulate, zeros: PyTree, microbatches: PyTree
) -> tuple[PyTree, PyTree]:
    """Like `jax.lax.scan`, but only over the first `active` microbatches, a number that changes by step. The
    outputs of the others are zeros."""
    count = jax.tree.leaves(microbatches)[0].shape[0]
    take = lambda i: jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), microbatches)
    _, output = jax.eval_shape(lambda: accumulate(zeros, take(0)))
    outputs = jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), output)

    def run_one(i: Array, state: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        total, outputs = state
        total, output = accumulate(total, take(i))
        put = lambda all, new: jax.lax.dynamic_update_index_in_dim(all, new, i, 0)
        return total, jax.tree.map(put, outputs, output)

    with jax.named_scope(f"at_most_{count}_times"):  # `plan.timing` reads the trip count from this name
        return jax.lax.fori_loop(0, active, run_one, (zeros, outputs))


def accumulate_gradients(
    task: TrainTask, axes: PyTree, params: PyTree, microbatches: PyTree
) -> tuple[PyTree, Metrics]:
    """Sum gradients and metrics over the microbatches, for an objective with one phase and no frozen
    weights."""
    (phase,) = update_phases(task)
    is_frozen = frozen_mask(params, frozenset())
    return accumulate_phase_gradients(task, phase, axes, params, microbatches, is_frozen=is_frozen)[:2]


def clip_by_global_norm(grads: PyTree, max_norm: float | None, is_trained: PyTree) -> tuple[PyTree, Array]:
    """Scale gradients down to a global norm of `max_norm`. Returns them with their norm before clipping.

    Weights that have an update rule of their own are neither counted nor scaled."""
    norm = optax.tree.norm(jax.tree.map(lambda trained, g: g if trained else None, is_trained, grads))
    if max_norm is None:
        return grads, norm
    scale = jnp.minimum(1.0, max_norm / (norm + 1e-6))
    return jax.tree.map(lambda trained, g: g * scale if trained else g, is_trained, grads), norm


def update_rule_metrics(axes: PyTree, grads: PyTree) -> Metrics:
    """Measure weights that follow a rule instead of gradients, such as an MoE router's bias."""
    by_name = dict(module.named_leaves(grads))  # without frozen weights, whose gradients are None
    return {
        weight_axes.update_rule.name: weight_axes.update_rule.measure(by_name[name])
        for name, weight_axes in module.named_leaves(axes)
        if weight_axes.update_rule and name in by_name
    }


def apply_update(
    update: OptimizerStep, axes: PyTree, state: State, grads: PyTree, metrics: Metrics, *, model: ModelConfig
) -> tuple[State, Metrics]:
    """Apply the optimizer. If the loss or gradient norm is not finite, or is a spike, no weight changes."""
    cfg = update.config
    guarded = {name: value for name, value in metrics.items() if name.endswith(("loss", "grad_norm"))}
    accept = jnp.isfinite(jnp.stack(list(guarded.values()))).all()
    latest = jnp.stack([jnp.float32(guarded.get(name, jnp.nan)) for name in update.guarded_metrics])
    if cfg.spike_threshold:
        accept &= ~loss_spikes.exceeds_running_median(state.recent, latest, cfg.spike_threshold)

    direction, optimizer = update.tx.update(grads, state.optimizer, state.params)
    learning_rate = cfg.learning_rate * update.curves.learning_rate(state.step)
    weight_decay = cfg.weight_decay * update.curves.weight_decay(state.step)

    def update_weight(axes: Axes, w: Array, d: Array | None, g: Array | None) -> Array:
        if d is None or g is None:  # frozen
            return w
        if axes.update_rule is not None:
            return axes.update_rule.move(model, w, g)
        return w - axes.lr_scale * learning_rate * (d + weight_decay * w if axes.is_matrix else d)

    params = jax.tree.map(update_weight, axes, state.params, direction, grads, is_leaf=_is_axes)
    ema = state.ema
    if ema is not None:
        ema = jax.tree.map(lambda mean, w: cfg.ema_decay * mean + (1 - cfg.ema_decay) * w, ema, params)

    def if_accepted(new: PyTree, old: PyTree) -> PyTree:
        return jax.tree.map(lambda n, o: jnp.where(accept, n, o), new, old)

    history = loss_spikes.record(state.recent, state.step, latest, ~accept)
    skipped = state.skipped + ~accept
    metrics = metrics | {"learning_rate": learning_rate, "skipped": skipped}
    metrics |= loss_spikes.skip_counts(history, state.step)
    next_state = State(
        step=state.step + 1,
        params=if_accepted(params, state.params),
        optimizer=if_accepted(optimizer, state.optimizer),
        ema=if_accepted(ema, state.ema),
        key=state.key,
        skipped=skipped,
        recent=history,
    )
    return next_state, metrics


def make_eval_step(task: TrainTask, axes: PyTree, repeats: int = 1) -> EvalStep:
    """Make the function (params, batch, number of the batch's first row) -> metric sums.

    Rows are masked by their own number in the split, so the result does not depend on the batch size. With
    `repeats` > 1 every row is masked that many times."""

    def step(params: PyTree, batch: Batch, first_row: int) -> Metrics:
        model = cast(params, axes, task.exec_opts)
        if repeats == 1:
            return eval_draw(task, model, batch, first_row, 0, repeats)
        one_draw = lambda _, draw: (None, eval_draw(task, model, batch, first_row, draw, repeats))
        _, sums = jax.lax.scan(one_draw, None, jnp.arange(repeats))
        return jax.tree.map(lambda per_draw: per_draw.sum(axis=0), sums)

    return step


def eval_draw(
    task: TrainTask, model: PyTree, batch: Batch, first_row: int, draw: Array | int, repeats: int
) -> Metrics:
    """Sum the metrics of one batch, under draw number `draw` of each row's random choices."""
    row_numbers = first_row + jnp.arange(batch.tokens.shape[0])
    make_examples = lambda row, row_number: eval_examples(task, row, row_number, draw, repeats)
    examples = jax.vmap(make_examples)(batch, row_numbers)
    sums = Metrics()
    for phase in update_phases(task):
        output = phase.loss(task, model, examples)
        examples = output.carry
        sums |= {phase.name + name: total for name, total in (output.sums | output.eval_sums).items()}
    return sums


def eval_examples(
    task: TrainTask, row: Batch, row_number: Array, draw: Array | int, repeats: int
) -> Examples:
    """Make the examples of one row. Diffusion spreads its noise levels evenly over rows and draws
    (`prepare_evaluation`); the other objectives draw at random, from the row's number."""
    objective = load_objective(task.objective)
    batch_of_one = jax.tree.map(lambda x: x[None], row)
    key = jax.random.fold_in(jax.random.key(0), row_number * repeats + draw)
    if objective.prepare_evaluation is None:
        examples = objective.prepare(task, batch_of_one, key)
    else:
        level = (draw + low_discrepancy(row_number)[None]) / repeats
        examples = objective.prepare_evaluation(task, batch_of_one, key, level)
    return jax.tree.map(lambda x: x[0], examples)


def low_discrepancy(number: Array) -> Array:
    """Map consecutive integers to evenly spread points in [0, 1), by multiples of the golden ratio."""
    return (jnp.asarray(number, jnp.uint32) * jnp.uint32(2654435769) >> 8) / jnp.float32(2**24)


def _is_axes(node: object) -> bool:
    return isinstance(node, Axes)
