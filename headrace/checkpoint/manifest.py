"""What the files of a checkpoint must be: a list of their sizes and CRC-32C sums, which has a sum of its own.
Orbax itself reads a flipped bit as another number and says nothing. CRC-32C finds every change of up to four
bytes in a row; it proves nothing against somebody who rewrites the list too. A bucket keeps the same sum of
each object and is asked for it, so that nothing is read."""

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, cast, get_args

import google_crc32c
from etils import epath

from headrace.storage import files as storage_files

# Permanent ones are never removed, temporary ones when there are enough newer ones, and those from half-way
# between two saves as soon as a newer one is whole.
Tier = Literal["permanent", "temporary", "interim"]

NAME = "manifest.txt"
DRAFT = NAME + ".draft"  # of a seal that was cut off
HEAD = "headrace manifest 1"
BLOCK = 1 << 20  # at 5 GB/s: the library holds Python's lock for 0.2 ms, which no loop notices
THREADS = 4  # a disk serves no more
FIRST = re.compile(rf"step (\d{{1,18}}) ({'|'.join(get_args(Tier))})")
LINE = re.compile(r"([0-9a-f]{8}) (\d{1,18}) (.+)")


class Damaged(Exception):
    """Says what is wrong with a checkpoint."""


@dataclass(frozen=True)
class Manifest:
    step: int
    tier: Tier
    files: dict[str, tuple[int, int]]  # by their path in the step's folder: size and CRC-32C

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.files.values())


def seal(folder: epath.Path, *, step: int, tier: Tier) -> Manifest:
    """Measures a step that is written and lists it, whole or not at all. All of it is on the disk before the
    list is: a machine that loses power may keep the list alone otherwise."""
    there = {
        name: entry for name, entry in storage_files.list_files(folder).items() if name not in (NAME, DRAFT)
    }
    made = Manifest(step, tier, dict(zip(there, _measured(folder, there, sync=True), strict=True)))
    for path in {folder, *((folder / name).parent for name in there)}:
        _sync(path)
    storage_files.write(folder / NAME, _text(made))
    _sync(folder)
    return made


def read(folder: epath.Path) -> Manifest | None:
    """None where there is none: the save was cut off before it."""
    try:
        found = storage_files.read(folder / NAME)
    except FileNotFoundError:
        return None
    # Compared as bytes, not as numbers: a changed letter in the sum of the list is a change as well.
    _, _, body = found.partition(b"\n")
    if found != _head(body) + body:
        raise Damaged(f"{NAME} is not what was written")
    # What somebody else made may have the right sum and be anything.
    first, *lines = body.decode(errors="replace").splitlines() or [""]
    named = FIRST.fullmatch(first)
    matches = [LINE.fullmatch(line) for line in lines]
    if named is None or not all(matches):
        raise Damaged(f"{NAME} is of another version")
    files = {match[3]: (int(match[2]), int(match[1], 16)) for match in matches if match}
    if any(name.startswith("/") or ".." in name.split("/") for name in files):
        raise Damaged(f"{NAME} lists files outside of the folder")
    step = int(named[1])
    if folder.name.isdecimal() and int(folder.name) != step:  # else a run would pass over what lies between
        raise Damaged(f"it is step {step} by its {NAME}")
    return Manifest(step, cast(Tier, named[2]), files)


def verify(folder: epath.Path) -> Manifest | None:
    """Reads all that the manifest lists; raises Damaged, with the first file that is not as it was written.
    None if there is no manifest. Files that are not listed are never read, and not looked at."""
    known = read(folder)
    if known is None:
        return None
    there = storage_files.list_files(folder)
    for name, (size, _) in known.files.items():  # without reading anything
        if name not in there:
            raise Damaged(f"{name} is missing")
        if there[name].size != size:
            raise Damaged(f"{name} has {there[name].size:,} bytes, and {size:,} were written")
    listed = {name: there[name] for name in known.files}
    for name, found in zip(listed, _measured(folder, listed), strict=True):
        if found != known.files[name]:
            raise Damaged(f"{name} has checksum {found[1]:08x}, and {known.files[name][1]:08x} was written")
    return known


def _head(body: bytes) -> bytes:
    return f"{HEAD} {google_crc32c.value(body):08x}\n".encode()


def _text(made: Manifest) -> bytes:
    lines = [f"step {made.step} {made.tier}"]
    lines += [f"{crc:08x} {size} {name}" for name, (size, crc) in made.files.items()]
    body = "".join(f"{line}\n" for line in lines).encode()
    return _head(body) + body


def _measured(
    folder: epath.Path, listed: dict[str, storage_files.FileInfo], *, sync: bool = False
) -> Iterator[tuple[int, int]]:
    with ThreadPoolExecutor(THREADS, "checksum") as pool:
        yield from pool.map(lambda name: _measure(folder / name, listed[name], sync), listed)


def _measure(path: epath.Path, entry: storage_files.FileInfo, sync: bool) -> tuple[int, int]:
    if entry.crc32c is not None:
        return entry.size, entry.crc32c
    if storage_files.is_url(path):
        content = storage_files.read(path)
        return len(content), google_crc32c.value(content)
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            size, crc = size + len(block), google_crc32c.extend(crc, block)
    if sync:
        _sync(path)
    return size, crc


def _sync(path: epath.Path) -> None:
    """Where there is a disk: what lies at a URL is kept once it is written."""
    if storage_files.is_url(path):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
