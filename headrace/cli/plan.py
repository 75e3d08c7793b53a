"""`headrace plan`: memory, time and cost of a recipe on slices, before they are rented.

What needs JAX is imported in the functions: mistakes in the recipe are reported before."""

import argparse
import dataclasses
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from headrace import api
from headrace.config.sections import TrainRecipe
from headrace.errors import ExitCode, UserError

if TYPE_CHECKING:
    from headrace.plan.outcome import Outcome


@dataclass(frozen=True)
class PlanOptions:
    """Options of a plan and of a search."""

    fast: bool
    json_file: Path | None
    prices: Path | None
    save_dir: Path | None
    days: float | None


def plan(args: argparse.Namespace) -> int:
    """Plan a recipe for slices, search its fastest settings on one, or recommend slices to rent.

    Returns the exit code: DOES_NOT_FIT if it does not fit any one of the slices."""
    recipe = api.load_recipe(args.recipe, args.overrides)
    check_options(args)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the slice is not here; before JAX is imported
    if args.recommend:
        return recommend_slices(recipe, args)
    options = PlanOptions(args.fast, args.json, args.prices, args.save, args.days)
    if args.search:
        return search_settings(recipe, args.slice[0], options, write=args.write)
    return plan_slices(recipe, args.slice, options)


def check_options(args: argparse.Namespace) -> None:
    """Refuse options that have no effect together, numbers out of range and files that cannot be written."""
    if not args.slice and not args.recommend:
        raise UserError("plan: expected --slice NAME, as in --slice v5p-32, or --recommend")
    if args.search and len(args.slice) != 1:
        raise UserError("plan: --search takes one --slice")
    if args.search and args.recommend:
        raise UserError(
            "plan: --search tunes a recipe for a slice, --recommend finds slices; use one of them"
        )
    without_effect = {
        "--write": args.write is not None and not args.search,
        "--tokens": args.tokens is not None and (not args.recommend or bool(args.slice)),
        "--budget": args.budget is not None and (not args.recommend or bool(args.slice)),
        "--json": args.json is not None and args.recommend,
        "--save": args.save is not None and (args.fast or args.recommend),
        "--fast": args.fast and args.recommend,
    }
    for option in (option for option, has_none in without_effect.items() if has_none):
        raise UserError(f"plan: {option} has no effect with the other options; leave it out")
    for option, value in (("--days", args.days), ("--budget", args.budget)):
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"plan: {option}: found {value:g}, expected a number above 0")
    for option, file in (("--json", args.json), ("--write", args.write)):
        if file is not None and file.is_dir():
            raise UserError(f"plan: {option}: found the folder {file}, expected a file")
        if file is not None and not file.absolute().parent.is_dir():
            raise UserError(f"plan: {option}: no such folder: {file.parent}")
    if args.write is not None and args.write.exists():
        raise UserError(f"plan: --write: {args.write} already exists; name a new file")
    if args.tokens is not None and not re.fullmatch(r"0*[1-9]\d*(\.\d+)?[KMBT]?", args.tokens):
        raise UserError(f"plan: --tokens: found {args.tokens}, expected a number, as in 20B")


def plan_slices(recipe: TrainRecipe, slice_names: Sequence[str], options: PlanOptions) -> int:
    """Plan a recipe for each slice, print the plans, and return the exit code."""
    from headrace.hardware.slices import parse_slice
    from headrace.plan.estimate import estimate_step
    from headrace.plan.planner import fill_data_sizes

    recipe = fill_data_sizes(recipe)
    for name in slice_names:
        estimate_step(recipe, parse_slice(name))  # reports mistakes before the first slice is compiled
    outcomes = []
    for name in slice_names:
        outcome = api.plan(recipe, name, fast=options.fast, prices=options.prices, save_dir=options.save_dir)
        print_outcome(outcome, recipe, options)
        outcomes.append(outcome)
    write_json(outcomes, options.json_file)
    return ExitCode.DONE if all(outcome.fits for outcome in outcomes) else ExitCode.DOES_NOT_FIT


