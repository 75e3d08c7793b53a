"""`headrace tpu disk ...`: a function for each command."""

import argparse
from collections.abc import Mapping

from headrace.cli.tpu_status import print_table
from headrace.errors import UserError
from headrace.tpu import disk, google_auth, install, timeouts
from headrace.tpu.arguments import connect_to_slice
from headrace.tpu.cloud import MANAGED_LABEL, Slice, other_owner
from headrace.tpu.gcp import Gcp
from headrace.tpu.request import check_resource_name, parse_tpu_slice, parse_zones
from headrace.tpu.workers import Workers

Namespace = argparse.Namespace


def ls(args: Namespace) -> None:
    """`disk ls`: list the disks that were made with Headrace."""
    disks = disk.list_managed_disks(google_auth.resolve_project(args.project), parse_zones(args.zone))
    print_table([(entry.name, entry.zone, f"{entry.gigabytes} GB", entry.disk_type) for entry in disks])
    if not disks:
        print("no disks")


def create(args: Namespace) -> None:
    """`disk create`: create an empty disk of the type that the TPU of --slice takes."""
    disks = open_disks(args)
    chip = parse_tpu_slice(args.slice, "any").chip.name if args.slice else ""
    disk_type = args.type or disk.DISK_TYPES.get(chip, disk.DEFAULT_DISK_TYPE)
    disks.create(args.disk, args.size, disk_type)
    print(
        f"{args.disk}: {args.size} GB of {disk_type} in {disks.zone}; it costs money until you run "
        "`headrace tpu disk delete`"
    )


def delete(args: Namespace) -> None:
    """`disk delete`: delete a disk with everything on it."""
    disks = open_disks(args)
    if not args.force:
        check_own(args.disk, disks.labels(args.disk))
    disks.delete(args.disk)
    print(f"{args.disk} deleted")


def attach(args: Namespace) -> None:
    """`disk attach`: attach a disk to a slice and mount it at /mnt/DISK of every worker."""
    cloud, slice_, machines = connect_to_google_slice(args)
    number = disk.attach(cloud, slice_, args.disk, write=args.write)
    mode: install.Mode = "rw" if args.write else "ro"
    install.mount(machines, args.disk, number, mode, retry_seconds=timeouts.CONNECT_TIMEOUT)
    print(f"{args.disk} mounted at /mnt/{args.disk} on {len(machines)} workers of {slice_.name}")


def detach(args: Namespace) -> None:
    """`disk detach`: unmount a disk and detach it from a slice."""
    cloud, slice_, machines = connect_to_google_slice(args)
    install.unmount(machines, args.disk)
    disk.detach(cloud, slice_, args.disk)
    print(f"{args.disk} detached from {slice_.name}")


def open_disks(args: Namespace) -> disk.Disks:
    """The disks of the zone of --zone."""
    return disk.Disks(google_auth.resolve_project(args.project), check_disk_options(args))


def check_disk_options(args: Namespace) -> str:
    """Check the name of the disk, and return the zone of --zone."""
    check_resource_name("DISK", args.disk)
    zones = parse_zones(args.zone)
    if not zones:
        raise UserError("--zone: found none, expected the zone of the disk, such as us-central2-b")
    return zones[0]


def connect_to_google_slice(args: Namespace) -> tuple[Gcp, Slice, Workers]:
    """The slice of --to or --from, its cloud and its workers."""
    check_disk_options(args)
    args.name = args.to
    cloud, slice_, machines = connect_to_slice(args)
    assert isinstance(cloud, Gcp)
    return cloud, slice_, machines


def check_own(name: str, labels: Mapping[str, str]) -> None:
    """Raise UserError unless the current user made the disk with these labels."""
    if MANAGED_LABEL not in labels:
        raise UserError(f"{name}: not created by Headrace; --force deletes it anyway")
    if owner := other_owner(labels):
        raise UserError(f"{name}: created by {owner}; --force deletes it anyway")
