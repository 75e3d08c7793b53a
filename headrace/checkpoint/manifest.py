"""The manifest of a checkpoint: the size and CRC-32C checksum of every file, and a checksum of itself.

Orbax reads a flipped bit as another number, without an error. CRC-32C detects every change of up to four
consecutive bytes; it proves nothing against someone who rewrites the manifest as well. A bucket stores the
same checksum with each object, so there nothing is downloaded to verify a step.

The file is text: a header with the checksum of all that follows, a line with step and tier, and a line per
file."""

import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, cast, get_args

import google_crc32c
from etils import epath

from headrace.storage import files as storage_files

# How long a step is kept. A permanent one is never removed, a temporary one when there are enough newer ones,
# and an interim one, saved halfway between two others, as soon as a newer step is sealed.
Tier = Literal["permanent", "temporary", "interim"]

NAME = "manifest.txt"
DRAFT = NAME + ".draft"  # left by a seal that was interrupted
HEADER = "headrace manifest 1"
BLOCK_BYTES = 1 << 20  # at 5 GB/s: google_crc32c holds the GIL for 0.2 ms, too short to delay training
THREADS = 4  # more do not read faster from one disk
STEP_LINE = re.compile(rf"step (\d{{1,18}}) ({'|'.join(get_args(Tier))})")
FILE_LINE = re.compile(r"([0-9a-f]{8}) (\d{1,18}) (.+)")


class Damaged(Exception):
    """A checkpoint differs from its manifest, or the manifest itself is damaged. The message says where."""


@dataclass(frozen=True)
class FileChecksum:
    """The size and CRC-32C of a file."""

    size: int  # bytes
    crc32c: int


@dataclass(frozen=True)
class Manifest:
    """The content of a step's manifest."""

    step: int
    tier: Tier
    files: dict[str, FileChecksum]  # by path relative to the step's folder

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files.values())


def seal(folder: epath.Path, *, step: int, tier: Tier) -> Manifest:
    """Write the manifest of a step whose files are all written. Only a step with a manifest counts.

    All other files are synced to the disk first: after a power failure, the manifest could otherwise be there
    and they not."""
    infos = {
        name: info for name, info in storage_files.list_files(folder).items() if name not in (NAME, DRAFT)
    }
    checksums = dict(zip(infos, _read_checksums(folder, infos, sync=True), strict=True))
    manifest = Manifest(step, tier, checksums)
    for directory in {folder, *((folder / name).parent for name in infos)}:
        _sync(directory)
    storage_files.write(folder / NAME, to_bytes(manifest))
    _sync(folder)
    return manifest


def read(folder: epath.Path) -> Manifest | None:
    """Read the manifest of a step, and no other file. None if there is none: the save was interrupted.

    Raises Damaged if the manifest is not as it was written, or belongs to another step."""
    try:
        content = storage_files.read(folder / NAME)
    except FileNotFoundError:
        return None
    # Compared as bytes, not as numbers: a changed character within the checksum is damage, too.
    _, _, body = content.partition(b"\n")
    if content != _header(body) + body:
        raise Damaged(f"{NAME} is not what was written")
    # A file that Headrace did not write may have a correct checksum and any content.
    step_line, *file_lines = body.decode(errors="replace").splitlines() or [""]
    step_match = STEP_LINE.fullmatch(step_line)
    file_matches = [FILE_LINE.fullmatch(line) for line in file_lines]
    if step_match is None or not all(file_matches):
        raise Damaged(f"{NAME} is of another version")
    checksums = {match[3]: FileChecksum(int(match[2]), int(match[1], 16)) for match in file_matches if match}
    if any(name.startswith("/") or ".." in name.split("/") for name in checksums):
        raise Damaged(f"{NAME} lists files outside of the folder")
    step = int(step_match[1])
    if folder.name.isdecimal() and int(folder.name) != step:  # resuming would skip the steps in between
        raise Damaged(f"it is step {step} by its {NAME}")
    return Manifest(step, cast(Tier, step_match[2]), checksums)


def verify(folder: epath.Path) -> Manifest | None:
    """Compare every file that the manifest lists with it. None if there is no manifest.

    Raises Damaged for the first file that differs. Files that are not listed are ignored."""
    manifest = read(folder)
    if manifest is None:
        return None
    infos = storage_files.list_files(folder)
    for name, expected in manifest.files.items():  # sizes first, since they need no reading
        if name not in infos:
            raise Damaged(f"{name} is missing")
        if infos[name].size != expected.size:
            raise Damaged(f"{name} has {infos[name].size:,} bytes, but {expected.size:,} were written")
    listed = {name: infos[name] for name in manifest.files}
    for name, found in zip(listed, _read_checksums(folder, listed), strict=True):
        expected = manifest.files[name]
        if found != expected:
            raise Damaged(f"{name} has checksum {found.crc32c:08x}, but {expected.crc32c:08x} was written")
    return manifest


def to_bytes(manifest: Manifest) -> bytes:
    """The content of manifest.txt."""
    lines = [f"step {manifest.step} {manifest.tier}"]
    lines += [f"{file.crc32c:08x} {file.size} {name}" for name, file in manifest.files.items()]
    body = "".join(f"{line}\n" for line in lines).encode()
    return _header(body) + body


def _header(body: bytes) -> bytes:
    return f"{HEADER} {google_crc32c.value(body):08x}\n".encode()


def _read_checksums(
    folder: epath.Path, infos: Mapping[str, storage_files.FileInfo], *, sync: bool = False
) -> Iterator[FileChecksum]:
    """Yield the checksum of each file, in the order of `infos`."""
    with ThreadPoolExecutor(THREADS, "checksum") as pool:
        yield from pool.map(lambda name: _read_checksum(folder / name, infos[name], sync), infos)


def _read_checksum(path: epath.Path, info: storage_files.FileInfo, sync: bool) -> FileChecksum:
    """Compute the checksum of a file. The bucket's own is used if there is one, without reading the file."""
    if info.crc32c is not None:
        return FileChecksum(info.size, info.crc32c)
    if storage_files.is_url(path):
        content = storage_files.read(path)
        return FileChecksum(len(content), google_crc32c.value(content))
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            size, crc = size + len(block), google_crc32c.extend(crc, block)
    if sync:
        _sync(path)
    return FileChecksum(size, crc)


def _sync(path: epath.Path) -> None:
    """Sync a file or folder to the disk. A bucket needs none: an object is durable once it is written."""
    if storage_files.is_url(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
