"""Plain text files, each one document: a file, a folder (its .txt, .md, .rst and .py files, at any depth)
or a glob such as `books/**/*.tex`. All of it must be UTF-8; nothing is skipped silently."""

import glob
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from millrace.data.tokenise import Document
from millrace.errors import UserError


@dataclass(frozen=True)
class Config:
    path: str


SUFFIXES = {".txt", ".md", ".rst", ".py"}  # taken from a folder; a glob takes what it matches


def rows(cfg: Config) -> Iterator[Document]:
    for name, path in sorted(files(cfg.path).items()):
        try:
            yield Document(name, path.read_bytes().decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"source.path: {path} is not UTF-8 text (byte {error.start})") from None


def files(pattern: str) -> dict[str, Path]:
    """The files by name. Names are relative, so that moving the texts does not change who is held out."""
    path = Path(pattern)
    if path.is_file():
        return {path.name: path}
    if path.is_dir():
        root, found = path, [file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES]
    else:
        root, found = fixed_part(path), [Path(match) for match in glob.glob(pattern, recursive=True)]
    found = [file for file in found if file.is_file()]
    if not found and path.is_dir():
        wanted = ", ".join(sorted(SUFFIXES))
        raise UserError(f"source.path: no {wanted} files in {pattern}; a glob can name others")
    if not found:
        raise UserError(f"source.path: no such file or folder: {pattern}")
    return {file.relative_to(root).as_posix(): file for file in found}


def fixed_part(pattern: Path) -> Path:
    """The folder that a glob starts from: everything before the first part with a wildcard."""
    root = Path()
    for part in pattern.parts:
        if set(part) & set("*?["):
            break
        root /= part
    return root
