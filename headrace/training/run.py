"""A training run, from the recipe to the exit code. The same command starts a run and resumes it.

Read `run` first; the functions that it calls follow in the order of the calls. The run folder is opened in
run_folder.py, and the loop over steps is in loop.py."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.state import State
from headrace.config import reader, run_length
from headrace.config.sections import TrainRecipe
from headrace.data.batch_order import BatchOrder
from headrace.data.dataset import Dataset
from headrace.errors import ExitCode
from headrace.kernels.linear_cross_entropy.dispatch import collect_warnings
from headrace.low_precision.support import emulation_warning, has_fast_matmul
from headrace.nn import module
from headrace.nn.module import PyTree
from headrace.objectives import TrainTask
from headrace.runtime import malloc, multihost
from headrace.runtime.signals import Stopper
from headrace.runtime.stragglers import StragglerMonitor
from headrace.runtime.watchdog import Watchdog
from headrace.trackers import Trackers
from headrace.training import compiled_step, memory_check
from headrace.training.batch import fill_model_sizes, special_tokens
from headrace.training.init_from.check import InitSource, check_source
from headrace.training.init_from.load import load_weights
from headrace.training.loop import train_with_rollback
from headrace.training.metrics import Meter, peak_flops
from headrace.training.profiler import StepRange, Trace
from headrace.training.run_folder import (
    RunFolder,
    check_not_quantized,
    claim_run_dir,
    close_at_exit,
    make_room_for_checkpoints,
    open_run_folder,
    report_nothing_left,
    start_clock,
    write_run_files,
)
from headrace.training.session import TrainSession
from headrace.training.setup import lower_step, make_mesh, make_state, make_update
from headrace.training.step import OptimizerStep, TrainStep, make_eval_step, make_train_step
from headrace.training.task import make_task, recipe_flops_per_token


@dataclass(frozen=True)
class TrainSetup:
    """The parts of a run that the recipe describes, built for these devices. No weight is allocated yet."""

    recipe: TrainRecipe
    task: TrainTask
    dataset: Dataset
    batch_order: BatchOrder  # which rows each step reads
    mesh: Mesh
    axes: PyTree  # an `Axes` for each weight
    update: OptimizerStep
    abstract_state: State  # shapes and shardings
    init_state: Callable[[], State]
    total_steps: int


def run(recipe: TrainRecipe, program_dir: Path | None = None, *, owns_process: bool = False) -> ExitCode:
    """Train until the schedule ends, a signal stops the run, or too many updates are skipped.

    The exit code is 0, 75 (PREEMPTED) or 1. `program_dir` may hold the training step, compiled by
    `headrace plan --save`. `owns_process` means that the process ends after this call, so that a second
    Ctrl-C need not wait for unfinished saves."""
    started_at = time.perf_counter()
    multihost.initialize()
    with contextlib.ExitStack() as stack:
        with multihost.fail_together(reader.to_yaml(recipe)):  # a mistake on one ends all hosts
            check_not_quantized(recipe.run_dir)
            mesh = make_mesh(recipe)
            if jax.default_backend() == "cpu":
                malloc.keep_freed(1 << 30)  # so that each step reuses the buffers of the last
            dataset = Dataset.open(recipe.data.path, sequence_length=recipe.data.sequence_length)
            mirror = stack.enter_context(claim_run_dir(recipe.run_dir))
        stack.enter_context(memory_check.translate_oom())
        clock = stack.enter_context(start_clock(mirror.local_dir, started_at))

        # What is trained, and the checkpoint from which training resumes.
        recipe = fill_model_sizes(recipe, dataset)
        task = make_task(recipe, special_tokens(dataset))
        batch_order = dataset.train_order(
            recipe.batch.sequences, seed=recipe.seed, ramp=run_length.ramp(recipe)
        )
        folder = open_run_folder(recipe, dataset, mirror, clock)
        batch_order = batch_order.skip(folder.rollback_log.skipped_ranges())
        compiled_step.enable_compilation_cache(recipe.run_dir)
        stack.enter_context(close_at_exit(folder, owns_process=owns_process))
        stack.enter_context(jax.set_mesh(mesh))
        stopper = stack.enter_context(Stopper())

        # Optimizer, shapes and shardings. All of it is on the host: weights are made in `load_state`.
        setup = make_setup(recipe, task, dataset, batch_order, mesh)
        folder.trackers.event(describe_run(setup, folder.start_step))
        if folder.start_step >= setup.total_steps:
            report_nothing_left(folder, setup.total_steps)
            return ExitCode.DONE

        # Whatever can refuse the recipe comes before compiling, and compiling before training.
        for warning in ineffective_settings(recipe, task, folder.start_step):
            folder.trackers.event(warning, level="warning")
        memory_check.check_memory(setup.abstract_state, setup.update.frozen)
        init_source = find_init_source(setup, folder)
        make_room_for_checkpoints(folder, setup.abstract_state)
        compiled = load_or_compile_train_step(setup, folder, program_dir)
        session = make_session(setup, folder, stopper, compiled, init_source)
        write_run_files(recipe, dataset.index.labels, mirror.local_dir)
        with session.watchdog:
            return session.finish(train_with_rollback(session, folder.resume_step))


def make_setup(
    recipe: TrainRecipe, task: TrainTask, dataset: Dataset, batch_order: BatchOrder, mesh: Mesh
) -> TrainSetup:
    """Resolve the recipe for these devices: optimizer, state shapes and shardings, number of steps."""
    update = make_update(recipe, task)
    abstract_state, init_state = make_state(recipe, task, update, mesh, has_init=recipe.init_from is not None)
    return TrainSetup(
        recipe=recipe,
        task=task,
        dataset=dataset,
        batch_order=batch_order,
        mesh=mesh,
        axes=module.axes(task.family.Model, task.model),
        update=update,
        abstract_state=abstract_state,
        init_state=init_state,
        total_steps=run_length.durations(recipe)["steps"],
    )


def describe_run(setup: TrainSetup, start_step: int) -> str:
    """Describe model, devices and steps in one line."""
    recipe, mesh, total = setup.recipe, setup.mesh, setup.total_steps
    parameters = sum(leaf.size for leaf in jax.tree.leaves(setup.abstract_state.params))
    devices = f"{mesh.size} {jax.devices()[0].device_kind}"
    if multihost.is_multi_host():
        devices += f" of {jax.process_count()} hosts"
    if mesh.size > 1:
        devices += f" ({' x '.join(f'{axis} {size}' for axis, size in mesh.shape.items() if size > 1)})"
    steps = f"from step {start_step} to {total}" if 0 < start_step < total else f"{total} steps"
    rows = f"{recipe.batch.sequences} x {recipe.data.sequence_length} tokens"
    return f"{setup.task.model.use} with {parameters:,} parameters on {devices}; {steps}, {rows} each"


def ineffective_settings(recipe: TrainRecipe, task: TrainTask, start_step: int) -> Iterator[str]:
    """Yield a warning for each setting that gains nothing on these devices, or comes too late."""
    device = jax.local_devices()[0]
    if recipe.compute.matmul != "compute" and not task.exec_opts.native_matmul:
        yield emulation_warning("compute.matmul", task.exec_opts.matmul, device)
    if recipe.loss.backend == "fp8" and not has_fast_matmul(device, "fp8"):
        yield emulation_warning("loss.backend", "fp8", device)
    traced = StepRange.parse(recipe.profile_steps)
    if 0 < traced.first <= start_step:
        later = f"{start_step + 1}:{start_step + 1 + traced.last - traced.first}"
        yield (
            f"profile_steps: {recipe.profile_steps} has no effect: the run resumes from step {start_step}, "
            f"and the trace would start at step {traced.first}; profile_steps={later} traces as many steps"
        )


def find_init_source(setup: TrainSetup, folder: RunFolder) -> InitSource | None:
    """Check the model that `init_from` names. A run that resumes has its own weights and needs none."""
    recipe = setup.recipe
    if recipe.init_from is None or folder.resume_step is not None:
        return None
    return check_source(recipe.init_from, setup.task.model, recipe.init_weights)


def load_or_compile_train_step(setup: TrainSetup, folder: RunFolder, program_dir: Path | None) -> TrainStep:
    """Compile the training step, or load it from `program_dir` if it is there."""
    dataset, event = setup.dataset, folder.trackers.event
    train_step = make_train_step(setup.task, setup.update, setup.axes)
    with folder.clock.category("compilation"):
        with collect_warnings() as warnings:
            lowered = lower_step(
                setup.recipe,
                train_step,
                setup.abstract_state,
                setup.mesh,
                has_loss_mask=dataset.has_loss_mask,
                has_labels=dataset.has_labels,
            )
        for warning in warnings:
            event(warning, level="warning")
        return compiled_step.load_or_compile(lowered, setup.mesh, program_dir, event)


def make_session(
    setup: TrainSetup,
    folder: RunFolder,
    stopper: Stopper,
    compiled: TrainStep,
    init_source: InitSource | None,
) -> TrainSession:
    """Collect what the loop works with."""
    recipe, task = setup.recipe, setup.task
    return TrainSession(
        recipe=recipe,
        dataset=setup.dataset,
        batch_order=setup.batch_order,
        mesh=setup.mesh,
        checkpoints=folder.checkpoints,
        rollback_log=folder.rollback_log,
        mirror=folder.mirror,
        trackers=folder.trackers,
        clock=folder.clock,
        meter=make_meter(setup),
        stragglers=StragglerMonitor(),
        stopper=stopper,
        trace=Trace(recipe.profile_steps, folder.mirror.local_dir, recipe.run_dir),
        watchdog=Watchdog(recipe.step_timeout, recipe.run_dir),
        load_state=functools.partial(load_state, setup, folder, init_source),
        train_step=compiled,
        eval_step=jax.jit(make_eval_step(task, setup.axes, recipe.eval.repeats)),
        total_steps=setup.total_steps,
        guarded_metrics=setup.update.guarded_metrics,
    )


def make_meter(setup: TrainSetup) -> Meter:
    """Make the meter that turns the metrics of a step into the row that is logged."""
    recipe = setup.recipe
    return Meter(
        tokens_per_step=recipe.batch.sequences * recipe.data.sequence_length,
        flops_per_token=recipe_flops_per_token(recipe),
        total_steps=setup.total_steps,
        num_devices=setup.mesh.size,
        peak_flops=peak_flops(jax.devices()[0]),
        tokens_until=functools.partial(run_length.tokens_until, recipe),
    )


def load_state(
    setup: TrainSetup, folder: RunFolder, init_source: InitSource | None, step: int | None
) -> State:
    """Load checkpoint `step`, or make a new state if it is None: at the start, and after a rollback."""
    if step is None:
        state = setup.init_state()
        if init_source is not None:
            state = apply_init_weights(setup, folder.trackers, init_source, state)
    else:
        state = restore_state(setup, folder.checkpoints, step)
    return clear_skip_history(state) if folder.rollback_log.has_rollback_to(step or 0) else state


def apply_init_weights(setup: TrainSetup, trackers: Trackers, source: InitSource, state: State) -> State:
    """Replace the weights of a new state by those of another model."""
    params, summary = load_weights(source, setup.task.model, state.params, setup.mesh, setup.recipe.data.path)
    trackers.event(summary)
    # A copy: the state is donated to the training step, and donated arrays must not be shared.
    ema = None if state.ema is None else jax.tree.map(jnp.copy, params)
    return replace(state, params=params, ema=ema)


def restore_state(setup: TrainSetup, checkpoints: Checkpoints, step: int) -> State:
    """Read a checkpoint. Step 0 is an imported model, which has weights only; the rest is new."""
    abstract = setup.abstract_state
    if step > 0:
        return checkpoints.restore(step, abstract)
    # Read twice: the state is donated to the training step, and donated arrays must not be shared.
    params = checkpoints.restore_params(step, abstract.params)
    ema = None if abstract.ema is None else checkpoints.restore_params(step, abstract.ema)
    return replace(setup.init_state(), params=params, ema=ema)


def clear_skip_history(state: State) -> State:
    """Forget skipped updates from before a rollback: they do not count against the steps that follow."""
    left_out = state.recent.left_out
    none = jnp.zeros_like(left_out, device=left_out.sharding)
    return replace(state, recent=replace(state.recent, left_out=none))
