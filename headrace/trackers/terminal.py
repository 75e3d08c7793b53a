"""What the user reads while a run is going: a display that stays in place on a terminal, with events
scrolling by above it, or aligned plain lines where output is not a terminal and in log.txt."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live as RichLive
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Level = Literal["info", "warning", "error"]
HEADER_EVERY = 20
STYLES = {"info": "", "warning": "yellow", "error": "bold red"}


def make(total_steps: int, *, step: int = 0) -> "Live | Plain":
    """The display for this process' standard output."""
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        return Live(total_steps, step=step, console=Console(highlight=False))
    return Plain(lambda line: print(line, flush=True), total_steps)


def log(path: Path, total_steps: int) -> "Plain":
    """log.txt: the plain lines, each with the time. Opened for each line, so that a full disk costs the
    lines of that while and no more."""

    def put(line: str) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}\n")

    return Plain(put, total_steps, name="log.txt")


class Plain:
    """A line a row, in aligned columns, without control characters. A column that a row has no value for
    is left out, and the header is said again when the columns change."""

    optional = False

    def __init__(self, put: Callable[[str], None], total_steps: int, *, name: str = "terminal") -> None:
        self.name = name
        self._put = put
        self._digits = max(len(f"{total_steps:,}"), 6)
        self._columns: list[Column] = []
        self._lines = 0

    def write(self, step: int, row: dict[str, Any]) -> None:
        if not _is_training(row):
            self.event(_sentence(step, row), "info")
            return
        columns = _present(row)
        if columns != self._columns or self._lines % HEADER_EVERY == 0:
            self._columns, self._lines = columns, 0
            self._put("step".rjust(self._digits) + "".join(c.title.rjust(c.width) for c in columns))
        cells = "".join(column.show(row[column.key]).rjust(column.width) for column in columns)
        self._put(f"{step:,}".rjust(self._digits) + cells)
        self._lines += 1

    def event(self, message: str, level: Level) -> None:
        for line in _clean(message).splitlines():
            self._put(line if level == "info" else f"{level}: {line}")

    def back(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class Live:
    """Two lines that stay at the foot of the terminal: how far the run is, and its newest row."""

    name = "terminal"
    optional = False

    def __init__(self, total_steps: int, *, step: int = 0, console: Console) -> None:
        self._console = console
        self._display = Display(total_steps, step)
        # Once a second: the time that is left counts down between the rows.
        self._live = RichLive(self._display, console=console, refresh_per_second=1)
        self._live.start(refresh=True)

    def write(self, step: int, row: dict[str, Any]) -> None:
        if _is_training(row):
            self._display.show(step, row)
            self._live.refresh()
        else:
            self.event(_sentence(step, row), "info")

    def event(self, message: str, level: Level) -> None:
        words = _clean(message if level == "info" else f"{level}: {message}")
        stamp = Text(time.strftime(" %H:%M:%S  "), "dim")
        line = Table.grid()
        line.add_row(stamp, Text(words, STYLES[level], overflow="fold"))
        self._console.print(line)

    def back(self, step: int) -> None:
        self._display.show(step, {})

    def close(self) -> None:
        self._live.stop()


class Display:
    """The two lines, fitted to whatever width the terminal has: what does not fit is left out."""

    def __init__(self, total_steps: int, step: int) -> None:
        self._total = total_steps
        self._step = step
        self._row: dict[str, Any] = {}
        self._shown_at = time.monotonic()

    def show(self, step: int, row: dict[str, Any]) -> None:
        self._step, self._row, self._shown_at = step, row, time.monotonic()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield self._progress(options.max_width - 2)
        yield self._numbers(options.max_width - 2)

    def _progress(self, width: int) -> Table:
        # Padded, so that nothing moves sideways as numbers grow.
        total = f"{self._total:,}"
        done = 100 * self._step // max(self._total, 1)
        cells = [f"{self._step:,}".rjust(len(total)) + "/" + total, f"{done:3} %"]
        if self._step >= self._total:
            cells.append("done")
        elif self._row.get("eta_seconds") is not None:
            left = self._row["eta_seconds"] - (time.monotonic() - self._shown_at)
            cells.append(f"{duration(max(left, 0)):>7} left")
        if self._row.get("goodput") is not None:
            cells.append(f"{percent(self._row['goodput'])} goodput")
        while len(cells) > 1 and width - len("   ".join(cells)) < 13:
            cells.pop()
        bar = ProgressBar(
            total=max(self._total, 1),
            completed=self._step,
            width=max(min(width - len("   ".join(cells)) - 3, 60), 1),
            complete_style="cyan",
            finished_style="green",
        )
        line = Table.grid(padding=0)
        line.add_row(" ", bar, Text("   " + "   ".join(cells), no_wrap=True, overflow="crop"))
        return line

    def _numbers(self, width: int) -> Text:
        cells = [column.cell(self._row[column.key]) for column in _present(self._row) if column.inline]
        if not cells:
            return Text(" waiting for the first step", "dim")
        gap = 3 if len(Text("   ").join(cells)) <= width else 2
        while len(cells) > 1 and len(Text(" " * gap).join(cells)) > width:
            cells.pop()
        return Text(" ", no_wrap=True, overflow="crop") + Text(" " * gap).join(cells)


@dataclass(frozen=True)
class Column:
    """A value of a row: how it reads under `title` in a table, and as `inline` words in a sentence."""

    key: str
    title: str
    width: int
    show: Callable[[float], str]
    inline: str = ""

    def cell(self, value: float) -> Text:
        before, after = self.inline.split("{}")
        return Text.assemble((before, "dim"), (self.show(value), "bold"), (after, "dim"))


def number(value: float) -> str:
    if abs(value) < 100 or not math.isfinite(value):
        return f"{value:.4f}"
    return f"{value:.2f}" if abs(value) < 1e5 else f"{value:.3g}"


def short(value: float) -> str:
    """Three digits, with k, M, G or T for thousands: 0.820, 12.3k."""
    if not math.isfinite(value):
        return str(value)
    power = 0
    while abs(value) >= 999.5 and power < 4:
        value, power = value / 1000, power + 1
    return f"{value:#.3g}".removesuffix(".") + ("kMGT"[power - 1] if power else "")


def whole(value: float) -> str:
    return f"{value:,.0f}"


def scientific(value: float) -> str:
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if value and math.isfinite(value) else f"{value:g}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1000 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.1f} {unit}" if count < 99.95 and unit != "B" else f"{count:.0f} {unit}"


def duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}h"
    if hours:
        return f"{hours}h {minute:02}m"
    return f"{minute}m {second:02}s" if minute else f"{second}s"


