"""The first stage of data preparation: converts documents of any source to one schema, as parquet. Reads each
part of a source, normalizes and filters its text, and writes one file with a summary next to it."""

import importlib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.config.sections import DataRecipe, NormalizeKeys
from headrace.data import shards
from headrace.data.clean import filters
from headrace.data.clean.minhash import Fingerprints
from headrace.data.documents import SCHEMA, FilePart, JsonObject, Problems
from headrace.data.sources import Source, SourceConfig

ROW_GROUP = 16_000_000  # bytes of text: what a later stage holds in memory at a time

UnicodeForm = Literal["NFC", "NFD", "NFKC", "NFKD"]


@dataclass(frozen=True)
class SourcePart:
    """A part of a source, which one worker processes at a time. `number` counts the parts of all sources."""

    number: int
    source: str
    cfg: SourceConfig | None  # the section of the recipe; None if only normalized documents are read
    part: FilePart


@dataclass(frozen=True)
class WriteStats:
    documents: int
    text_bytes: int


def list_source_parts(recipe: DataRecipe) -> list[SourcePart]:
    """The parts of all sources, in the order of the recipe."""
    parts = [
        (name, cfg, part) for name, cfg in recipe.sources.items() for part in load_source(cfg).list_parts(cfg)
    ]
    return [SourcePart(number, *part) for number, part in enumerate(parts)]


def normalize_part(
    source_part: SourcePart, cfg: NormalizeKeys, policy: Literal["stop", "skip"], folder: Path | str
) -> JsonObject:
    """Write NUMBER.parquet and the fingerprints that deduplication needs. Returns the summary for
    NUMBER.json. `policy` is the recipe's setting for bad input."""
    folder, problems = Path(folder), Problems(policy)
    reader = PartReader(source_part, cfg, problems)
    with shards.open_atomic(part_path(folder, source_part.number)) as file:
        write_documents(file, reader.iter_tables())
    reader.fingerprints.write(folder, source_part.number)
    return reader.to_json() | {"problems": problems.to_json()}


class PartReader:
    """Reads, normalizes and filters the documents of a part, and counts them."""

    def __init__(self, source_part: SourcePart, cfg: NormalizeKeys, problems: Problems) -> None:
        self.source_part, self.cfg, self.problems = source_part, cfg, problems
        self.fingerprints = Fingerprints(cfg, ids=has_user_ids(source_part.cfg))
        self.dropped = Counter[str]()
        self.documents_read = self.documents_kept = self.text_bytes = 0

    def iter_tables(self) -> Iterator[pa.Table]:
        """The documents that pass the filters, as tables with the columns of SCHEMA."""
        cfg = self.source_part.cfg
        assert cfg is not None
        for table in load_source(cfg).read(cfg, self.source_part.part, self.problems):
            if not len(table):
                continue
            indices = np.arange(self.documents_read, self.documents_read + len(table))
            self.documents_read += len(table)
            table = normalize_unicode(to_schema(table, self.source_part.source), self.cfg.unicode)
            texts = text_column(table)
            keep, dropped = filters.select_texts(texts, self.cfg)
            self.dropped.update(dropped)
            if dropped:
                mask = pa.array(keep)
                table, texts, indices = table.filter(mask), texts.filter(mask), indices[keep]
            if len(table):
                self.fingerprints.add(table, texts, indices)
                self.documents_kept += len(table)
                self.text_bytes += int(document_bytes(table).sum())
                yield table

    def to_json(self) -> JsonObject:
        """The summary of what `iter_tables` has read so far."""
        return {
            "number": self.source_part.number,
            "source": self.source_part.source,
            "file": self.source_part.part.file,
            "documents_read": self.documents_read,
            "documents": self.documents_kept,
            "bytes": self.text_bytes,
            "dropped": dict(self.dropped),
        }


