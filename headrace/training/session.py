"""What the loop works with, and does between steps: it logs, evaluates, profiles and saves."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.manifest import Tier
from headrace.checkpoint.state import State
from headrace.config import reader, sections
from headrace.data.batch_order import BatchOrder
from headrace.data.dataset import Dataset
from headrace.objectives import Batch
from headrace.runtime import goodput, multihost
from headrace.runtime.goodput import GoodputClock
from headrace.runtime.stragglers import StragglerMonitor
from headrace.runtime.watchdog import Watchdog
from headrace.storage.bucket_sync import Mirror
from headrace.trackers import Trackers
from headrace.training import rollback, step
from headrace.training.evaluate import device_batch, eval_metrics_of, evaluate, unpredicted_tokens
from headrace.training.metrics import Meter
from headrace.training.profiler import Trace


class TooManySkippedUpdates(Exception):
    """Too many updates were left out, the first `since` steps before this one."""

    def __init__(self, number: int, since: int) -> None:
        self.number, self.since = number, since


@dataclass(frozen=True)
class TrainSession:
    """What the loop works with."""

    recipe: sections.TrainRecipe
    dataset: Dataset
    batch_order: BatchOrder  # which rows each step reads
    mesh: Mesh
    checkpoints: Checkpoints
    mirror: Mirror
    trackers: Trackers
    meter: Meter
    clock: GoodputClock
    stragglers: StragglerMonitor
    train_step: Callable[[State, Batch], tuple[State, step.Metrics]]
    eval_step: Callable[..., step.Metrics]
    total_steps: int
    stopper: multihost.Stopper
    trace: Trace
    watchdog: Watchdog
    rollback_log: rollback.RollbackLog
    guarded_metrics: tuple[str, ...]  # metrics, as `State.recent` has them
    load_state: Callable[[int | None], State]  # the state at a checkpoint, or at the very start

    def load_batch(self, number: int) -> Batch:
        return device_batch(self.dataset, self.batch_order, self.mesh, number)

    def log(self, rows: list[tuple[int, dict[str, float]]]) -> None:
        """Every step is looked at, some are written down."""
        for number, values in rows:
            left_out, since = int(values.pop("left_out")), int(values.pop("since"))
            values["skipped"] = int(values["skipped"])
            if left_out:
                why = rollback.reason_text(values)
                self.trackers.event(f"step {number}: update left out: {why} ({self.rows(number)})", "warning")
            if number in (1, self.total_steps) or number % self.recipe.log.every == 0:
                row = self.meter.row(number, values)
                self.clock.step(number, row["skipped"], self.checkpoints.last_durable_step)
                for line in self.stragglers.compare(row["step_seconds"]):
                    self.trackers.event(f"step {number}: {line}", "warning")
                self.trackers.write(number, row | self.clock.metrics())
            if left_out >= self.recipe.optimizer.max_skipped:
                raise TooManySkippedUpdates(number, since)

    def rows(self, number: int) -> str:
        """Of the training data, which a step was made of."""
        first, count = rollback.row_span(self.batch_order, number, number)
        total = self.batch_order.stored_rows
        return f"rows {first % total:,} to {(first + count - 1) % total:,}"

    def evaluate(self, number: int, current: State) -> None:
        if not self.dataset.rows_per_epoch("evaluation"):
            self.trackers.event(
                f"step {number}: nothing is held out for evaluation (pack.eval_fraction), so none is made"
            )
            return
        with self.meter.pause(current.params), self.clock.category("evaluation"):
            result = evaluate(
                functools.partial(self.eval_step, current.params if current.ema is None else current.ema),
                self.dataset,
                self.mesh,
                sequences=self.recipe.batch.sequences // self.recipe.batch.microbatches,
                given=unpredicted_tokens(self.recipe.objective),
                judged=eval_metrics_of(self.recipe.objective),
                batches=self.recipe.eval.batches,
                stop=self.should_stop_evaluation,
            )
        if result is not None:
            self.trackers.write(number, {f"evaluate/{name}": value for name, value in result.items()})
        else:
            hint = f"`headrace eval {self.recipe.run_dir}` makes it"
            self.trackers.event(
                f"step {number}: evaluation left off, since the run was asked to stop; {hint}"
            )

    def should_stop_evaluation(self) -> bool:
        """Asked after each batch of an evaluation."""
        self.watchdog.reset()
        return self.stopper.can_abort()

    def finish_trace(self, number: int, current: State) -> None:
        with self.meter.pause(current.params), self.clock.category("other"):
            for line in self.trace.stop(number, current):
                self.trackers.event(line)

    def save(self, number: int, current: State, tier: Tier) -> None:
        with self.meter.pause(current.params), self.clock.category("checkpoint_save"):
            about = meta(self.recipe, self.dataset, self.batch_order, number)
            sent = self.checkpoints.save(number, current, about, tier=tier)
            if self.recipe.checkpoint.every == 1:  # there is no half-way
                self.checkpoints.wait()
        report_problems(self.trackers, self.checkpoints, self.mirror)
        if sent and tier != "interim":
            self.trackers.event(f"step {number}: checkpoint on its way to {self.recipe.run_dir}/checkpoints")

    def finish(self, code: int) -> int:
        """The exit code, once the last save is whole: a run whose end is not kept is not done."""
        self.watchdog.reset()
        with self.clock.category("checkpoint_save"):
            whole = self.checkpoints.wait()
        report_problems(self.trackers, self.checkpoints, self.mirror)
        if not whole:
            self.trackers.event(
                "the last checkpoint was not written; the same command makes it again", "error"
            )
        code = code if whole else code or 1
        self.clock.end(code, self.checkpoints.last_durable_step)
        self.trackers.event(goodput.summary_line(self.clock.totals))
        return code


def report_problems(out: Trackers, checkpoints: Checkpoints, mirror: Mirror) -> None:
    for line in [*checkpoints.drain_problems(), *mirror.drain_problems()]:
        out.event(line, "warning")


def meta(cfg: sections.TrainRecipe, dataset: Dataset, order: BatchOrder, number: int) -> dict[str, Any]:
    """What a checkpoint says of itself. The stream is a function of the step, so the step is its position."""
    return {
        "step": number,
        "seed": cfg.seed,
        "data": {
            "path": cfg.data.path,
            "fingerprint": dataset.fingerprint,
            "next_row": rollback.rows_of(order, number + 1, number + 1)[0].start,
        },
        "recipe": reader.to_dict(cfg),
        "tokenizer_sha256": dataset.tokenizer_sha256,
    }
