"""State of data preparation: which stages are done, and whether their results are still valid.

stages.json in the data folder has a record for each stage. Its fingerprint covers the recipe keys that the
stage and those before it depend on; a stage with another fingerprint is run again."""

import hashlib
import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from headrace.config.reader import to_dict
from headrace.config.sections import DataRecipe
from headrace.data.clean import normalize
from headrace.data.formats import open as formats_open
from headrace.data.shards import write_json
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.errors import UserError

StageName = Literal["normalize", "tokenizer", "pack", "shuffle"]
STAGES: tuple[StageName, ...] = ("normalize", "tokenizer", "pack", "shuffle")

RECIPE_KEYS: dict[StageName, tuple[str, ...]] = {  # that each stage depends on
    "normalize": ("sources", "normalize"),
    "tokenizer": ("tokenizer", "pack.eval_fraction", "pack.pause_tokens", "seed"),
    "pack": ("pack", "seed"),
    "shuffle": ("shuffle", "sources.weight"),
}
OUTPUTS: dict[StageName, tuple[str, ...]] = {  # file names, or patterns
    "normalize": ("read", "normalized"),
    "tokenizer": tokenizer_io.TOKENIZER_FILES,
    "pack": ("packed",),
    "shuffle": ("scatter", "evaluation-*", "train-*", "report.html", "index.json"),
}
LAYOUT = 2  # version of the intermediate files: those of another version are made again


class ProblemCounts(TypedDict):
    """Bad input that was skipped."""

    counts: dict[str, int]  # by kind
    samples: list[str]  # the first places


class NormalizeRecord(TypedDict, total=False):
    """Record of a stage in stages.json. `seconds` is there once the stage is done."""

    fingerprint: str
    seconds: float
    units: str  # hash of the list of source files
    written: bool  # documents are in normalized/; otherwise they are read when packed
    documents: int
    bytes: int
    dropped: dict[str, int]  # documents dropped by filters, by reason
    problems: ProblemCounts


class TokenizerRecord(TypedDict, total=False):
    """Record of a stage in stages.json. `seconds` is there once the stage is done."""

    fingerprint: str
    seconds: float
    vocab: int
    encoder: str  # library that encodes
    brought: str  # hash of the user's tokenizer files


class PackRecord(TypedDict, total=False):
    """Record of a stage in stages.json. `seconds` is there once the stage is done."""

    fingerprint: str
    seconds: float
    documents: int
    tokens: int
    bytes: int
    rows: int
    fill: float
    problems: ProblemCounts
    kinds: list[str]  # of documents: text, chat, ...
    spent: bool  # packed rows were deleted when the shuffle had read them


class ShuffleRecord(TypedDict, total=False):
    """Record of a stage in stages.json. `seconds` is there once the stage is done."""

    fingerprint: str
    seconds: float
    tokens: int
    shards: dict[str, list[list[dict[str, Any]]]]  # fields of a Shard, by split and epoch
    quality: dict[str, float | None]  # fields of ShuffleQuality


StageRecord = NormalizeRecord | TokenizerRecord | PackRecord | ShuffleRecord


class StageLog:
    """The records of stages.json, in memory and on the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "stages.json"
        try:
            self.records: dict[str, Any] = json.loads(self.path.read_bytes()) if self.path.exists() else {}
        except ValueError:
            raise UserError(f"{self.path} is damaged; remove {folder} and make the data again") from None

    @property
    def normalize(self) -> NormalizeRecord:
        return cast(NormalizeRecord, self.records.get("normalize", {}))

    @property
    def tokenizer(self) -> TokenizerRecord:
        return cast(TokenizerRecord, self.records.get("tokenizer", {}))

    @property
    def pack(self) -> PackRecord:
        return cast(PackRecord, self.records.get("pack", {}))

    @property
    def shuffle(self) -> ShuffleRecord:
        return cast(ShuffleRecord, self.records.get("shuffle", {}))

    def is_done(self, name: StageName) -> bool:
        return "seconds" in self.records.get(name, {})

    def fingerprint(self, name: StageName) -> str | None:
        return self.records.get(name, {}).get("fingerprint")

    def start(self, name: StageName, fingerprint: str) -> None:
        """Replace the record of a stage by one that only has its fingerprint."""
        self._write(self.records | {name: {"fingerprint": fingerprint}})

    def update(self, name: StageName, values: StageRecord) -> None:
        """Add values to the record of a stage."""
        self._write(self.records | {name: {**self.records[name], **values}})

    def keep_only(self, names: Sequence[StageName]) -> None:
        """Remove the records of all other stages."""
        self._write({name: self.records[name] for name in names if name in self.records})

    def invalidate(self, name: StageName) -> None:
        """Remove the records and the results of a stage and of those after it.

        The records go first. Finished data is kept until there are new documents, since the sources may turn
        out to be bad."""
        position = STAGES.index(name)
        self.keep_only(STAGES[:position])
        keeps_data = name == "normalize" and (self.folder / "index.json").exists()
        stages = [name] if keeps_data else STAGES[position:]
        for pattern in itertools.chain.from_iterable(OUTPUTS[stage] for stage in stages):
            for file in self.folder.glob(pattern):
                shutil.rmtree(file) if file.is_dir() else file.unlink()

    def _write(self, records: dict[str, Any]) -> None:
        self.records = records
        write_json(self.path, records)


def stage_fingerprint(recipe: DataRecipe, name: StageName) -> str:
    """Hash of all recipe keys that a stage and those before it depend on."""
    prefixes = list(
        itertools.chain.from_iterable(RECIPE_KEYS[stage] for stage in STAGES[: STAGES.index(name) + 1])
    )
    depends_on_weights = "sources.weight" in prefixes
    values = {
        key: value
        for key, value in flatten_tree(to_dict(recipe)).items()
        if any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)
        and (depends_on_weights or not (key.startswith("sources.") and key.endswith(".weight")))
    }
    return hashlib.sha256(json.dumps([LAYOUT, values]).encode()).hexdigest()[:16]


def sources_hash(recipe: DataRecipe) -> str:
    """Hash of the list of all parts of the sources, and of the sizes and times of their files."""
    parts = normalize.list_source_parts(recipe)
    paths = {path for part in parts for path in (part.part.file, *part.part.more_files)}
    stamps = [(path, formats_open.change_stamp(path)) for path in sorted(paths)]
    listing = repr([(part.source, part.part) for part in parts]) + repr(stamps)
    return hashlib.sha256(listing.encode()).hexdigest()[:16]


def tokenizer_hash(recipe: DataRecipe) -> str:
    """Hash of the tokenizer files that the user provides. Empty if there are none."""
    section, content = recipe.tokenizer, b""
    if section.use == "file":
        assert section.path is not None
        file = tokenizer_io.find_tokenizer_file(section.path)
        companions = [file.with_name(name) for name in tokenizer_io.TOKENIZER_FILES if name != file.name]
        content = b"\0".join(path.read_bytes() for path in (file, *companions) if path.is_file())
    content += read_template(section.chat_template).encode() if section.chat_template is not None else b""
    return hashlib.sha256(content).hexdigest()[:16] if content else ""


def read_template(name: str) -> str:
    """Read a chat template: one that comes with Headrace, by its name, or a file, by its path."""
    included = Path(__file__).parent.parent / "templates" / f"{name}.jinja"
    try:
        return (included if included.is_file() else Path(name)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"tokenizer.chat_template: {name} cannot be read: {error}") from None


def flatten_tree(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries to one, whose keys are joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten_tree(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
