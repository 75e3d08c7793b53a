"""From a recipe to what a step is made of: mesh, optimizer, state, the program to be compiled. What `train`
runs and `plan` compiles for slices that are not there."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from headrace import model_wrappers
from headrace.checkpoint import state
from headrace.checkpoint.state import State
from headrace.config import run_length, sections
from headrace.errors import UserError
from headrace.nn import module, sharding
from headrace.nn.compile import INIT_OPTIONS, check_offload
from headrace.objectives import Batch, TrainTask, update_phases
from headrace.optim import load_optimizer
from headrace.schedules import load_schedule
from headrace.training import loss_spikes, step


def make_mesh(cfg: sections.TrainRecipe, devices: Sequence[Any] | None = None) -> Mesh:
    """Lays out these devices, all there are by default."""
    sizes = mesh_sizes(cfg, jax.device_count() if devices is None else len(devices))
    try:
        return sharding.make_mesh(sizes, devices)
    except ValueError as error:
        raise UserError(f"mesh: {error}") from None


def mesh_sizes(cfg: sections.TrainRecipe, devices: int, slices: int = 1) -> dict[str, int]:
    """The mesh over so many devices, in so many slices, which `data` tells apart. What an axis splits must
    divide by it: a batch that does not would be computed by every device again, in silence."""
    try:
        sizes = sharding.resolve_sizes(dataclasses.asdict(cfg.mesh), devices)
    except ValueError as error:
        raise UserError(f"mesh: {error}") from None
    if sizes["data"] % slices:
        raise UserError(
            f"mesh.data: found {sizes['data']}, expected a multiple of {slices}, since it goes over the "
            f"{slices} slices; set mesh.data={slices}"
        )
    rows = cfg.batch.sequences // cfg.batch.microbatches
    over = math.prod(sizes[axis] for axis in sections.SPLIT_ROWS)
    if rows % over:
        whole, parts = cfg.batch.sequences, cfg.batch.microbatches
        fewer = [count for count in range(1, parts + 1) if whole % (count * over) == 0]
        wanted = f"batch.microbatches={fewer[-1]}" if fewer else f"batch.sequences to a multiple of {over}"
        raise UserError(
            f"batch.sequences: {rows} rows at a time cannot be shared by the {over} devices of mesh.data x "
            f"mesh.fsdp x mesh.expert ({whole} rows a step, batch.microbatches={parts}); set {wanted}, or "
            "change the mesh"
        )
    if cfg.data.sequence_length % sizes["context"]:
        raise UserError(f"mesh.context: {sizes['context']} does not divide data.sequence_length")
    return sizes


def make_update(cfg: sections.TrainRecipe, task: TrainTask) -> step.OptimizerStep:
    axes = module.axes(task.family.Model, task.model)
    whole = dataclasses.replace(cfg.schedule, **run_length.durations(cfg))
    curves = load_schedule(cfg.schedule).make(whole)
    still = frozen_names(cfg, axes)
    tx = make_optimizer(cfg.optimizer, axes, still)
    ramp = run_length.ramp(cfg) if cfg.batch.ramp_from else None
    watched = tuple(loss_spikes.names(update_phases(task)))
    return step.OptimizerStep(cfg.optimizer, tx, curves, cfg.batch.microbatches, ramp, still, watched)


def frozen_names(cfg: sections.TrainRecipe, axes: Any) -> frozenset[str]:
    """The weights that the recipe lets stay as they are."""
    every = dict(module.named_leaves(axes))
    still = frozenset(name for name, its in every.items() if its.frozen)
    if cfg.freeze is None:
        return still
    found = module.select_weights("freeze", cfg.freeze, every) | still
    if not any(jax.tree.leaves(module.trainable_mask(axes, found))):
        raise UserError(f"freeze: found {cfg.freeze}, expected some weight to be left to train")
    return found


def make_optimizer(
    optimizer: Any, axes: Any, frozen: frozenset[str] = frozenset()
) -> optax.GradientTransformation:
    """The recipe's optimizer for the weights that gradients move; it keeps nothing of the others."""
    trains = module.trainable_mask(axes, frozen)
    if all(jax.tree.leaves(trains)):
        return load_optimizer(optimizer).make(optimizer, axes)
    theirs = jax.tree.map(lambda trains, its: its if trains else optax.MaskedNode(), trains, axes)
    # A function, since a model can be called and optax would call it in place of one.
    return optax.masked(load_optimizer(optimizer).make(optimizer, theirs), lambda params: trains)


def make_state(
    cfg: sections.TrainRecipe,
    task: TrainTask,
    update: step.OptimizerStep,
    mesh: Mesh,
    *,
    has_init: bool = False,
) -> tuple[State, Callable[[], State]]:
    """The state as shapes with shardings, and the function that makes it afresh on the devices. What a frozen
    model will be `replaced` by is not drawn: it would take more memory than training does."""
    family = task.family
    axes = module.axes(family.Model, task.model)

    def make_train_state(params: Any) -> State:
        history = loss_spikes.empty_history(len(update.guarded_metrics))
        return state.init_state(
            params, update.tx, seed=cfg.seed, ema=cfg.optimizer.ema_decay > 0, history=history
        )

    def init_state() -> State:
        params = module.init(family.Model, task.model, jax.random.key(cfg.seed))
        return make_train_state(model_wrappers.drop_frozen_init(task.model, params) if has_init else params)

    abstract = jax.eval_shape(init_state)
    homes = state.state_shardings(abstract, axes, mesh)
    abstract = jax.tree.map(
        lambda leaf, home: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=home), abstract, homes
    )
    options = INIT_OPTIONS.get(jax.default_backend())
    on_host = family.init_on_host
    if on_host is None:
        return abstract, jax.jit(init_state, out_shardings=homes, compiler_options=options)

    def init_on_host() -> State:
        """Weights that no device can draw: each takes its part of what the host has."""
        put = lambda w, home: jax.make_array_from_callback(w.shape, home, lambda index: w[index])
        drawn = on_host(task.model, jax.random.key(cfg.seed))
        params = jax.tree.map(put, drawn, homes.params)
        return jax.jit(make_train_state, out_shardings=homes, donate_argnums=0, compiler_options=options)(
            params
        )

    return abstract, init_on_host


def lower_step(
    cfg: sections.TrainRecipe,
    train_step: Callable[..., Any],
    abstract: State,
    mesh: Mesh,
    *,
    has_loss_mask: bool = False,
    has_labels: bool = False,
) -> jax.stages.Lowered:
    """One program to be compiled, the state donated: new weights take the place of the old. `has_loss` says
    that batches mark the tokens to be learnt, `has_labels` that some have labels."""
    if cfg.compute.remat == "offload":
        check_offload(mesh)
    shape = (cfg.batch.sequences, cfg.data.sequence_length)
    rows: Any = jax.ShapeDtypeStruct(shape, "int32", sharding=sharding.row_sharding(mesh, shape))
    loss: Any = jax.ShapeDtypeStruct(shape, "bool", sharding=rows.sharding) if has_loss_mask else None
    homes = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    jitted = jax.jit(train_step, donate_argnums=0, out_shardings=(homes, None))
    return jitted.lower(abstract, Batch(rows, rows, rows, loss, rows if has_labels else None))
