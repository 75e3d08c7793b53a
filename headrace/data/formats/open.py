"""Opens files wherever they are, on a local disk or at any URL that fsspec knows, and decompresses them if
their name says so. Damage to a compressed file is told as Bad once all that came before it has been read."""

import bz2
import gzip
import io
import lzma
import os
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa

from headrace.data.formats import Bad
from headrace.errors import UserError

COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
FETCHED = 8 << 20  # bytes a request: object stores are slow to answer and quick to send


def here(path: str | Path) -> Path:
    """A folder of this machine."""
    if is_url(str(path)):
        raise UserError(f"{path}: only data on this machine can be looked into; copy it here first")
    return Path(path)


def is_url(file: str) -> bool:
    return "://" in file and not file.startswith("file://")


def local_path(file: str) -> str:
    return file.removeprefix("file://")


def is_web(file: str) -> bool:
    return file.startswith(("http://", "https://"))


def bare(file: str) -> str:
    """Without the query that may follow a file's name in a URL: FILE?download=true."""
    return file.split("?")[0] if is_web(file) else file


def compression(file: str) -> str | None:
    suffix = os.path.splitext(bare(file))[1].lower()
    return suffix if suffix in COMPRESSIONS else None


def suffix(file: str) -> str:
    """.jsonl for x.jsonl and x.jsonl.gz alike."""
    name = bare(file).lower().removesuffix(compression(file) or "")
    return os.path.splitext(name)[1]


def filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and what the URL is called there."""
    import fsspec  # takes 0.1 s, for those who need it

    from headrace.storage import files as store

    protocol = url.split("://")[0]
    if store.is_bucket(url):
        store.prepare_gcsfs()
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        hint = '`pip install ".[gcs]"`' if protocol in ("gs", "gcs") else str(error)
        raise UserError(f"{url}: {protocol}:// needs a package that is not installed; {hint}") from None
    except ValueError as error:
        raise UserError(f"{url}: {error}") from None


def stamp(file: str) -> tuple[str, ...]:
    """What changes when a file does: its size, and when it was written or the name of the version. Of a
    folder, which stands for all in it, nothing."""
    try:
        if not is_url(file):
            found = os.stat(local_path(file))
            is_file = os.path.isfile(local_path(file))
            return (str(found.st_size), str(found.st_mtime_ns)) if is_file else ()
        system, path = filesystem(file)
        info = system.info(path)
    except Exception as error:
        raise unreadable(file, error) from error
    return tuple(str(info[key]) for key in ("size", "etag", "ETag", "mtime", "updated") if key in info)


def has_ranges(url: str) -> bool:
    """Whether a file can be read from its middle. Some web servers only send files from the beginning."""
    if not is_web(url):
        return True
    system, path = filesystem(url)
    try:
        return len(system.cat_file(path, start=1, end=2)) == 1
    except ValueError:  # what fsspec says if the answer is the whole file
        return False


def open_random(file: str) -> Any:
    """A file for Arrow to read here and there."""
    try:
        if not is_url(file):
            return pa.memory_map(local_path(file))
        system, path = filesystem(file)
        if not has_ranges(file):
            return io.BytesIO(system.cat_file(path))
        return system.open(path, "rb", block_size=FETCHED)
    except Exception as error:
        raise unreadable(file, error) from error


def unreadable(file: str, error: Exception) -> Exception:
    """What to raise for trouble in opening a file. Stores have exceptions of their own, hence any at all."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, FileNotFoundError) and error.__cause__ is None:
        return UserError(f"{file}: no such file")
    # Whatever a web server answers, fsspec says that there is no such file, and has the reason as the cause.
    cause = error.__cause__ or error
    reason = getattr(cause, "strerror", None) or f"{type(cause).__name__}: {cause}"
    return UserError(f"{file}: cannot be opened: {reason}")


class Stream:
    """A file read from `start` to its end. Only files that are not compressed can be begun in the middle."""

    def __init__(self, file: str, start: int = 0) -> None:
        try:
            self.raw = _open_raw(file, start)
        except Exception as error:
            raise unreadable(file, error) from error
        self.inner = _decompressed(compression(file), self.raw)
        self.ready = memoryview(b"")  # read, but not handed out
        self.damage: Bad | None = None

    def read(self, size: int) -> bytes:
        """`size` bytes; fewer only at the end, or before damage, which is raised once nothing is left."""
        pieces: list[bytes | memoryview] = [self.ready[:size]] if self.ready else []
        have, self.ready = len(self.ready), self.ready[size:]
        while have < size and self.damage is None and (piece := self._piece(size - have)):
            pieces.append(piece if have + len(piece) <= size else memoryview(piece)[: size - have])
            self.ready = memoryview(piece)[size - have :]
            have += len(piece)
        if self.damage is not None and not have:
            raise self.damage
        return b"".join(pieces)

    def _piece(self, size: int) -> bytes:
        if self.inner is None:
            return self.raw.read(size)
        try:
            # read1 rather than read, which would lose what it has when it meets the damage.
            return self.inner.read1(min(size, 1 << 18))
        except EOFError:
            self.damage = Bad("truncated file", "ends in the middle of its compressed data")
        except (OSError, zlib.error, lzma.LZMAError) as error:
            self.damage = Bad("damaged file", f"cannot be decompressed: {error}")
        return b""

    def read_all(self, limit: int) -> bytes:
        """The whole rest, and a little more than `limit` bytes if there are more."""
        pieces, left = [], limit
        while left >= 0 and (piece := self.read(min(FETCHED, left + 1))):
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def close(self) -> None:
        self.raw.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


class Zstandard:
    """Decompresses zstd frames with Arrow's codec, which tells a cut file from a whole one."""

    def __init__(self, raw: Any) -> None:
        self.inner = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")

    def read1(self, size: int) -> bytes:
        try:
            # Little at a time: what it has when it meets the damage is lost.
            return self.inner.read(min(size, 1 << 16))
        except OSError as error:
            raise EOFError if "Truncated" in str(error) else error from None


def _open_raw(file: str, start: int) -> Any:
    if not is_url(file):
        raw = open(local_path(file), "rb", buffering=0 if compression(file) is None else FETCHED)  # noqa: SIM115
        raw.seek(start)
        return raw
    system, path = filesystem(file)
    if start == 0 and is_web(file):
        return system.open(path, "rb", block_size=0)  # one request for all, which every server can answer
    raw = system.open(path, "rb", block_size=FETCHED, cache_type="readahead")
    raw.seek(start)
    return raw


def _decompressed(compression: str | None, raw: Any) -> Any:
    match compression:
        case ".gz":
            return gzip.GzipFile(fileobj=raw)
        case ".bz2":
            return bz2.BZ2File(raw)
        case ".xz":
            return lzma.LZMAFile(raw)
        case ".zst":
            return Zstandard(raw)
    return None
