"""Local cache of packed data at a URL.

Blocks of remote files are fetched, several at once, into files of the cache, which are memory-mapped like
local data. While the cache has room nothing is fetched twice, whether by this process, another one on the
machine or a later run.

HEADRACE_CACHE is the cache's folder (~/.cache/headrace), HEADRACE_CACHE_GB its size limit (50)."""

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
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from headrace.data import shards
from headrace.errors import UserError
from headrace.storage import files

BLOCK = 8 << 20  # bytes; a bucket takes about 50 ms to respond, so smaller requests mostly wait
AHEAD = 8 * BLOCK  # 64 MB: 30 M tokens, which eight chips train on for some seconds
IN_FLIGHT = 16  # requests
PRESENT, ABSENT = b"\1", b"\0"

T = TypeVar("T")


class RemoteFolder:
    """The folder of a dataset at any URL that fsspec supports."""

    prefetch_bytes = AHEAD

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.filesystem, self.root = files.open_filesystem(self.url)
        self.slots = threading.Semaphore(IN_FLIGHT)

    def location(self, name: str) -> str:
        return f"{self.url}/{name}"

    def read(self, name: str) -> bytes:
        """Read a small file. Raises FileNotFoundError if there is none."""
        return self._retry(name, lambda: self._read_bytes(name, None, None))

    def fetch(self, name: str, start: int, stop: int) -> bytes:
        """Read bytes `start` to `stop` of a file. UserError if there is no such file."""

        def request() -> bytes:
            data = self._read_bytes(name, start, stop)
            if len(data) != stop - start:  # truncated on the way, or a server without ranges
                raise OSError(f"requested bytes {start} to {stop}, received {len(data)} bytes")
            return data

        try:
            return self._retry(name, request)
        except FileNotFoundError:
            raise UserError(f"{self.location(name)} is missing") from None

    def file_sizes(self, names: Sequence[str]) -> dict[str, int | None]:
        """Sizes of those files that exist; None where the server does not report one."""
        if self.url.startswith(("http://", "https://")):  # no listing: one request per file
            with ThreadPoolExecutor(IN_FLIGHT) as pool:
                return dict(found for found in pool.map(self._find_size, names) if found is not None)
        self.filesystem.invalidate_cache(self.root)
        listing = self._retry("", lambda: self.filesystem.ls(self.root, detail=True))
        sizes = {entry["name"].rsplit("/", 1)[-1]: entry["size"] for entry in listing}
        return {name: sizes[name] for name in names if name in sizes}

    def open(self, name: str, *, size: int, header: int, checksum: str) -> "CachedRemoteFile":
        return CachedRemoteFile(self, name, size=size, header=header, checksum=checksum)

    def _find_size(self, name: str) -> tuple[str, int | None] | None:
        """The name and size of a file; None if there is no such file."""
        try:
            info = self._retry(name, lambda: self.filesystem.info(f"{self.root}/{name}"))
        except FileNotFoundError:
            return None
        return name, info["size"]

    def _read_bytes(self, name: str, start: int | None, stop: int | None) -> bytes:
        return files.read_bytes(self.filesystem, f"{self.root}/{name}", start, stop)

    def _retry(self, name: str, request: Callable[[], T]) -> T:
        return files.retry(self.location(name), request)