COLUMNS = (
    Column("loss", "loss", 9, number, "loss {}"),
    Column("learning_rate", "lr", 9, scientific, "lr {}"),
    Column("grad_norm", "grad", 9, short, "grad {}"),
    Column("tokens_per_second", "tok/s", 7, short, "{} tok/s"),
    Column("mfu", "MFU", 8, percent, "{} MFU"),
    Column("skipped", "skipped", 9, whole, "{} skipped"),
    Column("memory", "memory", 10, size, "{}"),
    Column("goodput", "goodput", 9, percent),
    Column("eta_seconds", "left", 9, duration),
)


def _present(row: dict[str, Any]) -> list[Column]:
    """The columns that have something to say; no skipped updates are not news."""
    named = [column for column in COLUMNS if row.get(column.key) is not None]
    return [column for column in named if column.key != "skipped" or row["skipped"]]


def _is_training(row: dict[str, Any]) -> bool:
    return any("/" not in key for key in row if key != "step")


def _sentence(step: int, row: dict[str, Any]) -> str:
    """`evaluate at step 1,200   loss 2.4012   perplexity 11.0400`, from keys with that prefix."""
    names = [key for key, value in row.items() if key != "step" and value is not None]
    values = [f"{name.rpartition('/')[2].replace('_', ' ')} {number(row[name])}" for name in names]
    group = names[0].partition("/")[0] if names else "row"
    return "   ".join([f"{group} at step {step:,}", *values])


def _clean(message: str) -> str:
    return "".join(char if char.isprintable() or char == "\n" else " " for char in message)
