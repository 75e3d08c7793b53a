"""JSON lines: one record a line, compressed or not. Large files that are not compressed are divided. A file
named .json may also hold one list of records, which is read into memory as a whole."""

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from headrace.data.documents import FilePart, Problems
from headrace.data.formats import PART_BYTES, TABLE_BYTES, BadInput
from headrace.data.formats.columns import RecordOrigins, SourceColumns, make_ids, records_to_documents
from headrace.data.formats.open import (
    InputStream,
    compression_suffix,
    format_suffix,
    is_url,
    supports_ranges,
)

SUFFIXES = (".jsonl", ".ndjson", ".json")
BLOCK_BYTES = 1 << 20  # parsed at a time: 261 MB/s, against 237 with 16 MB and 209 with 256 KB
MAX_LINE_BYTES = 256 << 20  # longer lines are skipped without being held in memory
MAX_LIST_BYTES = 512 << 20  # of a list of records, which takes a few times as much in memory
BOM = b"\xef\xbb\xbf"


def list_parts(file: str, size: int) -> list[FilePart]:
    """Ranges of bytes; a line belongs to the part in which it starts."""
    if size <= PART_BYTES or compression_suffix(file) or is_json_list(file):
        return [FilePart(file)]
    if is_url(file) and not supports_ranges(file):
        return [FilePart(file)]
    starts = [
        *range(0, size - PART_BYTES // 2, PART_BYTES),
        size,
    ]  # the last part has 0.5 to 1.5 times the size
    return [FilePart(file, start, stop) for start, stop in itertools.pairwise(starts)]


def read(part: FilePart, name: str, *, columns: SourceColumns, problems: Problems) -> Iterator[pa.Table]:
    """The documents of a part, as tables."""
    if part.start == 0 and is_json_list(part.file):
        yield from read_list(part.file, name, columns=columns, problems=problems)
        return
    is_empty, problems_before = part == FilePart(part.file), problems.counts.total()
    with contextlib.closing(LineCounter(part.file)) as counter:
        for position, block in iter_blocks(part, counter, problems):
            records, starts = parse_lines(position, block)
            is_empty = is_empty and not records
            if records:
                locate = lambda row, starts=starts: counter.locate(int(starts[row]))
                origins = RecordOrigins(make_ids(name, "@", starts), locate)
                yield records_to_documents(records, origins, columns, problems)
    if is_empty and problems_before == problems.counts.total():
        problems.report("empty file", part.file, "holds no records")


def iter_blocks(part: FilePart, counter: "LineCounter", problems: Problems) -> Iterator[tuple[int, bytes]]:
    """The lines of a part in blocks of many, and the byte at which each block starts. Lines that are too long
    are skipped as they are read, so that at most MAX_LINE_BYTES are in memory."""
    stop = float("inf") if part.stop is None else part.stop
    # Starts one byte early: that byte shows whether a line starts at the first byte.
    position = start = max(part.start - 1, 0)
    is_skipping = part.start > 0  # to the end of a line that does not belong to this part, or is too long
    pending: list[bytes] = []
    with InputStream(part.file, position) as stream:
        while True:
            try:
                block = stream.read(int(min(BLOCK_BYTES, max(stop - position, BLOCK_BYTES // 16))))
            except BadInput as bad:  # the last line is cut and is dropped
                problems.report(bad.kind, counter.locate(start), bad.message)
                return
            position += len(block)
            if not block:
                if pending:
                    yield start, b"".join(pending)
                return
            end = (block.find(b"\n") if is_skipping else block.rfind(b"\n")) + 1
            if is_skipping and end:
                is_skipping, start, block = False, position - len(block) + end, block[end:]
                end = block.rfind(b"\n") + 1
            if start >= stop:
                return
            if is_skipping:
                continue
            if end:
                lines, pending = b"".join([*pending, block[:end]]), []
                if start + len(lines) >= stop:
                    yield start, lines[: lines.find(b"\n", int(stop) - start - 1) + 1]
                    return
                yield start, lines
                start += len(lines)
            pending.append(block[end:])
            if position - start > MAX_LINE_BYTES:
                message = f"a line of more than {MAX_LINE_BYTES >> 20} MB; is this file JSON lines?"
                problems.report("line too long", counter.locate(start), message)
                pending, is_skipping = [], True


def parse_lines(position: int, block: bytes) -> tuple[list[object | BadInput], np.ndarray]:
    """Parse a block that starts at byte `position` of a file. Returns a record, or a BadInput, for each line
    that is not blank, and the byte at which it starts."""
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
    if not block.endswith(b"\n"):
        ends = np.append(ends, len(block))
    starts = np.concatenate([[0], ends[:-1] + 1])
    first = len(BOM) if position == 0 and block.startswith(BOM) else 0
    view = memoryview(block)
    line_starts = [first, *starts[1:].tolist()]
    views = [view[start:end] for start, end in zip(line_starts, ends.tolist(), strict=True)]
    try:
        return [orjson.loads(line) for line in views], position + starts
    except ValueError:
        lines = [line.tobytes() for line in views]
        filled = [row for row, line in enumerate(lines) if line and not line.isspace()]
        return [_parse_record(lines[row]) for row in filled], position + starts[filled]


def read_list(file: str, name: str, *, columns: SourceColumns, problems: Problems) -> Iterator[pa.Table]:
    """The documents of a file that holds one list of records, as tables."""
    try:
        with InputStream(file) as stream:
            content = stream.read_all(MAX_LIST_BYTES)
        if len(content) > MAX_LIST_BYTES:
            limit = f"a list of records must fit in memory, expected at most {MAX_LIST_BYTES >> 20} MB"
            raise BadInput("file too long", f"{limit}; convert it to JSON lines")
        records = _parse_record(content.removeprefix(BOM))
        if isinstance(records, BadInput):
            raise records
    except BadInput as bad:
        problems.report(bad.kind, file, bad.message)
        return
    if not records:
        problems.report("empty file", file, "holds no records")
    step = max(1, TABLE_BYTES * len(records) // len(content))
    for first in range(0, len(records), step):
        batch = records[first : first + step]
        locate = lambda row, first=first: f"{file}, row {first + row + 1}"
        ids = make_ids(name, ":", np.arange(first, first + len(batch)) + 1)
        yield records_to_documents(batch, RecordOrigins(ids, locate), columns, problems)


def is_json_list(file: str) -> bool:
    """Whether a file holds one list of records. Opens only files named .json."""
    if format_suffix(file) != ".json":
        return False
    try:
        with InputStream(file) as stream:
            return stream.read(1 << 12).removeprefix(BOM).lstrip().startswith(b"[")
    except BadInput:
        return False  # `read` will report the damage


class LineCounter:
    """Converts positions in a file to line numbers, for messages. Counts lines only when needed, and
    continues from the last position."""

    def __init__(self, file: str) -> None:
        self.file, self.position, self.lines = file, 0, 0
        self.stream: InputStream | None = None
        self.buffer = b""

    def locate(self, position: int) -> str:
        """FILE:LINE of a byte; positions must not decrease from call to call."""
        if self.stream is None:
            self.stream = InputStream(self.file)
        while self.position < position:
            block = self.buffer or self.stream.read(BLOCK_BYTES)
            assert block, "a file has become shorter while it was read"
            size = position - self.position
            counted, self.buffer = block[:size], block[size:]
            self.lines += counted.count(b"\n")
            self.position += len(counted)
        return f"{self.file}:{self.lines + 1}"

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()


def _parse_record(line: bytes) -> Any:
    """The value in JSON, or a BadInput that describes the error."""
    try:
        return orjson.loads(line)
    except ValueError as error:
        reason = str(error)
    try:
        # Python writes half surrogate pairs and NaN, which are not JSON. NaN in a column that is not used
        # does no harm, and the half pair is reported later, with the name of its column.
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        return BadInput("not UTF-8", f"not UTF-8 at byte {error.start + 1} of the line")
    except (ValueError, RecursionError):
        return BadInput("bad JSON", f"not JSON: {reason}")
