"""Ownership of a slice, and what this process may therefore do with it.

Slices are found by name. A slice of the requested name may have been made by this process, by an earlier
command of the same user, by another user, or without Headrace. The labels that Headrace puts on its slices
distinguish the last three (cloud.py)."""

from enum import Enum

from headrace.errors import UserError
from headrace.tpu.cloud import Cloud, Slice, SliceState, delete_command
from headrace.tpu.request import Request


class SliceOwnership(Enum):
    """The rights of this process to the slice of the requested name.

    A new slice goes from REQUESTED to CREATED, one of an earlier command from FOUND to ADOPTED."""

    NONE = "no slice, or one that this process must leave alone"
    REQUESTED = "requested by this process; has no machines yet"
    CREATED = "requested by this process; ready"
    FOUND = "requested by an earlier command of this user; has no machines yet"
    ADOPTED = "requested by an earlier command of this user; ready"
    PROTECTED = "this user's, but it may hold work that is not saved: not deleted"
    FOREIGN = "made by another user or without Headrace; ready"
    DELETED = "deleted by this process"

    @classmethod
    def of(cls, *, is_own: bool, is_new: bool, may_use: bool) -> "SliceOwnership":
        """The ownership of a slice that has passed `check_usable`."""
        if not is_own:
            return cls.FOREIGN if may_use else cls.NONE
        if is_new:
            return cls.CREATED if may_use else cls.REQUESTED
        return cls.ADOPTED if may_use else cls.FOUND

    @property
    def is_new(self) -> bool:
        """Whether this process requested the slice, so that nothing ran on it before."""
        return self in (SliceOwnership.REQUESTED, SliceOwnership.CREATED)

    @property
    def may_use(self) -> bool:
        """Whether there are machines on which this process may train."""
        return self in (
            SliceOwnership.CREATED,
            SliceOwnership.ADOPTED,
            SliceOwnership.PROTECTED,
            SliceOwnership.FOREIGN,
        )

    @property
    def may_delete(self) -> bool:
        """Whether this process may delete the slice. Doing so twice only confirms that it is gone."""
        return self in (
            SliceOwnership.REQUESTED,
            SliceOwnership.CREATED,
            SliceOwnership.FOUND,
            SliceOwnership.ADOPTED,
            SliceOwnership.DELETED,
        )

    def to_unready(self) -> "SliceOwnership":
        """The ownership after machines that this process could use turned out to be gone."""
        if not self.may_use:
            return self
        if not self.may_delete:
            return SliceOwnership.NONE
        return SliceOwnership.REQUESTED if self.is_new else SliceOwnership.FOUND

    def to_protected(self) -> "SliceOwnership":
        """The same ownership without the right to delete."""
        if not self.may_delete:
            return self
        return SliceOwnership.PROTECTED if self.may_use else SliceOwnership.NONE


def check_usable(slice_: Slice, cloud: Cloud, request: Request, *, keep: bool, adopt: bool) -> None:
    """Raise UserError unless the slice is what was requested and this user may train on it."""
    check_owner(slice_, keep=keep, adopt=adopt)
    if not slice_.is_own and slice_.state in (SliceState.LOST, SliceState.FAILED):
        owner = f"{slice_.other_owner} made it" if slice_.other_owner else "Headrace did not make it"
        raise UserError(
            f"{slice_.name}: found it {slice_.status_text} in {slice_.zone}, and it is not replaced, since "
            f"{owner}; choose another --name, or delete it: `{delete_command(cloud, slice_)}`"
        )
    if slice_.state is SliceState.STOPPED:
        raise UserError(f"{slice_.name}: found it {stopped_slice_advice(cloud, slice_)}")
    actual = format_hardware(slice_.slices, slice_.accelerator, slice_.terms)
    expected = format_hardware(request.slice.slices, request.accelerator, request.terms)
    if actual != expected:
        raise UserError(
            f"{slice_.name}: found a slice of this name in {slice_.zone} that is {actual}, expected "
            f"{expected}; request {actual}, choose another --name, or delete the slice"
        )


def check_owner(slice_: Slice, *, keep: bool, adopt: bool) -> None:
    """Raise UserError if the slice is not this user's and the options do not allow to use it."""
    if slice_.other_owner and not adopt:
        raise UserError(
            f"{slice_.name}: found a slice of this name in {slice_.zone} that {slice_.other_owner} made; "
            "choose another --name, or pass --adopt to `headrace tpu run` to use it and leave it running"
        )
    if not slice_.is_managed and not keep:
        raise UserError(
            f"{slice_.name}: found a slice of this name in {slice_.zone} that Headrace did not make and "
            "would delete at the end; choose another --name, or pass --keep to use it and leave it running"
        )


def stopped_slice_advice(cloud: Cloud, slice_: Slice) -> str:
    """Advice for a slice whose machines somebody stopped, probably to start them again."""
    start_command = (
        f"gcloud compute tpus tpu-vm start {slice_.name} --project={cloud.scope} --zone={slice_.zone}"
    )
    return (
        f"{slice_.status_text} in {slice_.zone}, with its disks; start it with `{start_command}` "
        "(it deletes itself then if its hours are used up), "
        f"or delete it with `{delete_command(cloud, slice_)}`"
    )


def format_hardware(slices: int, accelerator: str, terms: str) -> str:
    """Hardware and terms of a slice, such as `2xv5litepod-16 spot`."""
    return f"{f'{slices}x' if slices > 1 else ''}{accelerator} {terms}"
