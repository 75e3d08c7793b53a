"""The seam to whoever rents out machines: what a slice looks like from outside, and what can be asked for.
gcp.py is Google's; local.py is this machine, "a pod on your laptop"."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from headrace.errors import UserError
from headrace.tpu.request import Request
from headrace.tpu.workers import login

# Labels and metadata of everything that is rented from here, so that it is found again.
LABEL = "headrace"
SECONDS = "headrace-seconds"  # that a slice may live; the timer on it goes by this
IDLE = "headrace-idle"  # and after its job has ended, if nobody gives it back; 0: no end by that
OWNER = "headrace-owner"  # who asked for it


class State(Enum):
    WAITING = "waiting"
    READY = "ready"
    LOST = "lost"  # preempted or suspended: holds its name and quota, and must be deleted
    FAILED = "failed"
    STOPPED = "stopped"  # by hand: its machines and their disks can be started again
    DELETING = "deleting"


@dataclass(frozen=True)
class Rented:
    """A slice as the cloud sees it."""

    name: str
    zone: str
    accelerator: str
    terms: str
    state: State
    said: str  # the cloud's own words for the state
    workers: tuple[str, ...] = ()  # addresses, in the order of their numbers
    created: float = 0.0  # when machines were there, seconds since 1970; 0: not yet
    births: frozenset[float] = frozenset()  # when each of its nodes was made
    labels: Mapping[str, str] = field(default_factory=dict)
    slices: int = 1  # that are joined to one
    single: bool = False  # a node that belongs to no queued resource
    disks: tuple[str, ...] = ()  # data disks, by name

    @property
    def ours(self) -> bool:
        return LABEL in self.labels

    @property
    def theirs(self) -> str:
        """The user who made it by Headrace, if that is not who asks."""
        return other(self.labels)

    @property
    def stays(self) -> bool:
        """Whether it was asked for without a job whose end is its own."""
        return self.labels.get(IDLE) == "0"

    def replaces(self, other: "Rented") -> bool:
        """Whether it is not that one, but another of its name that was asked for since. Nodes that are gone
        do not make it another."""
        new = self.births or self.state is State.WAITING
        return bool(other.births and new and not self.births & other.births)

    @property
    def seconds(self) -> float | None:
        """How long it may live, by its label."""
        text = self.labels.get(SECONDS, "")
        return float(text) if text.isdigit() else None

    @property
    def idle(self) -> float | None:
        """How long it may live after its job has ended; None: as long as else."""
        text = self.labels.get(IDLE, "")
        return float(text) or None if text.isdigit() else None


def user() -> str:
    """Who asks, as a label can hold it: the name by which ssh goes to the machines, and by which folders
    there are told apart; or HEADRACE_OWNER, where one person or team has several."""
    name = os.environ.get("HEADRACE_OWNER") or login()
    return re.sub(r"[^a-z0-9_-]", "-", name.lower())[:63]


def other(labels: Mapping[str, str]) -> str:
    """The user who made what has these labels, if that is not who asks."""
    owner = labels.get(OWNER, "")
    return owner if owner and owner != user() else ""


class Refused(UserError):
    """The cloud has none of these now, or lets us have no more: another zone or another time may do."""

    code = 1

    def __init__(self, message: str, *, quota: bool) -> None:
        super().__init__(message)
        self.quota = quota


class Silent(UserError):
    """The cloud does not answer. Nothing is known, and nothing should be concluded."""

    code = 1


class LoggedOut(Silent):
    """It would answer, but not to us: the login has run out. Who logs in again goes on."""

    code = 2


class Cloud(Protocol):
    name: str
    scope: str  # within which the name of a slice means one: a project, or this machine

    def find(self, name: str, zone: str = "") -> Rented | None:
        """The slice of that name, in whatever zone, or in that one alone."""
        ...

    def survey(self) -> tuple[list[Rented], dict[str, str]]:
        """All slices, and why those of some zones are not known."""
        ...

    def create(self, request: Request, zone: str, seconds: float, idle: float | None) -> None:
        """Asks for it, and does not wait. Raises Refused."""
        ...

    def extend(self, rented: Rented, seconds: float, idle: float | None) -> None:
        """Lets it live that long in all, and so long without a job."""
        ...

    def delete(self, rented: Rented) -> None:
        """Asks for its end, and does not wait. What is gone already is no error."""
        ...


def by_hand(cloud: Cloud, found: Rented) -> str:
    """The command that deletes it, from wherever it is typed."""
    local = cloud.name == "local"
    words = " --platform local" if local else f" --project {cloud.scope} --zone {found.zone}"
    force = "" if found.ours and not found.theirs else " --force"
    return f"headrace tpu delete {found.name}{words}{force}"
