"""The small files of a run in a bucket: metrics, log, TensorBoard, recipe, profile. Objects cannot be
appended to, so they are written in a folder here as always, and those that changed are uploaded whole, in a
thread: every 15 s, before a checkpoint counts, and at the end."""

import contextlib
import hashlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from headrace.storage import files as store
from headrace.errors import UserError

EVERY = 15.0  # seconds
RATE = 1e6  # bytes a second, on average, of a file that is uploaded again and again as it grows
# What the next life of a run adds to.
GOES_ON = ("metrics.jsonl", "goodput.jsonl", "log.txt", "wandb/headrace-id")


class Mirror:
    """A folder here, `near`, whose files are also in the run folder. For a run on a disk that folder itself,
    and nothing to do."""

    def __init__(self, run: str, process: int = 0) -> None:
        self.run, self.is_far = run, store.is_url(run)
        self.near = place(run, process) if self.is_far else Path(run)
        self.sent: dict[str, tuple[int, int]] = {}  # size and time of what was uploaded
        self.when: dict[str, float] = {}
        self.problems: list[str] = []
        self.failing = False
        self.turn, self.ended = threading.Lock(), threading.Event()

    @contextlib.contextmanager
    def open(self, *, goes_on: bool) -> Iterator["Mirror"]:
        """Fetches what is to be gone on with, if this is the host that does."""
        if not self.is_far:
            yield self
            return
        if self.near.is_dir() and store.exists(store.join(self.run, "recipe.yaml")):
            self.recover()
        shutil.rmtree(self.near, ignore_errors=True)
        self.near.mkdir(parents=True)
        for name in GOES_ON if goes_on else ():
            with contextlib.suppress(FileNotFoundError):
                store.write(self.near / name, store.read(store.join(self.run, name)))
                self.sent[name] = stamp(self.near / name)
        thread = threading.Thread(target=self.work, name="mirror", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.ended.set()
            thread.join()
            if self.bring():
                shutil.rmtree(self.near, ignore_errors=True)
            else:
                said = "; ".join([*self.told(), f"what could not be uploaded is in {self.near}"])
                print(f"headrace: {said}", file=sys.stderr)

    def recover(self) -> None:
        """What an earlier life on this machine could not upload, where it adds to what is there."""
        for name in self.changed():
            here, there = (self.near / name).read_bytes(), b""
            with contextlib.suppress(FileNotFoundError):
                there = store.read(store.join(self.run, name))
            if len(here) > len(there) and here.startswith(there):
                store.write(store.join(self.run, name), here)

    def told(self) -> list[str]:
        """What went wrong since this was last asked."""
        told, self.problems = self.problems, []
        return told

    def work(self) -> None:
        while not self.ended.wait(EVERY):
            self.bring(due=True)

    def bring(self, *, due: bool = False) -> bool:
        """Uploads what has changed; with `due`, large files not each time. Whether all went well. A run does
        not stop for it: the next round tries again."""
        if not self.is_far:
            return True
        with self.turn:
            try:
                for name in self.changed():
                    if not due or time.monotonic() > self.when.get(name, 0.0):
                        self.upload(name)
                self.failing = False
            except (UserError, OSError) as error:
                if not self.failing:
                    self.problems.append(
                        f"metrics and log cannot be uploaded: {error}; kept here; training goes on"
                    )
                self.failing = True
        return not self.failing

    def changed(self) -> list[str]:
        here = sorted(path for path in self.near.rglob("*") if path.is_file())
        names = [str(path.relative_to(self.near)) for path in here if path.suffix not in (".new", ".draft")]
        ours = [name for name in names if not name.startswith("wandb/") or name in GOES_ON]
        return [name for name in ours if self.sent.get(name) != stamp(self.near / name)]

    def upload(self, name: str) -> None:
        before = stamp(self.near / name)
        content = (self.near / name).read_bytes()
        store.write(store.join(self.run, name), content)
        self.sent[name], self.when[name] = before, time.monotonic() + len(content) / RATE


def stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def place(run: str, process: int) -> Path:
    """The same for each life of a run on a machine, so that killed ones leave one folder and no more."""
    cache = Path(os.environ.get("HEADRACE_CACHE") or Path.home() / ".cache/headrace")
    return cache / "runs" / f"{hashlib.sha256(run.encode()).hexdigest()[:16]}-{process}"
