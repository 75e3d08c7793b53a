"""The run, top to bottom: mesh, data, model, optimizer, restore, loop. One command starts and resumes it."""

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from headrace import trackers
from headrace.checkpoint import inventory
from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.open_run import copy_tokenizer
from headrace.checkpoint.state import State
from headrace.config import reader, run_length, sections
from headrace.data.dataset import Dataset
from headrace.data.prefetch import read_ahead
from headrace.errors import ExitCode, UserError
from headrace.kernels.linear_cross_entropy.dispatch import collect_warnings
from headrace.low_precision.support import emulation_warning, has_fast_matmul
from headrace.model_formats import quantized_folder
from headrace.model_wrappers import classification_head
from headrace.nn import module
from headrace.objectives import TrainTask
from headrace.runtime import malloc, multihost
from headrace.runtime.goodput import DataWait, GoodputClock
from headrace.runtime.stragglers import StragglerMonitor
from headrace.runtime.watchdog import Watchdog
from headrace.storage import files
from headrace.storage.bucket_sync import Mirror
from headrace.storage.lock import lock
from headrace.trackers import Trackers
from headrace.training import compiled_step, init_from, loss_spikes, memory_check, rollback, setup, step
from headrace.training.evaluate import fill_model_sizes, special_tokens
from headrace.training.metrics import DeferredMetrics, Meter, peak_flops
from headrace.training.profiler import StepRange, Trace
from headrace.training.session import TooManySkippedUpdates, TrainSession, report_problems
from headrace.training.task import make_task, recipe_flops_per_token


def run(recipe: sections.TrainRecipe, program_dir: Path | None = None, *, owns_process: bool = False) -> int:
    """Trains until the schedule ends, with the step that lies compiled in a folder, if one does. Returns the
    exit code: 0 done, 75 asked to stop, 1 too many bad steps. A program that is told twice to stop waits for
    no save; where Python goes on after this, nobody may write behind its back."""
    started = time.perf_counter()
    multihost.initialize()
    first = jax.process_index() == 0
    with contextlib.ExitStack() as held:
        with multihost.fail_together(reader.to_yaml(recipe)):
            if (
                not files.is_url(recipe.run_dir)
                and quantized_folder.read_quant_config(recipe.run_dir) is not None
            ):
                raise UserError(
                    f"run_dir: {recipe.run_dir} holds a quantised model, which is not trained further; train "
                    "the run it was made of, or name another folder with run_dir="
                )
            devices = setup.make_mesh(recipe)
            if jax.default_backend() == "cpu":
                malloc.keep_freed(1 << 30)  # what a step works in
            dataset = Dataset.open(recipe.data.path, sequence_length=recipe.data.sequence_length)
            if first:  # for all
                held.enter_context(lock(recipe.run_dir, on_wait=print_waiting))
            mirror = held.enter_context(Mirror(recipe.run_dir, jax.process_index()).open(download=first))
        held.enter_context(memory_check.translate_oom())
        ledger = held.enter_context(start_clock(mirror.local_dir, started))
        recipe = fill_model_sizes(recipe, dataset)
        task = make_task(recipe, special_tokens(dataset))
        family, steps = task.family, run_length.durations(recipe)["steps"]
        checkpoints = Checkpoints(recipe.run_dir, keep=recipe.checkpoint.keep, before_seal=mirror.upload)
        latest = checkpoints.find_resume_step(ledger.totals.last_saved)
        record = rollback.RollbackLog(recipe.run_dir)
        order = dataset.train_order(recipe.batch.sequences, seed=recipe.seed, ramp=run_length.ramp(recipe))
        order = order.skip(record.skipped_ranges())
        begun = latest or 0
        if latest is not None:
            check_resumable(checkpoints.read_meta(latest), recipe, dataset)
        elif (mirror.local_dir / "metrics.jsonl").is_file():
            checkpoints.problems.append(f"{recipe.run_dir} has no checkpoint yet: the run begins at step 0")
        out = open_trackers(recipe, mirror.local_dir, begun, steps)
        report_problems(out, checkpoints, mirror)
        compiled_step.enable_compilation_cache(recipe.run_dir)
        try:
            with jax.set_mesh(devices), multihost.Stopper() as stopper:
                update = setup.make_update(recipe, task)
                begins = recipe.init_from is not None
                abstract, fresh = setup.make_state(recipe, task, update, devices, has_init=begins)
                out.event(describe_run(recipe, task, abstract, devices, begun, steps))
                if begun >= steps:
                    for line in checkpoints.resume_warnings():
                        out.event(line, "warning")
                    out.event(nothing_left_message(begun, steps))
                    return 0
                for line in ineffective_settings(recipe, task, begun):
                    out.event(line, "warning")
                memory_check.check_memory(abstract, update.frozen)
                source = None
                if recipe.init_from is not None and latest is None:
                    source = init_from.check(recipe.init_from, task.model, recipe.init_weights)
                checkpoints.quarantine_damaged()
                checkpoints.check_room(abstract)
                checkpoints.remove_old()
                report_problems(out, checkpoints, mirror)

                def first_state(step: int | None) -> State:
                    current = restore_state(checkpoints, step, abstract, fresh)
                    if source is not None and step is None:
                        current, said = apply_init_weights(source, task, current, devices, recipe.data.path)
                        out.event(said)
                    return clear_skip_history(current) if record.has_rollback_to(step or 0) else current

                meter = Meter(
                    tokens_per_step=recipe.batch.sequences * recipe.data.sequence_length,
                    flops_per_token=recipe_flops_per_token(recipe),
                    total_steps=steps,
                    num_devices=devices.size,
                    peak_flops=peak_flops(jax.devices()[0]),
                    tokens_until=functools.partial(run_length.tokens_until, recipe),
                )
                axes = module.axes(family.Model, task.model)
                one = step.train_step(task, update, axes)
                with ledger.category("compilation"):
                    marks = dict(has_loss_mask=dataset.has_loss_mask, has_labels=dataset.has_labels)
                    with collect_warnings() as lines:
                        traced = setup.lower_step(recipe, one, abstract, devices, **marks)
                    for line in lines:
                        out.event(line, "warning")
                    compiled = compiled_step.load_or_compile(traced, devices, program_dir, out.event)
                session = TrainSession(
                    recipe=recipe,
                    dataset=dataset,
                    batch_order=order,
                    mesh=devices,
                    checkpoints=checkpoints,
                    mirror=mirror,
                    trackers=out,
                    meter=meter,
                    clock=ledger,
                    stragglers=StragglerMonitor(),
                    train_step=compiled,
                    eval_step=jax.jit(step.eval_step(task, axes, recipe.eval.repeats)),
                    total_steps=steps,
                    stopper=stopper,
                    trace=Trace(recipe.profile_steps, mirror.local_dir, recipe.run_dir),
                    watchdog=Watchdog(recipe.step_timeout, recipe.run_dir),
                    rollback_log=record,
                    guarded_metrics=update.guarded_metrics,
                    load_state=first_state,
                )
                write_run_files(recipe, mirror.local_dir, dataset.index.labels)
                with session.watchdog:
                    code = session.finish(train_with_rollback(session, latest))
                return code
        except KeyboardInterrupt:
            if owns_process:
                checkpoints.abandon()
            raise
        finally:
            checkpoints.close()
            out.close()


