"""Conversion of records with any columns to documents: finds the text or the messages, the id, and the
metadata.

With `text_column: auto` these are, in this order: a conversation, recognized by its columns; a column named
text; one named content; in a table, the only column of strings. A text with a column named label, or words
with tags, are read with their labels; `text_column: text` ignores the labels."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from headrace.data import labeled
from headrace.data.chat import records as chat_records
from headrace.data.documents import SCHEMA, Problems
from headrace.data.formats import TABLE_BYTES, BadInput

Column: TypeAlias = pa.Array | Sequence[str | None]
Record: TypeAlias = dict[str, Any]

DOCUMENT_SCHEMA = pa.schema([field for field in SCHEMA if field.name != "source"])
MAX_COLUMNS_SHOWN = 12  # in a message
# Layouts that are conversations even with a column named text.
CHAT_SHAPES_BEFORE_TEXT = ("messages", "sharegpt", "alpaca", "preference")


@dataclass(frozen=True)
class SourceColumns:
    """The columns that a recipe chooses for a source."""

    text_column: str = "auto"
    id_column: str | None = None
    meta_columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecordOrigins:
    """The origin of the records of a table: a generated id for each, and a function that gives the location
    of the record at an index for messages."""

    ids: pa.Array
    locate: Callable[[int], str]


@dataclass(frozen=True)
class ColumnPlan:
    """A plan for converting a table to documents: the columns to read; the column of the text, or None for
    conversations; and whether records without a text may be conversations."""

    read_columns: list[str]
    text_column: str | None
    may_hold_conversations: bool = False


def make_ids(name: str, separator: str, numbers: np.ndarray) -> pa.Array:
    """Ids such as NAME:12, without a Python string for each."""
    # pa.array and pa.scalar search for pandas in each call: where it is not installed, that is most of the
    # work.
    integers = pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers.astype(np.int64))])
    return pc.binary_join_element_wise(make_scalar(name), integers.cast(pa.string()), make_scalar(separator))


@lru_cache(8)
def make_scalar(text: str) -> pa.StringScalar:
    return pa.scalar(text)


def to_string_array(values: Sequence[str]) -> pa.LargeStringArray:
    """Copy Python strings to Arrow at once, in a quarter of the time that pa.array takes. Raises
    AttributeError for other values, and UnicodeEncodeError for half a surrogate pair."""
    encoded = [value.encode() for value in values]
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.large_string(), len(encoded), buffers)


def split_table(table: pa.Table) -> Iterator[pa.Table]:
    """Split a table into tables of about TABLE_BYTES, by the mean length of a row."""
    step = max(1, TABLE_BYTES * len(table) // max(table.nbytes, 1))
    return (table.slice(first, step) for first in range(0, len(table), step))


def records_to_documents(
    records: Sequence[Any], origins: RecordOrigins, columns: SourceColumns, problems: Problems
) -> pa.Table:
    """Convert records, as parsed from JSON, to a table of documents. Reports records that cannot be used; a
    record that is a BadInput was found bad by the parser."""
    text_column = "text" if columns.text_column == "auto" else columns.text_column
    try:
        names = set().union(*records) if columns.text_column == "auto" else set[str]()
        shape = chat_records.detect_shape(names)
        if shape in CHAT_SHAPES_BEFORE_TEXT or labeled.find_label_columns(names):
            raise LookupError
        texts = to_string_array([record[text_column] for record in records])
        ids = origins.ids
        if columns.id_column:
            ids = pa.array([_get_id(record, columns.id_column) for record in records], pa.string())
        return _make_table(ids, texts, None, _list_metas(records, columns))
    except (LookupError, TypeError, ValueError, AttributeError, BadInput):
        pass  # some record differs from the others: convert one by one, which reports the faulty ones
    rows, documents = [], []
    for row, record in enumerate(records):
        try:
            documents.append(_to_document(record, columns))
            rows.append(row)
        except BadInput as bad:
            problems.report(bad.kind, origins.locate(row), bad.message)
    ids, texts, messages, metas = zip(*documents, strict=True) if documents else ((), (), (), ())
    generated = origins.ids.take(pa.array(rows, pa.int64()))
    return _make_table(pa.array(ids, pa.string()) if columns.id_column else generated, texts, messages, metas)


def plan_columns(schema: pa.Schema, columns: SourceColumns) -> ColumnPlan:
    """Choose the columns of a table to read. Raises BadInput if the table does not have the chosen columns,
    or if there is nothing to choose."""
    names = schema.names
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise BadInput("missing column", f"two columns are named {duplicate}, expected different names")
    if columns.id_column is not None and columns.id_column not in names:
        raise BadInput("missing column", _missing_message(columns.id_column, names))
    extra = [
        name for name in (columns.id_column, *columns.meta_columns) if name is not None and name in names
    ]
    strings = [name for name in names if _is_text(schema.field(name).type)]
    if columns.text_column != "auto":
        return _plan_chosen_column(
            schema, columns.text_column, is_text=columns.text_column in strings, extra=extra
        )
    shape = chat_records.detect_shape([name for name in names if name != "text"])
    if shape:
        has_text = "text" in strings and shape not in CHAT_SHAPES_BEFORE_TEXT
        return ColumnPlan(names, "text" if has_text else None, may_hold_conversations=True)
    if labeled.find_label_columns(names):
        return ColumnPlan(names, None, may_hold_conversations=True)
    text = next((name for name in ("text", "content") if name in strings), None)
    candidates = [name for name in strings if name not in extra]
    if text is None and len(candidates) == 1:
        text = candidates[0]
    if text is None:
        raise BadInput("missing column", _unclear_message(names))
    return ColumnPlan(list(dict.fromkeys([text, *extra])), text)


def _plan_chosen_column(schema: pa.Schema, column: str, *, is_text: bool, extra: list[str]) -> ColumnPlan:
    if column not in schema.names:
        raise BadInput("missing column", _missing_message(column, schema.names))
    type = schema.field(column).type
    if not is_text and not _is_list(type):
        raise BadInput("missing column", f"column {column} holds {type}, expected text or messages")
    return ColumnPlan(list(dict.fromkeys([column, *extra])), column if is_text else None)


def table_to_documents(
    table: pa.Table, plan: ColumnPlan, origins: RecordOrigins, columns: SourceColumns, problems: Problems
) -> pa.Table:
    """Convert a table, read by a plan, to documents. Reports records that cannot be used."""
    if plan.text_column is not None:
        try:
            # Via bytes: Arrow checks that strings are UTF-8 only when it converts bytes to strings.
            texts = (
                _decode_dictionary(table[plan.text_column]).cast(pa.large_binary()).cast(pa.large_string())
            )
            if texts.null_count == 0:
                ids, metas = _get_table_ids(table, origins, columns), _get_table_metas(table, columns)
                return _make_table(ids, texts, None, metas)
        except (pa.ArrowInvalid, BadInput):
            pass  # convert each record by itself, which reports what is wrong with it
        if not plan.may_hold_conversations:
            columns = replace(columns, text_column=plan.text_column)
    return records_to_documents(_to_records(table), origins, columns, problems)


def _make_table(ids: Column, texts: Column, messages: Column | None, metas: Column | None) -> pa.Table:
    empty = pa.nulls(len(ids), pa.large_string())
    values = [ids, *(empty if column is None else column for column in (texts, messages, metas))]
    arrays = [
        column if isinstance(column, pa.Array | pa.ChunkedArray) else pa.array(column, field.type)
        for column, field in zip(values, DOCUMENT_SCHEMA, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=DOCUMENT_SCHEMA)


def _to_document(
    record: object, columns: SourceColumns
) -> tuple[str | None, str | None, str | None, str | None]:
    """Id, text, messages and meta of one record. Raises BadInput."""
    if isinstance(record, BadInput):
        raise record
    if not isinstance(record, dict):
        message = f'found {_describe_type(record)}, expected an object such as {{"text": "..."}}'
        raise BadInput("not an object", message)
    id = _get_id(record, columns.id_column) if columns.id_column else None
    text, messages = _get_content(record, columns)
    return id, text, messages, _get_meta(record, columns.meta_columns) if columns.meta_columns else None


def _get_content(record: Record, columns: SourceColumns) -> tuple[str | None, str | None]:
    """The text or the messages of a record. Raises BadInput."""
    column = columns.text_column
    if column == "auto":
        column, shape = _choose_column(record)
        if shape:
            return None, _get_messages(shape, record)
    if column not in record:
        raise BadInput("missing column", _missing_message(column, record))
    value = record[column]
    if isinstance(value, list):
        return None, _get_messages(chat_records.detect_shape([column]) or "messages", {column: value})
    if not isinstance(value, str | bytes):
        message = f"column {column} is {_describe_type(value)}, expected text or messages"
        raise BadInput("missing column", message)
    return _require_utf8(value, f"column {column}"), None


def _choose_column(record: Record) -> tuple[str, str | None]:
    """The column of a record's text, chosen by `text_column: auto`; ("", layout) for a conversation or a
    labeled record."""
    filled = [name for name, value in record.items() if value is not None and name != "text"]
    filled_shape = chat_records.detect_shape(filled)
    if filled_shape not in CHAT_SHAPES_BEFORE_TEXT and labeled.has_label(record):
        return "", "labeled"
    if isinstance(record.get("text"), str | bytes) and filled_shape not in CHAT_SHAPES_BEFORE_TEXT:
        return "text", None
    shape = filled_shape or chat_records.detect_shape([name for name in record if name != "text"])
    if shape:
        return "", shape
    if "text" in record or "content" in record:
        return "text" if "text" in record else "content", None
    raise BadInput("missing column", _unclear_message(record))


def _get_messages(shape: str, record: Record) -> str:
    """The JSON of a conversation, a preference pair or a labeled record. Raises BadInput."""
    try:
        if shape == "preference":
            messages = chat_records.to_preference_parts(record)
        elif shape == "labeled":
            messages = labeled.to_document_parts(record)
        else:
            messages = chat_records.to_messages(shape, record)
    except ValueError as error:
        raise BadInput("bad messages", str(error)) from None
    return _to_json(messages, "the conversation")


def _get_id(record: Record, column: str) -> str:
    """The id of a record as a string. Raises BadInput."""
    if column not in record:
        raise BadInput("missing column", _missing_message(column, record))
    value = record[column]
    if isinstance(value, str | bytes):
        return _require_utf8(value, f"column {column}")
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None or isinstance(value, list | dict):
        raise BadInput("missing column", f"column {column} is {_describe_type(value)}, expected an id")
    if isinstance(value, float) and abs(value) >= 2.0**63:  # an integer that lost its last digits in parsing
        message = f"column {column} is {value}, too long a number for an id; store it as a string"
        raise BadInput("missing column", message)
    return str(value)


def _list_metas(records: Iterable[Record], columns: SourceColumns) -> list[str] | None:
    return [_get_meta(record, columns.meta_columns) for record in records] if columns.meta_columns else None


def _get_meta(record: Record, columns: tuple[str, ...]) -> str:
    return _to_json({column: record.get(column) for column in columns}, f"column {' or '.join(columns)}")


def _to_json(value: object, subject: str) -> str:
    try:
        return orjson.dumps(value, default=str).decode()
    except TypeError as error:
        kind = "lone surrogate" if "surrogate" in str(error) else "not JSON"
        raise BadInput(kind, f"{subject} cannot be written as JSON: {error}") from None


def _require_utf8(value: str | bytes, subject: str) -> str:
    """A string that can be written as UTF-8. Raises BadInput; `subject` names the value in its message."""
    try:
        if isinstance(value, bytes):
            return value.decode()
        value.encode()
        return value
    except UnicodeDecodeError as error:
        raise BadInput("not UTF-8", f"{subject} is not UTF-8 at its byte {error.start}") from None
    except UnicodeEncodeError as error:
        message = f"{subject} has half a surrogate pair at its character {error.start}"
        raise BadInput("lone surrogate", message) from None


def _get_table_ids(table: pa.Table, origins: RecordOrigins, columns: SourceColumns) -> pa.Array:
    if columns.id_column is None:
        return origins.ids
    column = _decode_dictionary(table[columns.id_column])
    if pa.types.is_integer(column.type) and column.null_count == 0:
        return column.cast(pa.string())
    ids = [_get_id({columns.id_column: value}, columns.id_column) for value in _to_values(column)]
    return pa.array(ids, pa.string())


def _get_table_metas(table: pa.Table, columns: SourceColumns) -> list[str] | None:
    if not columns.meta_columns:
        return None
    names = [name for name in columns.meta_columns if name in table.column_names]
    return _list_metas(_to_values(table.select(names)), columns)


def _to_values(values: pa.Table | pa.ChunkedArray) -> list[Any]:
    """Ids or metadata as Python values. Raises BadInput."""
    try:
        return values.to_pylist()
    except UnicodeDecodeError as error:
        message = f"a string besides the text is not UTF-8 at its byte {error.start}"
        raise BadInput("not UTF-8", message) from None


def _to_records(table: pa.Table) -> list[Record | BadInput]:
    """The rows of a table as dicts; a BadInput for those that are not UTF-8."""
    try:
        return table.to_pylist()
    except UnicodeDecodeError:
        return [_to_record(table.slice(row, 1)) for row in range(len(table))]


def _to_record(row: pa.Table) -> Record | BadInput:
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError as error:
        return BadInput("not UTF-8", f"a string is not UTF-8 at its byte {error.start}")


def _decode_dictionary(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _is_text(type: pa.DataType) -> bool:
    type = type.value_type if pa.types.is_dictionary(type) else type
    types = pa.types
    tests = (types.is_string, types.is_large_string, types.is_string_view)
    return any(test(type) for test in (*tests, types.is_binary, types.is_large_binary, types.is_binary_view))


def _is_list(type: pa.DataType) -> bool:
    return pa.types.is_list(type) or pa.types.is_large_list(type) or pa.types.is_fixed_size_list(type)


def _describe_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def _missing_message(column: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(column, list(names), n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"no column {column}, found {_format_names(names)}{hint}"


def _unclear_message(names: Iterable[str]) -> str:
    return (
        f"found {_format_names(names)}, expected a column named text or content, or the columns of a "
        "conversation; choose one with `text_column`"
    )


def _format_names(names: Iterable[str]) -> str:
    names = [" ".join(name.split()) for name in names]  # a CSV file without a header has texts as names
    extra = f" and {len(names) - MAX_COLUMNS_SHOWN} more" if len(names) > MAX_COLUMNS_SHOWN else ""
    return (", ".join(names[:MAX_COLUMNS_SHOWN]) or "no columns") + extra
