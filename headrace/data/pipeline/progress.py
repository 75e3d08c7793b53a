"""How far a stage is: a bar on a terminal, a line now and then elsewhere."""

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

EVERY = 20.0  # seconds between lines where there is no terminal


class Bar:
    """Counts units, and the bytes and tokens that went through them."""

    def __init__(self, label: str, units: int, *, done: int = 0) -> None:
        self.label, self.units, self.done, self.before = label, units, done, done
        self.bytes = self.tokens = 0
        self.began = self.told = time.perf_counter()
        console = Console(stderr=True)
        columns: Any = [TextColumn("{task.description:<10}"), BarColumn(), TextColumn("{task.fields[rate]}")]
        columns += [TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()]
        self.bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self.console = console

    def __enter__(self) -> "Bar":
        if self.bar:
            self.bar.start()
            self.task = self.bar.add_task(self.label, total=self.units, completed=self.done, rate="")
        return self

    def advance(self, made: dict[str, Any]) -> None:
        """One unit more is done; `made` is what it says of itself."""
        self.done += 1
        self.bytes += made.get("bytes", 0)
        self.tokens += made.get("tokens", 0)
        now = time.perf_counter()
        if self.bar:
            self.bar.update(self.task, completed=self.done, rate=self.rate())
        elif now - self.told > EVERY:
            self.told = now
            left = self.seconds / (self.done - self.before) * (self.units - self.done)
            told = f"{self.label}: {self.done} of {self.units} parts, {self.rate()}, {left:.0f} s left"
            self.console.print(told, highlight=False, soft_wrap=True)

    @property
    def seconds(self) -> float:
        return max(time.perf_counter() - self.began, 1e-9)

    def rate(self) -> str:
        parts = [f"{self.bytes / 1e6:,.1f} MB, {self.bytes / 1e6 / self.seconds:,.1f} MB/s"] * bool(
            self.bytes
        )
        parts += [f"{self.tokens / 1e6:,.1f} M tokens"] * bool(self.tokens)
        return ", ".join(parts)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar:
            self.bar.stop()