class CachedRemoteFile:
    """A remote file, as far as it is in the cache.

    A local file of full size has holes for what has not been fetched. A second file has a flag byte for each
    block, set when the block is on the disk, and a last one, set when the whole file has been compared with
    its checksum, which does not cover the first `header` bytes."""

    def __init__(self, remote: RemoteFolder, name: str, *, size: int, header: int, checksum: str) -> None:
        self.remote, self.name, self.size, self.header, self.checksum = remote, name, size, header, checksum
        self.blocks = -(-size // BLOCK)
        self.path, self.data, self.flags = open_cache_files(
            remote.location(name), size, self.blocks + 1, checksum
        )
        for descriptor in (self.data, self.flags):
            weakref.finalize(self, os.close, descriptor)
        self.content = np.frombuffer(mmap.mmap(self.data, size, prot=mmap.PROT_READ), np.uint8)
        self.lock = threading.Lock()
        self.pending: dict[int, Future[None]] = {}  # by block; includes those that are done
        self.is_complete = False
        self._verify_if_complete()

    def prefetch(self, start: int, stop: int) -> list["Future[None]"]:
        """Start to fetch the missing blocks of these bytes. Returns their futures."""
        if self.is_complete:
            return []
        first, last = start // BLOCK, -(-min(stop, self.size) // BLOCK)
        present = os.pread(self.flags, last - first, first)
        missing = [first + i for i, flag in enumerate(present) if not flag]
        with self.lock:
            for block in missing:
                if block not in self.pending:
                    self.pending[block] = run_in_background(partial(self._fetch_block, block))
            return [self.pending[block] for block in missing]

    def ensure(self, start: int, stop: int) -> None:
        """Wait until these bytes can be read from `content`."""
        for future in self.prefetch(start, stop):
            try:
                future.result()
            except BaseException:
                with self.lock:  # so that the next call tries again
                    self.pending = {
                        block: pending for block, pending in self.pending.items() if pending is not future
                    }
                raise

    def _fetch_block(self, block: int) -> None:
        with self.remote.slots, lock_byte(self.flags, block):
            if os.pread(self.flags, 1, block) != PRESENT:  # another process may have fetched it meanwhile
                start = block * BLOCK
                data = self.remote.fetch(self.name, start, min(start + BLOCK, self.size))
                with translate_cache_errors(self.path):
                    write_at(self.data, data, start)
                    os.fsync(self.data)  # before the flag, which must not outlive its block in a power cut
                    os.pwrite(self.flags, PRESENT, block)
        self._verify_if_complete()

    def _verify_if_complete(self) -> None:
        """Once all blocks are there, compare the file with the checksum of the index."""
        flags = os.pread(self.flags, self.blocks + 1, 0)
        if ABSENT in flags[:-1]:
            return
        if flags[-1:] == ABSENT:
            checksum = shards.crc32_hex(self.content[self.header :].data)
            if checksum != self.checksum:
                remove_cached(self.path)
                raise UserError(
                    f"{self.remote.location(self.name)} has checksum {checksum}, and the index says "
                    f"{self.checksum}: it was damaged, or made again since this data was opened"
                )
            os.pwrite(self.flags, PRESENT, self.blocks)
        self.is_complete = True


def run_in_background(function: Callable[[], T]) -> "Future[T]":
    """Call a function in a daemon thread. A program would wait for threads of a pool when it ends."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="fetch", daemon=True).start()
    return future


def open_cache_files(url: str, size: int, num_flags: int, checksum: str) -> tuple[Path, int, int]:
    """Open the cached file of a URL and its flags, which are created if necessary.

    Returns the path, and the descriptors of both files."""
    folder = Path(os.environ.get("HEADRACE_CACHE") or Path.home() / ".cache/headrace") / "shards"
    key = hashlib.sha256(f"{url}\n{checksum}\n{size}".encode()).hexdigest()[:32]
    path = folder / f"{key}-{url.rsplit('/', 1)[-1]}"
    with translate_cache_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with lock_file(folder / "lock"):
            if not (has_size(path, size) and has_size(flags_path(path), num_flags)):
                remove_cached(path)
                evict(folder, size)
                for file, length in ((path, size), (flags_path(path), num_flags)):
                    with file.open("xb") as new:
                        new.truncate(length)  # zeros that take no space on the disk yet
            os.utime(path)  # the time of its last use
            return path, os.open(path, os.O_RDWR), os.open(flags_path(path), os.O_RDWR)


def evict(folder: Path, size: int) -> None:
    """Remove the least recently used files of the cache until another `size` bytes fit.

    A process that has mapped a removed file keeps it until it ends."""
    text = os.environ.get("HEADRACE_CACHE_GB") or "50"
    try:
        limit = float(text) * 1e9
    except ValueError:
        raise UserError(f"HEADRACE_CACHE_GB: found {text!r}, expected a number") from None
    cached = sorted((file.stat().st_mtime_ns, file.stat().st_size, file) for file in folder.glob("*.npy"))
    total = size + sum(length for _, length, _ in cached)
    for _, length, file in cached:
        if total <= limit:
            return
        remove_cached(file)
        total -= length


def remove_cached(path: Path) -> None:
    """Remove a file of the cache and its flags."""
    flags_path(path).unlink(missing_ok=True)  # first: flags of a file that is gone would be wrong
    path.unlink(missing_ok=True)


def flags_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.blocks")


def has_size(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size == size


def write_at(descriptor: int, data: bytes, start: int) -> None:
    """Write all of `data` at byte `start` of an open file."""
    remaining = memoryview(data)
    while remaining:
        written = os.pwrite(descriptor, remaining, start)
        remaining, start = remaining[written:], start + written


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is created. The kernel releases it if the process dies."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def lock_byte(descriptor: int, byte: int) -> Iterator[None]:
    """Hold an exclusive lock on one byte of an open file.

    The lock belongs to the open file, not to the process. With locks of processes the kernel would report a
    deadlock where threads of two processes wait for each other's blocks. Systems other than Linux have no
    such locks; there two processes may fetch the same block."""
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
def translate_cache_errors(path: Path) -> Iterator[None]:
    """Raise a UserError that names the cache for any OSError."""
    try:
        yield
    except OSError as error:
        advice = "; or name another folder with HEADRACE_CACHE"
        if error.errno == errno.ENOSPC:
            advice = "; free some space, or lower HEADRACE_CACHE_GB" + advice
        raise UserError(f"cache: {path} cannot be used: {error.strerror}{advice}") from None
