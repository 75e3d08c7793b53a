"""File formats, one a file. Each has SUFFIXES, the names it goes by; parts(file, size), how a file is divided
among workers; and read(part, name, wanted=, problems=), its documents as tables without their `source`. Ids
hang on `name` and the place in the file alone, never on how files are divided."""

import numpy as np

from headrace.data.documents import Part

PART = 32 << 20  # bytes of a file that one worker reads at a time
TABLE = 16 << 20  # bytes: about what a table of documents holds


class Bad(Exception):
    """Input that cannot be used: what kind of trouble it is, in a word or two, and what is wrong."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind, self.what = kind, what


def divided(file: str, sizes: list[int], part: int) -> list[Part]:
    """A file by pieces of these sizes: those that begin in the same `part` bytes stay together."""
    numbers = (np.cumsum(sizes) - sizes) // part
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(sizes)]
    return [Part(file, start, stop) for start, stop in zip(starts, starts[1:], strict=False)]
