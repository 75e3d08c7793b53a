"""JSON lines: a record a line, compressed or not; large files that are not compressed are divided. A file
named .json may also be one list of records, which is read whole."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from headrace.data.documents import Part, Problems
from headrace.data.formats import PART, TABLE, Bad
from headrace.data.formats.columns import Places, Wanted, from_records, made_ids
from headrace.data.formats.open import Stream, compression, has_ranges, is_url, suffix

SUFFIXES = (".jsonl", ".ndjson", ".json")
BLOCK = 1 << 20  # bytes parsed at a time: 261 MB/s, against 237 with 16 MB and 209 with 256 KB
LONGEST = 256 << 20  # bytes of a line; longer ones are left out without ever being held
LONGEST_LIST = 512 << 20  # bytes of a list of records, which becomes a few times as much in memory
BOM = b"\xef\xbb\xbf"


def parts(file: str, size: int) -> list[Part]:
    """A line belongs to the part that it begins in."""
    if size <= PART or compression(file) or is_list(file) or (is_url(file) and not has_ranges(file)):
        return [Part(file)]
    starts = [*range(0, size - PART // 2, PART), size]  # the last part is half to one and a half as long
    return [Part(file, start, stop) for start, stop in zip(starts, starts[1:], strict=False)]


def read(part: Part, name: str, *, wanted: Wanted, problems: Problems) -> Iterator[pa.Table]:
    if part.start == 0 and is_list(part.file):
        yield from read_list(part.file, name, wanted=wanted, problems=problems)
        return
    empty, troubles = part == Part(part.file), problems.counts.total()
    with contextlib.closing(LineNumbers(part.file)) as numbers:
        for position, block in blocks(part, numbers, problems):
            records, starts = parse(position, block)
            empty = empty and not records
            if records:
                where = lambda row, starts=starts: numbers.place(int(starts[row]))
                yield from_records(records, Places(made_ids(name, "@", starts), where), wanted, problems)
    if empty and troubles == problems.counts.total():
        problems.bad("empty file", part.file, "holds no records")


def blocks(part: Part, numbers: "LineNumbers", problems: Problems) -> Iterator[tuple[int, bytes]]:
    """The lines of a part, many at a time, and the byte that each lot begins at. A line that is too long is
    passed over as it is read, so that no more than LONGEST bytes are ever held."""
    stop = float("inf") if part.stop is None else part.stop
    # From the byte before, which tells whether a line begins at the first.
    position = begin = max(part.start - 1, 0)
    passing = part.start > 0  # over the end of a line that is not of this part
    held: list[bytes] = []
    with Stream(part.file, position) as stream:
        while True:
            try:
                block = stream.read(int(min(BLOCK, max(stop - position, BLOCK // 16))))
            except Bad as bad:  # the last line is cut: it goes as well
                problems.bad(bad.kind, numbers.place(begin), bad.what)
                return
            position += len(block)
            if not block:
                if held:
                    yield begin, b"".join(held)
                return
            end = (block.find(b"\n") if passing else block.rfind(b"\n")) + 1
            if passing and end:
                passing, begin, block = False, position - len(block) + end, block[end:]
                end = block.rfind(b"\n") + 1
            if begin >= stop:
                return
            if passing:
                continue
            if end:
                whole, held = b"".join([*held, block[:end]]), []
                if begin + len(whole) >= stop:
                    yield begin, whole[: whole.find(b"\n", int(stop) - begin - 1) + 1]
                    return
                yield begin, whole
                begin += len(whole)
            held.append(block[end:])
            if position - begin > LONGEST:
                what = f"a line of more than {LONGEST >> 20} MB; is this file JSON lines?"
                problems.bad("line too long", numbers.place(begin), what)
                held, passing = [], True


def parse(position: int, block: bytes) -> tuple[list[Any], np.ndarray]:
    """A record for each line that is not blank, and the byte it begins at."""
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
    if not block.endswith(b"\n"):
        ends = np.append(ends, len(block))
    starts = np.concatenate([[0], ends[:-1] + 1])
    first = len(BOM) if position == 0 and block.startswith(BOM) else 0
    view = memoryview(block)
    begins = [first, *starts[1:].tolist()]
    lines = [view[begin:end] for begin, end in zip(begins, ends.tolist(), strict=True)]
    try:
        return [orjson.loads(line) for line in lines], position + starts
    except ValueError:
        whole = [line.tobytes() for line in lines]
        filled = [row for row, line in enumerate(whole) if line and not line.isspace()]
        return [_record(whole[row]) for row in filled], position + starts[filled]


def read_list(file: str, name: str, *, wanted: Wanted, problems: Problems) -> Iterator[pa.Table]:
    try:
        with Stream(file) as stream:
            content = stream.read_all(LONGEST_LIST)
        if len(content) > LONGEST_LIST:
            limit = f"expected at most {LONGEST_LIST >> 20} MB"
            raise Bad("file too long", f"one list of records must be read whole, {limit}; make it JSON lines")
        records = _record(content.removeprefix(BOM))
        if isinstance(records, Bad):
            raise records
    except Bad as bad:
        problems.bad(bad.kind, file, bad.what)
        return
    if not records:
        problems.bad("empty file", file, "holds no records")
    step = max(1, TABLE * len(records) // len(content))
    for first in range(0, len(records), step):
        some = records[first : first + step]
        where = lambda row, first=first: f"{file}, row {first + row + 1}"
        ids = made_ids(name, ":", np.arange(first, first + len(some)) + 1)
        yield from_records(some, Places(ids, where), wanted, problems)


def is_list(file: str) -> bool:
    """Whether a file is one list of records. Only those named .json are looked into."""
    if suffix(file) != ".json":
        return False
    try:
        with Stream(file) as stream:
            return stream.read(1 << 12).removeprefix(BOM).lstrip().startswith(b"[")
    except Bad:
        return False  # reading it in earnest tells what is wrong


class LineNumbers:
    """The number of the line at a byte, for messages: lines are counted only when there is something to say,
    and from where they were counted to the time before."""

    def __init__(self, file: str) -> None:
        self.file, self.position, self.lines = file, 0, 0
        self.stream: Stream | None = None
        self.ahead = b""

    def place(self, position: int) -> str:
        """FILE:LINE."""
        if self.stream is None:
            self.stream = Stream(self.file)
        while self.position < position:
            block = self.ahead or self.stream.read(BLOCK)
            assert block, "a file has become shorter while it was read"
            taken, self.ahead = block[: position - self.position], block[position - self.position :]
            self.lines += taken.count(b"\n")
            self.position += len(taken)
        return f"{self.file}:{self.lines + 1}"

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()


def _record(line: bytes) -> Any:
    """A record, or what is wrong with it."""
    try:
        return orjson.loads(line)
    except ValueError as error:
        reason = str(error)
    try:
        # Half a surrogate pair and NaN, both of which Python writes, are no JSON. But a NaN in a column that
        # is not wanted does no harm, and the half pair is told by its name later.
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Bad("not UTF-8", f"not UTF-8 at byte {error.start + 1} of the line")
    except (ValueError, RecursionError):
        return Bad("bad JSON", f"not JSON: {reason}")
