"""The machinery of stages: lists of units of work, each of which leaves a file when it is done, so that what
is there when a run is stopped need not be done again. stages.json says how far the work has come."""

import functools
import hashlib
import itertools
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.config.reader import to_dict
from headrace.data.clean import dedup as duplicates, normalize as normalise
from headrace.data.tokenizer import tokenizer as tokenise
from headrace.data.pipeline.pool import Engine
from headrace.data.formats import open as storage
from headrace.data.pipeline.progress import Bar
from headrace.data.shards import write_json
from headrace.errors import UserError

Say = Callable[[str], None]

# What each stage reads of the recipe: it is done again when that has changed, or what one before it reads.
READS = {
    "normalize": ("sources", "normalize"),
    "tokenizer": ("tokenizer", "pack.evaluation", "pack.pause", "seed"),
    "pack": ("pack", "seed"),
    "shuffle": ("shuffle", "sources.weight"),
}
MAKES = {
    "normalize": ("read", "normalized"),
    "tokenizer": tokenise.FILES,
    "pack": ("packed",),
    "shuffle": ("scatter", "evaluation-*", "train-*", "report.html", "index.json"),
}
LAYOUT = 2  # of what lies between the stages; work of another layout begins anew


class Stages:
    """The stages of one recipe in its folder, up to one. A class with make_STAGE for each knows the work."""

    def __init__(
        self, recipe: Any, folder: Path, engine: Engine, say: Say, *, until: str = "shuffle"
    ) -> None:
        self.recipe, self.folder, self.engine, self.say, self.until = recipe, folder, engine, say, until
        file = folder / "stages.json"
        try:
            self.stages: dict[str, Any] = json.loads(file.read_bytes()) if file.exists() else {}
        except ValueError:
            raise UserError(f"{file} is damaged; remove {folder} to make the data anew") from None

    def run(self, name: str) -> None:
        wanted, began = fingerprint(to_dict(self.recipe), name), time.perf_counter()
        if name == "tokenizer":
            wanted += brought(self.recipe)
        if name == "normalize":
            self.check_sources()
        stage = self.stages.get(name, {})
        if self.lacks_text(name) and (self.folder / "packed").exists():
            self.say("normalize: documents are now written down, and packed again from there")
        if stage.get("fingerprint") != wanted or self.is_spent(name) or self.lacks_text(name):
            self.clear(name)
            self.keep(self.stages | {name: {"fingerprint": wanted}})
        elif "seconds" in stage:
            return self.say(f"{name}: done before")
        if name != "normalize":  # from here on, what was made before is no longer whole
            (self.folder / "index.json").unlink(missing_ok=True)
        made = getattr(self, f"make_{name}")()
        seconds = round(time.perf_counter() - began, 2)
        self.keep(self.stages | {name: self.stages[name] | {"seconds": seconds} | made})

    def is_spent(self, name: str) -> bool:
        """Whether packed rows are gone, since a shuffle had them all, and another shuffle is wanted now."""
        wanted = fingerprint(to_dict(self.recipe), "shuffle")
        spent = self.stages.get(name, {}).get("spent", False)
        return spent and self.stages.get("shuffle", {}).get("fingerprint") != wanted

    def lacks_text(self, name: str) -> bool:
        """Whether documents were not written down when they were read, and are now to be."""
        stage = self.stages.get(name, {})
        unwritten = "seconds" in stage and not stage.get("written")
        return name == "normalize" and unwritten and self.writes_text()

    def writes_text(self) -> bool:
        """Whether documents are written down before they are packed: on wish, where a tokenizer learns from
        them or duplicates are sought among them, and where data that is ready must outlive bad sources."""
        return (
            self.until == "normalize"
            or self.recipe.tokenizer.use != "file"
            or duplicates.are_sought(self.recipe)
            or (self.folder / "index.json").exists()
        )

    def clear(self, name: str) -> None:
        """Takes away what a stage and those after it have made. First they are no longer said to be done.
        Data that is ready stays until there are documents to make other of: sources may turn out bad."""
        names = list(READS)
        later = names[names.index(name) :]
        self.keep({key: value for key, value in self.stages.items() if key not in later})
        whole = name == "normalize" and (self.folder / "index.json").exists()
        for pattern in itertools.chain.from_iterable(MAKES[key] for key in ([name] if whole else later)):
            for file in self.folder.glob(pattern):
                shutil.rmtree(file) if file.is_dir() else file.unlink()

    def keep(self, stages: dict[str, Any]) -> None:
        self.stages = stages
        write_json(self.folder / "stages.json", stages)

    def units(self, label: str, unit: Callable[[Any], Any], jobs: dict[Path, Any]) -> list[dict[str, Any]]:
        """Runs a unit for each job whose file is not there yet, keeps what it says of its work in that file,
        and returns what all have said."""
        if not jobs:
            return []
        left = [(job, file) for file, job in jobs.items() if not self.is_done(file)]
        for folder in {file.parent for file in jobs}:
            folder.mkdir(parents=True, exist_ok=True)
        with Bar(label, len(jobs), done=len(jobs) - len(left)) as bar:
            for _, made in self.engine.run(functools.partial(finish, unit=unit), left):
                bar.advance(made or {})
        return [json.loads(file.read_bytes()) for file in jobs]

    def is_done(self, file: Path) -> bool:
        """Whether a unit has left its file, and not by skipping what is now to stop the work."""
        if not file.exists():
            return False
        made = json.loads(file.read_bytes()) or {}
        return self.recipe.errors == "skip" or not made.get("problems", {}).get("counts")

    def check_sources(self) -> None:
        """Begins anew if the files of the sources have changed since their list was noted down."""
        stage = self.stages.get("normalize", {})
        try:
            changed = "units" in stage and stage["units"] != listing(self.recipe)
        except UserError:
            if not stage.get("written") and "seconds" not in self.stages.get("pack", {}):
                raise
            changed = False  # gone, and no longer needed
        if changed:
            self.say("normalize: the files of the sources have changed, so it begins anew")
            self.clear("normalize")


