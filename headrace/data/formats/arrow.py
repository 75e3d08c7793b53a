"""Arrow IPC files and streams (.arrow, .feather), as Hugging Face datasets are saved too; divided by record
batches."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from headrace.data.documents import Part, Problems
from headrace.data.formats import PART, Bad, divided
from headrace.data.formats.columns import Places, Wanted, from_table, made_ids, plan, slices
from headrace.data.formats.open import is_url, open_random

SUFFIXES = (".arrow", ".feather")
MAGIC = b"ARROW1"  # begins a file; a stream has none
DAMAGE = (pa.ArrowException, OSError)


def parts(file: str, size: int) -> list[Part]:
    """`start` and `stop` are record batches. Files elsewhere are not divided: to count is to read them."""
    if size <= PART or is_url(file):
        return [Part(file)]
    try:
        with opened(file) as reader:
            sizes = [batch.nbytes for batch in batches(reader)]  # of a memory map: nothing is copied
    except Bad:
        return [Part(file)]  # reading it tells what is wrong
    return divided(file, sizes, PART)


def read(part: Part, name: str, *, wanted: Wanted, problems: Problems) -> Iterator[pa.Table]:
    row = 0
    try:
        with opened(part.file) as reader:
            columns = plan(reader.schema, wanted)
            found = batches(reader)
            row = sum(batch.num_rows for batch in islice(found, part.start))
            count = None if part.stop is None else part.stop - part.start
            some = (checked(batch, columns.columns) for batch in islice(found, count))
            for table in chain.from_iterable(map(slices, some)):
                where = lambda number, row=row: f"{part.file}, row {row + number + 1}"
                places = Places(made_ids(name, ":", np.arange(row, row + len(table)) + 1), where)
                yield from_table(table, columns, places, wanted, problems)
                row += len(table)
        if not row:
            raise Bad("empty file", "holds no rows")
    except Bad as bad:
        problems.bad(bad.kind, f"{part.file}, row {row + 1}" if row else part.file, bad.what)


@contextmanager
def opened(file: str) -> Iterator[Any]:
    with open_random(file) as source:
        magic = source.read(len(MAGIC))
        if not magic:
            raise Bad("empty file", "holds nothing")
        source.seek(0)
        try:
            reader = pa.ipc.open_file(source) if magic == MAGIC else pa.ipc.open_stream(source)
        except DAMAGE as error:
            raise damaged(error) from None
        yield reader


def batches(reader: Any) -> Iterator[pa.RecordBatch]:
    try:
        if isinstance(reader, pa.ipc.RecordBatchFileReader):
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            yield from reader
    except DAMAGE as error:
        raise damaged(error) from None


def checked(batch: pa.RecordBatch, columns: list[str]) -> pa.Table:
    """The columns of a batch, if nothing in them points outside of the file: Arrow itself would read there.
    Text that is not UTF-8 is told later, with its row."""
    table = pa.Table.from_batches([batch]).select(columns)
    for column in table.columns:
        try:
            column.validate(full=True)
        except DAMAGE as error:
            if "UTF8" not in str(error):
                raise damaged(error) from None
    return table


def damaged(error: Exception) -> Bad:
    return Bad("damaged file", f"cannot be read: {str(error).splitlines()[0]}")
