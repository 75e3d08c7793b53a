"""What users and their scripts see, as text: help of every command, recipe keys, files and keys of a run."""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from headrace.cli import parser
from headrace.config import json_schema, sections

HERE = Path(__file__).parent
TIMING_DEPENDENT = {"badput/data_loading"}  # logged only if the loop ever had to wait for data


def all_help() -> str:
    """The help of every command, as on a terminal of 100 columns."""
    os.environ["COLUMNS"] = "100"
    return "\n".join(f"$ {command} --help\n{text}" for command, text in commands(parser.make_parser()))


def commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    yield parser.prog, parser.format_help()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from commands(command)


def recipe_schema() -> str:
    recipes = {"train": sections.TrainRecipe, "data": sections.DataRecipe}
    schemas = {name: json_schema.schema(cls) for name, cls in recipes.items()}
    return json.dumps(schemas, indent=1, sort_keys=True) + "\n"


def run_folder(folder: Path) -> str:
    """Files of a run, keys of its metrics, and what `checkpoint ls` prints; numbers that vary become N."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    names = sorted({re.sub(r"/d/[0-9a-f]{32}$", "/d/HASH", name) for name in names})
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    keys = sorted({key for row in rows for key in row} - TIMING_DEPENDENT)
    command = [sys.executable, "-m", "headrace", "checkpoint", "ls", str(folder)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    listing = re.sub(r" +[0-9.]+ (GB|[a-z]+)\b", r" N \1", listing)
    listing = re.sub(r"N [a-z]+  ", "N UNIT  ", listing)
    return "\n".join([*names, "", "metrics.jsonl: " + ", ".join(keys), "", listing])