def finish(item: tuple[Any, Path], unit: Callable[[Any], Any]) -> Any:
    """A unit with its file, by the worker itself: what one has finished stays if another meets bad input."""
    job, file = item
    made = unit(job)
    write_json(file, made)
    return made


def listing(recipe: Any) -> str:
    """The checksum of the list of all parts of the sources, and of what changes when their files do."""
    units = normalise.units(recipe)
    named = {file for unit in units for file in (unit.part.file, *unit.part.more)}
    stamps = [(file, storage.stamp(file)) for file in sorted(named)]
    known = repr([(unit.source, unit.part) for unit in units]) + repr(stamps)
    return hashlib.sha256(known.encode()).hexdigest()[:16]


def brought(recipe: Any) -> str:
    """The checksum of the files that the user brought for the tokenizer."""
    cfg, content = recipe.tokenizer, b""
    if cfg.use == "file":
        file = tokenise.tokenizer_file(cfg.path)
        beside = [file.with_name(name) for name in tokenise.FILES if name != file.name]
        content = b"\0".join(one.read_bytes() for one in (file, *beside) if one.is_file())
    content += read_template(cfg.template).encode() if cfg.template is not None else b""
    return hashlib.sha256(content).hexdigest()[:16] if content else ""


def read_template(path: str) -> str:
    """A chat template: a file, or one that comes with Headrace, by its name alone."""
    ours = Path(__file__).parent.parent / "templates" / f"{path}.jinja"
    try:
        return (ours if ours.is_file() else Path(path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"tokenizer.template: {path} cannot be read: {error}") from None


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


def fingerprint(recipe: dict[str, Any], name: str) -> str:
    """Of all that a stage and those before it read of the recipe."""
    values = flat(recipe)
    names = list(READS)
    read = list(itertools.chain.from_iterable(READS[key] for key in names[: names.index(name) + 1]))
    by_weight = "sources.weight" in read
    chosen = {
        key: value
        for key, value in values.items()
        if any(key == one or key.startswith(f"{one}.") for one in read)
        and (by_weight or not (key.startswith("sources.") and key.endswith(".weight")))
    }
    return hashlib.sha256(json.dumps([LAYOUT, chosen]).encode()).hexdigest()[:16]
