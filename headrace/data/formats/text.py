"""Plain text, each file one document."""

from collections.abc import Iterator

import pyarrow as pa

from headrace.data.documents import Part, Problems
from headrace.data.formats import Bad
from headrace.data.formats.columns import DOCUMENT, Wanted
from headrace.data.formats.open import Stream

SUFFIXES = (".txt", ".md", ".rst", ".py")
LONGEST = 2 << 30  # bytes
BOM = b"\xef\xbb\xbf"


def parts(file: str, size: int) -> list[Part]:
    return [Part(file)]


def read(part: Part, name: str, *, wanted: Wanted, problems: Problems) -> Iterator[pa.Table]:
    """An empty file is an empty document: folders are full of them, and empty documents are dropped later."""
    try:
        with Stream(part.file) as stream:
            content = stream.read_all(LONGEST)
        if len(content) > LONGEST:
            raise Bad("file too long", f"more than {LONGEST >> 30} GB in one document; divide it")
    except Bad as bad:
        problems.bad(bad.kind, part.file, bad.what)
        return
    try:
        # Checked by Arrow rather than decoded: a Python string takes up to four times the memory.
        texts = pa.array([content.removeprefix(BOM)], pa.large_binary()).cast(pa.large_string())
    except pa.ArrowInvalid:
        place, what = _place(content)
        problems.bad("not UTF-8", f"{part.file}:{place}", what)
        return
    nothing = pa.nulls(1, pa.large_string())
    yield pa.Table.from_arrays([pa.array([name]), texts, nothing, nothing], schema=DOCUMENT)


def _place(content: bytes) -> tuple[int, str]:
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return content.count(b"\n", 0, error.start) + 1, f"not UTF-8 at byte {error.start} of the file"
    raise AssertionError("Arrow and Python differ on what is UTF-8")
