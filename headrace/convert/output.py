"""Output files and folders that appear when they are complete, or not at all."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import UserError
from headrace.storage import files


@contextmanager
def new_file(target: str) -> Iterator[Path]:
    """Yield a scratch path, and move the file written there to `target` at the end.

    If the block raises, nothing is left. UserError if `target` exists or is not on this machine."""
    final = _local_path(target, "file")
    if final.exists():
        raise UserError(f"{target}: already exists; name a new file, or remove it")
    with _make_scratch_folder(final) as scratch:
        yield scratch / final.name
        (scratch / final.name).rename(final)


@contextmanager
def new_folder(target: str) -> Iterator[Path]:
    """Yield an empty scratch folder, and move it to `target` at the end.

    If the block raises, nothing is left. UserError if `target` exists, unless it is an empty folder, or if it
    is not on this machine."""
    final = _local_path(target, "folder")
    if final.exists() and not (final.is_dir() and not any(final.iterdir())):
        raise UserError(f"{target}: already exists; name a new folder, or remove it")
    with _make_scratch_folder(final) as scratch:
        folder = scratch / final.name
        folder.mkdir()
        yield folder
        reference = scratch / "reference"
        reference.touch()
        for path in folder.rglob("*.safetensors"):  # safetensors writes files that only their owner can read
            path.chmod(reference.stat().st_mode)
        folder.rename(final)


def _local_path(target: str, kind: str) -> Path:
    if files.is_url(target):
        raise UserError(
            f"found {files.redacted(target)}, expected a {kind} on this machine; copy it there afterwards"
        )
    return Path(target).absolute()


@contextmanager
def _make_scratch_folder(final: Path) -> Iterator[Path]:
    """Make a temporary folder on the disk of `final`, so that a rename is enough to move files there."""
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{final.name}-", dir=final.parent) as scratch:
        yield Path(scratch)
