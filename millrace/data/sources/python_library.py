"""The source code of Python's own standard library, as installed: a few megabytes of real text that
every machine already has, for demos and tests. It differs a little from one Python version to the next."""

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from millrace.data.tokenise import Document


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


def rows(cfg: Config) -> Iterator[Document]:
    left = cfg.limit * 1_000_000
    for name, path in files(Path(sysconfig.get_path("stdlib"))):
        content = path.read_bytes()
        if not content.strip() or len(content) > LARGEST:
            continue
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        left -= len(content)
        if left < 0:
            return
        yield Document(name, text)


def files(library: Path) -> list[tuple[str, Path]]:
    """Each source file by its path inside the library, in the order of those paths."""
    found = []
    for folder, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in SKIPPED]
        # _sysconfigdata* holds the paths and compiler flags of this one machine.
        kept = [name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
        found += [(Path(folder, name).relative_to(library).as_posix(), Path(folder, name)) for name in kept]
    return sorted(found)
