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

from headrace.runtime import malloc as allocator, multihost as hosts
from headrace.training import (
    setup as build,
    memory_check as fit,
    compiled_step as programs,
    rollback,
    loss_spikes as spikes,
    init_from as start,
    step,
)
from headrace.model_wrappers import classification_head as classifier
from headrace.config import reader as config, run_length as lengths, sections
from headrace.nn import module
from headrace.checkpoint import inventory as saved
from headrace.storage import files as store
from headrace import trackers as writers
from headrace.checkpoint.manager import Checkpoints
from headrace.model_formats import quantized_folder as stored
from headrace.data.dataset import Dataset, read_ahead
from headrace.errors import UserError
from headrace.training.evaluate import vocabulary, with_vocabulary
from headrace.checkpoint.open_run import keep_tokenizer
from headrace.runtime.goodput import Idle, Ledger
from headrace.kernels.linear_cross_entropy.dispatch import heard
from headrace.storage.lock import lock
from headrace.training.metrics import Late, Meter, peak_flops
from headrace.storage.bucket_sync import Mirror
from headrace.objectives import Task, file, flops, make_task
from headrace.low_precision.support import emulated, multiplies
from headrace.training.session import Session, Spoilt, tell
from headrace.checkpoint.state import State
from headrace.runtime.stragglers import Pace
from headrace.training.profiler import Steps, Trace
from headrace.runtime.watchdog import Watchdog
from headrace.trackers import Writers

PREEMPTED = 75


def run(cfg: sections.Run, program: Path | None = None, *, is_program: bool = False) -> int:
    """Trains until the schedule ends, with the step that lies compiled in a folder, if one does. Returns the
    exit code: 0 done, 75 asked to stop, 1 too many bad steps. A program that is told twice to stop waits for
    no save; where Python goes on after this, nobody may write behind its back."""
    started = time.perf_counter()
    hosts.join()
    first = jax.process_index() == 0
    with contextlib.ExitStack() as held:
        with hosts.agreed(config.to_yaml(cfg)):
            if not store.is_url(cfg.run) and stored.settings_of(cfg.run) is not None:
                raise UserError(
                    f"run: {cfg.run} holds a quantised model, which is not trained further; train the run it "
                    "was made of, or name another folder with run="
                )
            devices = build.make_mesh(cfg)
            if jax.default_backend() == "cpu":
                allocator.keep_freed(1 << 30)  # what a step works in
            dataset = Dataset.open(cfg.data.path, sequence_length=cfg.data.sequence_length)
            if first:  # for all
                held.enter_context(lock(cfg.run, waiting=waiting))
            mirror = held.enter_context(Mirror(cfg.run, jax.process_index()).open(goes_on=first))
        held.enter_context(fit.told())
        ledger = held.enter_context(open_ledger(mirror.near, started))
        cfg = with_vocabulary(cfg, dataset)
        task = make_task(cfg, vocabulary(dataset))
        family, steps = file("models", task.model), lengths.durations(cfg)["steps"]
        checkpoints = Checkpoints(cfg.run, keep=cfg.checkpoint.keep, before=mirror.bring)
        latest = checkpoints.resume(ledger.account.saved)
        record = rollback.Record(cfg.run)
        dataset = dataset.passing(record.passed())
        begun = latest or 0
        if latest is not None:
            check_same(checkpoints.meta(latest), cfg, dataset)
        elif (mirror.near / "metrics.jsonl").is_file():
            checkpoints.problems.append(f"{cfg.run} has no checkpoint yet: the run begins at step 0")
        out = open_folder(cfg, mirror.near, begun, steps)
        tell(out, checkpoints, mirror)
        programs.keep_compiled(cfg.run)
        try:
            with jax.set_mesh(devices), hosts.Stopper() as stopper:
                update = build.make_update(cfg, task)
                begins = cfg.start is not None
                abstract, fresh = build.make_state(cfg, task, update, devices, replaced=begins)
                out.event(describe(cfg, task, abstract, devices, begun, steps))
                if begun >= steps:
                    for line in checkpoints.doubts():
                        out.event(line, "warning")
                    out.event(finished(begun, steps))
                    return 0
                for line in in_vain(cfg, task, begun):
                    out.event(line, "warning")
                fit.check(abstract, update.frozen)
                source = None
                if cfg.start is not None and latest is None:
                    source = start.check(cfg.start, task.model, cfg.take)
                checkpoints.clear_away()
                checkpoints.check_room(abstract)
                checkpoints.remove_old()
                tell(out, checkpoints, mirror)

                def first_state(step: int | None) -> State:
                    current = restored(checkpoints, step, abstract, fresh)
                    if source is not None and step is None:
                        current, said = with_weights(source, task, current, devices, cfg.data.path)
                        out.event(said)
                    return forgiven(current) if record.back_to(step or 0) else current

                meter = Meter(
                    tokens_per_step=cfg.batch.sequences * cfg.data.sequence_length,
                    flops_per_token=flops(cfg),
                    total_steps=steps,
                    devices=devices.size,
                    peak=peak_flops(jax.devices()[0]),
                    tokens_until=functools.partial(lengths.tokens_until, cfg),
                )
                axes = module.axes(family.Model, task.model)
                one = step.train_step(task, update, axes)
                with ledger.during("compilation"):
                    marks = dict(has_loss=dataset.has_loss, has_labels=dataset.has_labels)
                    with heard() as lines:
                        traced = build.lowered(cfg, one, abstract, devices, **marks)
                    for line in lines:
                        out.event(line, "warning")
                    compiled = programs.compiled(traced, devices, program, out.event)
                session = Session(
                    cfg=cfg,
                    dataset=dataset,
                    devices=devices,
                    checkpoints=checkpoints,
                    mirror=mirror,
                    out=out,
                    meter=meter,
                    ledger=ledger,
                    pace=Pace(),
                    train_step=compiled,
                    eval_step=jax.jit(step.eval_step(task, axes, cfg.eval.draws)),
                    steps=steps,
                    stopper=stopper,
                    trace=Trace(cfg.profile, mirror.near, cfg.run),
                    watchdog=Watchdog(cfg.hang, cfg.run),
                    record=record,
                    watched=update.watched,
                    fresh=first_state,
                )
                keep_recipe(cfg, mirror.near, dataset.index.labels)
                with session.watchdog:
                    code = session.settled(attempts(session, latest))
                return code
        except KeyboardInterrupt:
            if is_program:
                checkpoints.leave()
            raise
        finally:
            checkpoints.close()
            out.close()


