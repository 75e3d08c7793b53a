"""The data disk: filled once from a single machine, then mounted read-only on every worker of every slice."""

import argparse
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import UserError
from headrace.tpu import google_auth as google
from headrace.tpu.cloud import LABEL, OWNER, Rented, other, user
from headrace.tpu.gcp import Gcp, disk_source, same

# Newer TPUs take no persistent disks (docs.cloud.google.com/tpu/docs/attach-durable-block-storage, 2026-11).
KINDS = {"v6e": "hyperdisk-balanced", "tpu7x": "hyperdisk-balanced"}
USUAL = "pd-balanced"
PATIENCE = 300.0


class Disks:
    """Of one project and zone, through Compute Engine's own API."""

    def __init__(self, project: str, zone: str, place: str = "") -> None:
        self.project, self.zone = project, zone
        root = google.address("COMPUTE", google.COMPUTE)
        self.url = f"{root}/projects/{project}/{place or f'zones/{zone}'}"
        self.session = google.session(root)

    def create(self, name: str, gigabytes: int, kind: str) -> None:
        body = dict(name=name, sizeGb=str(gigabytes), labels={LABEL: "yes", OWNER: user()})
        body["type"] = f"projects/{self.project}/zones/{self.zone}/diskTypes/{kind}"
        self.wait(self.ask("POST", "disks", body))

    def delete(self, name: str) -> None:
        self.wait(self.ask("DELETE", f"disks/{name}"))

    def labels(self, name: str) -> dict[str, str]:
        return self.ask("GET", f"disks/{name}").get("labels", {})

    def pages(self, query: str) -> Iterator[dict[str, Any]]:
        """All disks; those of zones that do not answer are told of, and not left out."""
        token = ""
        while True:
            told = self.ask("GET", f"disks?{query}{token}")
            if told.get("unreachables"):
                raise UserError(f"disk: {', '.join(told['unreachables'])}: does not answer")
            yield told
            if not told.get("nextPageToken"):
                return
            token = f"&pageToken={urllib.parse.quote(told['nextPageToken'], safe='')}"

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        answer = google.ask(self.session, method, f"{self.url}/{path}", body)
        told = answer.json() if answer.content else {}
        if answer.status_code >= 400:
            raise UserError(f"disk: {told.get('error', {}).get('message', answer.reason)}")
        return told

    def wait(self, operation: dict[str, Any]) -> None:
        end = time.monotonic() + PATIENCE
        while operation.get("status") != "DONE":
            if time.monotonic() > end:
                raise UserError(f"disk: {operation.get('name')} is not done after {PATIENCE:.0f} s")
            time.sleep(0.5)
            operation = self.ask("GET", f"operations/{operation['name']}")
        for error in operation.get("error", {}).get("errors", ()):
            raise UserError(f"disk: {error.get('message')}")


@dataclass(frozen=True)
class Made:
    """A disk that Headrace made."""

    name: str
    zone: str
    gigabytes: int
    kind: str
    theirs: str  # the user who made it, if that is not who asks
    used: bool  # by a machine, of whatever kind


def ours(project: str, zones: Sequence[str] = ()) -> list[Made]:
    """Of some zones, or of all."""
    query = f"filter=labels.{LABEL}%3Dyes"
    if zones:
        answers = [page for zone in zones for page in Disks(project, zone).pages(query)]
    else:
        pages = list(Disks(project, "-", place="aggregated").pages(query))
        answers = [part for page in pages for part in page.get("items", {}).values()]
    told = [one for answer in answers for one in answer.get("items", answer.get("disks", ()))]
    return sorted(map(made, told), key=lambda one: (one.zone, one.name))


def made(told: dict[str, Any]) -> Made:
    last = lambda text: text.rpartition("/")[2]
    kind = last(told["zone"]), int(told["sizeGb"]), last(told["type"])
    return Made(told["name"], *kind, other(told["labels"]), bool(told.get("users")))


def show_unused(args: argparse.Namespace, cloud: Gcp, used: set[tuple[str, str]]) -> None:
    """Disks of ours that no slice has: they wait for the next one, or are forgotten."""
    try:
        every = ours(cloud.project, cloud.zones)
    except UserError as why:
        print(f"warning: disks could not be listed: {why}")
        return
    unused = [one for one in every if not one.used and (one.zone, one.name) not in used]
    project = f" --project {args.project}" if args.project else ""
    for one in unused if args.everybody else [one for one in unused if not one.theirs]:
        whose = f": {one.theirs} made it" if one.theirs else ""
        what = f"the disk {one.name} ({one.gigabytes} GB in {one.zone})"
        print(f"no slice has {what}, which costs{whose}; delete it?")
        force = " --force" if one.theirs else ""
        print(f"  headrace tpu disk delete {one.name}{project} --zone {one.zone}{force}")
    if not args.everybody:
        say_left_out("disk", sum(bool(one.theirs) for one in unused))


def say_left_out(what: str, count: int) -> None:
    if count:
        several = f"{what}s of other users are" if count > 1 else f"{what} of another user is"
        print(f"{count} {several} left out, since you are {user()}: --everybody")


def check(project: str, zones: Sequence[str], names: Sequence[str]) -> None:
    """That each is in every zone where a slice may come to be."""
    for zone in zones if names else ():
        disks = Disks(project, zone)
        for name in names:
            disks.ask("GET", f"disks/{name}")


def attach(cloud: Gcp, rented: Rented, disk: str, *, write: bool) -> int:
    """To all machines of a slice; returns its number among their disks. Two that write would spoil it."""
    if write and len(rented.workers) > 1:
        raise UserError(
            f"--write: {rented.name} has {len(rented.workers)} workers, expected one: fill the disk from a "
            "slice of one machine (v4-8, v5e-8), then attach it read-only"
        )
    modes, number = cloud.api.AttachedDisk.DiskMode, 0
    for node in cloud.nodes(rented):
        source = disk_source(cloud.project, rented.zone, disk)
        if all(not same(one.source_disk, source) for one in node.data_disks):
            mode = modes.READ_WRITE if write else modes.READ_ONLY
            node.data_disks.append(cloud.api.AttachedDisk(source_disk=source, mode=mode))
            cloud.update(node, "data_disks")
        number = 1 + [same(one.source_disk, source) for one in node.data_disks].index(True)
    return number


def detach(cloud: Gcp, rented: Rented, disk: str) -> None:
    source = disk_source(cloud.project, rented.zone, disk)
    for node in cloud.nodes(rented):
        kept = [one for one in node.data_disks if not same(one.source_disk, source)]
        if len(kept) < len(node.data_disks):
            node.data_disks = kept
            cloud.update(node, "data_disks")
