"""Data preparation from a recipe to packed, shuffled data: normalize, tokenizer, pack, shuffle.

All work on text is done here, once, before an accelerator waits for it. Each stage can be run alone, and
continues where it was interrupted. index.json, written last, makes the folder a dataset."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.config.reader import to_dict
from headrace.config.sections import DataRecipe
from headrace.data.pipeline.context import PipelineContext, Reporter
from headrace.data.pipeline.pool import WorkerPool
from headrace.data.pipeline.stages import StageLog, StageName, flatten_tree, sources_hash, tokenizer_hash
from headrace.data.pipeline.steps import DataPipeline, remove_scratch
from headrace.data.shards import Index
from headrace.errors import UserError

FREE_KEYS = ("path", "engine", "workers", "on_error")  # recipe keys that do not change the data


def prepare(
    recipe: DataRecipe, report: Reporter, *, until: StageName = "shuffle", replace: bool = False
) -> None:
    """Make the data of a recipe, up to a stage. Does nothing if that is done.

    `report` receives lines about the progress. `replace` allows to replace finished data of another recipe,
    or of sources that have changed since."""
    folder = Path(recipe.path)
    index = read_finished_index(folder)
    if index is not None and same_recipe(index.recipe, to_dict(recipe)):
        changed = changed_input(index, recipe)
        if changed and not replace:
            report(
                f"{folder} was made by this recipe, but the files of its {changed} have changed since; "
                "--replace makes it again"
            )
            return
        # Normalized documents may be missing in finished data.
        has_result = until != "normalize" or StageLog(folder).normalize.get("written")
        if not changed and has_result:
            remove_scratch(folder)
            report(f"{folder} is already made by this recipe; `headrace data inspect {folder}` shows it")
            return
    elif index is not None and not replace:
        raise UserError(
            f"path: {folder} holds data of another recipe, with "
            f"{first_difference(index.recipe, to_dict(recipe))}; "
            "choose another path=, or replace it with --replace"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder):
        for partial in folder.rglob(".*.partial"):
            partial.unlink()
        pool = WorkerPool.from_recipe(recipe)
        DataPipeline(PipelineContext(recipe, folder, pool, report, StageLog(folder), until)).run()


def changed_input(index: Index, recipe: DataRecipe) -> str | None:
    """Name the input whose files have changed since the data was made: "sources" or "tokenizer".

    None if neither has. Files that are gone do not count, since they are no longer needed."""
    for name, compute_hash in (("sources", sources_hash), ("tokenizer", tokenizer_hash)):
        try:
            if name in index.inputs and index.inputs[name] != compute_hash(recipe):
                return name
        except UserError:
            pass
    return None


def read_finished_index(folder: Path) -> Index | None:
    """Read the index of finished data in a folder, or None if there is none.

    UserError if the folder has other content than data: its files must not be overwritten."""
    file = folder / "index.json"
    if file.is_file():
        try:
            return Index.parse(file.read_bytes(), str(file))
        except UserError as error:
            raise UserError(f"path: {error}; choose another path=, or remove {folder}") from None
    if folder.exists() and not folder.is_dir():
        raise UserError(f"path: {folder} is a file; choose another")
    ignored = (".lock", ".partial")  # left by a run that was interrupted before its first stage
    has_files = folder.exists() and any(not file.name.endswith(ignored) for file in folder.iterdir())
    if has_files and not (folder / "stages.json").is_file():
        raise UserError(f"path: {folder} exists and holds no data of Headrace; choose another, or remove it")
    return None


def same_recipe(recipe: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two recipes make the same data."""
    return data_keys(recipe) == data_keys(other)


def data_keys(recipe: dict[str, Any]) -> dict[str, Any]:
    """The part of a recipe on which the data depends."""
    return {key: value for key, value in recipe.items() if key not in FREE_KEYS}


def first_difference(recipe: dict[str, Any], new_recipe: dict[str, Any]) -> str:
    """Describe the first key in which two recipes for different data differ."""
    old, new = flatten_tree(data_keys(recipe)), flatten_tree(data_keys(new_recipe))
    key = next(key for key in old | new if old.get(key) != new.get(key))
    return f"{key} = {old.get(key)}, and this recipe has {new.get(key)}"


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold a lock on a data folder. UserError if another process has it.

    The kernel releases it when the process ends, in whatever way."""
    with (folder / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"path: {folder} is being made by process {file.read() or 'another'}; wait for it"
            ) from None
        except OSError:  # a file system without locks
            pass
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