def in_vain(cfg: sections.Run, task: Task, begun: int) -> Iterator[str]:
    """What the recipe says that brings nothing on these devices, or to a run that goes on from this step."""
    here = jax.local_devices()[0]
    if cfg.memory.products != "compute" and not task.how.native:
        yield emulated("memory.products", task.how.products, here)
    if cfg.loss.split == "fp8" and not multiplies(here, "fp8"):
        yield emulated("loss.split", "fp8", here)
    traced = Steps.parse(cfg.profile)
    if 0 < traced.first <= begun:
        later = f"{begun + 1}:{begun + 1 + traced.last - traced.first}"
        yield (
            f"profile: {cfg.profile} has no effect: the run goes on from step {begun}, and the trace would "
            f"begin with step {traced.first}; profile={later} traces as many of those to come"
        )


def attempts(session: Session, step: int | None) -> int:
    """Trains from a checkpoint on, or from the start. Returns the exit code. Bad steps take the run back, and
    it goes on with the data after them."""
    kind = session.devices.devices.flat[0].device_kind
    session.ledger.begin(step or 0, devices=session.devices.size, kind=kind, hosts=jax.process_count())
    while True:
        with session.ledger.during("preparation" if step is None else "checkpoint_restore"):
            current = session.fresh(step)
        ended = loop(session, current, step or 0)
        if isinstance(ended, int):
            return ended
        session.watchdog.alive()
        step = session.checkpoints.back(ended.first)
        tell(session.out, session.checkpoints, session.mirror)
        cfg, dataset, record, to = session.cfg, session.dataset, session.record, step or 0
        much = f"{len(ended.left_out)} of the updates from step {ended.first} to {ended.last} were left out"
        stops = record.tries(to) >= rollback.TRIES
        if stops:
            record.add((ended.last, -1, -1, -1))
            said = f"stopped at step {ended.last}: {much}"
        else:
            passed = rollback.stretch(cfg, dataset, max(ended.first, to + 1), ended.last)
            record.add((ended.last, to, *passed))
            said = f"step {ended.last}: {much}; back to step {to}, and past the data of those steps"
        told = ""
        if jax.process_index() == 0:
            pages = rollback.pages(cfg, session.mirror.near, dataset, ended)
            told = f"; {record.report(said, pages)} names their documents"
        if stops:
            session.out.event(f"{said}{told}. {ADVICE}", "error")
            return 1
        session.out.event(said + told, "warning")
        session.ledger.back(to)
        session = dataclasses.replace(session, dataset=dataset.passing([passed]))
        session.out.back(to)


def loop(session: Session, current: State, start: int) -> int | rollback.Trouble:
    """Until the last step, a wish to stop, or bad steps: the exit code, or what the trouble is."""
    cfg, late = session.cfg, Late()
    session.meter.begin(start)
    session.ledger.train(start, int(current.skipped))
    number, idle = start, Idle()
    batches = read_ahead(session.batch, start, session.steps, idle.watch)
    try:
        session.pace.starts()
        for number, batch in enumerate(batches, start + 1):
            session.pace.ready()
            session.ledger.move("data_loading", idle.ended())
            session.trace.before(number, current)
            current, metrics = session.train_step(current, batch)
            idle.pending = metrics["skipped"]
            session.log(late.push(number, metrics))
            session.watchdog.stepped(number)
            last, stopping = number == session.steps, session.stopper.after(number)
            evaluating = last or (not stopping and cfg.eval.every and number % cfg.eval.every == 0)
            tier = saved.due(cfg.checkpoint, number)
            if (last or stopping) and tier != "permanent":
                tier = "temporary"
            tracing = session.trace.ends(number, stopping=last or stopping)
            if tracing or evaluating or tier:
                session.watchdog.alive()
            if tracing:
                session.profile(number, current)
            if evaluating or tier:
                session.log(late.flush())
            if tier:  # first: whatever evaluation meets, the work is kept
                session.save(number, current, tier)
            if evaluating:
                session.evaluate(number, current)
            if stopping and not last:
                session.ledger.why = session.stopper.asked or ""
                session.out.event(
                    f"asked to stop by {session.stopper.asked}; the same command goes on from step {number}"
                )
                return PREEMPTED
            session.pace.starts()
        return 0
    except Spoilt as error:
        if session.trace.ends(number, stopping=True):  # one that still runs could not be started again
            session.profile(number, current)
        # Not saved: such weights may be past saving, and would push out a good checkpoint.
        first, recent = error.number - error.since, jax.device_get(current.recent)
        left_out = spikes.left_out(recent, error.number, error.since + 1)
        return rollback.Trouble(first, error.number, left_out, session.watched)


