"""Files for reading, on a local disk or at any URL that fsspec supports, decompressed if their name has such
a suffix. Damage to a compressed file raises BadInput, after everything before the damage has been read."""

import bz2
import gzip
import io
import lzma
import os
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from headrace.data.formats import BadInput
from headrace.errors import UserError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
REQUEST_BYTES = 8 << 20  # object stores respond slowly and then send fast


class Decompressor(Protocol):
    def read1(self, size: int, /) -> bytes: ...


def require_local(path: str | Path) -> Path:
    """The path of a local folder. Raises UserError for a URL."""
    if is_url(str(path)):
        raise UserError(f"{path}: only local data can be inspected; copy it to this machine first")
    return Path(path)


def is_url(file: str) -> bool:
    """Whether a path is a URL other than file://."""
    return "://" in file and not file.startswith("file://")


def local_path(file: str) -> str:
    return file.removeprefix("file://")


def is_web(file: str) -> bool:
    return file.startswith(("http://", "https://"))


def strip_query(file: str) -> str:
    """Remove the query that may follow a file's name in a web URL: FILE?download=true."""
    return file.split("?")[0] if is_web(file) else file


def compression_suffix(file: str) -> str | None:
    suffix = os.path.splitext(strip_query(file))[1].lower()
    return suffix if suffix in COMPRESSIONS else None


def format_suffix(file: str) -> str:
    """The suffix without that of the compression: .jsonl for x.jsonl and for x.jsonl.gz."""
    name = strip_query(file).lower().removesuffix(compression_suffix(file) or "")
    return os.path.splitext(name)[1]


def open_filesystem(url: str) -> "tuple[AbstractFileSystem, str]":
    """The fsspec file system of a URL, and the path of the URL in it."""
    import fsspec  # takes 0.1 s, only needed for URLs

    from headrace.storage import files

    protocol = url.split("://")[0]
    if files.is_bucket(url):
        files.prepare_gcsfs()
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        hint = '`pip install ".[gcs]"`' if protocol in ("gs", "gcs") else str(error)
        raise UserError(f"{url}: {protocol}:// needs a package that is not installed; {hint}") from None
    except ValueError as error:
        raise UserError(f"{url}: {error}") from None


def change_stamp(file: str) -> tuple[str, ...]:
    """Values that change when a file does: its size, and its time of writing or the name of its version.
    Empty for a folder, which stands for its files."""
    try:
        if not is_url(file):
            stat = os.stat(local_path(file))
            is_file = os.path.isfile(local_path(file))
            return (str(stat.st_size), str(stat.st_mtime_ns)) if is_file else ()
        system, path = open_filesystem(file)
        info = system.info(path)
    except Exception as error:
        raise to_open_error(file, error) from error
    return tuple(str(info[key]) for key in ("size", "etag", "ETag", "mtime", "updated") if key in info)


def supports_ranges(url: str) -> bool:
    """Whether a file can be read from its middle. Some web servers send files only from their beginning."""
    if not is_web(url):
        return True
    system, path = open_filesystem(url)
    try:
        return len(system.cat_file(path, start=1, end=2)) == 1
    except ValueError:  # fsspec's error for a response with the full file
        return False


def open_random(file: str) -> Any:
    """Open a file for random access by Arrow."""
    try:
        if not is_url(file):
            return pa.memory_map(local_path(file))
        system, path = open_filesystem(file)
        if not supports_ranges(file):
            return io.BytesIO(system.cat_file(path))
        return system.open(path, "rb", block_size=REQUEST_BYTES)
    except Exception as error:
        raise to_open_error(file, error) from error


def to_open_error(file: str, error: Exception) -> UserError:
    """The UserError to raise if a file cannot be opened. Object stores raise exceptions of their own, so
    `error` may be any."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, FileNotFoundError) and error.__cause__ is None:
        return UserError(f"{file}: no such file")
    # fsspec reports every failure of a web server as a missing file, with the reason as the cause.
    cause = error.__cause__ or error
    reason = getattr(cause, "strerror", None) or f"{type(cause).__name__}: {cause}"
    return UserError(f"{file}: cannot be opened: {reason}")


class InputStream:
    """A file, decompressed, read from byte `start` to its end. `start` must be 0 for a compressed file."""

    def __init__(self, file: str, start: int = 0) -> None:
        try:
            self.raw = _open_raw(file, start)
        except Exception as error:
            raise to_open_error(file, error) from error
        self.decompressor = _open_decompressor(compression_suffix(file), self.raw)
        self.buffer = memoryview(b"")  # read, but not yet returned
        self.damage: BadInput | None = None

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer at the end of the file or before damage. Raises BadInput at the
        damage."""
        pieces: list[bytes | memoryview] = [self.buffer[:size]] if self.buffer else []
        have, self.buffer = len(self.buffer), self.buffer[size:]
        while have < size and self.damage is None and (piece := self._read_piece(size - have)):
            pieces.append(piece if have + len(piece) <= size else memoryview(piece)[: size - have])
            self.buffer = memoryview(piece)[size - have :]
            have += len(piece)
        if self.damage is not None and not have:
            raise self.damage
        return b"".join(pieces)

    def _read_piece(self, size: int) -> bytes:
        if self.decompressor is None:
            return self.raw.read(size)
        try:
            # `read1`, since `read` loses what it has decompressed when it reaches the damage.
            return self.decompressor.read1(min(size, 1 << 18))
        except EOFError:
            self.damage = BadInput("truncated file", "ends in the middle of its compressed data")
        except (OSError, zlib.error, lzma.LZMAError) as error:
            self.damage = BadInput("damaged file", f"cannot be decompressed: {error}")
        return b""

    def read_all(self, limit: int) -> bytes:
        """The remainder of the file, or `limit` + 1 bytes if there are more than `limit`."""
        pieces, remaining = [], limit
        while remaining >= 0 and (piece := self.read(min(REQUEST_BYTES, remaining + 1))):
            pieces.append(piece)
            remaining -= len(piece)
        return b"".join(pieces)

    def close(self) -> None:
        self.raw.close()

    def __enter__(self) -> "InputStream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ZstdReader:
    """Decompresses zstd frames with Arrow's codec, which distinguishes a truncated file from a complete
    one."""

    def __init__(self, raw: IO[bytes]) -> None:
        self.inner = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")

    def read1(self, size: int, /) -> bytes:
        """At most `size` bytes. Raises EOFError if the file is truncated, OSError if it is damaged."""
        try:
            # Small pieces: what the codec has decompressed when it reaches the damage is lost.
            return self.inner.read(min(size, 1 << 16))
        except OSError as error:
            raise EOFError if "Truncated" in str(error) else error from None


def _open_raw(file: str, start: int) -> IO[bytes]:
    if not is_url(file):
        buffering = 0 if compression_suffix(file) is None else REQUEST_BYTES
        raw = open(local_path(file), "rb", buffering=buffering)  # noqa: SIM115 (the caller closes it)
        raw.seek(start)
        return raw
    system, path = open_filesystem(file)
    if start == 0 and is_web(file):
        return system.open(
            path, "rb", block_size=0
        )  # one request for everything, which every server supports
    raw = system.open(path, "rb", block_size=REQUEST_BYTES, cache_type="readahead")
    raw.seek(start)
    return raw


def _open_decompressor(compression: str | None, raw: IO[bytes]) -> Decompressor | None:
    match compression:
        case ".gz":
            return gzip.GzipFile(fileobj=raw)
        case ".bz2":
            return bz2.BZ2File(raw)
        case ".xz":
            return lzma.LZMAFile(raw)
        case ".zst":
            return ZstdReader(raw)
    return None
