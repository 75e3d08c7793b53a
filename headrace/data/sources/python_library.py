"""The source code of the installed Python standard library: a few megabytes of real text that every machine
has, for demos and tests. It differs slightly between Python versions."""

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from headrace.data.documents import FilePart, Problems
from headrace.data.formats import TABLE_BYTES
from headrace.data.formats.columns import DOCUMENT_SCHEMA


@dataclass(frozen=True)
class Config:
    limit_mb: int = 8  # amount of text to read [megabytes]

    def __post_init__(self) -> None:
        if self.limit_mb < 1:
            raise ValueError("limit_mb: expected 1 megabyte or more")


MAX_FILE_BYTES = 200_000  # larger files are generated text or tables

# Not part of the library proper, or tables instead of code.
SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "idle_test",
    "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data",
}  # fmt: skip


def list_parts(cfg: Config) -> list[FilePart]:
    """One part: where the limit is reached depends on all files before."""
    return [FilePart(sysconfig.get_path("stdlib"))]


def read(cfg: Config, part: FilePart, problems: Problems) -> Iterator[pa.Table]:
    """Source files up to `cfg.limit_mb`, as tables of about TABLE_BYTES."""
    names: list[str] = []
    texts: list[str] = []
    size, remaining = 0, cfg.limit_mb * 1_000_000
    for name, path in list_files(Path(part.file)):
        content = path.read_bytes()
        if not content.strip() or len(content) > MAX_FILE_BYTES:
            continue
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        remaining -= len(content)
        if remaining < 0:
            break
        if size + len(content) > TABLE_BYTES:
            yield _make_table(names, texts)
            names, texts, size = [], [], 0
        names.append(name)
        texts.append(text)
        size += len(content)
    yield _make_table(names, texts)


def list_files(library: Path) -> list[tuple[str, Path]]:
    """(path within the library, path) of each source file, sorted."""
    files = []
    for folder, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        # _sysconfigdata* holds the paths and compiler flags of this machine.
        sources = [name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
        paths = [Path(folder, name) for name in sources]
        files += [(path.relative_to(library).as_posix(), path) for path in paths]
    return sorted(files)


def _make_table(names: list[str], texts: list[str]) -> pa.Table:
    empty = pa.nulls(len(names), pa.large_string())
    return pa.Table.from_arrays(
        [pa.array(names, pa.string()), pa.array(texts, pa.large_string()), empty, empty],
        schema=DOCUMENT_SCHEMA,
    )
