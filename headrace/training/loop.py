"""The training loop, and the rollback to an earlier checkpoint when too many updates are skipped.

Steps count from 1. A state, a checkpoint or a log line "at step n" is what there is after n steps."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax

from headrace.checkpoint.inventory import tier_due
from headrace.checkpoint.manifest import Tier
from headrace.checkpoint.state import State
from headrace.data.prefetch import read_ahead
from headrace.errors import ExitCode
from headrace.objectives import Batch
from headrace.runtime.goodput import DataWait
from headrace.training import loss_spikes, rollback
from headrace.training.metrics import DeferredMetrics
from headrace.training.rollback import BadStretch
from headrace.training.session import TooManySkippedUpdates, TrainSession, report_problems

ADVICE = (
    "Look at the data of those steps. The same command tries once more from the last checkpoint; a lower "
    "optimizer.learning_rate, a longer schedule.warmup or a lower optimizer.max_grad_norm may help"
)


def train_with_rollback(session: TrainSession, step: int | None) -> ExitCode:
    """Train from checkpoint `step` (None: from scratch) to the end of the run.

    Too many skipped updates roll the run back to a checkpoint from before them. Training continues there,
    without the data of the bad steps; after `rollback.MAX_ROLLBACKS` to one checkpoint the run stops."""
    device_kind = session.mesh.devices.flat[0].device_kind
    session.clock.begin(step or 0, devices=session.mesh.size, kind=device_kind, hosts=jax.process_count())
    while True:
        with session.clock.category("preparation" if step is None else "checkpoint_restore"):
            state = session.load_state(step)
        result = run_steps(session, state, step or 0)
        if isinstance(result, ExitCode):
            return result

        session.watchdog.reset()
        step = session.checkpoints.rewind_before(result.first)
        report_problems(session.trackers, session.checkpoints, session.mirror)
        if session.rollback_log.rollbacks_to(step or 0) >= rollback.MAX_ROLLBACKS:
            return stop_at_bad_stretch(session, result)
        session = roll_back(session, result, step or 0)


def run_steps(session: TrainSession, state: State, start_step: int) -> ExitCode | BadStretch:
    """Train until the last step, a stop signal, or too many skipped updates (a `BadStretch`).

    The loop does not wait for the step that it has just started: metrics are read one step late, so that the
    devices always have work queued."""
    deferred, data_wait = DeferredMetrics(), DataWait()
    session.meter.begin(start_step)
    session.clock.train(start_step, int(state.skipped))
    batches = iter_batches(session, start_step, data_wait)
    try:
        for step, batch in batches:
            session.trace.maybe_start(step, state)
            state, metrics = session.train_step(state, batch)
            data_wait.step_output = metrics["skipped"]  # there once the devices are done with this step
            session.log(deferred.push(step, metrics))
            session.watchdog.step_done(step)

            due = find_work_due(session, step)
            if due.end_trace or due.save or due.evaluate:
                session.watchdog.reset()  # what follows may take longer than a step
            if due.end_trace:
                session.finish_trace(step, state)
            if due.save or due.evaluate:
                session.log(deferred.flush())
            if due.save:  # before the evaluation: if that fails, the work is saved
                session.save(step, state, due.save)
            if due.evaluate:
                session.evaluate(step, state)
            if due.stop:
                return report_stop(session, step)
        return ExitCode.DONE
    except TooManySkippedUpdates as error:
        if session.trace.should_stop(step, run_ends=True):  # the next attempt could not start it again
            session.finish_trace(step, state)
        # Not saved: these weights may be beyond repair, and saving them would remove a good checkpoint.
        return find_bad_stretch(session, state, error)


def iter_batches(session: TrainSession, start_step: int, data_wait: DataWait) -> Iterator[tuple[int, Batch]]:
    """Yield each step with its batch, which a thread reads ahead. Counts the time that is spent waiting."""
    batches = read_ahead(session.load_batch, start_step, session.total_steps, on_wait=data_wait.watch)
    session.stragglers.step_started()
    for step, batch in enumerate(batches, start_step + 1):
        session.stragglers.batch_ready()
        session.clock.reclassify("data_loading", data_wait.finish())
        yield step, batch
        session.stragglers.step_started()


@dataclass(frozen=True)
class WorkDue:
    """Work that is due between a step and the next."""

    end_trace: bool
    save: Tier | None
    evaluate: bool
    stop: bool  # a signal ends the run before its last step


def find_work_due(session: TrainSession, step: int) -> WorkDue:
    """Decide what is due after `step`. The run saves a checkpoint wherever it ends."""
    is_last = step == session.total_steps
    is_stopping = session.stopper.should_stop(step)  # called after each step: hosts agree on one
    run_ends = is_last or is_stopping
    tier = tier_due(session.recipe.checkpoint, step)
    eval_every = session.recipe.eval.every
    return WorkDue(
        end_trace=session.trace.should_stop(step, run_ends=run_ends),
        save="temporary" if run_ends and tier != "permanent" else tier,
        evaluate=is_last or (not is_stopping and eval_every > 0 and step % eval_every == 0),
        stop=is_stopping and not is_last,
    )


def report_stop(session: TrainSession, step: int) -> ExitCode:
    """Log that a signal ends the run before its last step."""
    stop_signal = session.stopper.stop_signal
    session.clock.end_reason = stop_signal or ""
    session.trackers.event(f"stopped by {stop_signal}; the same command resumes from step {step}")
    return ExitCode.PREEMPTED


def find_bad_stretch(session: TrainSession, state: State, error: TooManySkippedUpdates) -> BadStretch:
    """Read from the state's history which updates were skipped, and with which losses."""
    history = jax.device_get(state.recent)
    return BadStretch(
        first=error.first,
        last=error.last,
        skipped=loss_spikes.skipped_updates(history, first=error.first, last=error.last),
        metric_names=session.guarded_metrics,
    )


