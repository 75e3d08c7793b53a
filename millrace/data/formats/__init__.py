"""File formats, one a file. Each has SUFFIXES, the names it goes by; parts(file, size), how a file is divided
among workers; and read(part, name, wanted=, problems=), its documents as tables without their `source`. Ids
hang on `name` and the place in the file alone, never on how files are divided."""

PART = 64 << 20  # bytes: about what a worker reads at a time, where a format can be divided
TABLE = 16 << 20  # bytes: about what a table of documents holds


class Bad(Exception):
    """Input that cannot be used: what kind of trouble it is, in a word or two, and what is wrong."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind, self.what = kind, what
