"""Files at a path or at a URL such as gs://bucket/folder: read, write, list, move and remove.

Permanent errors of a server (a missing bucket, no permission) are reported at once. Transient ones are
retried with longer and longer waits, and then raised as `Unreachable`, whose exit code makes `train`
restart."""

import base64
import contextlib
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from headrace.errors import Unreachable, UserError
from headrace.storage import redact

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

MAX_TRIES = 6
FIRST_WAIT = 0.5  # seconds; doubled each time, so about 15 in all; the client itself retries as well
RESPONSE_TIMEOUT = 60.0  # seconds; a connection may hang without an error
READ_TIMEOUT = 30.0  # seconds without a byte after which gcsfs gives up a connection and opens another
BUCKET_SCHEMES = ("gs://", "gcs://")
COMMITTED = "commit_success.txt"  # written last by Orbax, where folders cannot be renamed

Location = str | os.PathLike[str]
T = TypeVar("T")


@dataclass(frozen=True)
class FileInfo:
    """Size and age of a file."""

    size: int  # bytes
    modified_at: float  # seconds since 1970
    crc32c: int | None = None  # of the content, if the server stores it


@dataclass(frozen=True)
class ObjectVersion:
    """One generation of an object in a bucket."""

    content: bytes
    generation: int
    age: float  # seconds since it was written, by the clock of the server


def is_url(path: Location) -> bool:
    return "://" in os.fspath(path)


def is_bucket(path: Location) -> bool:
    return os.fspath(path).startswith(BUCKET_SCHEMES)


def join(folder: Location, *names: str) -> str:
    return "/".join([os.fspath(folder).rstrip("/"), *names])


def read(path: Location) -> bytes:
    """Read a file. Raises FileNotFoundError if there is none."""
    if not is_url(path):
        return Path(path).read_bytes()
    filesystem, root = open_filesystem(path)
    return retry(path, lambda: read_bytes(filesystem, root))


def write(path: Location, content: bytes) -> None:
    """Write a file atomically: an interrupted write leaves the old file, or none.

    A local file is synced to the disk before this returns."""
    if not is_url(path):
        local = Path(path)
        local.parent.mkdir(parents=True, exist_ok=True)
        draft = local.with_name(local.name + ".draft")
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(local)
        return
    filesystem, root = open_filesystem(path)
    try:
        retry(path, lambda: filesystem.pipe_file(root, content), verb="written")
    except FileNotFoundError:
        check_bucket(path)
        raise


def exists(path: Location) -> bool:
    """Whether there is a file or folder at this path or URL."""
    if not is_url(path):
        return Path(path).exists()
    filesystem, root = open_filesystem(path)
    return retry(path, lambda: filesystem.exists(root))


def list_names(folder: Location) -> list[str]:
    """Names of the files and folders directly in a folder, sorted. Empty if there is no such folder."""
    if not is_url(folder):
        try:
            return sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
    filesystem, root = open_filesystem(folder)
    try:
        paths = retry(folder, lambda: filesystem.ls(root, detail=False))
    except FileNotFoundError:
        return []
    return sorted({path.rstrip("/").rpartition("/")[2] for path in paths if path.rstrip("/") != root})


def list_files(folder: Location) -> dict[str, FileInfo]:
    """List all files below a folder, at any depth, by their path relative to it.

    Files that disappear while the folder is read are skipped. A bucket needs one request per 1,000 files."""
    if not is_url(folder):
        return _list_local_files(folder)
    filesystem, root = open_filesystem(folder)
    details = retry(folder, lambda: filesystem.find(root, detail=True))
    return {
        name[len(root) + 1 :]: FileInfo(info["size"], to_timestamp(info.get("mtime")), parse_crc32c(info))
        for name, info in sorted(details.items())
        if name != root and not name.endswith("/")
    }


