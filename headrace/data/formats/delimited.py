"""Comma and tab separated values with the names of the columns in the first row. Values in quotes may hold
new lines, so that nobody can tell from the middle of a file where a row begins: these are not divided."""

import csv
import io
import sys
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from headrace.data.documents import Part, Problems
from headrace.data.formats import Bad
from headrace.data.formats.columns import Places, Wanted, from_table, made_ids, plan, slices
from headrace.data.formats.open import Stream, suffix

SUFFIXES = (".csv", ".tsv")
LONGEST = 32 << 20  # bytes of a row; Arrow holds a few times as much
FIRST = 1 << 20  # bytes that the names of the columns are in
csv.field_size_limit(LONGEST)  # Python's own, 128 KB, is less than a page of text may have


def parts(file: str, size: int) -> list[Part]:
    return [Part(file)]


def read(part: Part, name: str, *, wanted: Wanted, problems: Problems) -> Iterator[pa.Table]:
    reader = Rows(part.file)
    try:
        names = header(part.file)
        if len(names) == 1 and (other := next((mark for mark in ";|\t" if mark in names[0]), None)):
            what = f"the names of the columns have {other!r} between them, expected {delimiter(part.file)!r}"
            raise Bad("wrong columns", f"{what}; write it anew, or name it .tsv if these are tabs")
        columns = plan(pa.schema([(column, pa.string()) for column in names]), wanted)
        for numbers, table in reader.tables(names, columns.columns, problems):
            where = lambda row, numbers=numbers: reader.place(int(numbers[row]))
            places = Places(made_ids(name, ":", numbers), where)
            yield from_table(table, columns, places, wanted, problems)
        if reader.next == 1:
            raise Bad("empty file", "holds no rows")
    except Bad as bad:
        problems.bad(bad.kind, reader.place(reader.next) if reader.next > 1 else part.file, bad.what)


def header(file: str) -> list[str]:
    """The names of the columns."""
    with Stream(file) as stream:
        first = stream.read(FIRST)
    text = io.StringIO(first.decode("utf-8-sig", "surrogateescape"), newline="")
    lines = csv.reader(text, delimiter=delimiter(file))
    try:
        names = next((names for names in lines if names), None)
    except csv.Error as error:
        raise Bad("damaged file", f"the names of the columns cannot be read: {error}") from None
    if names is None:
        raise Bad("empty file", "holds nothing")
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        raise Bad("not UTF-8", "the names of the columns are not UTF-8") from None
    return names


def delimiter(file: str) -> str:
    return "\t" if suffix(file) == ".tsv" else ","


def row_lines(file: str) -> Iterator[int]:
    """The line that each row begins on, that of the names of the columns first."""
    with Stream(file) as stream:
        text = io.TextIOWrapper(io.BufferedReader(_Raw(stream)), "utf-8-sig", "surrogateescape", newline="")
        reader = csv.reader(text, delimiter=delimiter(file))
        line = 1
        for row in reader:
            if row:
                yield line
            line = reader.line_num + 1


def open_quote(file: str) -> int | None:
    """The line of the row that ends with the file, since a quote in it is not closed."""
    with Stream(file) as stream:
        text = io.TextIOWrapper(io.BufferedReader(_Raw(stream)), "utf-8-sig", "surrogateescape", newline="")
        reader = csv.reader(text, delimiter=delimiter(file), strict=True)
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


