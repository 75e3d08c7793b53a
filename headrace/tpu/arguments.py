"""What the words of a command line come to: a request, a budget, a cloud, the workers of a slice. What is
wrong with them is told here, before anything is asked for."""

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import UserError
from headrace.tpu import cost, google_auth as google, job_ledger as place, workers
from headrace.tpu.cloud import Cloud, Rented, State
from headrace.tpu.gcp import Gcp
from headrace.tpu.local import Local
from headrace.tpu.request import Request, check_there, sliced, zones_from

Namespace = argparse.Namespace


def requested(args: Namespace) -> Request:
    slice_ = sliced(args.slice, args.runtime or ("any" if args.platform == "local" else ""))
    if args.platform == "local":
        if args.disk:
            raise UserError(f"--disk: found {args.disk[0]}, expected none with --platform local")
        return Request(args.name, slice_, ("local",), terms=args.terms)
    zones = zones_from(args.zone)
    if not zones:
        raise UserError("--zone: found none, expected one or more, such as --zone us-central2-b")
    key = ""
    if not args.dry_run:
        workers.check_ssh()
        _, key = workers.public_key(args.ssh_key)
    return Request(
        args.name,
        slice_,
        zones,
        terms=args.terms,
        runtime=args.runtime,
        wait=args.wait,
        disks=tuple(args.disk),
        internal=args.internal_ips,
        public_key=key,
    )


def budgeted(args: Namespace, request: Request) -> cost.Budget:
    found = cost.budget(request, args.max_hours, args.max_cost, args.prices)
    return dataclasses.replace(found, rate=None) if args.platform == "local" else found


def reachable(cfg: Any, platform: str) -> Any:
    """A run and its data must be where every worker finds them, also those of the next slice."""
    if platform == "local":
        data = dataclasses.replace(cfg.data, path=absolute(cfg.data.path))
        start = cfg.start and (absolute(cfg.start) if Path(cfg.start).exists() else cfg.start)
        return dataclasses.replace(cfg, run=absolute(cfg.run), data=data, start=start)
    for key, path in (("run", cfg.run), ("data.path", cfg.data.path), ("start", cfg.start)):
        if path and "://" not in path and not path.startswith("/"):
            raise UserError(
                f"{key}: found {path}, expected what all workers reach and a preemption leaves alone: "
                f"{key}=gs://BUCKET/FOLDER, or a path from / of a disk that they share"
            )
    return cfg


def check_written(run: str, disks: Sequence[str]) -> None:
    for name in disks:
        if Path(os.path.normpath(run)).is_relative_to(f"/mnt/{name}"):
            raise UserError(
                f"run: found {run}, expected what all workers write to: --disk {name} is read-only there; "
                "run=gs://BUCKET/FOLDER"
            )


def absolute(path: str) -> str:
    return path if "://" in path else str(Path(path).absolute())


def secret(name: str) -> str:
    if "=" in name:  # whose value is in the shell's history now, and should not be in a log as well
        before = name.partition("=")[0]
        raise UserError(f"--env {before}: found a value with it, expected the name alone: export it first")
    if name not in os.environ:
        raise UserError(f"--env {name}: found no such variable here")
    return os.environ[name]


def opened(args: Namespace) -> Cloud:
    """Looks where it was told to, else where the job was last, else everywhere."""
    if args.platform == "local":
        return Local()
    project, name = google.project(args.project), getattr(args, "name", None)
    known = place.Ledger(place.key(project, name)).zones() if name else ()
    return Gcp(project, zones_from(args.zone) or known)


def opened_to_rent(args: Namespace) -> Cloud:
    """Looks in the zones that are asked for, and where there is one of that name from an earlier time."""
    if args.platform == "local":
        return Local()
    project, asked = google.project(args.project), zones_from(args.zone)
    elsewhere = list(place.Ledger(place.key(project, args.name)).zones())
    with contextlib.suppress(UserError):  # not everybody may list every zone
        elsewhere += [one.zone for one in Gcp(project, patience=0.0).survey()[0] if one.name == args.name]
    return Gcp(project, tuple(dict.fromkeys((*asked, *elsewhere))))


def found_by_name(args: Namespace) -> tuple[Cloud, Rented]:
    check_there("NAME", args.name)
    cloud = opened(args)
    found = cloud.find(args.name)
    if found is None and isinstance(cloud, Gcp) and not args.zone:
        cloud = Gcp(cloud.project)
        found = cloud.find(args.name)
    if found is None:
        raise UserError(f"{args.name}: found no slice of that name; `headrace tpu ls` lists them")
    return cloud, found


def connector(args: Namespace, cloud: Cloud) -> Callable[[Rented], workers.Workers]:
    def connect(found: Rented) -> workers.Workers:
        if isinstance(cloud, Local):
            return workers.on_this_machine(found.workers, cloud.coordinator(found))
        key, _ = workers.public_key(args.ssh_key)
        known = place.folder(place.key(cloud.scope, found.name)) / f"known_hosts.{found.created:.0f}"
        return workers.by_ssh(found.workers, key, known)

    return connect


def reached(args: Namespace) -> tuple[Cloud, Rented, workers.Workers]:
    cloud, found = found_by_name(args)
    if found.state is not State.READY:
        raise UserError(f"{args.name}: found it {found.said}, expected it ready")
    return cloud, found, connector(args, cloud)(found)


def told(args: Namespace) -> str:
    """The options by which the next command means the same place."""
    words = " --platform local" if args.platform == "local" else ""
    words += f" --project {args.project}" if args.project else ""
    return words + "".join(f" --zone {zone}" for zone in args.zone or () if args.platform != "local")
