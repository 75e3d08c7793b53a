"""The parts that the training loop works with, and its work between steps: logs, evaluations, saves."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jax.sharding import Mesh

from headrace.checkpoint.manager import Checkpoints, Metadata
from headrace.checkpoint.manifest import Tier
from headrace.checkpoint.state import State
from headrace.config import reader
from headrace.config.sections import TrainRecipe
from headrace.data.batch_order import BatchOrder
from headrace.data.dataset import Dataset
from headrace.errors import ExitCode
from headrace.objectives import Batch
from headrace.runtime import goodput
from headrace.runtime.goodput import GoodputClock
from headrace.runtime.signals import Stopper
from headrace.runtime.stragglers import StragglerMonitor
from headrace.runtime.watchdog import Watchdog
from headrace.storage.bucket_sync import Mirror
from headrace.trackers import Trackers
from headrace.training import rollback
from headrace.training.batch import device_batch
from headrace.training.evaluate import evaluate
from headrace.training.metrics import Meter, Scalars
from headrace.training.profiler import Trace
from headrace.training.rollback import RollbackLog
from headrace.training.step import EvalStep, TrainStep


class TooManySkippedUpdates(Exception):
    """`optimizer.max_skipped` updates were skipped from step `first` to `last`."""

    def __init__(self, *, first: int, last: int) -> None:
        self.first, self.last = first, last


@dataclass(frozen=True)
class TrainSession:
    """Everything that the loop works with, except for the train state."""

    recipe: TrainRecipe
    dataset: Dataset
    batch_order: BatchOrder  # which rows each step reads
    mesh: Mesh
    checkpoints: Checkpoints
    rollback_log: RollbackLog
    mirror: Mirror
    trackers: Trackers
    clock: GoodputClock
    meter: Meter
    stragglers: StragglerMonitor
    stopper: Stopper
    trace: Trace
    watchdog: Watchdog
    load_state: Callable[[int | None], State]  # checkpoint `step`, or a new state if that is None
    train_step: TrainStep
    eval_step: EvalStep
    total_steps: int
    guarded_metrics: tuple[str, ...]  # checked for spikes, ordered as in State.recent

    def load_batch(self, step: int) -> Batch:
        """Read the batch of `step` onto the devices. The first step is 0 here."""
        return device_batch(self.dataset, self.batch_order, self.mesh, step)

    def log(self, steps: Sequence[tuple[int, Scalars]]) -> None:
        """Log skipped updates, and the metrics of every `log.every` steps.

        Raises TooManySkippedUpdates if there were `optimizer.max_skipped` of them."""
        for step, metrics in steps:
            num_skipped, steps_since_first = int(metrics.pop("left_out")), int(metrics.pop("since"))
            metrics["skipped"] = int(metrics["skipped"])
            if num_skipped:
                reason = rollback.skip_reason(metrics)
                message = f"step {step}: update skipped: {reason} ({self.describe_rows(step)})"
                self.trackers.event(message, "warning")
            if step in (1, self.total_steps) or step % self.recipe.log.every == 0:
                self.log_row(step, metrics)
            if num_skipped >= self.recipe.optimizer.max_skipped:
                raise TooManySkippedUpdates(first=step - steps_since_first, last=step)

    def log_row(self, step: int, metrics: Scalars) -> None:
        """Log the metrics of `step`, with the speed and the goodput so far."""
        row = self.meter.make_row(step, metrics)
        self.clock.record_progress(step, row["skipped"], self.checkpoints.last_durable_step)
        for warning in self.stragglers.compare(row["step_seconds"]):
            self.trackers.event(f"step {step}: {warning}", "warning")
        self.trackers.write(step, row | self.clock.metrics())

    def describe_rows(self, step: int) -> str:
        """Name the rows of training data that `step` was made of."""
        rows, total = rollback.row_span(self.batch_order, step, step), self.batch_order.stored_rows
        return f"rows {rows.start % total:,} to {(rows.stop - 1) % total:,}"

    def evaluate(self, step: int, state: State) -> None:
        """Evaluate the weights, or their average if there is one, and log the result."""
        if not self.dataset.rows_per_epoch("evaluation"):
            self.trackers.event(
                f"step {step}: no evaluation, since no data is held out for it (pack.eval_fraction)"
            )
            return
        params = state.params if state.ema is None else state.ema
        with self.meter.pause(state.params), self.clock.category("evaluation"):
            result = evaluate(
                functools.partial(self.eval_step, params),
                self.dataset,
                self.mesh,
                self.recipe.objective,
                batch_size=self.recipe.batch.sequences // self.recipe.batch.microbatches,
                max_batches=self.recipe.eval.batches,
                should_stop=self.should_stop_evaluation,
            )
        if result is not None:
            row = {f"evaluate/{name}": value for name, value in result.items()}
            self.trackers.write(step, row)
        else:
            self.trackers.event(
                f"step {step}: evaluation aborted by {self.stopper.stop_signal}; "
                f"`headrace eval {self.recipe.run_dir}` repeats it"
            )

    def should_stop_evaluation(self) -> bool:
        """Whether to abort the evaluation after this batch. Keeps the watchdog quiet until the next."""
        self.watchdog.reset()
        return self.stopper.can_abort()

    def finish_trace(self, step: int, state: State) -> None:
        """End the profile after `step`, and log what takes longest."""
        with self.meter.pause(state.params), self.clock.category("other"):
            for line in self.trace.stop(step, state):
                self.trackers.event(line)

    def save(self, step: int, state: State, tier: Tier) -> None:
        """Start to save a checkpoint, which is written while training continues."""
        with self.meter.pause(state.params), self.clock.category("checkpoint_save"):
            is_saving = self.checkpoints.save(step, state, self.checkpoint_meta(step), tier=tier)
            if self.recipe.checkpoint.every == 1:  # no interim save fits in between
                self.checkpoints.wait()
        report_problems(self.trackers, self.checkpoints, self.mirror)
        if is_saving and tier != "interim":
            self.trackers.event(f"step {step}: writing a checkpoint to {self.recipe.run_dir}/checkpoints")

    def checkpoint_meta(self, step: int) -> Metadata:
        """Make the JSON of a checkpoint. Rows follow from the step, so that is the position in the data."""
        next_rows = rollback.ranges_of_steps(self.batch_order, step + 1, step + 1)
        return {
            "step": step,
            "seed": self.recipe.seed,
            "data": {
                "path": self.recipe.data.path,
                "fingerprint": self.dataset.fingerprint,
                "next_row": next_rows[0].start,
            },
            "recipe": reader.to_dict(self.recipe),
            "tokenizer_sha256": self.dataset.tokenizer_sha256,
        }

    def finish(self, exit_code: ExitCode) -> ExitCode:
        """Wait for the last checkpoint and return the final exit code: FAILED if it could not be written,
        since a run whose result is not stored has failed."""
        self.watchdog.reset()
        with self.clock.category("checkpoint_save"):
            is_saved = self.checkpoints.wait()
        report_problems(self.trackers, self.checkpoints, self.mirror)
        if not is_saved:
            self.trackers.event(
                "the last checkpoint was not written; the same command trains those steps again", "error"
            )
            exit_code = exit_code or ExitCode.FAILED
        self.clock.end(exit_code, self.checkpoints.last_durable_step)
        self.trackers.event(goodput.summary_line(self.clock.totals))
        return exit_code


def report_problems(trackers: Trackers, checkpoints: Checkpoints, mirror: Mirror) -> None:
    """Log what went wrong with checkpoints and uploads since the last call."""
    for problem in [*checkpoints.drain_problems(), *mirror.drain_problems()]:
        trackers.event(problem, "warning")
