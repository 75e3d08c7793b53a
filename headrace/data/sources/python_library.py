"""The source code of Python's own standard library, as installed: a few megabytes of real text that
every machine already has, for demos and tests. It differs a little from one Python version to the next."""

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from headrace.data.documents import Part, Problems
from headrace.data.formats import TABLE
from headrace.data.formats.columns import DOCUMENT


@dataclass(frozen=True)
class Config:
    limit: int = 8  # megabytes of text

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ValueError("limit: expected 1 megabyte or more")


LARGEST = 200_000  # bytes: what lies above is generated text or tables

# Not of the library proper, or tables rather than code.
SKIPPED = {
    "site-packages", "dist-packages", "test", "tests", "idle_test",
    "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data",
}  # fmt: skip


def parts(cfg: Any) -> list[Part]:
    """One alone: where the limit falls hangs on all files before."""
    return [Part(sysconfig.get_path("stdlib"))]


def read(cfg: Any, part: Part, problems: Problems) -> Iterator[pa.Table]:
    names: list[str] = []
    texts: list[str] = []
    size, left = 0, cfg.limit * 1_000_000
    for name, path in files(Path(part.file)):
        content = path.read_bytes()
        if not content.strip() or len(content) > LARGEST:
            continue
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        left -= len(content)
        if left < 0:
            break
        if size + len(content) > TABLE:
            yield _table(names, texts)
            names, texts, size = [], [], 0
        names.append(name)
        texts.append(text)
        size += len(content)
    yield _table(names, texts)


def files(library: Path) -> list[tuple[str, Path]]:
    """Each source file by its path inside the library, in the order of those paths."""
    found = []
    for folder, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in SKIPPED]
        # _sysconfigdata* holds the paths and compiler flags of this one machine.
        kept = [name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
        found += [(Path(folder, name).relative_to(library).as_posix(), Path(folder, name)) for name in kept]
    return sorted(found)


def _table(names: list[str], texts: list[str]) -> pa.Table:
    nothing = pa.nulls(len(names), pa.large_string())
    return pa.Table.from_arrays(
        [pa.array(names, pa.string()), pa.array(texts, pa.large_string()), nothing, nothing], schema=DOCUMENT
    )
