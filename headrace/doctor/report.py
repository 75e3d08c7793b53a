"""`headrace doctor`: checks whatever may keep a run from working, before it starts.

Every line is ok, warn or fail, and says how to fix what is wrong."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.config import sections
from headrace.storage import redact

State = Literal["ok", "warn", "fail"]
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class CheckResult:
    """One line of the report."""

    state: State
    topic: str
    message: str
    fix: str = ""


Check = Callable[[], Sequence[CheckResult]]


def run_doctor(cfg: sections.TrainRecipe | None, path: str | None, overrides: Sequence[str]) -> int:
    """Run all checks in parallel, since most of them wait, and print the results in order. `path` and
    `overrides` are those of `cfg`. Returns the exit code: 1 if a check failed."""
    from headrace.doctor import devices, gce, machine

    instance = gce.Instance.find()
    checks: dict[str, Check] = {
        "versions": machine.check_versions,
        "devices": lambda: devices.check_devices(cfg, path, overrides, instance),
        "driver": machine.check_driver,
        "limits": machine.check_limits,
        "ports": machine.check_port,
        "disk": lambda: machine.check_folders(cfg),
        "region": lambda: gce.check_regions(cfg, instance),
        "bucket": lambda: gce.check_soft_delete(cfg),
        "clock": lambda: gce.check_clock(cfg, instance),
    }
    console = Console(highlight=False)
    counts = dict.fromkeys(STYLES, 0)
    with ThreadPoolExecutor(len(checks), "doctor") as pool:
        for results in pool.map(run_check, checks, checks.values()):
            for result in results:
                counts[result.state] += 1
                print_result(result, console)
    summary = ((f"{count} {state}   ", STYLES[state] if count else "dim") for state, count in counts.items())
    console.print(Text.assemble("\n", *summary))
    return 1 if counts["fail"] else 0


def run_check(topic: str, check: Check) -> Sequence[CheckResult]:
    """The results of a check; one warning if the check itself fails."""
    try:
        return check()
    except Exception as error:
        return [CheckResult("warn", topic, f"the check failed: {type(error).__name__}: {error}")]


def print_result(result: CheckResult, console: Console) -> None:
    """Print one result, and the fix below it."""
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(width=4)
    row.add_column(width=9)
    row.add_column(overflow="fold")
    state = Text(result.state, STYLES[result.state])
    row.add_row(state, Text(result.topic, "bold"), Text(redact.redact(result.message)))
    if result.fix:
        row.add_row("", "", Text.assemble(("fix: ", "dim"), redact.redact(result.fix)))
    console.print(row)