class Rows:
    """The rows of a file with their numbers; the first below the names of the columns is 1."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.next = 1  # number of the row that comes next
        self.wrong: list[Any] = []  # rows of another width, which Arrow may meet ahead of those it hands out
        self.damage: Bad | None = None
        self.quotes = 0
        self.rest, self.lines = row_lines(file), array("q")

    def place(self, row: int) -> str:
        """FILE:LINE. Lines are counted only when there is something to say."""
        try:
            while len(self.lines) <= row:
                self.lines.append(next(self.rest))
            return f"{self.file}:{self.lines[row]}"
        except (Bad, csv.Error, StopIteration):  # where Arrow and Python read a damaged file differently
            return f"{self.file}, row {row}"

    def tables(
        self, names: list[str], columns: list[str], problems: Problems
    ) -> Iterator[tuple[np.ndarray, pa.Table]]:
        held: pa.Table | None = None  # the last one, whose last row goes if the file turns out to be cut
        for table in self._read(names, columns):
            if held is not None:
                yield self._numbers(len(held), problems), held
            held = table
        if held is not None and self.damage and not self._is_wrong_last(len(held)):
            held = held.slice(0, len(held) - 1)
        elif self.damage and self.wrong:
            self.wrong.pop()  # the row that is cut
        if held is not None and len(held):
            yield self._numbers(len(held), problems), held
        self._report(problems, before=None)
        if self.damage:
            raise self.damage
        if self.quotes % 2 and (line := open_quote(self.file)):
            what = "a quote that is never closed makes one value of all that follows"
            problems.bad("open quote", f"{self.file}:{line}", what)

    def _read(self, names: list[str], columns: list[str]) -> Iterator[pa.Table]:
        with Stream(self.file) as stream:
            try:
                opened = lambda: pa.csv.open_csv(
                    pa.PythonFile(_Source(stream, self), mode="r"),
                    pa.csv.ReadOptions(use_threads=False, block_size=LONGEST),
                    pa.csv.ParseOptions(
                        delimiter=delimiter(self.file),
                        newlines_in_values=True,
                        invalid_row_handler=self._skip,
                    ),
                    # All are strings, and whether they are UTF-8 is looked at row by row.
                    pa.csv.ConvertOptions(
                        check_utf8=False,
                        column_types=dict.fromkeys(names, pa.string()),
                        include_columns=columns,
                    ),
                )
                reader = _quietly(opened)
                while (batch := _quietly(lambda: next(reader, None))) is not None:
                    yield from slices(pa.Table.from_batches([batch]))
            except (pa.ArrowException, OSError) as error:
                if "straddling" in str(error):
                    what = f"a row of more than {LONGEST >> 20} MB, or a quote that is never closed"
                    raise Bad("line too long", f"{what}; all that follows is lost") from None
                if not self.damage and "Empty CSV" not in str(error):  # so Arrow calls names without rows
                    raise Bad("damaged file", f"cannot be read: {str(error).splitlines()[0]}") from None

    def _skip(self, row: Any) -> str:
        self.wrong.append(row)
        return "skip"

    def _next(self, count: int) -> np.ndarray:
        """Numbers of the next rows that are not wrong."""
        wrong = [row.number - 1 for row in self.wrong]  # Arrow counts the names of the columns as the first
        numbers = np.arange(self.next, self.next + count + len(wrong))
        return numbers[~np.isin(numbers, wrong)][:count]

    def _is_wrong_last(self, count: int) -> bool:
        return bool(self.wrong) and self.wrong[-1].number - 1 > self._next(count)[-1]

    def _numbers(self, count: int, problems: Problems) -> np.ndarray:
        numbers = self._next(count)
        self._report(problems, before=int(numbers[-1]))
        self.next = int(numbers[-1]) + 1
        return numbers

    def _report(self, problems: Problems, before: int | None) -> None:
        while self.wrong and (before is None or self.wrong[0].number - 1 < before):
            row = self.wrong.pop(0)
            self.next = max(self.next, row.number)
            what = f"found {row.actual_columns} columns, expected {row.expected_columns}"
            problems.bad("wrong columns", self.place(row.number - 1), what)


def _quietly(call: Callable[[], Any]) -> Any:
    """A row of another width that is not UTF-8 Arrow cannot hand over to `_skip`: it refuses the file, which
    is told, and would print a traceback as well, which nobody needs."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda found: None if found.exc_type is UnicodeDecodeError else hook(found)
    try:
        return call()
    finally:
        sys.unraisablehook = hook


class _Raw(io.RawIOBase):
    """A stream as Python's own readers want it."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self.stream.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


class _Source:
    """A stream as Arrow wants it. Damage looks like the end and is remembered: an exception would also lose
    what was read before."""

    closed = False

    def __init__(self, stream: Stream, rows: Rows) -> None:
        self.stream, self.rows = stream, rows

    def read(self, size: int) -> bytes:
        pieces: list[bytes] = []
        try:
            while size > 0 and not self.rows.damage and (piece := self.stream.read(size)):
                pieces.append(piece)
                size -= len(piece)
                self.rows.quotes += piece.count(b'"')
        except Bad as bad:
            self.rows.damage = bad
        return b"".join(pieces)

    def close(self) -> None:
        self.closed = True
