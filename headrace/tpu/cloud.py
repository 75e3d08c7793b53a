"""The interface to a cloud that rents out slices: `Slice`, `Cloud` and the errors of a request.

gcp.py implements it for Google Cloud, local.py with processes of this machine."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from headrace.errors import UserError
from headrace.tpu.request import Request
from headrace.tpu.workers import login_name

# Labels and metadata of everything that Headrace rents.
MANAGED_LABEL = "headrace"
TIME_LIMIT_LABEL = "headrace-seconds"  # after its creation; the timer of the slice reads it
IDLE_LIMIT_LABEL = "headrace-idle"  # seconds after the end of its job; 0: no such limit
OWNER_LABEL = "headrace-owner"  # the user who requested it


class SliceState(Enum):
    """The state of a slice, as far as the launcher has to distinguish it."""

    WAITING = "waiting"
    READY = "ready"
    LOST = "lost"  # preempted or suspended: keeps its name and quota until it is deleted
    FAILED = "failed"
    STOPPED = "stopped"  # by a user, who can start its machines again with their disks
    DELETING = "deleting"


@dataclass(frozen=True)
class Slice:
    """A slice as the cloud describes it."""

    name: str
    zone: str
    accelerator: str
    terms: str
    state: SliceState
    status_text: str  # the cloud's own name of the state
    workers: tuple[str, ...] = ()  # addresses, in order of worker number
    created_at: float = 0.0  # of its machines, in seconds since 1970; 0: no machines yet
    node_creation_times: frozenset[float] = frozenset()
    labels: Mapping[str, str] = field(default_factory=dict)
    slices: int = 1  # joined to one
    is_standalone: bool = False  # a node that belongs to no queued resource
    disks: tuple[str, ...] = ()  # names of its data disks

    @property
    def is_managed(self) -> bool:
        """Whether Headrace made it."""
        return MANAGED_LABEL in self.labels

    @property
    def other_owner(self) -> str:
        """The user who made it with Headrace, unless that is the current user: then the empty string."""
        return other_owner(self.labels)

    @property
    def is_own(self) -> bool:
        """Whether the current user made it with Headrace."""
        return self.is_managed and not self.other_owner

    @property
    def outlives_job(self) -> bool:
        """Whether it was requested to stay after the end of its job."""
        return self.labels.get(IDLE_LIMIT_LABEL) == "0"

    def replaces(self, earlier: "Slice") -> bool:
        """Whether this is another slice than `earlier`, requested later under the same name. A slice that has
        only lost nodes is still the same."""
        is_known = self.node_creation_times or self.state is SliceState.WAITING
        return bool(
            earlier.node_creation_times
            and is_known
            and not self.node_creation_times & earlier.node_creation_times
        )

    @property
    def time_limit(self) -> float | None:
        """Seconds after its creation at which it deletes itself, by its label; None without one."""
        text = self.labels.get(TIME_LIMIT_LABEL, "")
        return float(text) if text.isdigit() else None

    @property
    def idle_limit(self) -> float | None:
        """Seconds after the end of its job at which it deletes itself, by its label; None without a limit."""
        text = self.labels.get(IDLE_LIMIT_LABEL, "")
        return float(text) or None if text.isdigit() else None


def current_user_label() -> str:
    """The current user as a value of `OWNER_LABEL`: HEADRACE_OWNER, which a team may share, or the login."""
    name = os.environ.get("HEADRACE_OWNER") or login_name()
    return re.sub(r"[^a-z0-9_-]", "-", name.lower())[:63]


def other_owner(labels: Mapping[str, str]) -> str:
    """The owner by these labels, or the empty string if there is none or it is the current user."""
    owner = labels.get(OWNER_LABEL, "")
    return owner if owner and owner != current_user_label() else ""


def limit_labels(time_limit: float, idle_limit: float | None) -> dict[str, str]:
    """The labels that store the limits of a slice."""
    return {TIME_LIMIT_LABEL: str(int(time_limit)), IDLE_LIMIT_LABEL: str(int(idle_limit or 0))}


class CloudRefused(UserError):
    """The cloud has no such slice now, or the quota is used up. Another zone or time may help."""

    exit_code = 1

    def __init__(self, message: str, *, is_quota: bool) -> None:
        super().__init__(message)
        self.is_quota = is_quota


class CloudUnreachable(UserError):
    """The cloud did not answer, so nothing is known about the slice."""

    exit_code = 1


class CredentialsExpired(CloudUnreachable):
    """The login has expired. Waiting helps if the user logs in again."""

    exit_code = 2


class Cloud(Protocol):
    """A provider of slices. Every method may raise CloudUnreachable, CloudRefused or another UserError."""

    name: str
    scope: str  # in which names of slices are unique: a project, or this machine

    def find(self, name: str, zone: str = "") -> Slice | None:
        """Look up a slice by name, in all zones or in one."""
        ...

    def list_slices(self) -> tuple[list[Slice], dict[str, str]]:
        """List all slices. The second value names the zones that did not answer, each with the reason."""
        ...

    def create(self, request: Request, zone: str, time_limit: float, idle_limit: float | None) -> None:
        """Request a slice, without waiting for it, with its timer. Raises CloudRefused."""
        ...

    def set_timer(self, slice_: Slice, time_limit: float, idle_limit: float | None) -> None:
        """Set the seconds after its creation, and after the end of its job, at which it deletes itself."""
        ...

    def delete(self, slice_: Slice) -> None:
        """Request the deletion of a slice, without waiting for it. Does nothing if it is gone already."""
        ...


def delete_command(cloud: Cloud, slice_: Slice) -> str:
    """The `headrace tpu delete` command for this slice, complete for any directory and machine."""
    location = (
        " --platform local" if cloud.name == "local" else f" --project {cloud.scope} --zone {slice_.zone}"
    )
    force = "" if slice_.is_own else " --force"
    return f"headrace tpu delete {slice_.name}{location}{force}"
