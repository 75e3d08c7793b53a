"""What this machine remembers of a job: the hours it had, its logs, and whether somebody watches it."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from headrace.errors import UserError
from headrace.tpu.console import complain, whisper


def home() -> Path:
    return Path(os.environ.get("HEADRACE_HOME") or Path.home() / ".headrace")


def key(scope: str, name: str) -> str:
    """Of a slice: another project may have one of the same name, and so may this machine."""
    return f"{scope}/{name}"


def folder(key: str) -> Path:
    """Where that is. Never holds a credential."""
    path = home() / "tpu" / key
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def watching(key: str) -> Iterator[None]:
    """While this lasts, no other launcher of this machine takes the job on. Tried for a moment: who only asks
    whether somebody watches holds the lock no longer than that."""
    with open(folder(key) / "lock", "w") as file:
        until = time.monotonic() + 2.0
        while not locked(file, fcntl.LOCK_EX):
            if time.monotonic() > until:
                name = key.rpartition("/")[2]
                raise UserError(
                    f"{name}: another `headrace tpu run` watches it; `headrace tpu logs {name}` shows it"
                )
            time.sleep(0.05)
        yield


def watched(key: str) -> bool:
    """Makes nothing: many of those who are asked about were never here."""
    try:
        with open(home() / "tpu" / key / "lock") as file:
            return not locked(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def locked(file: IO[str], how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


class Ledger:
    """The lives of a job: when machines were there, when they were last seen, and when their timer ends them.
    A launcher that is killed leaves a life open: it counts until the slice is known to be gone."""

    def __init__(self, key: str, run: str | None = None) -> None:
        """Of a run folder, if one is named: hours that another had are not this one's."""
        self.key, self.path = key, home() / "tpu" / key / "lives.json"
        try:
            told = json.loads(self.path.read_text())
        except (OSError, ValueError):
            told = dict(run=run, lives=[])
        self.run = told["run"] if run is None else run
        self.lives: list[dict[str, Any]] = told["lives"] if told["run"] == self.run else []

    def seen(self, zone: str, created: float, now: float, seconds: float | None = None) -> None:
        """`seconds` are those after which the slice ends itself."""
        if not self.lives or self.lives[-1]["created"] != created:
            self.close(now)
            self.lives.append(dict(zone=zone, created=created))
        life = self.lives[-1]
        life |= dict(seen=now, open=True)
        if seconds is not None:
            life["until"] = created + seconds
        self.save()

    def close(self, now: float) -> None:
        """The slice is gone: since now, or since its timer ended it if nobody looked before."""
        for life in self.lives:
            life |= dict(seen=until(life, now), open=False)
        self.save()

    def spent(self, now: float, but: float = 0.0) -> float:
        """Hours in all, without the life that began at `but`."""
        lives = [life for life in self.lives if life["created"] != but]
        return sum(until(life, now) - life["created"] for life in lives) / 3600

    def zones(self) -> tuple[str, ...]:
        """Where it was last, which saves looking everywhere."""
        return tuple(life["zone"] for life in self.lives[-1:])

    def clear(self) -> None:
        """The job is done: the next of this name begins anew."""
        self.lives = []
        self.save()

    unsaved = False

    def save(self) -> None:
        """Where that cannot be written, hours are counted on in memory: the slice has a timer of its own."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps(dict(run=self.run, lives=self.lives)))
            new.replace(self.path)
        except OSError as why:
            if not self.unsaved:
                words = f"warning: {self.path}: {why.strerror}; the hours of this run are not kept there"
                whisper(complain, words)
            self.unsaved = True


def until(life: dict[str, Any], now: float) -> float:
    if not life.get("open"):
        return life["seen"]
    return max(life["seen"], min(now, life.get("until", now)))
