"""File formats, one file each: the contract `Format` and what they share."""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from headrace.data.documents import FilePart, Problems

if TYPE_CHECKING:
    from headrace.data.formats.columns import SourceColumns

PART_BYTES = 32 << 20  # of a file, which one worker reads at a time
TABLE_BYTES = 16 << 20  # of documents in a table, about


class Format(Protocol):
    """The contents of a module in this folder."""

    SUFFIXES: tuple[str, ...]  # of the names of its files

    def list_parts(self, file: str, size: int) -> list[FilePart]:
        """The parts into which workers divide a file of `size` bytes."""
        ...

    def read(
        self, part: FilePart, name: str, *, columns: "SourceColumns", problems: Problems
    ) -> Iterator[pa.Table]:
        """The documents of a part, as tables with the columns of `columns.DOCUMENT_SCHEMA`. Ids that are not
        in the data consist of `name` and the position in the file, so that they do not depend on how it is
        divided."""
        ...


class BadInput(Exception):
    """Input that cannot be used. `kind` is the category under which it is counted, `message` the
    description."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


def split_by_bytes(file: str, sizes: list[int], part_bytes: int) -> list[FilePart]:
    """Divide a file that consists of blocks of these sizes. `start` and `stop` of the parts are block
    numbers; blocks that start in the same `part_bytes` of the file belong to one part."""
    numbers = (np.cumsum(sizes) - sizes) // part_bytes
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(sizes)]
    return [FilePart(file, start, stop) for start, stop in itertools.pairwise(starts)]
