"""The parts of a training step, made from a recipe: mesh, optimizer, state, and the program to compile.

`train` runs them, and `plan` compiles them for slices that this machine does not have."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import optax
from jax.sharding import Mesh

from headrace import model_wrappers
from headrace.checkpoint import state
from headrace.checkpoint.state import State
from headrace.config import run_length
from headrace.config.sections import SPLIT_ROWS, TrainRecipe
from headrace.errors import UserError
from headrace.nn import module, sharding
from headrace.nn.compile import INIT_OPTIONS, check_offload
from headrace.nn.module import PyTree
from headrace.objectives import Batch, TrainTask, update_phases
from headrace.optim import OptimizerConfig, load_optimizer
from headrace.schedules import load_schedule
from headrace.training import loss_spikes
from headrace.training.step import OptimizerStep, TrainStep


def make_mesh(recipe: TrainRecipe, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Make the recipe's mesh over these devices, all of them by default."""
    sizes = mesh_sizes(recipe, jax.device_count() if devices is None else len(devices))
    try:
        return sharding.make_mesh(sizes, devices)
    except ValueError as error:
        raise UserError(f"mesh: {error}") from None


def mesh_sizes(recipe: TrainRecipe, num_devices: int, num_slices: int = 1) -> dict[str, int]:
    """Resolve the size of each mesh axis, and check that it divides what it splits.

    Only `data` is split over slices. A batch whose rows cannot be split evenly is refused, since every device
    would compute all of it, without an error."""
    try:
        sizes = sharding.resolve_sizes(dataclasses.asdict(recipe.mesh), num_devices)
    except ValueError as error:
        raise UserError(f"mesh: {error}") from None
    if sizes["data"] % num_slices:
        raise UserError(
            f"mesh.data: found {sizes['data']}, expected a multiple of {num_slices}, since it is split over "
            f"the {num_slices} slices; set mesh.data={num_slices}"
        )
    check_rows(recipe, math.prod(sizes[axis] for axis in SPLIT_ROWS))
    if recipe.data.sequence_length % sizes["context"]:
        raise UserError(f"mesh.context: {sizes['context']} does not divide data.sequence_length")
    return sizes


def check_rows(recipe: TrainRecipe, num_parts: int) -> None:
    """Raise UserError if a microbatch cannot be split into this many parts."""
    rows, microbatches = recipe.batch.sequences, recipe.batch.microbatches
    if rows // microbatches % num_parts == 0:
        return
    fewer = [count for count in range(1, microbatches + 1) if rows % (count * num_parts) == 0]
    fix = f"batch.microbatches={fewer[-1]}" if fewer else f"batch.sequences to a multiple of {num_parts}"
    raise UserError(
        f"batch.sequences: {rows // microbatches} rows at a time cannot be split over the {num_parts} "
        f"devices of mesh.data x mesh.fsdp x mesh.expert ({rows} rows per step, "
        f"batch.microbatches={microbatches}); set {fix}, or change the mesh"
    )


def make_update(recipe: TrainRecipe, task: TrainTask) -> OptimizerStep:
    """Make the optimizer, its schedule and its batch-size ramp."""
    axes = module.axes(task.family.Model, task.model)
    schedule = dataclasses.replace(recipe.schedule, **run_length.durations(recipe))
    frozen = frozen_names(recipe.freeze, axes)
    return OptimizerStep(
        config=recipe.optimizer,
        tx=make_optimizer(recipe.optimizer, axes, frozen),
        curves=load_schedule(recipe.schedule).make(schedule),
        microbatches=recipe.batch.microbatches,
        ramp=run_length.ramp(recipe) if recipe.batch.ramp_from else None,
        frozen=frozen,
        guarded_metrics=tuple(loss_spikes.guarded_metric_names(update_phases(task))),
    )


def frozen_names(freeze: str | None, axes: PyTree) -> frozenset[str]:
    """The paths of the weights that are never updated: by the model's design, or by the recipe's `freeze`."""
    axes_by_name = dict(module.named_leaves(axes))
    frozen = frozenset(name for name, weight_axes in axes_by_name.items() if weight_axes.frozen)
    if freeze is None:
        return frozen
    frozen |= module.select_weights("freeze", freeze, axes_by_name)
    if not any(jax.tree.leaves(module.trainable_mask(axes, frozen))):
        raise UserError(f"freeze: found {freeze}, expected some weight to be left to train")
    return frozen