def roll_back(session: TrainSession, bad: BadStretch, to_step: int) -> TrainSession:
    """Record the rollback to `to_step`. Returns the session to continue with, which skips the bad rows."""
    # Without a checkpoint from before the bad steps, `to_step` is the oldest one and may lie among them.
    first = max(bad.first, to_step + 1)
    bad_rows = rollback.row_span(session.batch_order, first, bad.last)
    session.rollback_log.add_rollback(bad.last, to_step=to_step, rows=bad_rows)
    message = (
        f"step {bad.last}: {describe_bad_stretch(bad)}; "
        f"rolled back to step {to_step}, and the data of those steps is skipped"
    )
    session.trackers.event(message + write_report(session, bad, message), level="warning")
    session.clock.rewind(to_step)
    session.trackers.rewind(to_step)
    return replace(session, batch_order=session.batch_order.skip([bad_rows]))


def stop_at_bad_stretch(session: TrainSession, bad: BadStretch) -> ExitCode:
    """Log that the run stops, since rolling back did not help."""
    session.rollback_log.add_stop(bad.last)
    message = f"stopped at step {bad.last}: {describe_bad_stretch(bad)}"
    session.trackers.event(f"{message}{write_report(session, bad, message)}. {ADVICE}", level="error")
    return ExitCode.FAILED


def describe_bad_stretch(bad: BadStretch) -> str:
    """Say how many updates were skipped, and where."""
    return f"{len(bad.skipped)} of the updates from step {bad.first} to {bad.last} were skipped"


def write_report(session: TrainSession, bad: BadStretch, message: str) -> str:
    """Write a report that names the documents of the bad steps. Returns the end of the log message.

    Only the first host writes, and only its messages are shown."""
    if jax.process_index() != 0:
        return ""
    lines = rollback.report_lines(session.dataset, session.batch_order, session.mirror.local_dir, bad)
    return f"; {session.rollback_log.write_report(message, lines)} names their documents"
