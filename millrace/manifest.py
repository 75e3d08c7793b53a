"""What the files of a checkpoint must be: a list of their sizes and CRC-32C sums, which has a sum of its own.
Orbax itself reads a flipped bit as another number and says nothing. CRC-32C finds every change of up to four
bytes in a row; it proves nothing against somebody who rewrites the list too."""

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import google_crc32c
from etils import epath

NAME = "manifest.txt"
HEAD = "millrace manifest 1"
BLOCK = 1 << 20  # at 5 GB/s: the library holds Python's lock for 0.2 ms, which no loop notices
THREADS = 4  # a disk serves no more
LINE = re.compile(r"([0-9a-f]{8}) (\d+) (.+)")


class Damaged(Exception):
    """Says what is wrong with a checkpoint."""


@dataclass(frozen=True)
class Manifest:
    step: int
    permanent: bool
    files: dict[str, tuple[int, int]]  # by their path in the step's folder: size and CRC-32C

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.files.values())


def seal(folder: epath.Path, *, step: int, permanent: bool) -> Manifest:
    """Measures a step that is written and lists it, whole or not at all. All of it is on the disk before the
    list is: a machine that loses power may keep the list alone otherwise."""
    names = [name for name in sorted(_names(folder)) if name != NAME]
    made = Manifest(step, permanent, dict(zip(names, _measured(folder, names, sync=True), strict=True)))
    draft = folder / (NAME + ".draft")
    draft.write_bytes(_text(made))
    _sync(draft)
    for path in {folder, *((folder / name).parent for name in names)}:
        _sync(path)
    draft.replace(folder / NAME)
    _sync(folder)
    return made


def read(folder: epath.Path) -> Manifest | None:
    """None where there is none: the save was cut off before it."""
    try:
        found = (folder / NAME).read_bytes()
    except FileNotFoundError:
        return None
    # Compared as bytes, not as numbers: a changed letter in the sum of the list is a change as well.
    _, _, body = found.partition(b"\n")
    if found != _head(body) + body:
        raise Damaged(f"{NAME} is not what was written")
    first, *lines = body.decode().splitlines()
    named = re.fullmatch(r"step (\d+) (permanent|temporary)", first)
    matches = [LINE.fullmatch(line) for line in lines]
    if named is None or not all(matches):
        raise Damaged(f"{NAME} is of another version")
    files = {match[3]: (int(match[2]), int(match[1], 16)) for match in matches if match}
    if any(name.startswith("/") or ".." in name.split("/") for name in files):
        raise Damaged(f"{NAME} lists files outside of the folder")
    return Manifest(int(named[1]), named[2] == "permanent", files)


def verify(folder: epath.Path) -> Manifest | None:
    """Reads all that the manifest lists; raises Damaged, with the first file that is not as it was written.
    None if there is no manifest. Files that are not listed are never read, and not looked at."""
    known = read(folder)
    if known is None:
        return None
    for name, (size, _) in known.files.items():  # without reading anything
        try:
            found = (folder / name).stat().length
        except (FileNotFoundError, NotADirectoryError):
            raise Damaged(f"{name} is missing") from None
        if found != size:
            raise Damaged(f"{name} has {found:,} bytes, and {size:,} were written")
    for name, found in zip(known.files, _measured(folder, list(known.files)), strict=True):
        if found != known.files[name]:
            raise Damaged(f"{name} has checksum {found[1]:08x}, and {known.files[name][1]:08x} was written")
    return known


def _head(body: bytes) -> bytes:
    return f"{HEAD} {google_crc32c.value(body):08x}\n".encode()


def _text(made: Manifest) -> bytes:
    lines = [f"step {made.step} {'permanent' if made.permanent else 'temporary'}"]
    lines += [f"{crc:08x} {size} {name}" for name, (size, crc) in made.files.items()]
    body = "".join(f"{line}\n" for line in lines).encode()
    return _head(body) + body


def _names(folder: epath.Path, below: str = "") -> Iterator[str]:
    for path in folder.iterdir():
        name = f"{below}{path.name}"
        if path.is_dir():
            yield from _names(path, f"{name}/")
        else:
            yield name


def _measured(folder: epath.Path, names: list[str], *, sync: bool = False) -> Iterator[tuple[int, int]]:
    with ThreadPoolExecutor(THREADS, "checksum") as pool:
        yield from pool.map(lambda name: _measure(folder / name, sync), names)


def _measure(path: epath.Path, sync: bool) -> tuple[int, int]:
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            size, crc = size + len(block), google_crc32c.extend(crc, block)
    if sync:
        _sync(path)
    return size, crc


def _sync(path: epath.Path) -> None:
    """Where there is a disk: what lies at a URL is kept once it is written."""
    if "://" in str(path):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