def make_optimizer(
    config: OptimizerConfig, axes: PyTree, frozen: frozenset[str] = frozenset()
) -> optax.GradientTransformation:
    """Make the recipe's optimizer. It has no state for weights that gradients do not update."""
    is_trained = module.trainable_mask(axes, frozen)
    if all(jax.tree.leaves(is_trained)):
        return load_optimizer(config).make(config, axes)
    trained_axes = jax.tree.map(
        lambda trained, weight_axes: weight_axes if trained else optax.MaskedNode(), is_trained, axes
    )
    # A function, since optax would call a mask that is callable, as a model is.
    return optax.masked(load_optimizer(config).make(config, trained_axes), lambda params: is_trained)


def make_state(
    recipe: TrainRecipe, task: TrainTask, update: OptimizerStep, mesh: Mesh, *, has_init: bool = False
) -> tuple[State, Callable[[], State]]:
    """Make the state as shapes with shardings, and the function that initializes it on the devices.

    With `has_init`, weights that `init_from` overwrites are not drawn: that could take more memory than
    training does."""
    family = task.family
    axes = module.axes(family.Model, task.model)

    def make_train_state(params: PyTree) -> State:
        history = loss_spikes.empty_history(len(update.guarded_metrics))
        has_ema = recipe.optimizer.ema_decay > 0
        return state.init_state(params, update.tx, seed=recipe.seed, ema=has_ema, history=history)

    def init_state() -> State:
        params = module.init(family.Model, task.model, jax.random.key(recipe.seed))
        return make_train_state(model_wrappers.drop_frozen_init(task.model, params) if has_init else params)

    abstract = jax.eval_shape(init_state)
    shardings = state.state_shardings(abstract, axes, mesh)
    abstract = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=spec),
        abstract,
        shardings,
    )
    options = INIT_OPTIONS.get(jax.default_backend())
    init_params_on_host = family.init_on_host
    if init_params_on_host is None:
        return abstract, jax.jit(init_state, out_shardings=shardings, compiler_options=options)

    def init_state_on_host() -> State:
        """Draw the weights on the host, since no device can, and put its part of them on each device."""
        params = init_params_on_host(task.model, jax.random.key(recipe.seed))
        put = lambda w, spec: jax.make_array_from_callback(w.shape, spec, lambda index: w[index])
        make = jax.jit(make_train_state, out_shardings=shardings, donate_argnums=0, compiler_options=options)
        return make(jax.tree.map(put, params, shardings.params))

    return abstract, init_state_on_host


def lower_step(
    recipe: TrainRecipe,
    train_step: TrainStep,
    abstract: State,
    mesh: Mesh,
    *,
    has_loss_mask: bool = False,
    has_labels: bool = False,
) -> jax.stages.Lowered:
    """Lower the training step to one program. The state is donated: new weights replace the old ones in
    memory. `has_loss_mask` and `has_labels` say which arrays the batches have."""
    if recipe.compute.remat == "offload":
        check_offload(mesh)
    batch = abstract_batch(recipe, mesh, has_loss_mask=has_loss_mask, has_labels=has_labels)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None)).lower(abstract, batch)


def abstract_batch(recipe: TrainRecipe, mesh: Mesh, *, has_loss_mask: bool, has_labels: bool) -> Batch:
    """Make the batch of a step as shapes with shardings."""
    shape = (recipe.batch.sequences, recipe.data.sequence_length)
    row_sharding = sharding.row_sharding(mesh, shape)
    ids: PyTree = jax.ShapeDtypeStruct(shape, "int32", sharding=row_sharding)
    mask: PyTree = jax.ShapeDtypeStruct(shape, "bool", sharding=row_sharding)
    return Batch(
        tokens=ids,
        segments=ids,
        positions=ids,
        loss_mask=mask if has_loss_mask else None,
        labels=ids if has_labels else None,
    )