def ineffective_settings(cfg: sections.TrainRecipe, task: TrainTask, begun: int) -> Iterator[str]:
    """What the recipe says that brings nothing on these devices, or to a run that goes on from this step."""
    here = jax.local_devices()[0]
    if cfg.compute.matmul != "compute" and not task.exec_opts.native_matmul:
        yield emulation_warning("compute.matmul", task.exec_opts.matmul, here)
    if cfg.loss.backend == "fp8" and not has_fast_matmul(here, "fp8"):
        yield emulation_warning("loss.backend", "fp8", here)
    traced = StepRange.parse(cfg.profile_steps)
    if 0 < traced.first <= begun:
        later = f"{begun + 1}:{begun + 1 + traced.last - traced.first}"
        yield (
            f"profile_steps: {cfg.profile_steps} has no effect: the run goes on from step {begun}, and the "
            "trace would "
            f"begin with step {traced.first}; profile_steps={later} traces as many of those to come"
        )


def train_with_rollback(session: TrainSession, step: int | None) -> int:
    """Trains from a checkpoint on, or from the start. Returns the exit code. Bad steps take the run back, and
    it goes on with the data after them."""
    kind = session.mesh.devices.flat[0].device_kind
    session.clock.begin(step or 0, devices=session.mesh.size, kind=kind, hosts=jax.process_count())
    while True:
        with session.clock.category("preparation" if step is None else "checkpoint_restore"):
            current = session.load_state(step)
        ended = run_steps(session, current, step or 0)
        if isinstance(ended, int):
            return ended
        session.watchdog.reset()
        step = session.checkpoints.rewind_before(ended.first)
        report_problems(session.trackers, session.checkpoints, session.mirror)
        record, to = session.rollback_log, step or 0
        much = f"{len(ended.skipped)} of the updates from step {ended.first} to {ended.last} were left out"
        stops = record.rollbacks_to(to) >= rollback.MAX_ROLLBACKS
        if stops:
            record.add((ended.last, -1, -1, -1))
            said = f"stopped at step {ended.last}: {much}"
        else:
            skipped, rows = rollback.row_span(session.batch_order, max(ended.first, to + 1), ended.last)
            record.add((ended.last, to, skipped, rows))
            said = f"step {ended.last}: {much}; back to step {to}, and past the data of those steps"
        told = ""
        if jax.process_index() == 0:
            pages = rollback.report_lines(
                session.batch_order, session.mirror.local_dir, session.dataset, ended
            )
            told = f"; {record.write_report(said, pages)} names their documents"
        if stops:
            session.trackers.event(f"{said}{told}. {ADVICE}", "error")
            return 1
        session.trackers.event(said + told, "warning")
        session.clock.rewind(to)
        order = session.batch_order.skip([range(skipped, skipped + rows)])
        session = dataclasses.replace(session, batch_order=order)
        session.trackers.rewind(to)


