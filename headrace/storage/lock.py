"""One trainer a run folder: a second would clear away what the first is writing. On a disk the kernel keeps
the lock and lets go of it when the process dies. In a bucket it is an object that one process alone can
create (ifGenerationMatch), written again while that lives, and taken over once it has long been silent."""

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

from headrace.storage import files as store
from headrace.errors import UserError

NAME = ".lock"
BEAT = 15.0  # seconds between signs of life
SILENT = 90.0  # seconds without one after which an owner is taken for dead: two failed requests take 60
TAKEN = 2  # the exit code of an owner that is one no longer: nothing to start again for


@contextlib.contextmanager
def lock(run: str, *, waiting: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """Holds a run folder. UserError if somebody else does; one that may be dead is waited for, and `waiting`
    told of it."""
    if store.is_url(run):
        if not run.startswith("gs://"):
            raise UserError(f"run: found {store.shown(run)}, expected a local folder or gs://BUCKET/FOLDER")
        with Lease(run).held(waiting):
            yield
        return
    try:
        Path(run).mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"run: {error.filename} is no folder; name another with run=") from None
    with open(Path(run) / NAME, "a+", opener=no_link) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise taken(run, f"pid {file.read().strip() or 'unknown'}") from None
        except OSError as error:  # a file system without locks
            waiting(f"{run} cannot be locked ({error.strerror}): see that nobody else trains in it")
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def no_link(path: str, flags: int) -> int:
    """What is written here is truncated: not a file elsewhere that a folder from elsewhere points to."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def taken(run: str, holder: str) -> UserError:
    return UserError(
        f"{store.shown(run)}: another process trains in this folder ({holder}); wait for it, stop it, or use "
        "another `run`"
    )


class Lease:
    """The object RUN/.lock of a bucket. It names its owner; each sign of life is a new generation of it."""

    def __init__(self, run: str) -> None:
        self.run, self.url = run, store.join(run, NAME)
        self.owner = {"id": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid()}
        self.owner["machine"] = machine()
        self.generation, self.beats = 0, 0
        self.ended = threading.Event()

    @contextlib.contextmanager
    def held(self, waiting: Callable[[str], None]) -> Iterator[None]:
        self.take(waiting)
        beating = threading.Thread(target=self.live, name="lock", daemon=True)
        beating.start()
        try:
            yield
        finally:
            self.ended.set()
            beating.join()
            with contextlib.suppress(UserError):  # silence will tell as well
                store.drop(self.url, self.generation)

    def take(self, waiting: Callable[[str], None]) -> None:
        """By creating the object, or by replacing that of an owner that is dead, or has been silent since we
        look. An owner that is heard of in the meantime lives."""
        first: store.Version | None = None
        while not self.beat():
            found = store.version(self.url)
            if found is None:  # it was let go of just now
                self.generation = 0
                continue
            holder = owner_of(found.content)
            if first is not None and found.generation != first.generation:
                raise taken(self.run, named(holder))
            self.generation = found.generation
            left = 0.0 if is_dead(holder) else SILENT - found.age
            if left <= 0:
                continue
            if first is None:
                waiting(
                    f"{self.run} is held by {named(holder)}, silent for {found.age:.0f} s; it is taken over "
                    f"in {left:.0f} s unless it is heard of"
                )
            first = found
            time.sleep(min(left, BEAT / 3))
            self.generation = -1  # of nothing: look before the next try

    def beat(self) -> bool:
        """Whether the object is ours, now and after this."""
        if self.generation < 0:
            return False
        self.beats += 1
        written = store.swap(
            self.url, json.dumps(self.owner | {"beat": self.beats}).encode(), self.generation
        )
        if written is not None:
            self.generation = written
        return written is not None

    def live(self) -> None:
        """A bucket that does not answer for a while costs nothing: the next beat finds out whether the
        object is still ours. If it is not, this process ends at once, before it writes anything more."""
        while not self.ended.wait(BEAT):
            try:
                ours = self.beat()
            except Exception:  # whatever a library has: a thread that ends would give the run away
                continue
            if not ours:
                print(
                    f"headrace: {self.run}: another process took this run over, since nothing was heard of "
                    "this one; this one ends",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(TAKEN)


def owner_of(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def named(owner: dict[str, Any]) -> str:
    return f"pid {owner.get('pid', 'unknown')} on {owner.get('host', 'an unknown host')}"


def is_dead(owner: dict[str, Any]) -> bool:
    """Only of a process on this very machine can that be said at once."""
    if owner.get("machine") != machine() or not isinstance(owner.get("pid"), int):
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


def machine() -> str:
    """One boot of one machine, and the set of processes that we see there: containers have their own."""
    parts = [socket.gethostname()]
    for read in (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        lambda: os.readlink("/proc/self/ns/pid"),
    ):
        with contextlib.suppress(OSError):
            parts.append(read())
    return " ".join(parts)