ADVICE = (
    "Look at the data of those steps; to try once more from the last checkpoint, run the command again, with "
    "a lower optimizer.learning_rate, a longer schedule.warmup or a lower optimizer.clip"
)


def waiting(line: str) -> None:
    """Before there is anything else to say it with."""
    print(f"headrace: {line}", file=sys.stderr, flush=True)


def restored(
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


def forgiven(current: State) -> State:
    """Without the bad steps before a checkpoint that the run went back to: what follows is judged alone. Also
    when it is started again from there."""
    none = jnp.zeros_like(current.recent.left_out, device=current.recent.left_out.sharding)
    return dataclasses.replace(current, recent=dataclasses.replace(current.recent, left_out=none))


def with_weights(
    source: start.Source, task: Task, current: State, devices: Mesh, data: str
) -> tuple[State, str]:
    """A fresh state with another model's weights, and what is to be said of it. The state is donated and must
    not share arrays, so an average gets its own."""
    params, said = start.weights(source, task.model, current.params, devices, data)
    ema = None if current.ema is None else jax.tree.map(jnp.copy, params)
    return dataclasses.replace(current, params=params, ema=ema), said


def check_same(saved: dict[str, Any], cfg: sections.Run, dataset: Dataset) -> None:
    """A run goes on only with the model, the tokenizer and the data it began with, in their order. The rest
    of the recipe may change. What differs is told at once, all of it."""
    before, now = config.flat(saved["recipe"]), config.flat(config.to_dict(cfg))
    fixed = {key for key in {**before, **now} if key.startswith("model.")}
    if "seed" in saved:  # not an import, which has taken no step yet
        fixed |= {"optimizer.use", "seed", "batch.sequences", "data.sequence_length"}
        fixed |= {"batch.accumulate", "batch.ramp", "batch.ramp_from"} if cfg.batch.ramp_from else set()
    other = [key for key in {**now, **before} if before.get(key) != now.get(key) and key != "run"]
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
            f"{cfg.run} holds a run with {'; with '.join(wrong)}; use another `run`, or put back what differs"
            + may
        )


def open_folder(cfg: sections.Run, near: Path, start: int, steps: int) -> Writers:
    if jax.process_index():
        return Writers()
    log = cfg.log
    settings = config.to_dict(cfg)
    out = writers.make(
        near, step=start, total_steps=steps, tensorboard=log.tensorboard, wandb=log.wandb, recipe=settings
    )
    return out


def open_ledger(near: Path, started: float) -> Ledger:
    """The first host keeps it, in the run folder."""
    ledger = Ledger(near / "goodput.jsonl" if jax.process_index() == 0 else None, started=started)
    ledger.enter("preparation")
    return ledger


def keep_recipe(cfg: sections.Run, near: Path, labels: Sequence[str]) -> None:
    """Recipe, tokenizer and what labels are called, once nothing stands against going on with them."""
    if jax.process_index() == 0:
        (near / "recipe.yaml").write_text(config.to_yaml(cfg))
        keep_tokenizer(cfg.data.path, near)
        if classifier.has_labels(cfg.model):
            classifier.keep_names(near, labels)


def describe(cfg: sections.Run, task: Task, abstract: State, devices: Mesh, start: int, steps: int) -> str:
    size = sum(leaf.size for leaf in jax.tree.leaves(abstract.params))
    split = " x ".join(f"{axis} {n}" for axis, n in devices.shape.items() if n > 1)
    kind = jax.devices()[0].device_kind
    many = f" of {jax.process_count()} hosts" if hosts.several() else ""
    where = f"{devices.size} {kind}{many}" + (f" ({split})" if split else "")
    begin = f"from step {start} to {steps}" if 0 < start < steps else f"{steps} steps"
    rows = f"{cfg.batch.sequences} x {cfg.data.sequence_length} tokens"
    return f"{task.model.use} with {size:,} parameters on {where}; {begin} of {rows}"


def finished(start: int, steps: int) -> str:
    if start > steps:
        return f"the run is at step {start}, beyond schedule.steps, which is {steps}; raise it to go on"
    return f"all {steps} steps are done; raise schedule.steps to go on"
