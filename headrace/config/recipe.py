"""Recipes, read and checked, from files, run folders and URLs. No JAX in here."""

import dataclasses
import typing
from pathlib import Path
from typing import Any

from headrace.storage import files as store
from headrace.config.validate import check_data, check_run
from headrace.config.reader import Reader, names
from headrace.errors import UserError
from headrace.config.sections import DataRun, Quantize, Run


def load_method(name: str, overrides: typing.Sequence[str]) -> Any:
    """The Config of a method of quantisation, with these of its keys set."""
    reader = Reader(None, [f"method.use={name}", *(f"method.{item}" for item in overrides)])
    return reader.read(Quantize, lambda read, reader: None).method


def load(path: str | Path, overrides: typing.Sequence[str] = ()) -> Run:
    """The training recipe at `path` with `key=value` overrides applied. Raises UserError."""
    return _read(Reader(path, overrides), Run)


def load_data(path: str | Path, overrides: typing.Sequence[str] = ()) -> DataRun:
    return _read(Reader(path, overrides), DataRun)


def load_run(folder: str | Path, overrides: typing.Sequence[str] = ()) -> Run:
    """The recipe of a run folder, which may have been moved since."""
    if not store.exists(store.join(folder, "recipe.yaml")):
        store.check_bucket(folder)
        makes = "`headrace train RECIPE` makes one"
        if store.exists(store.join(folder, "config.json")):
            makes = f"of this Hugging Face folder `headrace import {store.shown(folder)} RUN` makes one"
        raise UserError(f"{store.shown(folder)}: not a run folder: no recipe.yaml in it; {makes}")
    found = load_from(str(folder).rstrip("/"), "recipe.yaml", overrides)
    return dataclasses.replace(found, run=str(folder).rstrip("/"))


def load_train(path: str | Path, overrides: typing.Sequence[str] = ()) -> Run:
    """The recipe to train by. One that lies in a run folder means that folder, wherever it was moved to."""
    folder, _, name = str(path).rpartition("/")
    named = any(item.startswith("run=") for item in overrides)
    if name == "recipe.yaml" and not named and store.names(f"{folder or '.'}/checkpoints"):
        return load_run(folder or ".", overrides)
    return load_from(folder, name, overrides) if store.is_url(folder) else load(path, overrides)


def load_from(folder: str, name: str, overrides: typing.Sequence[str]) -> Run:
    """A recipe that may lie at a URL."""
    with store.near(folder, [name]) as near:
        try:
            return load(near / name, overrides)
        except UserError as error:
            raise UserError(str(error).replace(str(near), folder)) from None


def load_any(path: str | Path, overrides: typing.Sequence[str] = ()) -> Run | DataRun:
    """A recipe of either kind: data recipes have `sources`."""
    reader = Reader(path, overrides)
    return _read(reader, DataRun if "sources" in reader.tree else Run)


def _read(reader: Reader, cls: type[Any]) -> Any:
    tree, path = reader.tree, reader.path
    parts = {f.name: f.metadata["folder"] for f in dataclasses.fields(cls) if "folder" in f.metadata}
    if "use" in tree:
        name = next((name for name, folder in parts.items() if tree["use"] in names(folder)), "SECTION")
        # Recipes stand beside the folder that has a section's name, or beside the file itself.
        folder, last = Path(path).absolute().parts[-2:]
        seen = f"{name}/{last}" if folder == name else last
        hint = f"a recipe takes it with `{name}: {seen}`, the path seen from the recipe"
        raise UserError(f"{path}:1: found a section alone, expected a whole recipe; {hint}")
    if cls is Run and "sources" in tree and "model" not in tree:
        hint = f"`headrace data prepare {path}` makes its data"
        raise UserError(f"{path}:1: found a data recipe, expected a training recipe; {hint}")
    if cls is DataRun and "model" in tree and "sources" not in tree:
        hint = f"`headrace train {path}` trains with it"
        raise UserError(f"{path}:1: found a training recipe, expected a data recipe; {hint}")
    return reader.read(cls, check_run if cls is Run else check_data)
