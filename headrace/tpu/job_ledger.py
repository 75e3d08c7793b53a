"""The records of this machine about a job: the hours it used, its logs, and whether a launcher watches it."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypedDict

from headrace.errors import UserError
from headrace.tpu import clock
from headrace.tpu.console import print_error, print_quietly

LOCK_TIMEOUT = 2.0  # seconds; `is_watched` in another process takes the lock for a moment


class AttemptRecord(TypedDict, total=False):
    """One attempt of a job. Times are in seconds since 1970."""

    zone: str
    created: float  # when the hours began to count
    seen: float  # when the slice was last known to exist, or when it ended
    open: bool  # it is not known to be gone
    until: float  # when its timer deletes it


def state_dir() -> Path:
    """The folder of everything that the launcher stores on this machine."""
    return Path(os.environ.get("HEADRACE_HOME") or Path.home() / ".headrace")


def job_id(scope: str, name: str) -> str:
    """The id of a job on this machine: the name of its slice and the project in which it is unique."""
    return f"{scope}/{name}"


def job_dir(job: str) -> Path:
    """The folder of a job by its id, created if missing. It never holds a credential."""
    path = state_dir() / "tpu" / job
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def watch_lock(job: str) -> Iterator[None]:
    """Hold the lock of a job while a launcher watches it. Raises UserError if another one holds it."""
    with open(job_dir(job) / "lock", "w") as file:
        deadline = clock.monotonic() + LOCK_TIMEOUT
        while not try_lock(file, fcntl.LOCK_EX):
            if clock.monotonic() > deadline:
                name = job.rpartition("/")[2]
                raise UserError(
                    f"{name}: another `headrace tpu run` watches it; `headrace tpu logs {name}` shows its "
                    "output"
                )
            clock.sleep(0.05)
        yield


def is_watched(job: str) -> bool:
    """Whether a launcher on this machine watches the job. Creates no file."""
    try:
        with open(state_dir() / "tpu" / job / "lock") as file:
            return not try_lock(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def try_lock(file: IO[str], operation: int) -> bool:
    """Take a lock (`fcntl.LOCK_EX` or `LOCK_SH`) without waiting. Return False if another process has it."""
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


class JobLedger:
    """The attempts of a job and their hours.

    An attempt stays open if the launcher is killed: its hours count until its slice is known to be gone."""

    def __init__(self, job: str, run_dir: str | None = None) -> None:
        """Read the ledger of a job by its id. With `run_dir`, attempts for another run folder are dropped:
        their hours do not count for this one."""
        self.job, self.path = job, state_dir() / "tpu" / job / "lives.json"
        self.has_warned = False
        try:
            stored = json.loads(self.path.read_text())
        except (OSError, ValueError):
            stored = dict(run=run_dir, lives=[])
        self.run_dir: str | None = stored["run"] if run_dir is None else run_dir
        self.attempts: list[AttemptRecord] = stored["lives"] if stored["run"] == self.run_dir else []

    def record(self, zone: str, created_at: float, now: float, time_limit: float | None = None) -> None:
        """Record that a slice exists now; one created at another time begins a new attempt. `time_limit` is
        in how many seconds after its creation its timer deletes it."""
        if not self.attempts or self.attempts[-1]["created"] != created_at:
            self.close(now)
            self.attempts.append(AttemptRecord(zone=zone, created=created_at))
        attempt = self.attempts[-1]
        attempt["seen"], attempt["open"] = now, True
        if time_limit is not None:
            attempt["until"] = created_at + time_limit
        self.save()

    def close(self, now: float) -> None:
        """Record that the slice is gone: since now, or since its timer deleted it."""
        for attempt in self.attempts:
            attempt["seen"], attempt["open"] = end_time(attempt, now), False
        self.save()

    def hours_spent(self, now: float, excluding: float = 0.0) -> float:
        """Hours of all attempts, but for the one that was created at `excluding`."""
        counted = [attempt for attempt in self.attempts if attempt["created"] != excluding]
        return sum(end_time(attempt, now) - attempt["created"] for attempt in counted) / 3600

    def last_zones(self) -> tuple[str, ...]:
        """The zone of the last attempt, or nothing. It saves a search in all zones."""
        return tuple(attempt["zone"] for attempt in self.attempts[-1:])

    def clear(self) -> None:
        """Forget all attempts, since the job is done: the next one of this name starts at 0 hours."""
        self.attempts = []
        self.save()

    def save(self) -> None:
        """Write the ledger. On failure warn once and continue in memory: the slice has its own timer."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps(dict(run=self.run_dir, lives=self.attempts)))
            new.replace(self.path)
        except OSError as error:
            if not self.has_warned:
                warning = f"warning: {self.path}: {error.strerror}; the hours of this run are not stored"
                print_quietly(print_error, warning)
            self.has_warned = True


def end_time(attempt: AttemptRecord, now: float) -> float:
    """The end of an attempt, or `now` for an open one whose timer has not deleted it."""
    if not attempt.get("open"):
        return attempt["seen"]
    return max(attempt["seen"], min(now, attempt.get("until", now)))
