"""Comma and tab separated values, with the names of the columns in the first row. These files are not
divided: values in quotes may contain newlines, so that the start of a row cannot be found from the middle of
a file."""

import csv
import io
import sys
from array import array
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.csv

from headrace.data.documents import FilePart, Problems
from headrace.data.formats import BadInput
from headrace.data.formats.columns import (
    RecordOrigins,
    SourceColumns,
    make_ids,
    plan_columns,
    split_table,
    table_to_documents,
)
from headrace.data.formats.open import InputStream, format_suffix

SUFFIXES = (".csv", ".tsv")
MAX_ROW_BYTES = 32 << 20  # Arrow holds a few times as much in memory
HEADER_BYTES = 1 << 20  # at the start of a file, which must contain the names of the columns
csv.field_size_limit(MAX_ROW_BYTES)  # Python's default, 128 KB, is less than a page of text may have

Result = TypeVar("Result")


def list_parts(file: str, size: int) -> list[FilePart]:
    return [FilePart(file)]


def read(part: FilePart, name: str, *, columns: SourceColumns, problems: Problems) -> Iterator[pa.Table]:
    """The documents of a file, as tables."""
    reader = DelimitedReader(part.file)
    try:
        names = read_header(part.file)
        other = next((mark for mark in ";|\t" if mark in names[0]), None) if len(names) == 1 else None
        if other:
            message = (
                f"the names of the columns are separated by {other!r}, expected {get_delimiter(part.file)!r}"
            )
            raise BadInput("wrong columns", f"{message}; convert the file, or name it .tsv if these are tabs")
        plan = plan_columns(pa.schema([(column, pa.string()) for column in names]), columns)
        for numbers, table in reader.iter_tables(names, plan.read_columns, problems):
            locate = lambda row, numbers=numbers: reader.locate(int(numbers[row]))
            origins = RecordOrigins(make_ids(name, ":", numbers), locate)
            yield table_to_documents(table, plan, origins, columns, problems)
        if reader.next_row == 1:
            raise BadInput("empty file", "holds no rows")
    except BadInput as bad:
        location = reader.locate(reader.next_row) if reader.next_row > 1 else part.file
        problems.report(bad.kind, location, bad.message)


def read_header(file: str) -> list[str]:
    """The names of the columns. Raises BadInput."""
    with InputStream(file) as stream:
        content = stream.read(HEADER_BYTES)
    text = io.StringIO(content.decode("utf-8-sig", "surrogateescape"), newline="")
    rows = csv.reader(text, delimiter=get_delimiter(file))
    try:
        names = next((row for row in rows if row), None)
    except csv.Error as error:
        raise BadInput("damaged file", f"the names of the columns cannot be read: {error}") from None
    if names is None:
        raise BadInput("empty file", "holds no data")
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        raise BadInput("not UTF-8", "the names of the columns are not UTF-8") from None
    return names


def get_delimiter(file: str) -> str:
    return "\t" if format_suffix(file) == ".tsv" else ","


def iter_row_lines(file: str) -> Iterator[int]:
    """The line number on which each row starts, the header first."""
    with InputStream(file) as stream:
        reader = csv.reader(_open_text(stream), delimiter=get_delimiter(file))
        line = 1
        for row in reader:
            if row:
                yield line
            line = reader.line_num + 1


def find_open_quote(file: str) -> int | None:
    """The line number of the row that continues to the end of the file because a quote in it is not closed;
    None if all quotes are closed."""
    with InputStream(file) as stream:
        reader = csv.reader(_open_text(stream), delimiter=get_delimiter(file), strict=True)
        line = 1
        while True:
            try:
                next(reader)
            except StopIteration:
                return None
            except csv.Error as error:
                if "unexpected end of data" in str(error):
                    return line
            line = reader.line_num + 1


def _open_text(stream: InputStream) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedReader(_RawStream(stream)), "utf-8-sig", "surrogateescape", newline="")


