"""`headrace tpu disk ...`: create, attach, detach, delete and ls."""

import argparse
from collections.abc import Mapping

from headrace.errors import UserError
from headrace.tpu import disk, google_auth as google, install
from headrace.tpu.arguments import reached
from headrace.tpu.cloud import LABEL, other
from headrace.tpu.gcp import Gcp
from headrace.cli.tpu_status import table
from headrace.tpu.request import check_there, sliced, zones_from
from headrace.tpu.timeouts import REACH


def ls(args: argparse.Namespace) -> None:
    found = disk.ours(google.project(args.project), zones_from(args.zone))
    table([(one.name, one.zone, f"{one.gigabytes} GB", one.kind) for one in found])
    if not found:
        print("no disks")


def change(args: argparse.Namespace) -> None:
    """create, attach, detach and delete."""
    check_there("DISK", args.disk)
    project = google.project(args.project)
    zone = (zones_from(args.zone) or ("",))[0]
    if not zone:
        raise UserError("--zone: found none, expected the zone of the disk, such as us-central2-b")
    if args.act in ("create", "delete"):
        disks = disk.Disks(project, zone)
        if args.act == "create":
            kind = args.type or disk.KINDS.get(
                sliced(args.slice, "any").chip.name if args.slice else "", disk.USUAL
            )
            disks.create(args.disk, args.size, kind)
            print(
                f"{args.disk}: {args.size} GB of {kind} in {zone}; it costs until `headrace tpu disk delete`"
            )
        else:
            if not args.force:
                check_ours(args.disk, disks.labels(args.disk))
            disks.delete(args.disk)
            print(f"{args.disk} is deleted")
        return
    args.name = args.to
    cloud, found, machines = reached(args)
    assert isinstance(cloud, Gcp)
    if args.act == "detach":
        install.unmount(machines, args.disk)
        disk.detach(cloud, found, args.disk)
        print(f"{args.disk} is detached from {found.name}")
        return
    number = disk.attach(cloud, found, args.disk, write=args.write)
    install.mount(machines, args.disk, number, "rw" if args.write else "ro", REACH)
    print(f"{args.disk} is /mnt/{args.disk} on {len(machines)} workers of {found.name}")


def check_ours(name: str, labels: Mapping[str, str]) -> None:
    if LABEL not in labels:
        raise UserError(f"{name}: Headrace did not make it; --force deletes it all the same")
    if who := other(labels):
        raise UserError(f"{name}: {who} made it; --force deletes it all the same")
