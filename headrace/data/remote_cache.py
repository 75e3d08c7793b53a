"""Packed data at a URL: blocks of its files are fetched, several at once, into a local cache, and mapped into
memory from there like files that were always here. Nothing is fetched twice, be it by this process, another
on the machine or the next run, while the cache has room.

HEADRACE_CACHE names the cache's folder (~/.cache/headrace), HEADRACE_CACHE_GB its size (50)."""

import errno
import fcntl
import hashlib
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from headrace.storage import files as store
from headrace.data import shards
from headrace.errors import UserError

BLOCK = 8 << 20  # buckets answer in about 50 ms whatever the size: smaller reads wait more than they carry
AHEAD = 8 * BLOCK  # 64 MB: 30 M tokens, some seconds of what eight chips train on
IN_FLIGHT = 16
PRESENT, ABSENT = b"\1", b"\0"

T = TypeVar("T")


class Remote:
    """A folder at a URL that fsspec knows. `ahead` is how many bytes to ask for before they are needed."""

    ahead = AHEAD

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.filesystem, self.root = store.filesystem(self.url)
        self.room = threading.Semaphore(IN_FLIGHT)

    def where(self, name: str) -> str:
        return f"{self.url}/{name}"

    def read(self, name: str) -> bytes:
        """All of a small file. Raises FileNotFoundError if there is none."""
        return self._ask(name, lambda: self._bytes(name, None, None))

    def fetch(self, name: str, start: int, stop: int) -> bytes:
        def get() -> bytes:
            data = self._bytes(name, start, stop)
            if len(data) != stop - start:  # cut short on its way, or a server that knows no ranges
                raise OSError(f"bytes {start} to {stop} were asked for, and {len(data)} bytes came")
            return data

        try:
            return self._ask(name, get)
        except FileNotFoundError:
            raise UserError(f"{self.where(name)} is missing") from None

    def sizes(self, names: Sequence[str]) -> dict[str, int | None]:
        """Of those files that are there; None where the server does not tell."""
        if self.url.startswith(("http://", "https://")):  # has no listing, so one question a file
            with ThreadPoolExecutor(IN_FLIGHT) as pool:
                found = zip(names, pool.map(self._size, names), strict=True)
                return {name: size for name, size in found if size is not ABSENT}
        self.filesystem.invalidate_cache(self.root)
        listed = self._ask("", lambda: self.filesystem.ls(self.root, detail=True))
        here = {entry["name"].rsplit("/", 1)[-1]: entry["size"] for entry in listed}
        return {name: here[name] for name in names if name in here}

    def open(self, name: str, *, size: int, header: int, checksum: str) -> "Cached":
        return Cached(self, name, size=size, header=header, checksum=checksum)

    def _size(self, name: str) -> Any:
        try:
            return self._ask(name, lambda: self.filesystem.info(f"{self.root}/{name}"))["size"]
        except FileNotFoundError:
            return ABSENT

    def _bytes(self, name: str, start: int | None, stop: int | None) -> bytes:
        return store.whole(self.filesystem, f"{self.root}/{name}", start, stop)

    def _ask(self, name: str, question: Callable[[], T]) -> T:
        return store.ask(self.where(name), question)