class DelimitedReader:
    """Reads the rows of a file and numbers them; the first row below the header is 1."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.next_row = 1  # the number of the row that is read next
        # Rows with a wrong number of columns. Arrow may find them before it returns the rows in front of
        # them.
        self.invalid_rows: list[pa.csv.InvalidRow] = []
        self.damage: BadInput | None = None
        self.quotes = 0
        self.row_lines, self.lines = iter_row_lines(file), array("q")

    def locate(self, row: int) -> str:
        """FILE:LINE of a row, for messages. Counts lines only when it is called."""
        try:
            while len(self.lines) <= row:
                self.lines.append(next(self.row_lines))
            return f"{self.file}:{self.lines[row]}"
        except (BadInput, csv.Error, StopIteration):  # Arrow and Python may read a damaged file differently
            return f"{self.file}, row {row}"

    def iter_tables(
        self, names: list[str], columns: list[str], problems: Problems
    ) -> Iterator[tuple[np.ndarray, pa.Table]]:
        """Tables of `columns` with the numbers of their rows; `names` are all columns of the file. Raises
        BadInput at damage, after the rows before it."""
        pending: pa.Table | None = (
            None  # the last row of the last table is dropped if the file turns out to be cut
        )
        for table in self._read(names, columns):
            if pending is not None:
                yield self._number_rows(len(pending), problems), pending
            pending = table
        if pending is not None and self.damage and not self._ends_invalid(len(pending)):
            pending = pending.slice(0, len(pending) - 1)
        elif self.damage and self.invalid_rows:
            self.invalid_rows.pop()  # the row that is cut
        if pending is not None and len(pending):
            yield self._number_rows(len(pending), problems), pending
        self._report_invalid(problems, before=None)
        if self.damage:
            raise self.damage
        if self.quotes % 2 and (line := find_open_quote(self.file)):
            message = "a quote that is never closed makes one value of the remainder of the file"
            problems.report("open quote", f"{self.file}:{line}", message)

    def _read(self, names: list[str], columns: list[str]) -> Iterator[pa.Table]:
        with InputStream(self.file) as stream:
            try:
                reader = _without_traceback(lambda: self._open_arrow(stream, names, columns))
                while (batch := _without_traceback(lambda: next(reader, None))) is not None:
                    yield from split_table(pa.Table.from_batches([batch]))
            except (pa.ArrowException, OSError) as error:
                if "straddling" in str(error):
                    message = f"a row of more than {MAX_ROW_BYTES >> 20} MB, or a quote that is never closed"
                    raise BadInput("line too long", f"{message}; the remainder is lost") from None
                if not self.damage and "Empty CSV" not in str(
                    error
                ):  # Arrow's message for a header without rows
                    message = f"cannot be read: {str(error).splitlines()[0]}"
                    raise BadInput("damaged file", message) from None

    def _open_arrow(
        self, stream: InputStream, names: list[str], columns: list[str]
    ) -> pa.csv.CSVStreamingReader:
        return pa.csv.open_csv(
            pa.PythonFile(_ArrowStream(stream, self), mode="r"),
            pa.csv.ReadOptions(use_threads=False, block_size=MAX_ROW_BYTES),
            pa.csv.ParseOptions(
                delimiter=get_delimiter(self.file),
                newlines_in_values=True,
                invalid_row_handler=self._skip,
            ),
            # All columns are strings; whether they are UTF-8 is checked row by row.
            pa.csv.ConvertOptions(
                check_utf8=False,
                column_types=dict.fromkeys(names, pa.string()),
                include_columns=columns,
            ),
        )

    def _skip(self, row: pa.csv.InvalidRow) -> str:
        self.invalid_rows.append(row)
        return "skip"

    def _next_numbers(self, count: int) -> np.ndarray:
        """The numbers of the next `count` valid rows."""
        invalid = [row.number - 1 for row in self.invalid_rows]  # Arrow counts the header as row 1
        numbers = np.arange(self.next_row, self.next_row + count + len(invalid))
        return numbers[~np.isin(numbers, invalid)][:count]

    def _ends_invalid(self, count: int) -> bool:
        """Whether an invalid row comes after the next `count` valid rows."""
        return bool(self.invalid_rows) and self.invalid_rows[-1].number - 1 > self._next_numbers(count)[-1]

    def _number_rows(self, count: int, problems: Problems) -> np.ndarray:
        """Advance by `count` valid rows and return their numbers. Reports invalid rows in front of them."""
        numbers = self._next_numbers(count)
        self._report_invalid(problems, before=int(numbers[-1]))
        self.next_row = int(numbers[-1]) + 1
        return numbers

    def _report_invalid(self, problems: Problems, before: int | None) -> None:
        while self.invalid_rows and (before is None or self.invalid_rows[0].number - 1 < before):
            row = self.invalid_rows.pop(0)
            self.next_row = max(self.next_row, row.number)
            message = f"found {row.actual_columns} columns, expected {row.expected_columns}"
            problems.report("wrong columns", self.locate(row.number - 1), message)


def _without_traceback(call: Callable[[], Result]) -> Result:
    """Call a function of Arrow without a traceback on the terminal. Arrow cannot pass a row with a wrong
    number of columns that is not UTF-8 to `_skip`: it raises, which is reported, and would also print the
    traceback."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda raised: None if raised.exc_type is UnicodeDecodeError else hook(raised)
    try:
        return call()
    finally:
        sys.unraisablehook = hook


class _RawStream(io.RawIOBase):
    """An InputStream with the interface of Python's raw files."""

    def __init__(self, stream: InputStream) -> None:
        self.stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        piece = self.stream.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


class _ArrowStream:
    """An InputStream with the interface that Arrow needs. Damage ends the stream and is stored in the reader:
    after an exception Arrow would lose what it has read before."""

    closed = False

    def __init__(self, stream: InputStream, reader: DelimitedReader) -> None:
        self.stream, self.reader = stream, reader

    def read(self, size: int) -> bytes:
        """`size` bytes; fewer at the end or before damage."""
        pieces: list[bytes] = []
        try:
            while size > 0 and not self.reader.damage and (piece := self.stream.read(size)):
                pieces.append(piece)
                size -= len(piece)
                self.reader.quotes += piece.count(b'"')
        except BadInput as bad:
            self.reader.damage = bad
        return b"".join(pieces)

    def close(self) -> None:
        self.closed = True