def run_steps(session: TrainSession, current: State, start: int) -> int | rollback.BadStretch:
    """Until the last step, a wish to stop, or bad steps: the exit code, or what the trouble is."""
    cfg, late = session.recipe, DeferredMetrics()
    session.meter.begin(start)
    session.clock.train(start, int(current.skipped))
    number, idle = start, DataWait()
    batches = read_ahead(session.load_batch, start, session.total_steps, idle.watch)
    try:
        session.stragglers.step_started()
        for number, batch in enumerate(batches, start + 1):
            session.stragglers.batch_ready()
            session.clock.reclassify("data_loading", idle.finish())
            session.trace.maybe_start(number, current)
            current, metrics = session.train_step(current, batch)
            idle.step_output = metrics["skipped"]
            session.log(late.push(number, metrics))
            session.watchdog.step_done(number)
            last, stopping = number == session.total_steps, session.stopper.should_stop(number)
            evaluating = last or (not stopping and cfg.eval.every and number % cfg.eval.every == 0)
            tier = inventory.tier_due(cfg.checkpoint, number)
            if (last or stopping) and tier != "permanent":
                tier = "temporary"
            tracing = session.trace.should_stop(number, run_ends=last or stopping)
            if tracing or evaluating or tier:
                session.watchdog.reset()
            if tracing:
                session.finish_trace(number, current)
            if evaluating or tier:
                session.log(late.flush())
            if tier:  # first: whatever evaluation meets, the work is kept
                session.save(number, current, tier)
            if evaluating:
                session.evaluate(number, current)
            if stopping and not last:
                session.clock.end_reason = session.stopper.stop_signal or ""
                session.trackers.event(
                    f"asked to stop by {session.stopper.stop_signal}; the same command goes on from step "
                    f"{number}"
                )
                return ExitCode.PREEMPTED
            session.stragglers.step_started()
        return 0
    except TooManySkippedUpdates as error:
        if session.trace.should_stop(number, run_ends=True):  # one that still runs could not be started again
            session.finish_trace(number, current)
        # Not saved: such weights may be past saving, and would push out a good checkpoint.
        first, recent = error.number - error.since, jax.device_get(current.recent)
        left_out = loss_spikes.skipped_updates(recent, error.number, error.since + 1)
        return rollback.BadStretch(first, error.number, left_out, session.guarded_metrics)


ADVICE = (
    "Look at the data of those steps; to try once more from the last checkpoint, run the command again, with "
    "a lower optimizer.learning_rate, a longer schedule.warmup or a lower optimizer.max_grad_norm"
)


def print_waiting(line: str) -> None:
    """Before there is anything else to say it with."""
    print(f"headrace: {line}", file=sys.stderr, flush=True)


def restore_state(
    checkpoints: Checkpoints, latest: int | None, abstract: State, fresh: Callable[[], State]
) -> State:
    if latest is None:
        return fresh()
    if latest > 0:
        return checkpoints.restore(latest, abstract)
    # An import: weights alone, at step 0. Read twice, since the state is donated and must not share arrays.
    params = checkpoints.restore_params(latest, abstract.params)
    ema = None if abstract.ema is None else checkpoints.restore_params(latest, abstract.ema)
    return dataclasses.replace(fresh(), params=params, ema=ema)


def clear_skip_history(current: State) -> State:
    """Without the bad steps before a checkpoint that the run went back to: what follows is judged alone. Also
    when it is started again from there."""
    none = jnp.zeros_like(current.recent.left_out, device=current.recent.left_out.sharding)
    return dataclasses.replace(current, recent=dataclasses.replace(current.recent, left_out=none))


