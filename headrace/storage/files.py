"""Files at a path or at a URL such as gs://bucket/folder, in one way: read, written, listed, moved, removed.
What a server refuses for good is told at once; what may pass is asked for again, after longer and longer
waits, and told (with a code that makes `train` start again) when it does not."""

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
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from headrace.storage import redact as secret
from headrace.errors import Unreachable, UserError

TRIES = 6
FIRST_WAIT = 0.5  # seconds; doubled each time, so about 15 in all, on top of what the client itself retries
PATIENCE = 60.0  # seconds for an answer: a connection may hang without an error
SILENCE = 30.0  # seconds without a byte after which gcsfs takes a connection for broken and opens another
BUCKETS = ("gs://", "gcs://")
COMMITTED = "commit_success.txt"  # what Orbax writes last, where folders cannot be renamed

Location = str | os.PathLike[str]
T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """A file: bytes, seconds since 1970, and the CRC-32C of its content where the server keeps it."""

    size: int
    written: float
    crc: int | None = None


@dataclass(frozen=True)
class Version:
    """An object of a bucket at one of its generations, and how long ago it was written by the server's own
    clock."""

    content: bytes
    generation: int
    age: float


def is_url(path: Location) -> bool:
    return "://" in os.fspath(path)


def is_bucket(path: Location) -> bool:
    return os.fspath(path).startswith(BUCKETS)


def join(folder: Location, *names: str) -> str:
    return "/".join([os.fspath(folder).rstrip("/"), *names])


def read(path: Location) -> bytes:
    """All of a file. Raises FileNotFoundError if there is none."""
    if not is_url(path):
        return Path(path).read_bytes()
    files, root = filesystem(path)
    return ask(path, lambda: whole(files, root))


def write(path: Location, content: bytes) -> None:
    """The whole file or nothing: objects come into being with their last byte. On a disk it is there to stay
    when this returns."""
    if not is_url(path):
        near = Path(path)
        near.parent.mkdir(parents=True, exist_ok=True)
        draft = near.with_name(near.name + ".draft")
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(near)
        return
    files, root = filesystem(path)
    try:
        ask(path, lambda: files.pipe_file(root, content), verb="written")
    except FileNotFoundError:
        check_bucket(path)
        raise


def exists(path: Location) -> bool:
    if not is_url(path):
        return Path(path).exists()
    files, root = filesystem(path)
    return ask(path, lambda: files.exists(root))


def names(folder: Location) -> list[str]:
    """Of what lies directly in a folder; none if there is no folder."""
    if not is_url(folder):
        try:
            return sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
    files, root = filesystem(folder)
    try:
        found = ask(folder, lambda: files.ls(root, detail=False))
    except FileNotFoundError:
        return []
    return sorted({path.rstrip("/").rpartition("/")[2] for path in found if path.rstrip("/") != root})


