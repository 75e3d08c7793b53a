"""Arrow IPC files and streams (.arrow, .feather), the format in which Hugging Face datasets are saved. Files
are divided by record batches."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from headrace.data.documents import FilePart, Problems
from headrace.data.formats import PART_BYTES, BadInput, split_by_bytes
from headrace.data.formats.columns import (
    RecordOrigins,
    SourceColumns,
    make_ids,
    plan_columns,
    split_table,
    table_to_documents,
)
from headrace.data.formats.open import is_url, open_random

SUFFIXES = (".arrow", ".feather")
MAGIC = b"ARROW1"  # starts a file; a stream has none
READ_ERRORS = (pa.ArrowException, OSError)

Reader: TypeAlias = pa.ipc.RecordBatchFileReader | pa.ipc.RecordBatchStreamReader


def list_parts(file: str, size: int) -> list[FilePart]:
    """Parts of whole record batches. Remote files are not divided: counting their batches would read them."""
    if size <= PART_BYTES or is_url(file):
        return [FilePart(file)]
    try:
        with open_reader(file) as reader:
            sizes = [batch.nbytes for batch in iter_batches(reader)]  # of a memory map: copies nothing
    except BadInput:
        return [FilePart(file)]  # `read` will report the damage
    return split_by_bytes(file, sizes, PART_BYTES)


def read(part: FilePart, name: str, *, columns: SourceColumns, problems: Problems) -> Iterator[pa.Table]:
    """The documents of a part, as tables."""
    row = 0
    try:
        with open_reader(part.file) as reader:
            plan = plan_columns(reader.schema, columns)
            batches = iter_batches(reader)
            row = sum(batch.num_rows for batch in islice(batches, part.start))
            count = None if part.stop is None else part.stop - part.start
            valid = (select_valid(batch, plan.read_columns) for batch in islice(batches, count))
            for table in chain.from_iterable(map(split_table, valid)):
                locate = lambda number, row=row: f"{part.file}, row {row + number + 1}"
                ids = make_ids(name, ":", np.arange(row, row + len(table)) + 1)
                yield table_to_documents(table, plan, RecordOrigins(ids, locate), columns, problems)
                row += len(table)
        if not row:
            raise BadInput("empty file", "holds no rows")
    except BadInput as bad:
        problems.report(bad.kind, f"{part.file}, row {row + 1}" if row else part.file, bad.message)


@contextmanager
def open_reader(file: str) -> Iterator[Reader]:
    """Open a file or a stream. Raises BadInput if it is damaged."""
    with open_random(file) as source:
        magic = source.read(len(MAGIC))
        if not magic:
            raise BadInput("empty file", "holds no data")
        source.seek(0)
        try:
            reader = pa.ipc.open_file(source) if magic == MAGIC else pa.ipc.open_stream(source)
        except READ_ERRORS as error:
            raise damage_error(error) from None
        yield reader


def iter_batches(reader: Reader) -> Iterator[pa.RecordBatch]:
    """The record batches of a file or stream. Raises BadInput if it is damaged."""
    try:
        if isinstance(reader, pa.ipc.RecordBatchFileReader):
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            yield from reader
    except READ_ERRORS as error:
        raise damage_error(error) from None


def select_valid(batch: pa.RecordBatch, columns: list[str]) -> pa.Table:
    """The given columns of a batch. Raises BadInput if their offsets point outside of the file, where Arrow
    would read without a check. Text that is not UTF-8 is reported later, with its row."""
    table = pa.Table.from_batches([batch]).select(columns)
    for column in table.columns:
        try:
            column.validate(full=True)
        except READ_ERRORS as error:
            if "UTF8" not in str(error):
                raise damage_error(error) from None
    return table


def damage_error(error: Exception) -> BadInput:
    return BadInput("damaged file", f"cannot be read: {str(error).splitlines()[0]}")
