"""Recipes, read and checked, from files, run folders and URLs. No JAX in here."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.config.reader import RecipeReader, optional_key, part_names, recipe_fields
from headrace.config.sections import DataRecipe, QuantizeRecipe, TrainRecipe
from headrace.config.source_model import complete_model
from headrace.config.validate import check_data_recipe, check_train_recipe
from headrace.errors import UserError
from headrace.storage import files


def load(path: str | Path, overrides: Sequence[str] = ()) -> TrainRecipe:
    """Read the training recipe at `path` and apply `key=value` overrides. Raises UserError."""
    return _read_train(RecipeReader(path, overrides))


def load_data(path: str | Path, overrides: Sequence[str] = ()) -> DataRecipe:
    """Read the data recipe at `path` and apply `key=value` overrides. Raises UserError."""
    return _read_data(RecipeReader(path, overrides))


def load_any(path: str | Path, overrides: Sequence[str] = ()) -> TrainRecipe | DataRecipe:
    """Read a recipe of either kind: data recipes have `sources`."""
    reader = RecipeReader(path, overrides)
    return _read_data(reader) if "sources" in reader.tree else _read_train(reader)


def load_run(folder: str | Path, overrides: Sequence[str] = ()) -> TrainRecipe:
    """Read the recipe of a run folder. `run_dir` is that folder, wherever it was moved to."""
    folder = str(folder).rstrip("/")
    if not files.exists(files.join(folder, "recipe.yaml")):
        files.check_bucket(folder)
        hint = "`headrace train RECIPE` makes one"
        if files.exists(files.join(folder, "config.json")):
            hint = f"`headrace import {files.redacted(folder)} RUN` makes one from this Hugging Face folder"
        raise UserError(f"{files.redacted(folder)}: not a run folder: no recipe.yaml in it; {hint}")
    return dataclasses.replace(_load_from(folder, "recipe.yaml", overrides), run_dir=folder)


def load_train(path: str | Path, overrides: Sequence[str] = ()) -> TrainRecipe:
    """Read the recipe to train by. A recipe in a run folder means that folder, wherever it was moved to."""
    folder, _, name = str(path).rpartition("/")
    has_run_dir = any(item.startswith("run_dir=") for item in overrides)
    if name == "recipe.yaml" and not has_run_dir and files.list_names(f"{folder or '.'}/checkpoints"):
        return load_run(folder or ".", overrides)
    return _load_from(folder, name, overrides) if files.is_url(folder) else load(path, overrides)


def load_method(name: str, overrides: Sequence[str]) -> Any:
    """Make the config of a method of quantization from `key=value` settings."""
    reader = RecipeReader(None, [f"method.use={name}", *(f"method.{item}" for item in overrides)])
    return reader.read(QuantizeRecipe, lambda recipe, reader: None).method


def _load_from(folder: str, name: str, overrides: Sequence[str]) -> TrainRecipe:
    """Read a recipe that may be at a URL."""
    with files.local_copy(folder, [name]) as local:
        try:
            return load(local / name, overrides)
        except UserError as error:
            raise UserError(str(error).replace(str(local), folder)) from None


def _read_train(reader: RecipeReader) -> TrainRecipe:
    _refuse_section(reader, TrainRecipe)
    if "sources" in reader.tree and "model" not in reader.tree:
        hint = f"`headrace data prepare {reader.path}` makes its data"
        raise UserError(f"{reader.path}:1: found a data recipe, expected a training recipe; {hint}")
    complete = functools.partial(complete_model, load_run=load_run)
    recipe: TrainRecipe = reader.read(TrainRecipe, check_train_recipe, complete)
    if optional_key(recipe.objective, "reference", None) == "copy":
        model = dataclasses.replace(recipe.model, frozen_copy=True)
        recipe = dataclasses.replace(recipe, model=model)
    return recipe


def _read_data(reader: RecipeReader) -> DataRecipe:
    _refuse_section(reader, DataRecipe)
    if "model" in reader.tree and "sources" not in reader.tree:
        hint = f"`headrace train {reader.path}` trains with it"
        raise UserError(f"{reader.path}:1: found a training recipe, expected a data recipe; {hint}")
    return reader.read(DataRecipe, check_data_recipe)


def _refuse_section(reader: RecipeReader, cls: type) -> None:
    """Refuse a file that holds one section of a recipe instead of a recipe."""
    if "use" not in reader.tree:
        return
    folders = {name: f.metadata["folder"] for name, f in recipe_fields(cls).items() if "folder" in f.metadata}
    use = reader.tree["use"]
    name = next((name for name, folder in folders.items() if use in part_names(folder)), "SECTION")
    # Recipes are in the folder above one that is named like a section, or in the folder of the file itself.
    folder, file = Path(reader.path).absolute().parts[-2:]
    path = f"{name}/{file}" if folder == name else file
    hint = f"a recipe includes it with `{name}: {path}`, a path relative to the recipe"
    raise UserError(f"{reader.path}:1: found a single section, expected a whole recipe; {hint}")