def entries(folder: Location) -> dict[str, Entry]:
    """All files below a folder by their path in it, less those that go meanwhile. From a bucket in one
    question a thousand."""
    if not is_url(folder):

        def failed(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        there, walk = {}, os.walk(folder, onerror=failed)
        for path in sorted(Path(place, name) for place, _, inside in walk for name in inside):
            with contextlib.suppress(FileNotFoundError):
                about = path.stat()
                there[str(path.relative_to(folder))] = Entry(about.st_size, about.st_mtime)
        return there
    files, root = filesystem(folder)
    found = ask(folder, lambda: files.find(root, detail=True))
    return {
        name[len(root) + 1 :]: Entry(about["size"], moment(about.get("mtime")), crc_of(about))
        for name, about in sorted(found.items())
        if name != root and not name.endswith("/")
    }


def move(folder: Location, target: Location, *, last: Sequence[str] = ()) -> None:
    """A folder to another name. In a bucket file by file, `last` in this order at the end: a move that was
    cut off is recognised by them."""
    if not is_url(folder):
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(folder).rename(target)
        return
    files, root = filesystem(folder)
    _, goal = filesystem(target)
    found = entries(folder)
    for name in [*(name for name in found if name not in last), *(name for name in last if name in found)]:
        ask(join(folder, name), partial(files.mv, [f"{root}/{name}"], [f"{goal}/{name}"]), verb="moved")


def remove(folder: Location, *, first: Sequence[str] = ()) -> None:
    """A folder with all in it, or none. In a bucket, these names go before the rest, one after the other."""
    if not is_url(folder):
        shutil.rmtree(folder, ignore_errors=not Path(folder).exists())
        return
    files, root = filesystem(folder)
    there = entries(folder)
    rest = sorted(name for name in there if name not in first)
    for some in [*([name] for name in first if name in there), rest]:
        paths = [f"{root}/{name}" for name in some]
        with contextlib.suppress(FileNotFoundError):  # by an earlier try, whose answer was lost
            if paths:
                ask(folder, partial(files.rm, paths), verb="removed")


@contextlib.contextmanager
def near(folder: Location, wanted: Sequence[str]) -> Iterator[Path]:
    """A folder here with these files of another, as far as they are there: that itself, if it is here."""
    if not is_url(folder):
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory(prefix="headrace-") as scratch:
        for name in wanted:
            with contextlib.suppress(FileNotFoundError):
                write(Path(scratch) / name, read(join(folder, name)))
        yield Path(scratch)


def version(url: str) -> Version | None:
    """An object of a bucket as it is now; None if there is none."""
    files, root = filesystem(url)
    bucket, _, name = root.partition("/")

    def get() -> Version:
        headers, about = files.call("GET", "b/{}/o/{}", bucket, name)
        told = json.loads(about)
        now = parsedate_to_datetime(headers["Date"]).timestamp() if "Date" in headers else time.time()
        _, content = files.call(
            "GET", "b/{}/o/{}", bucket, name, alt="media", generation=str(told["generation"])
        )
        written = files._parse_timestamp(told["updated"]).timestamp()
        return Version(content, int(told["generation"]), max(now - written, 0.0))

    try:
        return ask(url, get)
    except FileNotFoundError:
        check_bucket(url)
        return None


def swap(url: str, content: bytes, generation: int) -> int | None:
    """Writes an object of a bucket if it is still of this generation, 0 for one that is not there yet. Its
    new generation, or None if somebody else was first. The content must be like no other."""
    files, root = filesystem(url)
    bucket, _, name = root.partition("/")
    place = f"{files._location}/upload/storage/v1/b/{quote(bucket, safe='')}/o"
    how = dict(uploadType="media", name=name, ifGenerationMatch=str(generation))
    kind = {"Content-Type": "application/octet-stream"}

    def put() -> int:
        return int(files.call("POST", place, **how, data=content, headers=kind, json_out=True)["generation"])

    try:
        return ask(url, put, verb="written")
    except FileExistsError:  # perhaps it was us: the answer to an earlier try may have been lost
        found = version(url)
        return found.generation if found is not None and found.content == content else None
    except FileNotFoundError:
        check_bucket(url)
        raise


def drop(url: str, generation: int) -> None:
    """Removes an object of a bucket if it is still of this generation."""
    files, root = filesystem(url)
    bucket, _, name = root.partition("/")
    with contextlib.suppress(FileNotFoundError, FileExistsError):
        ask(
            url,
            lambda: files.call("DELETE", "b/{}/o/{}", bucket, name, ifGenerationMatch=str(generation)),
            verb="removed",
        )


def check_bucket(path: Location) -> None:
    """Told apart from a file that is missing."""
    if not is_bucket(path):
        return
    files, root = filesystem(path)
    bucket = root.partition("/")[0]
    try:
        ask(path, lambda: files.call("GET", "b/{}/o", bucket, maxResults="1"))
    except FileNotFoundError:
        raise UserError(
            f"{shown(path)}: there is no bucket {bucket}; "
            f"`gcloud storage buckets create gs://{bucket}` makes one"
        ) from None


def filesystem(url: Location) -> tuple[Any, str]:
    """The file system that fsspec has for a URL, and the path in it."""
    import fsspec  # takes 0.1 s, for those who need it

    text = os.fspath(url)
    if is_bucket(text):
        prepare_gcsfs()
    try:
        files, root = fsspec.core.url_to_fs(text)
    except ImportError as error:
        extra = "; pip install 'headrace[gcs]'" if is_bucket(text) else ""
        raise UserError(f"{shown(text)} cannot be read: {error}{extra}") from None
    except ValueError as error:
        raise UserError(f"{shown(text)} cannot be read: {error}") from None
    return files, root.rstrip("/")


def prepare_gcsfs() -> None:
    """Before it is first used, by Orbax as well: no listings from memory, since tensorstore writes beside it;
    no question to another service about the kind of bucket, which takes a minute where that is blocked; and
    what fails is told by us, not logged with a traceback."""
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        import aiohttp
        import fsspec
    except ImportError:
        return
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    settings = fsspec.config.conf.setdefault("gs", {})
    settings.setdefault("use_listings_cache", False)
    quiet = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENCE)
    settings.setdefault("requests_timeout", quiet)


