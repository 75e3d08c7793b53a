"""Where the rows and events of a run go. metrics.jsonl, log.txt and the terminal always; trackers when
asked for. Nothing that goes wrong in here may stop a training run."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from headrace.storage import redact as secret
from headrace.trackers import terminal
from headrace.trackers.jsonl import Jsonl
from headrace.trackers.tensorboard import TensorBoard
from headrace.trackers.terminal import Level
from headrace.trackers.wandb import Wandb


class Writer(Protocol):
    """`optional` writers are dropped at their first error, the others are tried again."""

    name: str
    optional: bool

    def write(self, step: int, row: dict[str, Any]) -> None: ...

    def event(self, message: str, level: Level) -> None: ...

    def back(self, step: int) -> None: ...

    def close(self) -> None: ...


class Writers:
    """Hands every row and event to each writer. An optional one that fails is dropped; the others are
    tried again with the next row. Either is told once. Without writers (other hosts) it does nothing."""

    def __init__(self, writers: Sequence[Writer] = ()) -> None:
        self._writers = list(writers)
        self._failing: set[str] = set()

    def write(self, step: int, row: dict[str, Any]) -> None:
        """A row of the training loop, or of `evaluate/...` keys."""
        for writer in list(self._writers):
            self._attempt(writer, partial(writer.write, step, row))

    def event(self, message: str, level: Level = "info") -> None:
        """One sentence for the user: a checkpoint was saved, an update was skipped."""
        words = secret.clean(message)
        for writer in list(self._writers):
            self._attempt(writer, partial(writer.event, words, level))

    def back(self, step: int) -> None:
        """The run goes on from an earlier step once more: later rows are not its own."""
        for writer in list(self._writers):
            self._attempt(writer, partial(writer.back, step))

    def add(self, name: str, make: Callable[[], Writer]) -> None:
        """Opens a writer; one that cannot be opened is told and left out."""
        try:
            self._writers.append(make())
        except Exception as error:
            self.event(f"{name} is off: {_reason(error)}; training goes on without it", "warning")

    def close(self) -> None:
        for writer in list(self._writers):
            self._attempt(writer, writer.close)
        self._writers = []

    def _attempt(self, writer: Writer, call: Callable[[], None]) -> None:
        if writer not in self._writers:  # dropped while telling of another
            return
        try:
            call()
        except Exception as error:
            if writer.optional:
                self._writers.remove(writer)
                self.event(f"{writer.name} failed and is off: {_reason(error)}; training goes on", "warning")
            elif writer.name not in self._failing:
                self._failing.add(writer.name)
                self.event(f"{writer.name} cannot be written: {_reason(error)}; training goes on", "warning")


def make(
    folder: str | os.PathLike[str],
    *,
    step: int = 0,
    total_steps: int,
    tensorboard: bool = False,
    wandb: bool = False,
    recipe: dict[str, Any] | None = None,
) -> Writers:
    """The writers of a run that goes on from `step`, 0 for a new one. For the first host only; the
    others take `Writers()`."""
    run = Path(folder)
    run.mkdir(parents=True, exist_ok=True)
    writers = Writers()
    writers.add("terminal", lambda: terminal.make(total_steps, step=step))
    writers.add("log.txt", lambda: terminal.log(run / "log.txt", total_steps))
    writers.add("metrics.jsonl", lambda: Jsonl(run / "metrics.jsonl", step=step))
    if tensorboard:
        writers.add("tensorboard", lambda: TensorBoard(run / "tensorboard", step=step))
    if wandb:
        writers.add("wandb", lambda: Wandb(run, recipe=recipe or {}, say=writers.event))
    return writers


def _reason(error: Exception) -> str:
    """One line, without the full stop that would stand before our own words."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.rstrip(".")
