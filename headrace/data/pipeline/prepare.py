"""A data recipe from end to end: normalize, tokenizer, pack, shuffle. All the work on text is done here,
once, before an accelerator waits for it. Each stage can be run alone and goes on where it was stopped;
index.json, written last, is what makes the folder a dataset."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.config.reader import to_dict
from headrace.data.pipeline.pool import Engine
from headrace.data.shards import Index
from headrace.data.pipeline.stages import READS, Say, brought, flat, listing
from headrace.data.pipeline.steps import Work
from headrace.errors import UserError


def prepare(recipe: Any, say: Say, *, until: str = "shuffle", replace: bool = False) -> None:
    """Makes the data of a recipe, up to a stage. Does nothing where that was done before."""
    folder = Path(recipe.path)
    made = finished(folder)
    if made is not None and same(made.recipe, to_dict(recipe)):
        changed = changed_since(made, recipe)
        if changed and not replace:
            return say(
                f"{folder} was made by this recipe, but the files of its {changed} have changed since; "
                "--replace makes it anew"
            )
        work = Work(recipe, folder, Engine.of(recipe), say)
        if not changed and (until != "normalize" or work.stages.get("normalize", {}).get("written")):
            work.tidy()
            return say(f"{folder} is already made by this recipe; `headrace data inspect {folder}` shows it")
    elif made is not None and not replace:
        raise UserError(
            f"path: {folder} holds data of another recipe, with {difference(made.recipe, to_dict(recipe))}; "
            "choose another path=, or replace it with --replace"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        for stale in folder.rglob(".*.partial"):
            stale.unlink()
        work = Work(recipe, folder, Engine.of(recipe), say, until=until)
        names = list(READS)
        for name in names[: names.index(until) + 1]:
            work.run(name)
        if until == "shuffle":
            work.complete()


def changed_since(made: Index, recipe: Any) -> str | None:
    """Which of its inputs are no longer those that data was made of. What is gone is no longer needed."""
    for name, checksum in (("sources", listing), ("tokenizer", brought)):
        try:
            if name in made.inputs and made.inputs[name] != checksum(recipe):
                return name
        except UserError:
            pass
    return None


def finished(folder: Path) -> Index | None:
    """The index of data made before. A folder that holds anything else is not ours to fill."""
    file = folder / "index.json"
    if file.is_file():
        try:
            return Index.parse(file.read_bytes(), str(file))
        except UserError as error:
            raise UserError(f"path: {error}; choose another path=, or remove {folder}") from None
    if folder.exists() and not folder.is_dir():
        raise UserError(f"path: {folder} is a file; choose another")
    ours = (".lock", ".partial")  # what is left where the work was stopped before it began
    others = folder.exists() and any(not file.name.endswith(ours) for file in folder.iterdir())
    if others and not (folder / "stages.json").is_file():
        raise UserError(f"path: {folder} exists and holds no data of ours; choose another, or remove it")
    return None


def same(made: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether two recipes make the same data: where it lies and who does the work do not matter."""
    return relevant(made) == relevant(wanted)


def relevant(recipe: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in recipe.items() if key not in ("path", "engine", "workers", "errors")}


def difference(made: dict[str, Any], wanted: dict[str, Any]) -> str:
    before, now = flat(relevant(made)), flat(relevant(wanted))
    key = next(key for key in before | now if before.get(key) != now.get(key))
    return f"{key} = {before.get(key)}, and this one says {now.get(key)}"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time. The lock goes when the process does, however it ends."""
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