def apply_init_weights(
    source: init_from.InitSource, task: TrainTask, current: State, devices: Mesh, data: str
) -> tuple[State, str]:
    """A fresh state with another model's weights, and what is to be said of it. The state is donated and must
    not share arrays, so an average gets its own."""
    params, said = init_from.load_weights(source, task.model, current.params, devices, data)
    ema = None if current.ema is None else jax.tree.map(jnp.copy, params)
    return dataclasses.replace(current, params=params, ema=ema), said


# Sections that decide which weights there are and how large they are.
WEIGHT_SECTIONS = ("model", "lora", "qat", "recurrence", "classifier")


def check_resumable(saved: dict[str, Any], cfg: sections.TrainRecipe, dataset: Dataset) -> None:
    """A run goes on only with the model, the tokenizer and the data it began with, in their order. The rest
    of the recipe may change. What differs is told at once, all of it."""
    before, now = reader.flatten(saved["recipe"]), reader.flatten(reader.to_dict(cfg))
    fixed = {key for key in {**before, **now} if key.partition(".")[0] in WEIGHT_SECTIONS}
    fixed.add("objective.reference")
    if "seed" in saved:  # not an import, which has taken no step yet
        fixed |= {"optimizer.use", "seed", "batch.sequences", "data.sequence_length"}
        fixed |= {"batch.microbatches", "batch.ramp", "batch.ramp_from"} if cfg.batch.ramp_from else set()
    other = [key for key in {**now, **before} if before.get(key) != now.get(key) and key != "run_dir"]
    told = {key: f"{key} = {before.get(key)}, and this recipe says {now.get(key)}" for key in other}
    wrong = [line for key, line in told.items() if key in fixed]
    if saved["tokenizer_sha256"] not in (None, dataset.tokenizer_sha256):
        wrong.append(
            f"tokenizer {saved['tokenizer_sha256']}, and {cfg.data.path} was made with "
            f"{dataset.tokenizer_sha256}"
        )
    fingerprint = saved.get("data", {}).get("fingerprint")
    if fingerprint not in (None, dataset.fingerprint):
        wrong.append(
            f"data of fingerprint {fingerprint} ({saved['data']['path']}), and {cfg.data.path} has "
            f"{dataset.fingerprint}: other rows, or another order"
        )
    if wrong:
        free = [f"{key} {before.get(key)} -> {now.get(key)}" for key in other if key not in fixed]
        may = f" (changed too, which it may be: {', '.join(free)})" if free else ""
        raise UserError(
            f"{cfg.run_dir} holds a run with {'; with '.join(wrong)}; use another `run_dir`, or put back "
            "what differs" + may
        )


def open_trackers(cfg: sections.TrainRecipe, near: Path, start: int, steps: int) -> Trackers:
    if jax.process_index():
        return Trackers()
    log = cfg.log
    settings = reader.to_dict(cfg)
    out = trackers.make_trackers(
        near, step=start, total_steps=steps, tensorboard=log.tensorboard, wandb=log.wandb, recipe=settings
    )
    return out


def start_clock(near: Path, started: float) -> GoodputClock:
    """The first host keeps it, in the run folder."""
    ledger = GoodputClock(near / "goodput.jsonl" if jax.process_index() == 0 else None, started_at=started)
    ledger.enter("preparation")
    return ledger


def write_run_files(cfg: sections.TrainRecipe, near: Path, labels: Sequence[str]) -> None:
    """Recipe, tokenizer and what labels are called, once nothing stands against going on with them."""
    if jax.process_index() == 0:
        (near / "recipe.yaml").write_text(reader.to_yaml(cfg))
        copy_tokenizer(cfg.data.path, near)
        if classification_head.has_labels(cfg.model):
            classification_head.write_label_names(near, labels)


def describe_run(
    cfg: sections.TrainRecipe, task: TrainTask, abstract: State, devices: Mesh, start: int, steps: int
) -> str:
    size = sum(leaf.size for leaf in jax.tree.leaves(abstract.params))
    split = " x ".join(f"{axis} {n}" for axis, n in devices.shape.items() if n > 1)
    kind = jax.devices()[0].device_kind
    many = f" of {jax.process_count()} hosts" if multihost.is_multi_host() else ""
    where = f"{devices.size} {kind}{many}" + (f" ({split})" if split else "")
    begin = f"from step {start} to {steps}" if 0 < start < steps else f"{steps} steps"
    rows = f"{cfg.batch.sequences} x {cfg.data.sequence_length} tokens"
    return f"{task.model.use} with {size:,} parameters on {where}; {begin} of {rows}"


def nothing_left_message(start: int, steps: int) -> str:
    if start > steps:
        return f"the run is at step {start}, beyond schedule.steps, which is {steps}; raise it to go on"
    return f"all {steps} steps are done; raise schedule.steps to go on"
