"""Terminal output of a run, and log.txt.

On a terminal, two lines stay at the bottom and events scroll above them. Otherwise, and in log.txt, rows are
aligned plain lines."""

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
Row = dict[str, Any]  # metrics by name: JSON values
HEADER_EVERY = 20  # rows
STYLES = {"info": "", "warning": "yellow", "error": "bold red"}


def make_terminal(total_steps: int, *, step: int = 0) -> "LiveTerminal | PlainTerminal":
    """Make the tracker for standard output: live on a terminal, else plain."""
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        return LiveTerminal(total_steps, step=step, console=Console(highlight=False))
    return PlainTerminal(lambda line: print(line, flush=True), total_steps)


def make_log(path: Path, total_steps: int) -> "PlainTerminal":
    """Make the tracker for log.txt: plain lines with timestamps.

    The file is opened for each line, so that a full disk loses only the lines written meanwhile."""

    def write_line(line: str) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}\n")

    return PlainTerminal(write_line, total_steps, name="log.txt")


class PlainTerminal:
    """Rows as lines in aligned columns, without control characters.

    Columns without a value are omitted. The header is repeated when the columns change."""

    optional = False

    def __init__(
        self, write_line: Callable[[str], None], total_steps: int, *, name: str = "terminal"
    ) -> None:
        self.name = name
        self._write_line = write_line
        self._step_width = max(len(f"{total_steps:,}"), 6)
        self._columns: list[MetricColumn] = []
        self._rows_since_header = 0

    def write(self, step: int, row: Row) -> None:
        """Write a row of training as a line of the table, and other rows as a sentence."""
        if not _is_training(row):
            self.event(_to_sentence(step, row), "info")
            return
        columns = _present_columns(row)
        if columns != self._columns or self._rows_since_header % HEADER_EVERY == 0:
            self._columns, self._rows_since_header = columns, 0
            titles = "".join(column.title.rjust(column.width) for column in columns)
            self._write_line("step".rjust(self._step_width) + titles)
        cells = "".join(column.format(row[column.key]).rjust(column.width) for column in columns)
        self._write_line(f"{step:,}".rjust(self._step_width) + cells)
        self._rows_since_header += 1

    def event(self, message: str, level: Level) -> None:
        for line in _to_printable(message).splitlines():
            self._write_line(line if level == "info" else f"{level}: {line}")

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class LiveTerminal:
    """Two lines at the bottom of the terminal: the progress of the run, and its newest row."""

    name = "terminal"
    optional = False

    def __init__(self, total_steps: int, *, step: int = 0, console: Console) -> None:
        self._console = console
        self._display = Display(total_steps, step)
        # Redrawn every second: the remaining time counts down between rows.
        self._live = RichLive(self._display, console=console, refresh_per_second=1)
        self._live.start(refresh=True)

    def write(self, step: int, row: Row) -> None:
        if _is_training(row):
            self._display.show(step, row)
            self._live.refresh()
        else:
            self.event(_to_sentence(step, row), "info")

    def event(self, message: str, level: Level) -> None:
        text = _to_printable(message if level == "info" else f"{level}: {message}")
        timestamp = Text(time.strftime(" %H:%M:%S  "), "dim")
        line = Table.grid()
        line.add_row(timestamp, Text(text, STYLES[level], overflow="fold"))
        self._console.print(line)

    def rewind(self, step: int) -> None:
        self._display.show(step, {})

    def close(self) -> None:
        self._live.stop()


class Display:
    """The two lines, fitted to the width of the terminal: cells that do not fit are omitted."""

    def __init__(self, total_steps: int, step: int) -> None:
        self._total_steps = total_steps
        self._step = step
        self._row: Row = {}
        self._shown_at = time.monotonic()

    def show(self, step: int, row: Row) -> None:
        self._step, self._row, self._shown_at = step, row, time.monotonic()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield self._progress_line(options.max_width - 2)
        yield self._metrics_line(options.max_width - 2)

    def _progress_line(self, width: int) -> Table:
        # Padded, so that nothing moves sideways when numbers grow.
        total = f"{self._total_steps:,}"
        percentage = 100 * self._step // max(self._total_steps, 1)
        cells = [f"{self._step:,}".rjust(len(total)) + "/" + total, f"{percentage:3} %"]
        if self._step >= self._total_steps:
            cells.append("done")
        elif self._row.get("eta_seconds") is not None:
            remaining = self._row["eta_seconds"] - (time.monotonic() - self._shown_at)
            cells.append(f"{format_duration(max(remaining, 0)):>7} left")
        if self._row.get("goodput") is not None:
            cells.append(f"{format_percent(self._row['goodput'])} goodput")
        while len(cells) > 1 and width - len("   ".join(cells)) < 13:
            cells.pop()
        bar = ProgressBar(
            total=max(self._total_steps, 1),
            completed=self._step,
            width=max(min(width - len("   ".join(cells)) - 3, 60), 1),
            complete_style="cyan",
            finished_style="green",
        )
        line = Table.grid(padding=0)
        line.add_row(" ", bar, Text("   " + "   ".join(cells), no_wrap=True, overflow="crop"))
        return line

    def _metrics_line(self, width: int) -> Text:
        columns = [column for column in _present_columns(self._row) if column.inline]
        cells = [column.make_cell(self._row[column.key]) for column in columns]
        if not cells:
            return Text(" waiting for the first step", "dim")
        gap = 3 if len(Text("   ").join(cells)) <= width else 2
        while len(cells) > 1 and len(Text(" " * gap).join(cells)) > width:
            cells.pop()
        return Text(" ", no_wrap=True, overflow="crop") + Text(" " * gap).join(cells)


