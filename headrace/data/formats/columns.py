"""From records with any columns to documents: finds the text or messages, the id, and what is kept besides.

With `column: auto` that is a conversation, recognised by its columns; or a column named text; or a column
named content; or, of a table, the only column of strings. A text beside a column named label, or words beside
their tags, come with these; `column: text` leaves them."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from headrace.data import labelled
from headrace.data.chat import records as shapes
from headrace.data.documents import SCHEMA
from headrace.data.formats import TABLE, Bad

DOCUMENT = pa.schema([field for field in SCHEMA if field.name != "source"])
LISTED = 12  # columns named at most in a message
CERTAIN = (
    "messages",
    "sharegpt",
    "alpaca",
    "preference",
)  # shapes that are conversations even beside a column named text


@dataclass(frozen=True)
class Wanted:
    """Which columns a source takes, by name."""

    column: str = "auto"
    id: str | None = None
    meta: tuple[str, ...] = ()


@dataclass(frozen=True)
class Places:
    """Where the records of a table are from: an id made for each, and what a message calls its place."""

    ids: pa.Array
    where: Callable[[int], str]


@dataclass(frozen=True)
class Plan:
    """How documents come out of a table: the columns to read; the one that is the text, or None for
    conversations; and whether a record without text may be a conversation."""

    columns: list[str]
    text: str | None
    mixed: bool = False


def made_ids(name: str, mark: str, numbers: np.ndarray) -> pa.Array:
    """NAME:12 and so on, without a Python string for each."""
    # pa.array and pa.scalar look for pandas each time: where there is none, that is most of the work.
    whole = pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers.astype(np.int64))])
    return pc.binary_join_element_wise(scalar(name), whole.cast(pa.string()), scalar(mark))


@lru_cache(8)
def scalar(text: str) -> pa.StringScalar:
    return pa.scalar(text)


def strings(values: Sequence[Any]) -> pa.LargeStringArray:
    """Python strings in Arrow's memory: in one go, which takes a quarter of what pa.array takes for texts.
    Raises for what is no string, or has half a surrogate pair."""
    encoded = [value.encode() for value in values]
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.large_string(), len(encoded), buffers)


def slices(table: pa.Table) -> Iterator[pa.Table]:
    """Of about 16 MB, by the mean length of a row."""
    step = max(1, TABLE * len(table) // max(table.nbytes, 1))
    return (table.slice(first, step) for first in range(0, len(table), step))


def from_records(records: Sequence[Any], places: Places, wanted: Wanted, problems: Any) -> pa.Table:
    """Documents of records as a JSON parser makes them. A record that is Bad was so already."""
    column = "text" if wanted.column == "auto" else wanted.column
    try:
        names = set().union(*records) if wanted.column == "auto" else set[str]()
        if shapes.detect(names) in CERTAIN or labelled.detect(names):
            raise LookupError
        texts = strings([record[column] for record in records])
        ids = places.ids
        if wanted.id:
            ids = pa.array([_id(record, wanted.id) for record in records], pa.string())
        return _table(ids, texts, None, _metas(records, wanted))
    except (LookupError, TypeError, ValueError, AttributeError, Bad):
        pass  # some record is not like the others: each is looked at alone, which tells what is wrong with it
    kept, documents = [], []
    for row, record in enumerate(records):
        try:
            documents.append(_document(record, wanted))
            kept.append(row)
        except Bad as bad:
            problems.bad(bad.kind, places.where(row), bad.what)
    ids, texts, messages, metas = zip(*documents, strict=True) if documents else ((), (), (), ())
    made = places.ids.take(pa.array(kept, pa.int64()))
    return _table(pa.array(ids, pa.string()) if wanted.id else made, texts, messages, metas)


def plan(schema: pa.Schema, wanted: Wanted) -> Plan:
    """Raises Bad if a table does not have what is wanted."""
    names = schema.names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise Bad("missing column", f"two columns are named {twice}, expected different names")
    if wanted.id is not None and wanted.id not in names:
        raise Bad("missing column", _lacking(wanted.id, names))
    besides = [name for name in (wanted.id, *wanted.meta) if name is not None and name in names]
    strings = [name for name in names if _is_text(schema.field(name).type)]
    if wanted.column != "auto":
        if wanted.column not in names:
            raise Bad("missing column", _lacking(wanted.column, names))
        type = schema.field(wanted.column).type
        if wanted.column not in strings and not _is_list(type):
            raise Bad("missing column", f"column {wanted.column} holds {type}, expected text or messages")
        columns = list(dict.fromkeys([wanted.column, *besides]))
        return Plan(columns, wanted.column if wanted.column in strings else None)
    others = [name for name in strings if name not in besides]
    shape = shapes.detect([name for name in names if name != "text"])
    if shape:
        plain = "text" in strings and shape not in CERTAIN
        return Plan(names, "text" if plain else None, mixed=True)
    if labelled.detect(names):
        return Plan(names, None, mixed=True)
    text = next((name for name in ("text", "content") if name in strings), None)
    if text is None and len(others) == 1:
        text = others[0]
    if text is None:
        raise Bad("missing column", _unclear(names))
    return Plan(list(dict.fromkeys([text, *besides])), text)


def from_table(table: pa.Table, plan: Plan, places: Places, wanted: Wanted, problems: Any) -> pa.Table:
    """Documents of the columns that were planned."""
    if plan.text is not None:
        try:
            # By way of bytes: that strings are UTF-8 is only looked at when they are made of bytes.
            texts = _plain(table[plan.text]).cast(pa.large_binary()).cast(pa.large_string())
            if texts.null_count == 0:
                return _table(_table_ids(table, places, wanted), texts, None, _table_metas(table, wanted))
        except (pa.ArrowInvalid, Bad):
            pass  # each record is looked at alone, which tells what is wrong with it
        if not plan.mixed:
            wanted = replace(wanted, column=plan.text)
    return from_records(_records(table), places, wanted, problems)


def _table(ids: Any, texts: Any, messages: Any, metas: Any) -> pa.Table:
    nothing = pa.nulls(len(ids), pa.large_string())
    columns = [ids, *(nothing if column is None else column for column in (texts, messages, metas))]
    arrays = [
        column if isinstance(column, pa.Array | pa.ChunkedArray) else pa.array(column, field.type)
        for column, field in zip(columns, DOCUMENT, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=DOCUMENT)


def _document(record: Any, wanted: Wanted) -> tuple[str | None, str | None, str | None, str | None]:
    """Id, text, messages and meta of one record."""
    if isinstance(record, Bad):
        raise record
    if not isinstance(record, dict):
        raise Bad("not an object", f'found {_kind(record)}, expected an object such as {{"text": "..."}}')
    id = _id(record, wanted.id) if wanted.id else None
    text, messages = _content(record, wanted)
    return id, text, messages, _meta(record, wanted.meta) if wanted.meta else None


def _content(record: dict[str, Any], wanted: Wanted) -> tuple[str | None, str | None]:
    """The text or the messages of a record."""
    column = wanted.column
    if column == "auto":
        column, shape = _choose(record)
        if shape:
            return None, _messages(shape, record)
    if column not in record:
        raise Bad("missing column", _lacking(column, record))
    value = record[column]
    if isinstance(value, list):
        return None, _messages(shapes.detect([column]) or "messages", {column: value})
    if not isinstance(value, str | bytes):
        raise Bad("missing column", f"column {column} is {_kind(value)}, expected text or messages")
    return _checked(value, f"column {column}"), None


def _choose(record: dict[str, Any]) -> tuple[str, str | None]:
    """With `column: auto`, the column that is the text of a record, or the shape of one that has more."""
    filled = [name for name, value in record.items() if value is not None and name != "text"]
    if shapes.detect(filled) not in CERTAIN and labelled.is_labelled(record):
        return "", "labelled"
    if isinstance(record.get("text"), str | bytes) and shapes.detect(filled) not in CERTAIN:
        return "text", None
    shape = shapes.detect(filled) or shapes.detect([name for name in record if name != "text"])
    if shape:
        return "", shape
    if "text" in record or "content" in record:
        return "text" if "text" in record else "content", None
    raise Bad("missing column", _unclear(record))


def _messages(shape: str, record: dict[str, Any]) -> str:
    try:
        found = {"preference": shapes.pair, "labelled": labelled.parts}.get(shape)
        messages = shapes.messages(shape, record) if found is None else found(record)
    except ValueError as error:
        raise Bad("bad messages", str(error)) from None
    return _json(messages, "the conversation")


def _id(record: dict[str, Any], column: str) -> str:
    if column not in record:
        raise Bad("missing column", _lacking(column, record))
    value = record[column]
    if isinstance(value, str | bytes):
        return _checked(value, f"column {column}")
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None or isinstance(value, list | dict):
        raise Bad("missing column", f"column {column} is {_kind(value)}, expected an id")
    if isinstance(value, float) and abs(value) >= 2.0**63:  # an integer that lost its last digits in parsing
        raise Bad(
            "missing column", f"column {column} is {value}, too long a number for an id: make it a string"
        )
    return str(value)


def _metas(records: Iterable[dict[str, Any]], wanted: Wanted) -> list[str] | None:
    return [_meta(record, wanted.meta) for record in records] if wanted.meta else None


def _meta(record: dict[str, Any], columns: tuple[str, ...]) -> str:
    return _json({column: record.get(column) for column in columns}, f"column {' or '.join(columns)}")


def _json(value: Any, what: str) -> str:
    try:
        return orjson.dumps(value, default=str).decode()
    except TypeError as error:
        kind = "lone surrogate" if "surrogate" in str(error) else "not JSON"
        raise Bad(kind, f"{what} cannot be written as JSON: {error}") from None


def _checked(value: str | bytes, what: str) -> str:
    """A string that can be written as UTF-8."""
    try:
        if isinstance(value, bytes):
            return value.decode()
        value.encode()
        return value
    except UnicodeDecodeError as error:
        raise Bad("not UTF-8", f"{what} is not UTF-8 at its byte {error.start}") from None
    except UnicodeEncodeError as error:
        what = f"{what} has half a surrogate pair at its character {error.start}"
        raise Bad("lone surrogate", what) from None


def _table_ids(table: pa.Table, places: Places, wanted: Wanted) -> Any:
    if wanted.id is None:
        return places.ids
    column = _plain(table[wanted.id])
    if pa.types.is_integer(column.type) and column.null_count == 0:
        return column.cast(pa.string())
    return pa.array([_id({wanted.id: value}, wanted.id) for value in _values(column)], pa.string())


def _table_metas(table: pa.Table, wanted: Wanted) -> list[str] | None:
    if not wanted.meta:
        return None
    return _metas(_values(table.select([name for name in wanted.meta if name in table.column_names])), wanted)


def _values(found: pa.Table | pa.ChunkedArray) -> list[Any]:
    """Of what stands beside the text."""
    try:
        return found.to_pylist()
    except UnicodeDecodeError as error:
        raise Bad("not UTF-8", f"a string beside the text is not UTF-8 at its byte {error.start}") from None


def _records(table: pa.Table) -> list[Any]:
    try:
        return table.to_pylist()
    except UnicodeDecodeError:
        return [_record(table.slice(row, 1)) for row in range(len(table))]


def _record(row: pa.Table) -> Any:
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError as error:
        return Bad("not UTF-8", f"a string is not UTF-8 at its byte {error.start}")


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _is_text(type: pa.DataType) -> bool:
    type = type.value_type if pa.types.is_dictionary(type) else type
    types = pa.types
    tests = (types.is_string, types.is_large_string, types.is_string_view)
    return any(test(type) for test in (*tests, types.is_binary, types.is_large_binary, types.is_binary_view))


def _is_list(type: pa.DataType) -> bool:
    return pa.types.is_list(type) or pa.types.is_large_list(type) or pa.types.is_fixed_size_list(type)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def _lacking(column: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(column, list(names), n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"no column {column}, found {_listed(names)}{hint}"


def _unclear(names: Iterable[str]) -> str:
    return (
        f"found {_listed(names)}, expected a column named text or content, or the columns of a conversation; "
        "say which one with `column`"
    )


def _listed(names: Iterable[str]) -> str:
    names = [" ".join(name.split()) for name in names]  # a CSV file without them has a text there
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return (", ".join(names[:LISTED]) or "no columns") + more