class Cached:
    """A file at a URL, as far as it is here: a local file of its full size with holes in it, and beside it a
    byte for each block, set once the block is on the disk, and one more, set once the whole was compared with
    its checksum. The first `header` bytes do not count for that."""

    def __init__(self, remote: Remote, name: str, *, size: int, header: int, checksum: str) -> None:
        self.remote, self.name, self.size, self.header, self.checksum = remote, name, size, header, checksum
        self.blocks = -(-size // BLOCK)
        self.path, self.data, self.flags = enter(remote.where(name), size, self.blocks + 1, checksum)
        for descriptor in (self.data, self.flags):
            weakref.finalize(self, os.close, descriptor)
        self.content = np.frombuffer(mmap.mmap(self.data, size, prot=mmap.PROT_READ), np.uint8)
        self.lock = threading.Lock()
        self.coming: dict[int, Future[None]] = {}
        self.whole = False
        self._compare()

    def want(self, start: int, stop: int) -> list["Future[None]"]:
        """Sets out to fetch what is missing of these bytes."""
        if self.whole:
            return []
        first, last = start // BLOCK, -(-min(stop, self.size) // BLOCK)
        present = os.pread(self.flags, last - first, first)
        missing = [first + i for i, flag in enumerate(present) if not flag]
        with self.lock:
            for block in missing:
                if block not in self.coming:
                    self.coming[block] = in_background(self._fetch, block)
            return [self.coming[block] for block in missing]

    def need(self, start: int, stop: int) -> None:
        """Returns once these bytes are here."""
        for future in self.want(start, stop):
            try:
                future.result()
            except BaseException:
                with self.lock:  # the next who asks may have better luck
                    self.coming = {block: one for block, one in self.coming.items() if one is not future}
                raise

    def _fetch(self, block: int) -> None:
        with self.remote.room, alone(self.flags, block):
            if os.pread(self.flags, 1, block) != PRESENT:  # another process may have been at it
                start = block * BLOCK
                data = self.remote.fetch(self.name, start, min(start + BLOCK, self.size))
                with cache_troubles(self.path):
                    write(self.data, data, start)
                    os.fsync(self.data)  # before the flag: it must not outlive its block in a power cut
                    os.pwrite(self.flags, PRESENT, block)
        self._compare()

    def _compare(self) -> None:
        """Once all is here, with the checksum that the index has."""
        flags = os.pread(self.flags, self.blocks + 1, 0)
        if ABSENT in flags[:-1]:
            return
        if flags[-1:] == ABSENT:
            found = shards.checksum(self.content[self.header :].data)
            if found != self.checksum:
                forget(self.path)
                raise UserError(
                    f"{self.remote.where(self.name)} has checksum {found}, and the index says "
                    f"{self.checksum}: it was damaged, or made again since this data was opened"
                )
            os.pwrite(self.flags, PRESENT, self.blocks)
        self.whole = True


def in_background(function: Callable[..., T], *args: Any) -> "Future[T]":
    """In a daemon thread: those of a ThreadPoolExecutor would be waited for when the program ends."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="fetch", daemon=True).start()
    return future


def enter(url: str, size: int, flags: int, checksum: str) -> tuple[Path, int, int]:
    """A file's place in the cache, made if there is none: its path, descriptors of it and of its flags."""
    folder = Path(os.environ.get("HEADRACE_CACHE") or Path.home() / ".cache/headrace") / "shards"
    key = hashlib.sha256(f"{url}\n{checksum}\n{size}".encode()).hexdigest()[:32]
    path = folder / f"{key}-{url.rsplit('/', 1)[-1]}"
    with cache_troubles(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock"):
            if not (holds(path, size) and holds(flags_of(path), flags)):
                forget(path)
                make_room(folder, size)
                for file, length in ((path, size), (flags_of(path), flags)):  # zeros, which take no room yet
                    with file.open("xb") as new:
                        new.truncate(length)
            os.utime(path)  # used now
            return path, os.open(path, os.O_RDWR), os.open(flags_of(path), os.O_RDWR)


def make_room(folder: Path, size: int) -> None:
    """Removes what was not used for longest. Whoever has it mapped keeps it until done."""
    asked = os.environ.get("HEADRACE_CACHE_GB") or "50"
    try:
        limit = float(asked) * 1e9
    except ValueError:
        raise UserError(f"HEADRACE_CACHE_GB: found {asked!r}, expected a number") from None
    found = sorted((file.stat().st_mtime_ns, file.stat().st_size, file) for file in folder.glob("*.npy"))
    total = size + sum(length for _, length, _ in found)
    for _, length, file in found:
        if total <= limit:
            return
        forget(file)
        total -= length


def forget(path: Path) -> None:
    flags_of(path).unlink(missing_ok=True)  # first: flags without a file would be lies
    path.unlink(missing_ok=True)


def flags_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.blocks")


def holds(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size == size


def write(descriptor: int, data: bytes, start: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, start)
        rest, start = rest[written:], start + written


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # let go when the file is closed, also by death
        yield


@contextmanager
def alone(descriptor: int, byte: int) -> Iterator[None]:
    """Only one process at a time may hold this byte. The lock is the open file's, not the process's: the
    kernel would take threads of two processes that wait for each other's blocks for a deadlock. Systems other
    than Linux lack such locks; there two processes may fetch the same block."""
    command = getattr(fcntl, "F_OFD_SETLKW", None)
    if command is None:
        yield
        return
    fcntl.fcntl(descriptor, command, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    try:
        yield
    finally:
        fcntl.fcntl(descriptor, command, struct.pack("hhqqi", fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))


@contextmanager
def cache_troubles(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        cures = {errno.ENOSPC: "; make room, lower HEADRACE_CACHE_GB"}
        cure = cures.get(error.errno or 0, "") + "; or name another folder with HEADRACE_CACHE"
        raise UserError(f"{path}, a place in the cache, cannot be used: {error.strerror}{cure}") from None
