"""Outputs of a run's metrics and events: metrics.jsonl, log.txt and the terminal, and optional trackers.

An error in one of them never stops a training run."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from headrace.storage import redact
from headrace.trackers import terminal
from headrace.trackers.jsonl import Jsonl
from headrace.trackers.tensorboard import TensorBoard
from headrace.trackers.terminal import Level, Row
from headrace.trackers.wandb import Wandb


class Tracker(Protocol):
    """One output. If it is `optional`, it is removed at its first error; the others are tried again."""

    name: str
    optional: bool

    def write(self, step: int, row: Row) -> None: ...

    def event(self, message: str, level: Level) -> None: ...

    def rewind(self, step: int) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """The outputs of a run, each of which receives every row and event.

    An optional output that fails is removed; the others are tried again with the next row. Both cause one
    warning. Hosts other than the first have no outputs, so that nothing is written there."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self._trackers = list(trackers)
        self._failing: set[str] = set()

    def write(self, step: int, row: Row) -> None:
        """Write a row of the training loop, or one of `evaluate/...` keys."""
        for tracker in list(self._trackers):
            self._attempt(tracker, partial(tracker.write, step, row))

    def event(self, message: str, level: Level = "info") -> None:
        """Write a sentence for the user, such as that an update was skipped. Secrets are redacted."""
        text = redact.redact(message)
        for tracker in list(self._trackers):
            self._attempt(tracker, partial(tracker.event, text, level))

    def rewind(self, step: int) -> None:
        """Discard rows after `step`, from which the run continues."""
        for tracker in list(self._trackers):
            self._attempt(tracker, partial(tracker.rewind, step))

    def add(self, name: str, open_tracker: Callable[[], Tracker]) -> None:
        """Open an output. If that fails, log a warning and continue without it."""
        try:
            self._trackers.append(open_tracker())
        except Exception as error:
            self.event(f"{name} is off: {_reason(error)}; training continues without it", "warning")

    def close(self) -> None:
        for tracker in list(self._trackers):
            self._attempt(tracker, tracker.close)
        self._trackers = []

    def _attempt(self, tracker: Tracker, call: Callable[[], None]) -> None:
        if tracker not in self._trackers:  # removed while the failure of another was reported
            return
        try:
            call()
        except Exception as error:
            reason = _reason(error)
            if tracker.optional:
                self._trackers.remove(tracker)
                self.event(f"{tracker.name} failed and is off: {reason}; training continues", "warning")
            elif tracker.name not in self._failing:
                self._failing.add(tracker.name)
                self.event(f"{tracker.name} cannot be written: {reason}; training continues", "warning")


def make_trackers(
    folder: str | os.PathLike[str],
    *,
    step: int = 0,
    total_steps: int,
    tensorboard: bool = False,
    wandb: bool = False,
    recipe: dict[str, Any] | None = None,
) -> Trackers:
    """Open the outputs of a run that starts at `step`, or resumes from it.

    For the first host only; the others use `Trackers()`."""
    run_dir = Path(folder)
    run_dir.mkdir(parents=True, exist_ok=True)
    trackers = Trackers()
    trackers.add("terminal", lambda: terminal.make_terminal(total_steps, step=step))
    trackers.add("log.txt", lambda: terminal.make_log(run_dir / "log.txt", total_steps))
    trackers.add("metrics.jsonl", lambda: Jsonl(run_dir / "metrics.jsonl", step=step))
    if tensorboard:
        trackers.add("tensorboard", lambda: TensorBoard(run_dir / "tensorboard", step=step))
    if wandb:
        trackers.add("wandb", lambda: Wandb(run_dir, recipe=recipe or {}, on_message=trackers.event))
    return trackers


def _reason(error: Exception) -> str:
    """Return an error's message as one line without a final period."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.rstrip(".")