@dataclass(frozen=True)
class MetricColumn:
    """A metric of a row: under `title` in a table, and in the text `inline` in the live display."""

    key: str
    title: str
    width: int
    format: Callable[[float], str]
    inline: str = ""

    def make_cell(self, value: float) -> Text:
        prefix, suffix = self.inline.split("{}")
        return Text.assemble((prefix, "dim"), (self.format(value), "bold"), (suffix, "dim"))


def format_number(value: float) -> str:
    """Format with four decimals, or fewer for large numbers: 2.4012, 142.70."""
    if abs(value) < 100 or not math.isfinite(value):
        return f"{value:.4f}"
    return f"{value:.2f}" if abs(value) < 1e5 else f"{value:.3g}"


def format_short(value: float) -> str:
    """Format with three digits, and k, M, G or T for thousands: 0.820, 12.3k."""
    if not math.isfinite(value):
        return str(value)
    power = 0
    while abs(value) >= 999.5 and power < 4:
        value, power = value / 1000, power + 1
    return f"{value:#.3g}".removesuffix(".") + ("kMGT"[power - 1] if power else "")


def format_count(value: float) -> str:
    return f"{value:,.0f}"


def format_scientific(value: float) -> str:
    """Format such as 2.96e-4."""
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if value and math.isfinite(value) else f"{value:g}"


def format_percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def format_bytes(count: float) -> str:
    """Format bytes in binary units: 5.0 MiB, 139 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1000 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.1f} {unit}" if count < 99.95 and unit != "B" else f"{count:.0f} {unit}"


def format_duration(seconds: float) -> str:
    """Format in the two largest units: 2d 02h, 2h 05m, 3m 20s, 5s."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}h"
    if hours:
        return f"{hours}h {minute:02}m"
    return f"{minute}m {second:02}s" if minute else f"{second}s"


COLUMNS = (
    MetricColumn("loss", "loss", 9, format_number, "loss {}"),
    MetricColumn("learning_rate", "lr", 9, format_scientific, "lr {}"),
    MetricColumn("grad_norm", "grad", 9, format_short, "grad {}"),
    MetricColumn("tokens_per_second", "tok/s", 7, format_short, "{} tok/s"),
    MetricColumn("mfu", "MFU", 8, format_percent, "{} MFU"),
    MetricColumn("skipped", "skipped", 9, format_count, "{} skipped"),
    MetricColumn("memory", "memory", 10, format_bytes, "{}"),
    MetricColumn("goodput", "goodput", 9, format_percent),
    MetricColumn("eta_seconds", "left", 9, format_duration),
)


def _present_columns(row: Row) -> list[MetricColumn]:
    """Return the columns that have a value; `skipped` only where it is not 0."""
    columns = [column for column in COLUMNS if row.get(column.key) is not None]
    return [column for column in columns if column.key != "skipped" or row["skipped"]]


def _is_training(row: Row) -> bool:
    return any("/" not in key for key in row if key != "step")


def _to_sentence(step: int, row: Row) -> str:
    """Format keys with a prefix: `evaluate at step 1,200   loss 2.4012   perplexity 11.0400`."""
    names = [key for key, value in row.items() if key != "step" and value is not None]
    values = [f"{name.rpartition('/')[2].replace('_', ' ')} {format_number(row[name])}" for name in names]
    group = names[0].partition("/")[0] if names else "row"
    return "   ".join([f"{group} at step {step:,}", *values])


def _to_printable(message: str) -> str:
    return "".join(char if char.isprintable() or char == "\n" else " " for char in message)