def part_path(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.parquet"


def summary_path(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.json"


def write_documents(file: BinaryIO, tables: Iterable[pa.Table]) -> WriteStats:
    """Write tables as parquet with row groups of about ROW_GROUP bytes. The bytes of the file do not depend
    on how the documents are divided into tables."""
    documents, text_bytes, pending = 0, 0, SCHEMA.empty_table()
    # Statistics and dictionaries of long texts cost time and save nothing. LZ4 is read three times as fast as
    # snappy.
    options = dict(compression="lz4", use_dictionary=["source"], write_statistics=False)
    with pq.ParquetWriter(file, SCHEMA, **options) as writer:
        for table in tables:
            pending = pa.concat_tables([pending, table])
            ends = np.cumsum(document_bytes(pending))
            start = written = 0
            while len(ends) and ends[-1] - written >= ROW_GROUP:
                stop = int(np.searchsorted(ends, written + ROW_GROUP)) + 1
                writer.write_table(pending.slice(start, stop - start).combine_chunks())
                start, written = stop, int(ends[stop - 1])
            documents, text_bytes = documents + start, text_bytes + written
            pending = pending.slice(start)
        if len(pending):
            writer.write_table(pending.combine_chunks())
    return WriteStats(documents + len(pending), text_bytes + int(document_bytes(pending).sum()))


def document_bytes(table: pa.Table) -> np.ndarray:
    """[n]: the bytes of text or messages of each document."""
    lengths = [pc.fill_null(pc.binary_length(table[name]), 0).to_numpy() for name in ("text", "messages")]
    return lengths[0] + lengths[1]


def to_schema(table: pa.Table, source: str) -> pa.Table:
    """Add the column `source` and convert to SCHEMA, with one chunk for each column."""
    table = table.append_column("source", pa.repeat(pa.scalar(source), len(table)))
    return table.select(SCHEMA.names).cast(SCHEMA).combine_chunks()


def normalize_unicode(table: pa.Table, form: Literal["none", "nfc", "nfkc"]) -> pa.Table:
    """A table with its texts and the strings in its messages in a Unicode normal form."""
    if form == "none":
        return table
    normal_form = cast(UnicodeForm, form.upper())
    for name, normalize in (("text", unicodedata.normalize), ("messages", normalize_json)):
        column = combine_chunks(table[name])
        mask = pc.fill_null(pc.invert(pc.string_is_ascii(column)), False)  # ASCII is normal in every form
        if pc.any(mask).as_py():
            normalized = [normalize(normal_form, value) for value in column.filter(mask).to_pylist()]
            column = pc.replace_with_mask(column, mask, pa.array(normalized, pa.large_string()))
            table = table.set_column(table.schema.get_field_index(name), SCHEMA.field(name), column)
    return table


def normalize_json(form: UnicodeForm, document: str) -> str:
    """Normalize each string in JSON on its own: in the text of the JSON, an accent would combine with the n
    of \\n, and a character that becomes a quotation mark would end a string."""

    def walk(value: object) -> object:
        if isinstance(value, str):
            return unicodedata.normalize(form, value)
        if isinstance(value, list):
            return [walk(item) for item in value]
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        return value

    return orjson.dumps(walk(orjson.loads(document))).decode()


def text_column(table: pa.Table) -> pa.LargeStringArray:
    """The readable text of each document: its text, or the contents of its messages, one a line."""
    text = combine_chunks(table["text"])
    if text.null_count:
        contents = [
            None if value is None else messages_text(value) for value in table["messages"].to_pylist()
        ]
        text = pc.coalesce(text, pa.array(contents, pa.large_string()), pa.scalar("", pa.large_string()))
    return text


def combine_chunks(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def messages_text(messages: str) -> str:
    """The contents of messages, one a line: strings as they are, lists of words joined by spaces, content
    parts and tool calls as JSON."""
    flat = [message for part in orjson.loads(messages) for message in part.get("messages", [part])]
    values = [message.get(key) for message in flat for key in ("content", "tool_calls")]
    values = [" ".join(value) if is_word_list(value) else value for value in values]
    return "\n".join(
        value if isinstance(value, str) else orjson.dumps(value).decode() for value in values if value
    )


def is_word_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def has_user_ids(cfg: SourceConfig | None) -> bool:
    """Whether the ids of a source come from its data, and so may be duplicated."""
    return getattr(cfg, "id_column", None) is not None


def load_source(cfg: SourceConfig) -> Source:
    """The plugin that reads a source."""
    return cast(Source, importlib.import_module(f"headrace.data.sources.{cfg.use}"))
