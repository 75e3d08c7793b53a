"""A lock on a run folder: two trainers would remove each other's files.

On a disk the kernel keeps the lock, and releases it when the process dies. In a bucket it is an object that
only one process can create (ifGenerationMatch). Its owner rewrites it every few seconds; when it has not been
rewritten for long, another process takes it over."""

import contextlib
import fcntl
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headrace.errors import UserError
from headrace.storage import files

NAME = ".lock"
RENEW_SECONDS = 15.0  # between renewals
EXPIRY_SECONDS = 90.0  # without a renewal, after which an owner counts as dead: two failed requests take 60
LEASE_LOST = 2  # exit code of a process whose lease was taken over: a restart would not help


@contextlib.contextmanager
def lock(run_dir: str, *, on_wait: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """Lock a run folder, which is created if necessary. UserError if another process has the lock.

    Waits for an owner that may be dead. `on_wait` receives a line that says so, and a warning where a file
    system has no locks."""
    if files.is_url(run_dir):
        if not run_dir.startswith("gs://"):
            raise UserError(
                f"run_dir: found {files.redacted(run_dir)}, expected a local folder or gs://BUCKET/FOLDER"
            )
        with Lease(run_dir).hold(on_wait):
            yield
        return
    try:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"run_dir: {error.filename} is not a folder; name another with run_dir=") from None
    with open(Path(run_dir) / NAME, "a+", opener=open_without_links) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise locked_error(run_dir, f"pid {file.read().strip() or 'unknown'}") from None
        except OSError as error:  # a file system without locks
            on_wait(
                f"{run_dir} cannot be locked ({error.strerror}); make sure that no other process trains in it"
            )
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def open_without_links(path: str, flags: int) -> int:
    """Opener for `open` that refuses symbolic links.

    The file is truncated: a link in a folder of unknown origin may point to any file of ours."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def locked_error(run_dir: str, owner: str) -> UserError:
    """The error for a run folder that another process has locked; `owner` is a description of it."""
    return UserError(
        f"{files.redacted(run_dir)}: another process trains in this folder ({owner}); wait for it, stop it, "
        "or use another `run_dir`"
    )


class Lease:
    """The lock of a run in a bucket: an object RUN/.lock that names its owner.

    Each renewal is a new generation of the object."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir, self.url = run_dir, files.join(run_dir, NAME)
        self.owner: dict[str, str | int] = {
            "id": uuid.uuid4().hex,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "machine": machine_id(),
        }
        self.generation = 0  # of our object, or of the one to replace; 0: none, -1: unknown
        self.renewals = 0
        self.closed = threading.Event()

    @contextlib.contextmanager
    def hold(self, on_wait: Callable[[str], None]) -> Iterator[None]:
        """Acquire the lease, renew it in a thread, and release it at the end."""
        self.acquire(on_wait)
        renewing = threading.Thread(target=self.renew_until_closed, name="lock", daemon=True)
        renewing.start()
        try:
            yield
        finally:
            self.closed.set()
            renewing.join()
            with contextlib.suppress(UserError):  # it expires anyway
                files.delete_if_generation(self.url, self.generation)

    def acquire(self, on_wait: Callable[[str], None]) -> None:
        """Create the object, or replace that of an owner that is dead.

        An owner counts as dead if its process is gone, or if it does not renew the object while we watch. If
        it does, this raises UserError."""
        first_seen: files.ObjectVersion | None = None
        while not self.renew():
            current = files.read_version(self.url)
            if current is None:  # released just now
                self.generation = 0
                continue
            owner = parse_owner(current.content)
            if first_seen is not None and current.generation != first_seen.generation:
                raise locked_error(self.run_dir, describe_owner(owner))
            self.generation = current.generation
            seconds_left = 0.0 if is_dead(owner) else EXPIRY_SECONDS - current.age
            if seconds_left <= 0:
                continue
            if first_seen is None:
                on_wait(
                    f"{self.run_dir} is locked by {describe_owner(owner)}, which last renewed the lock "
                    f"{current.age:.0f} s ago; without a renewal this process takes over in "
                    f"{seconds_left:.0f} s"
                )
            first_seen = current
            time.sleep(min(seconds_left, RENEW_SECONDS / 3))
            self.generation = -1  # read it again before the next try

    def renew(self) -> bool:
        """Write the object again, unless another process has changed it. Returns whether it is ours now."""
        if self.generation < 0:
            return False
        self.renewals += 1
        content = json.dumps(self.owner | {"beat": self.renewals}).encode()
        new_generation = files.write_if_generation(self.url, content, self.generation)
        if new_generation is not None:
            self.generation = new_generation
        return new_generation is not None

    def renew_until_closed(self) -> None:
        """Renew the lease every RENEW_SECONDS. If another process has taken it over, end this process.

        It ends at once, before it writes anything more. A bucket that does not respond for a while is no
        problem: the next renewal finds out whether the object is still ours."""
        while not self.closed.wait(RENEW_SECONDS):
            try:
                is_ours = self.renew()
            except Exception:  # of any kind: if this thread ended, the run would be lost to the next process
                continue
            if not is_ours:
                print(
                    f"headrace: {self.run_dir}: another process took this run over, because this one had not "
                    "renewed its lock; this process ends",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(LEASE_LOST)


def parse_owner(content: bytes) -> dict[str, Any]:
    """The owner in a lock object, by the keys of `Lease.owner`. Empty if the content is not ours."""
    try:
        owner = json.loads(content)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def describe_owner(owner: dict[str, Any]) -> str:
    return f"pid {owner.get('pid', 'unknown')} on {owner.get('host', 'an unknown host')}"


def is_dead(owner: dict[str, Any]) -> bool:
    """Whether the owner is a process of this machine that has ended. False for other machines."""
    if owner.get("machine") != machine_id() or not isinstance(owner.get("pid"), int):
        return False
    if owner["pid"] == os.getpid():
        return False
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def machine_id() -> str:
    """Identify one boot of one machine and its process namespace, within which a process id is unique.

    A container has a namespace of its own."""
    parts = [socket.gethostname()]
    for read in (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        lambda: os.readlink("/proc/self/ns/pid"),
    ):
        with contextlib.suppress(OSError):
            parts.append(read())
    return " ".join(parts)