def _list_local_files(folder: Location) -> dict[str, FileInfo]:
    def raise_unless_missing(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    paths = [
        Path(directory, name)
        for directory, _, names in os.walk(folder, onerror=raise_unless_missing)
        for name in names
    ]
    files: dict[str, FileInfo] = {}
    for path in sorted(paths):
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            files[str(path.relative_to(folder))] = FileInfo(stat.st_size, stat.st_mtime)
    return files


def move(folder: Location, target: Location, *, last: Sequence[str] = ()) -> None:
    """Rename a folder.

    In a bucket the files are moved one by one, those named in `last` at the end and in this order, so that
    an interrupted move can be recognized."""
    if not is_url(folder):
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(folder).rename(target)
        return
    filesystem, root = open_filesystem(folder)
    _, target_root = open_filesystem(target)
    files = list_files(folder)
    ordered = [name for name in files if name not in last] + [name for name in last if name in files]
    for name in ordered:
        move_file = partial(filesystem.mv, [f"{root}/{name}"], [f"{target_root}/{name}"])
        retry(join(folder, name), move_file, verb="moved")


def remove(folder: Location, *, first: Sequence[str] = ()) -> None:
    """Remove a folder and everything in it. Does nothing if there is no such folder.

    In a bucket the files named in `first` are removed before all others, one by one."""
    if not is_url(folder):
        shutil.rmtree(folder, ignore_errors=not Path(folder).exists())
        return
    filesystem, root = open_filesystem(folder)
    files = list_files(folder)
    unordered = sorted(name for name in files if name not in first)
    for batch in [*([name] for name in first if name in files), unordered]:
        paths = [f"{root}/{name}" for name in batch]
        with contextlib.suppress(FileNotFoundError):  # removed by an earlier try, whose answer was lost
            if paths:
                retry(folder, partial(filesystem.rm, paths), verb="removed")


@contextlib.contextmanager
def local_copy(folder: Location, file_names: Sequence[str]) -> Iterator[Path]:
    """A local folder with these files of `folder`, as far as they exist.

    That is the folder itself if it is local, otherwise a temporary copy."""
    if not is_url(folder):
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory(prefix="headrace-") as scratch:
        for name in file_names:
            with contextlib.suppress(FileNotFoundError):
                write(Path(scratch) / name, read(join(folder, name)))
        yield Path(scratch)


def read_version(url: str) -> ObjectVersion | None:
    """Read the current generation of an object in a bucket, or None if there is no such object."""
    filesystem, root = open_filesystem(url)
    bucket, _, name = root.partition("/")

    def request() -> ObjectVersion:
        headers, body = filesystem.call("GET", "b/{}/o/{}", bucket, name)
        metadata = json.loads(body)
        generation = str(metadata["generation"])
        now = parsedate_to_datetime(headers["Date"]).timestamp() if "Date" in headers else time.time()
        _, content = filesystem.call("GET", "b/{}/o/{}", bucket, name, alt="media", generation=generation)
        written_at = filesystem._parse_timestamp(metadata["updated"]).timestamp()
        return ObjectVersion(content, int(generation), max(now - written_at, 0.0))

    try:
        return retry(url, request)
    except FileNotFoundError:
        check_bucket(url)
        return None


def write_if_generation(url: str, content: bytes, generation: int) -> int | None:
    """Write an object in a bucket only if its current generation is `generation` (0: it does not exist).

    Returns the new generation, or None if another process has changed the object. The content must be unique:
    it shows whether an earlier try, whose answer was lost, has succeeded."""
    filesystem, root = open_filesystem(url)
    bucket, _, name = root.partition("/")
    endpoint = f"{filesystem._location}/upload/storage/v1/b/{quote(bucket, safe='')}/o"
    parameters = dict(uploadType="media", name=name, ifGenerationMatch=str(generation))
    headers = {"Content-Type": "application/octet-stream"}

    def request() -> int:
        reply = filesystem.call("POST", endpoint, **parameters, data=content, headers=headers, json_out=True)
        return int(reply["generation"])

    try:
        return retry(url, request, verb="written")
    except FileExistsError:
        current = read_version(url)
        return current.generation if current is not None and current.content == content else None
    except FileNotFoundError:
        check_bucket(url)
        raise


def delete_if_generation(url: str, generation: int) -> None:
    """Delete an object in a bucket if its current generation is `generation`; otherwise do nothing."""
    filesystem, root = open_filesystem(url)
    bucket, _, name = root.partition("/")
    request = partial(filesystem.call, "DELETE", "b/{}/o/{}", bucket, name, ifGenerationMatch=str(generation))
    with contextlib.suppress(FileNotFoundError, FileExistsError):
        retry(url, request, verb="removed")


def check_bucket(path: Location) -> None:
    """Raise UserError if the bucket of a URL does not exist: a message of its own, not "file not found"."""
    if not is_bucket(path):
        return
    filesystem, root = open_filesystem(path)
    bucket = root.partition("/")[0]
    try:
        retry(path, lambda: filesystem.call("GET", "b/{}/o", bucket, maxResults="1"))
    except FileNotFoundError:
        raise UserError(
            f"{redacted(path)}: there is no bucket {bucket}; "
            f"`gcloud storage buckets create gs://{bucket}` creates it"
        ) from None


def open_filesystem(url: Location) -> tuple["AbstractFileSystem", str]:
    """Return the fsspec file system of a URL, and the path in it."""
    import fsspec  # 0.1 s, only for URLs

    text = os.fspath(url)
    if is_bucket(text):
        prepare_gcsfs()
    try:
        filesystem, root = fsspec.core.url_to_fs(text)
    except ImportError as error:
        extra = "; pip install 'headrace[gcs]'" if is_bucket(text) else ""
        raise UserError(f"{redacted(text)} cannot be read: {error}{extra}") from None
    except ValueError as error:
        raise UserError(f"{redacted(text)} cannot be read: {error}") from None
    return filesystem, root.rstrip("/")


def prepare_gcsfs() -> None:
    """Configure gcsfs. Must run before its first use, including the one by Orbax.

    Listings are not cached, since tensorstore writes to the same bucket. The request for the kind of a bucket
    is disabled: it takes a minute where that service is blocked. Errors are not logged, since we report
    them."""
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        import aiohttp
        import fsspec
    except ImportError:
        return
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    settings = fsspec.config.conf.setdefault("gs", {})
    settings.setdefault("use_listings_cache", False)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=READ_TIMEOUT)
    settings.setdefault("requests_timeout", timeout)


