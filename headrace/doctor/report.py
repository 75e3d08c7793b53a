"""`headrace doctor`: what may keep a run from working, before it is started. Each line is ok, warn or fail,
and says how to put it right."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.storage import redact as secret
from headrace.config import sections

State = Literal["ok", "warn", "fail"]
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Line:
    state: State
    topic: str
    said: str
    fix: str = ""


Check = Callable[[], Sequence[Line]]


def examine(cfg: sections.Run | None, path: str | None, overrides: Sequence[str]) -> int:
    """Looks at everything at once, since most of it is waiting, and tells it in order. The exit code."""
    from headrace.doctor import devices, gce as google, machine as here

    where = google.Instance.find()
    checks: list[Check] = [
        here.versions,
        lambda: devices.check(cfg, path, overrides, where),
        here.driver,
        here.limits,
        here.ports,
        lambda: here.storage(cfg),
        lambda: google.regions(cfg, where),
        lambda: google.removals(cfg),
        lambda: google.clock(cfg, where),
    ]
    console, found = Console(highlight=False), []
    with ThreadPoolExecutor(len(checks), "doctor") as pool:
        for lines in pool.map(attempt, checks):
            for line in lines:
                found.append(line)
                show(line, console)
    counts = {state: sum(line.state == state for line in found) for state in STYLES}
    console.print(
        Text.assemble(
            "\n",
            *((f"{count} {state}   ", STYLES[state] if count else "dim") for state, count in counts.items()),
        )
    )
    return 1 if counts["fail"] else 0


def attempt(check: Check) -> Sequence[Line]:
    """What goes wrong in looking is something to tell, too."""
    try:
        return check()
    except Exception as error:
        name = getattr(check, "__name__", "check").strip("<>")
        return [Line("warn", name, f"could not be looked at: {type(error).__name__}: {error}")]


def show(line: Line, console: Console) -> None:
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(width=4)
    row.add_column(width=9)
    row.add_column(overflow="fold")
    row.add_row(Text(line.state, STYLES[line.state]), Text(line.topic, "bold"), Text(secret.clean(line.said)))
    if line.fix:
        row.add_row("", "", Text.assemble(("fix: ", "dim"), secret.clean(line.fix)))
    console.print(row)
