"""Plain text: each file is one document."""

from collections.abc import Iterator

import pyarrow as pa

from headrace.data.documents import FilePart, Problems
from headrace.data.formats import BadInput
from headrace.data.formats.columns import DOCUMENT_SCHEMA, SourceColumns
from headrace.data.formats.open import InputStream

SUFFIXES = (".txt", ".md", ".rst", ".py")
MAX_BYTES = 2 << 30
BOM = b"\xef\xbb\xbf"


def list_parts(file: str, size: int) -> list[FilePart]:
    return [FilePart(file)]


def read(part: FilePart, name: str, *, columns: SourceColumns, problems: Problems) -> Iterator[pa.Table]:
    """The file as a table of one document. An empty file is an empty document, not a problem: folders are
    full of them, and empty documents are removed later."""
    try:
        with InputStream(part.file) as stream:
            content = stream.read_all(MAX_BYTES)
        if len(content) > MAX_BYTES:
            raise BadInput("file too long", f"more than {MAX_BYTES >> 30} GB in one document; split the file")
    except BadInput as bad:
        problems.report(bad.kind, part.file, bad.message)
        return
    try:
        # Checked by Arrow, not decoded: a Python string takes up to four times the memory.
        texts = pa.array([content.removeprefix(BOM)], pa.large_binary()).cast(pa.large_string())
    except pa.ArrowInvalid:
        line, message = _find_invalid_utf8(content)
        problems.report("not UTF-8", f"{part.file}:{line}", message)
        return
    empty = pa.nulls(1, pa.large_string())
    yield pa.Table.from_arrays([pa.array([name]), texts, empty, empty], schema=DOCUMENT_SCHEMA)


def _find_invalid_utf8(content: bytes) -> tuple[int, str]:
    """The line of the first byte that is not UTF-8, and a message."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return content.count(b"\n", 0, error.start) + 1, f"not UTF-8 at byte {error.start} of the file"
    raise AssertionError("Arrow and Python differ on what is UTF-8")