def read_bytes(
    filesystem: "AbstractFileSystem", root: str, start: int | None = None, stop: int | None = None
) -> bytes:
    """Read a file or a part of it, with a timeout. fsspec itself would wait forever."""
    import fsspec

    if not filesystem.async_impl:
        return filesystem.cat_file(root, start=start, end=stop)
    return fsspec.asyn.sync(
        filesystem.loop, filesystem._cat_file, root, start=start, end=stop, timeout=RESPONSE_TIMEOUT
    )


def retry(path: Location, request: Callable[[], T], *, verb: str = "read") -> T:
    """Return the result of `request`, which is repeated after transient errors.

    Raises UserError if access is forbidden and Unreachable after the last try; other errors are passed on.
    `path` and `verb` ("read", "written") are for the message."""
    for attempt in range(MAX_TRIES):
        try:
            return request()
        except Exception as error:
            location = redacted(path)
            reason = redact.redact(" ".join(f"{type(error).__name__}: {error}".split()))
            if is_forbidden(error):
                raise UserError(f"{location} may not be {verb} ({reason}); check the credentials") from None
            if not is_transient(error):
                raise
            if attempt == MAX_TRIES - 1:
                raise Unreachable(
                    f"{location} could not be {verb} in {MAX_TRIES} tries; the last error: {reason}"
                ) from error
        # Of random length, so that requests that failed at the same time are not repeated at the same time.
        time.sleep(FIRST_WAIT * 2**attempt * random.uniform(0.5, 1.5))
    raise AssertionError


def is_forbidden(error: BaseException) -> bool:
    """Whether credentials are missing or do not suffice."""
    is_auth_error = type(error).__module__.startswith("google.auth") or str(error).startswith("Forbidden: ")
    return is_auth_error or isinstance(error, PermissionError) or http_status(error) in (401, 403)


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later: the server is busy, or the connection broke."""
    code = http_status(error)
    if code is not None:
        return code in (408, 429) or code >= 500
    aiohttp = sys.modules.get("aiohttp")
    connection_errors = (OSError, aiohttp.ClientError) if aiohttp else (OSError,)
    return isinstance(error, connection_errors) and not isinstance(error, FileNotFoundError | FileExistsError)


def http_status(error: BaseException) -> int | None:
    """HTTP status of an error of aiohttp (`status`) or gcsfs (`code`), or None."""
    codes = (getattr(error, name, None) for name in ("status", "code"))
    return next((code for code in codes if isinstance(code, int)), None)


def redacted(path: Location) -> str:
    """The path or URL without secrets, for messages."""
    return redact.redact_url(os.fspath(path))


def to_timestamp(modified: datetime | float | None) -> float:
    """Convert a modification time to seconds since 1970. File systems report datetimes, seconds or
    nothing."""
    return modified.timestamp() if isinstance(modified, datetime) else float(modified or 0)


def parse_crc32c(info: dict[str, Any]) -> int | None:
    """Return the CRC-32C from the details of an object in a bucket, or None if it has none."""
    encoded = info.get("crc32c")
    return int.from_bytes(base64.b64decode(encoded), "big") if encoded else None
