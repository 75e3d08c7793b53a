"""`headrace doctor`: checks of whatever may keep a run from working, each with a fix."""

import argparse

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace import api
from headrace.doctor.report import CheckResult, run_checks
from headrace.storage import redact

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(args: argparse.Namespace) -> int:
    """Run all checks and print their results. Returns the exit code: 1 if a check failed."""
    recipe = api.load_recipe(args.recipe, args.overrides) if args.recipe else None
    console = Console(highlight=False)
    counts = dict.fromkeys(STYLES, 0)
    for result in run_checks(recipe, args.recipe, args.overrides):
        counts[result.state] += 1
        print_result(result, console)
    summary = ((f"{count} {state}   ", STYLES[state] if count else "dim") for state, count in counts.items())
    console.print(Text.assemble("\n", *summary))
    return 1 if counts["fail"] else 0


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
