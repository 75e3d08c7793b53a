"""`headrace recipe`: show, check, list and explain recipes."""

import argparse
import json
from pathlib import Path

from headrace.config import explain as explanations
from headrace.config import json_schema, reader, recipe
from headrace.config.sections import DataRecipe, TrainRecipe
from headrace.errors import UserError


def show(args: argparse.Namespace) -> None:
    """Print a recipe with all its keys, as YAML."""
    print(reader.to_yaml(recipe.load_any(args.recipe, args.overrides)), end="")


def check(args: argparse.Namespace) -> None:
    """Check a recipe. A mistake is raised as UserError."""
    recipe.load_any(args.recipe, args.overrides)
    print(f"{args.recipe}: ok")


def list_recipes(args: argparse.Namespace) -> None:
    """Print the recipes in a folder, each with the comment in its first line."""
    paths = sorted(Path(args.folder).rglob("*.yaml"))
    if not paths:
        raise UserError(
            f"{args.folder}: found no .yaml file in it, expected a folder of recipes, such as `recipes` in "
            "Headrace's repository"
        )
    width = max(len(str(path)) for path in paths)
    for path in paths:
        first_line = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        summary = first_line.removeprefix("#").strip() if first_line.startswith("#") else ""
        print(f"{path!s:{width}}  {summary}".rstrip())


def explain(args: argparse.Namespace) -> None:
    """Explain a key or a section."""
    print(explanations.explain(args.key))


def schema(args: argparse.Namespace) -> None:
    """Print the JSON schema of training recipes, or with --data of data recipes."""
    print(json.dumps(json_schema.schema(DataRecipe if args.data else TrainRecipe), indent=2))
