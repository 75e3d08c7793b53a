"""The first stage: documents of any source, made alike, as parquet. Each part of a source is read, its text
normalised and filtered, and written as one file with a summary beside it."""

import importlib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.data.clean import filters
from headrace.data import shards
from headrace.data.documents import SCHEMA, Part, Problems
from headrace.data.clean.minhash import Fingerprints

ROW_GROUP = 16_000_000  # bytes of text: what a later stage holds at a time


@dataclass(frozen=True)
class Unit:
    """The work of one worker at a time: a part of a source, by its number among those of all sources."""

    number: int
    source: str
    cfg: Any  # the source's section of the recipe
    part: Part


@dataclass(frozen=True)
class Tally:
    documents: int
    bytes: int  # of text


def units(recipe: Any) -> list[Unit]:
    """All there is to read, in the order of the recipe."""
    found = [
        (name, cfg, part) for name, cfg in recipe.sources.items() for part in source_module(cfg).parts(cfg)
    ]
    return [Unit(number, *rest) for number, rest in enumerate(found)]


def normalise_part(unit: Unit, cfg: Any, policy: Any, folder: Path | str) -> dict[str, Any]:
    """Writes NUMBER.parquet and what duplicates are found by, if they are looked for. Returns a summary, for
    NUMBER.json. `cfg` is the recipe's normalize section, `policy` what to do with bad input."""
    folder, problems = Path(folder), Problems(policy)
    reading = Reading(unit, cfg, problems)
    with shards.atomic(place(folder, unit.number)) as file:
        write_documents(file, reading.tables())
    reading.fingerprints.write(folder, unit.number)
    return reading.summary() | {"problems": problems.summary()}


class Reading:
    """The documents of a part that are kept, and what there is to tell when all were read."""

    def __init__(self, unit: Unit, cfg: Any, problems: Problems) -> None:
        self.unit, self.cfg, self.problems = unit, cfg, problems
        self.fingerprints = Fingerprints(cfg, ids=has_ids(unit.cfg))
        self.dropped = Counter[str]()
        self.read = self.documents = self.bytes = 0

    def tables(self) -> Iterator[pa.Table]:
        for table in source_module(self.unit.cfg).read(self.unit.cfg, self.unit.part, self.problems):
            if not len(table):
                continue
            numbers = np.arange(self.read, self.read + len(table))
            self.read += len(table)
            table = unicode(conform(table, self.unit.source), self.cfg.unicode)
            texts = contents(table)
            keep, dropped = filters.judge(texts, self.cfg)
            self.dropped.update(dropped)
            if dropped:
                mask = pa.array(keep)
                table, texts, numbers = table.filter(mask), texts.filter(mask), numbers[keep]
            if len(table):
                self.fingerprints.add(table, texts, numbers)
                self.documents += len(table)
                self.bytes += int(sizes(table).sum())
                yield table

    def summary(self) -> dict[str, Any]:
        return {
            "number": self.unit.number,
            "source": self.unit.source,
            "file": self.unit.part.file,
            "documents_read": self.read,
            "documents": self.documents,
            "bytes": self.bytes,
            "dropped": dict(self.dropped),
        }


def place(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.parquet"


def summary_place(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.json"


def write_documents(file: Any, tables: Iterable[pa.Table]) -> Tally:
    """Row groups of about ROW_GROUP bytes. How the documents were divided into tables leaves no trace."""
    documents, total, waiting = 0, 0, SCHEMA.empty_table()
    # Statistics and dictionaries of long texts cost time and save nothing. LZ4 is read three times as fast as
    # snappy.
    options = dict(compression="lz4", use_dictionary=["source"], write_statistics=False)
    with pq.ParquetWriter(file, SCHEMA, **options) as writer:
        for table in tables:
            waiting = pa.concat_tables([waiting, table])
            ends = np.cumsum(sizes(waiting))
            start = done = 0
            while len(ends) and ends[-1] - done >= ROW_GROUP:
                stop = int(np.searchsorted(ends, done + ROW_GROUP)) + 1
                writer.write_table(waiting.slice(start, stop - start).combine_chunks())
                start, done = stop, int(ends[stop - 1])
            documents, total = documents + start, total + done
            waiting = waiting.slice(start)
        if len(waiting):
            writer.write_table(waiting.combine_chunks())
    return Tally(documents + len(waiting), total + int(sizes(waiting).sum()))


def sizes(table: pa.Table) -> np.ndarray:
    """Bytes of text or messages, of each document."""
    lengths = [pc.fill_null(pc.binary_length(table[name]), 0).to_numpy() for name in ("text", "messages")]
    return lengths[0] + lengths[1]


def conform(table: pa.Table, source: str) -> pa.Table:
    """With all columns of SCHEMA, each in one piece."""
    table = table.append_column("source", pa.repeat(pa.scalar(source), len(table)))
    return table.select(SCHEMA.names).cast(SCHEMA).combine_chunks()


def unicode(table: pa.Table, form: str) -> pa.Table:
    if form == "none":
        return table
    for name, change in (("text", unicodedata.normalize), ("messages", normalise_json)):
        column = in_one(table[name])
        mask = pc.fill_null(pc.invert(pc.string_is_ascii(column)), False)  # ASCII is normal in every form
        if pc.any(mask).as_py():
            changed = [change(form.upper(), value) for value in column.filter(mask).to_pylist()]  # type: ignore[arg-type]
            column = pc.replace_with_mask(column, mask, pa.array(changed, pa.large_string()))
            table = table.set_column(table.schema.get_field_index(name), SCHEMA.field(name), column)
    return table


def normalise_json(form: str, document: str) -> str:
    """Each string by itself: in the text of the JSON, an accent would join the n of \\n, and what becomes a
    quotation mark would end a string."""

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return unicodedata.normalize(form, value)  # type: ignore[arg-type]
        if isinstance(value, list):
            return [walk(item) for item in value]
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        return value

    return orjson.dumps(walk(orjson.loads(document))).decode()


def contents(table: pa.Table) -> pa.LargeStringArray:
    """What is read of each document: its text, or all that is said in its messages, a line each."""
    text = in_one(table["text"])
    if text.null_count:
        said = [None if value is None else spoken(value) for value in table["messages"].to_pylist()]
        text = pc.coalesce(text, pa.array(said, pa.large_string()), pa.scalar("", pa.large_string()))
    return text


def in_one(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def spoken(messages: str) -> str:
    """Contents as they are where they are strings, words with spaces between; parts and calls of tools as
    JSON."""
    found = [one for part in orjson.loads(messages) for one in part.get("messages", [part])]
    said = [message.get(key) for message in found for key in ("content", "tool_calls")]
    said = [" ".join(value) if is_words(value) else value for value in said]
    return "\n".join(
        value if isinstance(value, str) else orjson.dumps(value).decode() for value in said if value
    )


def is_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def has_ids(source: Any) -> bool:
    """Whether ids are the user's, and may thus come twice."""
    return getattr(source, "id", None) is not None


def source_module(cfg: Any) -> Any:
    return importlib.import_module(f"headrace.data.sources.{cfg.use}")