def search_settings(recipe: TrainRecipe, slice_name: str, options: PlanOptions, *, write: Path | None) -> int:
    """Search the fastest settings on a slice, print them, and write the recipe with them to `write`.

    Returns the exit code."""
    from headrace.config import reader
    from headrace.hardware.slices import parse_slice
    from headrace.plan import search
    from headrace.plan.planner import fill_data_sizes

    recipe = fill_data_sizes(recipe)
    outcomes: dict[TrainRecipe, Outcome] = {}

    def compile_candidate(candidate: TrainRecipe, folder: Path) -> float | None:
        """Plan a candidate and print its step time, which is None if it does not fit."""
        settings = " ".join(search.list_overrides(recipe, candidate)) or "unchanged"
        try:
            outcomes[candidate] = api.plan(
                candidate, slice_name, fast=options.fast, prices=options.prices, save_dir=folder
            )
            seconds = outcomes[candidate].step_seconds
            verdict = f"{seconds:.3g} s per step" if seconds else "does not fit"
        except UserError as error:
            if candidate.attention == recipe.attention:
                raise
            seconds, verdict = None, str(error)
        print_text(f"  {settings}: {verdict}")
        return seconds

    with tempfile.TemporaryDirectory(prefix="headrace-plan-") as scratch:
        folder = options.save_dir or Path(scratch)
        try:
            best, _ = search.search_settings(
                recipe, parse_slice(slice_name), compile_candidate, folder, exact=options.fast
            )
        except search.NothingFits as error:
            print_text(str(error))
            return ExitCode.DOES_NOT_FIT
    print_outcome(outcomes[best], best, dataclasses.replace(options, days=None))
    write_json([outcomes[best]], options.json_file)
    overrides = " ".join(search.list_overrides(recipe, best))
    print_text(f"the best settings: {overrides or 'those of the recipe'}")
    if write is not None:
        write.write_text(reader.to_yaml(best))
        print_text(f"{write} is the recipe with them: `headrace train {write}`")
    return ExitCode.DONE


def recommend_slices(recipe: TrainRecipe, args: argparse.Namespace) -> int:
    """Print which slices to rent for a recipe; for given slices, which model and tokens they train best.

    Returns the exit code."""
    from headrace.hardware import chips
    from headrace.hardware.slices import parse_slice
    from headrace.plan import recommend, show
    from headrace.plan.planner import fill_data_sizes

    recipe = fill_data_sizes(recipe)
    if args.slice:
        days = args.days or show.DEFAULT_DAYS
        print_lines(show.format_optimal_model(parse_slice(name), days) for name in args.slice)
        return ExitCode.DONE
    if args.tokens is not None:
        schedule = dataclasses.replace(recipe.schedule, steps=f"{args.tokens} tokens")
        recipe = dataclasses.replace(recipe, schedule=schedule)
    limits = "" if args.days is None else f" in {args.days:g} days"
    limits += "" if args.budget is None else f" for ${args.budget:,.0f}"
    prices = chips.load_prices(args.prices)
    offers = recommend.find_offers(recipe, prices, days=args.days, budget=args.budget)
    any_offers = offers or recommend.find_offers(recipe, prices, days=None, budget=None)
    print_lines(show.format_offers(offers, any_offers, recipe, limits))
    return ExitCode.DONE if offers else ExitCode.DOES_NOT_FIT


def write_json(outcomes: Sequence["Outcome"], path: Path | None) -> None:
    """Write outcomes to the file of --json, if there is one."""
    if path is not None:
        path.write_text(json.dumps([outcome.to_json() for outcome in outcomes], indent=2) + "\n")


def print_outcome(outcome: "Outcome", recipe: TrainRecipe, options: PlanOptions) -> None:
    from headrace.plan import show

    own_prices = options.prices is not None
    print_lines(show.format_outcome(outcome, recipe, options.days, own_prices=own_prices))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines in the markup of `rich`, without wrapping them."""
    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        console.print(line)


def print_text(line: str) -> None:
    """Print a line as it is: brackets in it are not markup."""
    Console(highlight=False, soft_wrap=True).print(line, markup=False)
