"""Data disks: filled once from a slice of one machine, then mounted read-only on every worker of every
slice."""

import argparse
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.errors import UserError
from headrace.tpu import clock, google_auth
from headrace.tpu.cloud import MANAGED_LABEL, OWNER_LABEL, Slice, current_user_label, other_owner
from headrace.tpu.gcp import Gcp, disk_path
from headrace.tpu.gcp_slices import is_same_resource

if TYPE_CHECKING:
    from google.cloud.tpu_v2 import AttachedDisk

# By chip, where not the default: newer TPUs take no persistent disks
# (docs.cloud.google.com/tpu/docs/attach-durable-block-storage, 2026-11).
DISK_TYPES = {"v6e": "hyperdisk-balanced", "tpu7x": "hyperdisk-balanced"}
DEFAULT_DISK_TYPE = "pd-balanced"
OPERATION_TIMEOUT = 300.0  # seconds


class Disks:
    """The disks of one project and zone, through the API of Compute Engine."""

    def __init__(self, project: str, zone: str, scope: str = "") -> None:
        """`scope` replaces the zone in addresses: `aggregated` means all zones."""
        self.project, self.zone = project, zone
        root = google_auth.api_url("COMPUTE", google_auth.COMPUTE)
        self.url = f"{root}/projects/{project}/{scope or f'zones/{zone}'}"
        self.session = google_auth.open_session(root)

    def create(self, name: str, gigabytes: int, disk_type: str) -> None:
        """Create an empty disk, and wait until it is there."""
        labels = {MANAGED_LABEL: "yes", OWNER_LABEL: current_user_label()}
        body: dict[str, Any] = dict(name=name, sizeGb=str(gigabytes), labels=labels)
        body["type"] = f"projects/{self.project}/zones/{self.zone}/diskTypes/{disk_type}"
        self.wait_until_done(self.call_api("POST", "disks", body))

    def delete(self, name: str) -> None:
        """Delete a disk with everything on it, and wait until it is gone."""
        self.wait_until_done(self.call_api("DELETE", f"disks/{name}"))

    def check_exists(self, name: str) -> None:
        """Raise UserError if there is no such disk."""
        self.call_api("GET", f"disks/{name}")

    def labels(self, name: str) -> dict[str, str]:
        """The labels of a disk."""
        labels: dict[str, str] = self.call_api("GET", f"disks/{name}").get("labels", {})
        return labels

    def iter_pages(self, query: str) -> Iterator[dict[str, Any]]:
        """Yield the pages of a list of disks. Raises UserError if zones are missing from it."""
        token = ""
        while True:
            page = self.call_api("GET", f"disks?{query}{token}")
            if page.get("unreachables"):
                raise UserError(f"disk: {', '.join(page['unreachables'])}: does not answer")
            yield page
            if not page.get("nextPageToken"):
                return
            token = f"&pageToken={urllib.parse.quote(page['nextPageToken'], safe='')}"

    def call_api(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call the API, and return its answer. Raises UserError for an error."""
        response = google_auth.send_with_retries(self.session, method, f"{self.url}/{path}", body)
        answer: dict[str, Any] = response.json() if response.content else {}
        if response.status_code >= 400:
            raise UserError(f"disk: {answer.get('error', {}).get('message', response.reason)}")
        return answer

    def wait_until_done(self, operation: dict[str, Any]) -> None:
        """Wait until an operation is done. Raises UserError if it fails."""
        deadline = clock.monotonic() + OPERATION_TIMEOUT
        while operation.get("status") != "DONE":
            if clock.monotonic() > deadline:
                raise UserError(f"disk: {operation.get('name')} is not done after {OPERATION_TIMEOUT:.0f} s")
            clock.sleep(0.5)
            operation = self.call_api("GET", f"operations/{operation['name']}")
        for error in operation.get("error", {}).get("errors", ()):
            raise UserError(f"disk: {error.get('message')}")


@dataclass(frozen=True)
class ManagedDisk:
    """A disk that was made with Headrace."""

    name: str
    zone: str
    gigabytes: int
    disk_type: str
    other_owner: str  # the user who made it, unless that is the current user
    is_attached: bool  # to a virtual machine of any kind; slices are not counted


def list_managed_disks(project: str, zones: Sequence[str] = ()) -> list[ManagedDisk]:
    """The disks in these zones, or in all, that were made with Headrace."""
    query = f"filter=labels.{MANAGED_LABEL}%3Dyes"
    if zones:
        parts = [page for zone in zones for page in Disks(project, zone).iter_pages(query)]
    else:
        pages = list(Disks(project, "-", scope="aggregated").iter_pages(query))
        parts = [part for page in pages for part in page.get("items", {}).values()]
    items = [item for part in parts for item in part.get("items", part.get("disks", ()))]
    return sorted(map(parse_disk, items), key=lambda disk: (disk.zone, disk.name))


def parse_disk(item: dict[str, Any]) -> ManagedDisk:
    """A disk from its description in JSON."""
    return ManagedDisk(
        name=item["name"],
        zone=item["zone"].rpartition("/")[2],
        gigabytes=int(item["sizeGb"]),
        disk_type=item["type"].rpartition("/")[2],
        other_owner=other_owner(item["labels"]),
        is_attached=bool(item.get("users")),
    )


def print_unused_disks(args: argparse.Namespace, cloud: Gcp, used: set[tuple[str, str]]) -> None:
    """Print the disks that no slice or virtual machine uses, each with the command that deletes it. `used`
    has zone and name of those of all slices."""
    try:
        disks = list_managed_disks(cloud.project, cloud.zones)
    except UserError as error:
        print(f"warning: disks could not be listed: {error}")
        return
    unused = [disk for disk in disks if not disk.is_attached and (disk.zone, disk.name) not in used]
    project = f" --project {args.project}" if args.project else ""
    for disk in unused if args.everybody else [disk for disk in unused if not disk.other_owner]:
        owner = f", made by {disk.other_owner}" if disk.other_owner else ""
        print(
            f"no slice uses the disk {disk.name} ({disk.gigabytes} GB in {disk.zone}{owner}), which costs "
            "money; to delete it:"
        )
        force = " --force" if disk.other_owner else ""
        print(f"  headrace tpu disk delete {disk.name}{project} --zone {disk.zone}{force}")
    if not args.everybody:
        print_omitted("disk", sum(bool(disk.other_owner) for disk in unused))


def print_omitted(noun: str, count: int) -> None:
    """Print how many slices or disks of other users a list omits."""
    if count:
        subject = f"{noun}s of other users" if count > 1 else f"{noun} of another user"
        print(f"{count} {subject} omitted, since you are {current_user_label()}: --everybody shows all")


def check_disks_exist(project: str, zones: Sequence[str], names: Sequence[str]) -> None:
    """Raise UserError unless every disk exists in every zone where the slice may be created."""
    for zone in zones if names else ():
        disks = Disks(project, zone)
        for name in names:
            disks.check_exists(name)


def attach(cloud: Gcp, slice_: Slice, disk: str, *, write: bool) -> int:
    """Attach a disk to all machines of a slice, and return its number among their data disks, from 1. With
    `write` the slice must have one machine: two that write would destroy the file system."""
    if write and len(slice_.workers) > 1:
        raise UserError(
            f"--write: {slice_.name} has {len(slice_.workers)} workers, expected one: fill the disk from a "
            "slice of one machine (v4-8, v5e-8), then attach it read-only"
        )
    modes, number = cloud.api.AttachedDisk.DiskMode, 0
    source = disk_path(cloud.project, slice_.zone, disk)
    for node in cloud.nodes_of(slice_):
        if not any(is_same_disk(attached, source) for attached in node.data_disks):
            mode = modes.READ_WRITE if write else modes.READ_ONLY
            node.data_disks.append(cloud.api.AttachedDisk(source_disk=source, mode=mode))
            cloud.update_node(node, "data_disks")
        number = 1 + [is_same_disk(attached, source) for attached in node.data_disks].index(True)
    return number


def detach(cloud: Gcp, slice_: Slice, disk: str) -> None:
    """Detach a disk from all machines of a slice."""
    source = disk_path(cloud.project, slice_.zone, disk)
    for node in cloud.nodes_of(slice_):
        remaining = [attached for attached in node.data_disks if not is_same_disk(attached, source)]
        if len(remaining) < len(node.data_disks):
            node.data_disks = remaining
            cloud.update_node(node, "data_disks")


def is_same_disk(attached: "AttachedDisk", source: str) -> bool:
    """Whether this is the disk with the full name `source`."""
    return is_same_resource(attached.source_disk, source)
