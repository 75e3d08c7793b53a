"""Parquet files. They are divided by row groups; only the columns that are needed are read."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from headrace.data.documents import FilePart, Problems
from headrace.data.formats import PART_BYTES, TABLE_BYTES, BadInput, split_by_bytes
from headrace.data.formats.columns import (
    RecordOrigins,
    SourceColumns,
    make_ids,
    plan_columns,
    table_to_documents,
)
from headrace.data.formats.open import open_random

SUFFIXES = (".parquet",)
MAX_ROWS = 1 << 16  # in a table, however short they are
READ_ERRORS = (pa.ArrowException, OSError)


def list_parts(file: str, size: int) -> list[FilePart]:
    """Parts of whole row groups."""
    if size <= PART_BYTES:
        return [FilePart(file)]
    try:
        with open_parquet(file) as parquet:
            sizes = [parquet.metadata.row_group(n).total_byte_size for n in range(parquet.num_row_groups)]
    except BadInput:
        return [FilePart(file)]  # `read` will report the damage
    return split_by_bytes(file, sizes, PART_BYTES)


def read(part: FilePart, name: str, *, columns: SourceColumns, problems: Problems) -> Iterator[pa.Table]:
    """The documents of a part, as tables."""
    row = 0
    try:
        with open_parquet(part.file) as parquet:
            if parquet.metadata.num_rows == 0:
                raise BadInput("empty file", "holds no rows")
            plan = plan_columns(parquet.schema_arrow, columns)
            groups = range(part.start, parquet.num_row_groups if part.stop is None else part.stop)
            row = sum(parquet.metadata.row_group(group).num_rows for group in range(part.start))
            for batch in iter_batches(parquet, groups, plan.read_columns):
                locate = lambda number, row=row: f"{part.file}, row {row + number + 1}"
                ids = make_ids(name, ":", np.arange(row, row + len(batch)) + 1)
                table = pa.Table.from_batches([batch])
                yield table_to_documents(table, plan, RecordOrigins(ids, locate), columns, problems)
                row += len(batch)
    except BadInput as bad:
        problems.report(bad.kind, f"{part.file}, row {row + 1}" if row else part.file, bad.message)


@contextmanager
def open_parquet(file: str) -> Iterator[pa.parquet.ParquetFile]:
    """Open a parquet file. Raises BadInput if it is damaged."""
    with open_random(file) as source:
        if not source.seek(0, 2):
            raise BadInput("empty file", "holds no data")
        source.seek(0)
        try:
            # With a buffer a row group of gigabytes is read page by page.
            parquet = pa.parquet.ParquetFile(source, buffer_size=1 << 20, page_checksum_verification=True)
        except READ_ERRORS as error:
            raise damage_error(error) from None
        yield parquet


def iter_batches(
    parquet: pa.parquet.ParquetFile, groups: range, columns: list[str]
) -> Iterator[pa.RecordBatch]:
    """The rows of some row groups in batches of about TABLE_BYTES, by the mean length of a row. Raises
    BadInput if the file is damaged."""
    metadata = [parquet.metadata.row_group(group) for group in groups]
    rows, size = sum(group.num_rows for group in metadata), sum(group.total_byte_size for group in metadata)
    step = min(max(TABLE_BYTES * rows // max(size, 1), 1), MAX_ROWS)
    try:
        yield from parquet.iter_batches(step, row_groups=list(groups), columns=columns, use_threads=False)
    except READ_ERRORS as error:
        raise damage_error(error) from None


def damage_error(error: Exception) -> BadInput:
    return BadInput("damaged file", f"cannot be read: {str(error).splitlines()[0]}")