def whole(files: Any, root: str, start: int | None = None, stop: int | None = None) -> bytes:
    """A file's bytes. fsspec itself would wait for ever."""
    import fsspec

    if not files.async_impl:
        return files.cat_file(root, start=start, end=stop)
    return fsspec.asyn.sync(files.loop, files._cat_file, root, start=start, end=stop, timeout=PATIENCE)


def ask(path: Location, question: Callable[[], T], *, verb: str = "read") -> T:
    """The answer, asked for again as long as the trouble may pass."""
    for attempt in range(TRIES):
        try:
            return question()
        except Exception as error:
            where, why = shown(path), secret.clean(" ".join(f"{type(error).__name__}: {error}".split()))
            if is_forbidden(error):
                raise UserError(f"{where} may not be {verb} ({why}); check the credentials") from None
            if not is_transient(error):
                raise
            if attempt == TRIES - 1:
                raise Unreachable(f"{where} could not be {verb} in {TRIES} tries; the last: {why}") from error
        # Of random length: those that failed together must not come back together.
        time.sleep(FIRST_WAIT * 2**attempt * random.uniform(0.5, 1.5))
    raise AssertionError


def is_forbidden(error: BaseException) -> bool:
    gcsfs = type(error).__module__.startswith("google.auth") or str(error).startswith("Forbidden: ")
    return gcsfs or isinstance(error, PermissionError) or status(error) in (401, 403)


def is_transient(error: BaseException) -> bool:
    """Whether the same question may be answered in a while: servers that are busy, connections that broke."""
    code = status(error)
    if code is not None:
        return code in (408, 429) or code >= 500
    aiohttp = sys.modules.get("aiohttp")
    broken = (OSError, aiohttp.ClientError) if aiohttp else (OSError,)
    return isinstance(error, broken) and not isinstance(error, FileNotFoundError | FileExistsError)


def status(error: BaseException) -> int | None:
    """Of the server's answer; aiohttp and gcsfs name it differently."""
    codes = (getattr(error, name, None) for name in ("status", "code"))
    return next((code for code in codes if isinstance(code, int)), None)


def shown(path: Location) -> str:
    """As it may be told."""
    return secret.shown(os.fspath(path))


def moment(written: Any) -> float:
    """File systems tell times as datetimes or seconds, or not at all."""
    return written.timestamp() if hasattr(written, "timestamp") else float(written or 0)


def crc_of(about: dict[str, Any]) -> int | None:
    told = about.get("crc32c")
    return int.from_bytes(base64.b64decode(told), "big") if told else None
