"""From a recipe to what a step is made of: mesh, optimizer, state, the program to be compiled. What `train`
runs and `plan` compiles for slices that are not there."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from headrace.config import run_length as lengths, sections
from headrace.model_wrappers import split_weights as matrices
from headrace.nn import sharding as mesh, module
from headrace.training import loss_spikes as spikes, step
from headrace.checkpoint import state
from headrace.errors import UserError
from headrace.nn.stack import INIT_OPTIONS, check_offload
from headrace.objectives import Batch, Task, file, turns
from headrace.checkpoint.state import State


def make_mesh(cfg: sections.Run, devices: Sequence[Any] | None = None) -> Mesh:
    """Lays out these devices, all there are by default."""
    sizes = mesh_sizes(cfg, jax.device_count() if devices is None else len(devices))
    try:
        return mesh.make(sizes, devices)
    except ValueError as error:
        raise UserError(f"mesh: {error}") from None


def mesh_sizes(cfg: sections.Run, devices: int, slices: int = 1) -> dict[str, int]:
    """The mesh over so many devices, in so many slices, which `data` tells apart. What an axis splits must
    divide by it: a batch that does not would be computed by every device again, in silence."""
    try:
        sizes = mesh.resolve(dataclasses.asdict(cfg.mesh), devices)
    except ValueError as error:
        raise UserError(f"mesh: {error}") from None
    if sizes["data"] % slices:
        raise UserError(
            f"mesh.data: found {sizes['data']}, expected a multiple of {slices}, since it goes over the "
            f"{slices} slices; set mesh.data={slices}"
        )
    rows = cfg.batch.sequences // cfg.batch.accumulate
    over = math.prod(sizes[axis] for axis in sections.SPLIT_ROWS)
    if rows % over:
        whole, parts = cfg.batch.sequences, cfg.batch.accumulate
        fewer = [count for count in range(1, parts + 1) if whole % (count * over) == 0]
        wanted = f"batch.accumulate={fewer[-1]}" if fewer else f"batch.sequences to a multiple of {over}"
        raise UserError(
            f"batch.sequences: {rows} rows at a time cannot be shared by the {over} devices of mesh.data x "
            f"mesh.fsdp x mesh.expert ({whole} rows a step, batch.accumulate={parts}); set {wanted}, or "
            "change the mesh"
        )
    if cfg.data.sequence_length % sizes["context"]:
        raise UserError(f"mesh.context: {sizes['context']} does not divide data.sequence_length")
    return sizes


def make_update(cfg: sections.Run, task: Task) -> step.Update:
    axes = module.axes(file("models", task.model).Model, task.model)
    whole = dataclasses.replace(cfg.schedule, **lengths.durations(cfg))
    curves = file("schedules", cfg.schedule).make(whole)
    still = frozen(cfg, axes)
    tx = make_optimizer(cfg.optimizer, axes, still)
    ramp = lengths.ramp(cfg) if cfg.batch.ramp_from else None
    watched = tuple(spikes.names(turns(task)))
    return step.Update(cfg.optimizer, tx, curves, cfg.batch.accumulate, ramp, still, watched)


def frozen(cfg: sections.Run, axes: Any) -> frozenset[str]:
    """The weights that the recipe lets stay as they are."""
    every = dict(module.named(axes))
    still = frozenset(name for name, its in every.items() if its.still)
    if cfg.freeze is None:
        return still
    found = module.matching("freeze", cfg.freeze, every) | still
    if not any(jax.tree.leaves(module.trained(axes, found))):
        raise UserError(f"freeze: found {cfg.freeze}, expected some weight to be left to train")
    return found


def make_optimizer(
    optimizer: Any, axes: Any, frozen: frozenset[str] = frozenset()
) -> optax.GradientTransformation:
    """The recipe's optimizer for the weights that gradients move; it keeps nothing of the others."""
    trains = module.trained(axes, frozen)
    if all(jax.tree.leaves(trains)):
        return file("optim", optimizer).make(optimizer, axes)
    theirs = jax.tree.map(lambda trains, its: its if trains else optax.MaskedNode(), trains, axes)
    # A function, since a model can be called and optax would call it in place of one.
    return optax.masked(file("optim", optimizer).make(optimizer, theirs), lambda params: trains)


def make_state(
    cfg: sections.Run, task: Task, update: step.Update, devices: Mesh, *, replaced: bool = False
) -> tuple[State, Callable[[], State]]:
    """The state as shapes with shardings, and the function that makes it afresh on the devices. What a frozen
    model will be `replaced` by is not drawn: it would take more memory than training does."""
    family = file("models", task.model)
    axes = module.axes(family.Model, task.model)

    def around(params: Any) -> State:
        its = len(turns(task))
        return state.fresh(params, update.tx, seed=cfg.seed, ema=cfg.optimizer.ema > 0, turns=its)

    def fresh() -> State:
        params = module.init(family.Model, task.model, jax.random.key(cfg.seed))
        return around(matrices.without_frozen(task.model, params) if replaced else params)

    abstract = jax.eval_shape(fresh)
    homes = state.shardings(abstract, axes, devices)
    abstract = jax.tree.map(
        lambda leaf, home: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=home), abstract, homes
    )
    options = INIT_OPTIONS.get(jax.default_backend())
    on_host = getattr(family.Model, "on_host", None)
    if on_host is None:
        return abstract, jax.jit(fresh, out_shardings=homes, compiler_options=options)

    def placed() -> State:
        """Weights that no device can draw: each takes its part of what the host has."""
        put = lambda w, home: jax.make_array_from_callback(w.shape, home, lambda index: w[index])
        drawn = on_host(task.model, jax.random.key(cfg.seed))
        params = jax.tree.map(put, drawn, homes.params)
        return jax.jit(around, out_shardings=homes, donate_argnums=0, compiler_options=options)(params)

    return abstract, placed


def lowered(
    cfg: sections.Run,
    train_step: Callable[..., Any],
    abstract: State,
    devices: Mesh,
    *,
    has_loss: bool = False,
    has_labels: bool = False,
) -> jax.stages.Lowered:
    """One program to be compiled, the state donated: new weights take the place of the old. `has_loss` says
    that batches mark the tokens to be learnt, `has_labels` that some have labels."""
    if cfg.memory.remat == "offload":
        check_offload(devices)
    shape = (cfg.batch.sequences, cfg.data.sequence_length)
    rows: Any = jax.ShapeDtypeStruct(shape, "int32", sharding=mesh.row_sharding(devices, shape))
    loss: Any = jax.ShapeDtypeStruct(shape, "bool", sharding=rows.sharding) if has_loss else None
    homes = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    jitted = jax.jit(train_step, donate_argnums=0, out_shardings=(homes, None))
    return jitted.lower(abstract, Batch(rows, rows, rows, loss, rows if has_labels else None))
