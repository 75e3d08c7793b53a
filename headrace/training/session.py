"""What the loop works with, and does between steps: it logs, evaluates, profiles and saves."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from headrace.config import reader as config, run_length as lengths, sections
from headrace.runtime import goodput, multihost as hosts
from headrace.training import rollback, step
from headrace.checkpoint.manager import Checkpoints
from headrace.data.dataset import Dataset
from headrace.training.evaluate import evaluate, given_to, judged_by, place
from headrace.runtime.goodput import Ledger
from headrace.checkpoint.manifest import Tier
from headrace.training.metrics import Meter
from headrace.storage.bucket_sync import Mirror
from headrace.objectives import Batch
from headrace.checkpoint.state import State
from headrace.runtime.stragglers import Pace
from headrace.training.profiler import Trace
from headrace.runtime.watchdog import Watchdog
from headrace.trackers import Writers


class Spoilt(Exception):
    """Too many updates were left out, the first `since` steps before this one."""

    def __init__(self, number: int, since: int) -> None:
        self.number, self.since = number, since


@dataclass(frozen=True)
class Session:
    """What the loop works with."""

    cfg: sections.Run
    dataset: Dataset
    devices: Mesh
    checkpoints: Checkpoints
    mirror: Mirror
    out: Writers
    meter: Meter
    ledger: Ledger
    pace: Pace
    train_step: Callable[[State, Batch], tuple[State, step.Metrics]]
    eval_step: Callable[..., step.Metrics]
    steps: int
    stopper: hosts.Stopper
    trace: Trace
    watchdog: Watchdog
    record: rollback.Record
    watched: tuple[str, ...]  # metrics, as `State.recent` has them
    fresh: Callable[[int | None], State]  # the state at a checkpoint, or at the very start

    def batch(self, number: int) -> Batch:
        cfg = self.cfg
        return place(
            self.dataset,
            self.devices,
            number,
            split="train",
            sequences=cfg.batch.sequences,
            seed=cfg.seed,
            ramp=lengths.ramp(cfg),
        )

    def log(self, rows: list[tuple[int, dict[str, float]]]) -> None:
        """Every step is looked at, some are written down."""
        for number, values in rows:
            left_out, since = int(values.pop("left_out")), int(values.pop("since"))
            values["skipped"] = int(values["skipped"])
            if left_out:
                why = rollback.described(values)
                self.out.event(f"step {number}: update left out: {why} ({self.rows(number)})", "warning")
            if number in (1, self.steps) or number % self.cfg.log.every == 0:
                row = self.meter.row(number, values)
                self.ledger.step(number, row["skipped"], self.checkpoints.sealed)
                for line in self.pace.compare(row["step_seconds"]):
                    self.out.event(f"step {number}: {line}", "warning")
                self.out.write(number, row | self.ledger.told())
            if left_out >= self.cfg.optimizer.patience:
                raise Spoilt(number, since)

    def rows(self, number: int) -> str:
        """Of the training data, which a step was made of."""
        first, count = rollback.stretch(self.cfg, self.dataset, number, number)
        total = self.dataset.ends["train"][-1]
        return f"rows {first % total:,} to {(first + count - 1) % total:,}"

    def evaluate(self, number: int, current: State) -> None:
        if not self.dataset.rows("evaluation"):
            self.out.event(
                f"step {number}: nothing is held out for evaluation (pack.evaluation), so none is made"
            )
            return
        with self.meter.pause(current.params), self.ledger.during("evaluation"):
            result = evaluate(
                functools.partial(self.eval_step, current.params if current.ema is None else current.ema),
                self.dataset,
                self.devices,
                sequences=self.cfg.batch.sequences // self.cfg.batch.accumulate,
                given=given_to(self.cfg.objective),
                judged=judged_by(self.cfg.objective),
                batches=self.cfg.eval.batches,
                stop=self.leaves_off,
            )
        if result is not None:
            self.out.write(number, {f"evaluate/{name}": value for name, value in result.items()})
        else:
            hint = f"`headrace eval {self.cfg.run}` makes it"
            self.out.event(f"step {number}: evaluation left off, since the run was asked to stop; {hint}")

    def leaves_off(self) -> bool:
        """Asked after each batch of an evaluation."""
        self.watchdog.alive()
        return self.stopper.at_once()

    def profile(self, number: int, current: State) -> None:
        with self.meter.pause(current.params), self.ledger.during("other"):
            for line in self.trace.end(number, current):
                self.out.event(line)

    def save(self, number: int, current: State, tier: Tier) -> None:
        with self.meter.pause(current.params), self.ledger.during("checkpoint_save"):
            about = meta(self.cfg, self.dataset, number)
            sent = self.checkpoints.save(number, current, about, tier=tier)
            if self.cfg.checkpoint.every == 1:  # there is no half-way
                self.checkpoints.settle()
        tell(self.out, self.checkpoints, self.mirror)
        if sent and tier != "interim":
            self.out.event(f"step {number}: checkpoint on its way to {self.cfg.run}/checkpoints")

    def settled(self, code: int) -> int:
        """The exit code, once the last save is whole: a run whose end is not kept is not done."""
        self.watchdog.alive()
        with self.ledger.during("checkpoint_save"):
            whole = self.checkpoints.settle()
        tell(self.out, self.checkpoints, self.mirror)
        if not whole:
            self.out.event("the last checkpoint was not written; the same command makes it again", "error")
        code = code if whole else code or 1
        self.ledger.end(code, self.checkpoints.sealed)
        self.out.event(goodput.spoken(self.ledger.account))
        return code


def tell(out: Writers, checkpoints: Checkpoints, mirror: Mirror) -> None:
    for line in [*checkpoints.told(), *mirror.told()]:
        out.event(line, "warning")


def meta(cfg: sections.Run, dataset: Dataset, number: int) -> dict[str, Any]:
    """What a checkpoint says of itself. The stream is a function of the step, so the step is its position."""
    return {
        "step": number,
        "seed": cfg.seed,
        "data": {
            "path": cfg.data.path,
            "fingerprint": dataset.fingerprint,
            "next_row": rollback.rows_of(cfg, dataset, number + 1, number + 1)[0][0],
        },
        "recipe": config.to_dict(cfg),
        "tokenizer_sha256": dataset.tokenizer_sha256,
    }
