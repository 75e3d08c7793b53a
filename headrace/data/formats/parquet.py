"""Parquet, divided by row groups; only the columns that are needed are read."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from headrace.data.documents import Part, Problems
from headrace.data.formats import PART, TABLE, Bad, divided
from headrace.data.formats.columns import Places, Wanted, from_table, made_ids, plan
from headrace.data.formats.open import open_random

SUFFIXES = (".parquet",)
MOST_ROWS = 1 << 16  # in a table, however short they are
DAMAGE = (pa.ArrowException, OSError)


def parts(file: str, size: int) -> list[Part]:
    """`start` and `stop` are row groups."""
    if size <= PART:
        return [Part(file)]
    try:
        with opened(file) as parquet:
            groups = [parquet.metadata.row_group(n).total_byte_size for n in range(parquet.num_row_groups)]
    except Bad:
        return [Part(file)]  # reading it tells what is wrong
    return divided(file, groups, PART)


def read(part: Part, name: str, *, wanted: Wanted, problems: Problems) -> Iterator[pa.Table]:
    row = 0
    try:
        with opened(part.file) as parquet:
            if parquet.metadata.num_rows == 0:
                raise Bad("empty file", "holds no rows")
            columns = plan(parquet.schema_arrow, wanted)
            groups = range(part.start, parquet.num_row_groups if part.stop is None else part.stop)
            row = sum(parquet.metadata.row_group(group).num_rows for group in range(part.start))
            for batch in batches(parquet, groups, columns.columns):
                where = lambda number, row=row: f"{part.file}, row {row + number + 1}"
                places = Places(made_ids(name, ":", np.arange(row, row + len(batch)) + 1), where)
                yield from_table(pa.Table.from_batches([batch]), columns, places, wanted, problems)
                row += len(batch)
    except Bad as bad:
        problems.bad(bad.kind, f"{part.file}, row {row + 1}" if row else part.file, bad.what)


@contextmanager
def opened(file: str) -> Iterator[pa.parquet.ParquetFile]:
    with open_random(file) as source:
        if not source.seek(0, 2):
            raise Bad("empty file", "holds nothing")
        source.seek(0)
        try:
            # A buffer, so that a row group of gigabytes is read page by page.
            parquet = pa.parquet.ParquetFile(source, buffer_size=1 << 20, page_checksum_verification=True)
        except DAMAGE as error:
            raise damaged(error) from None
        yield parquet


def batches(parquet: pa.parquet.ParquetFile, groups: range, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Of about 16 MB, by the mean length of a row."""
    found = [parquet.metadata.row_group(group) for group in groups]
    rows, size = sum(group.num_rows for group in found), sum(group.total_byte_size for group in found)
    step = min(max(TABLE * rows // max(size, 1), 1), MOST_ROWS)
    try:
        yield from parquet.iter_batches(step, row_groups=list(groups), columns=columns, use_threads=False)
    except DAMAGE as error:
        raise damaged(error) from None


def damaged(error: Exception) -> Bad:
    return Bad("damaged file", f"cannot be read: {str(error).splitlines()[0]}")
