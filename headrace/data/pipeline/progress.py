"""Progress of a stage: a bar on a terminal, a line from time to time elsewhere."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINE_SECONDS = 20.0  # between lines where there is no terminal


class Bar:
    """Progress of a number of jobs, with the bytes and tokens that they processed."""

    def __init__(self, label: str, jobs: int, *, done: int = 0) -> None:
        self.label, self.jobs, self.done, self.done_before = label, jobs, done, done
        self.bytes = self.tokens = 0
        self.started_at = self.last_line_at = time.perf_counter()
        self.console = Console(stderr=True)
        columns: list[ProgressColumn] = [
            TextColumn("{task.description:<10}"),
            BarColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        ]
        is_terminal = self.console.is_terminal
        self.bar = Progress(*columns, console=self.console, transient=True) if is_terminal else None

    def __enter__(self) -> "Bar":
        if self.bar:
            self.bar.start()
            self.task = self.bar.add_task(self.label, total=self.jobs, completed=self.done, rate="")
        return self

    def advance(self, result: Mapping[str, Any]) -> None:
        """Count a finished job, and the `bytes` and `tokens` in its result, if any."""
        self.done += 1
        self.bytes += result.get("bytes", 0)
        self.tokens += result.get("tokens", 0)
        now = time.perf_counter()
        if self.bar:
            self.bar.update(self.task, completed=self.done, rate=self.format_rate())
        elif now - self.last_line_at > LINE_SECONDS:
            self.last_line_at = now
            seconds_left = self.seconds / (self.done - self.done_before) * (self.jobs - self.done)
            progress = f"{self.done} of {self.jobs} parts, {self.format_rate()}, {seconds_left:.0f} s left"
            self.console.print(f"{self.label}: {progress}", highlight=False, soft_wrap=True)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return max(time.perf_counter() - self.started_at, 1e-9)

    def format_rate(self) -> str:
        """Describe the bytes and tokens so far, as far as there are any."""
        parts = []
        if self.bytes:
            parts.append(f"{self.bytes / 1e6:,.1f} MB, {self.bytes / 1e6 / self.seconds:,.1f} MB/s")
        if self.tokens:
            parts.append(f"{self.tokens / 1e6:,.1f} M tokens")
        return ", ".join(parts)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar:
            self.bar.stop()
