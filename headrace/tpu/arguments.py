"""Build a request, a budget, a cloud and the workers of a slice from the arguments of `headrace tpu`.

Every mistake in them raises UserError here, before anything is rented."""

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.config.sections import TrainRecipe
from headrace.errors import UserError
from headrace.tpu import cost, google_auth, job_ledger, workers
from headrace.tpu.cloud import Cloud, Slice, SliceState
from headrace.tpu.gcp import Gcp
from headrace.tpu.local import Local
from headrace.tpu.request import Request, check_resource_name, parse_tpu_slice, parse_zones

Namespace = argparse.Namespace
Connector = Callable[[Slice], workers.Workers]


def build_request(args: Namespace) -> Request:
    """The slice that --slice, --zone and so on describe. Checks that the workers could be reached over
    ssh."""
    shape = parse_tpu_slice(args.slice, args.runtime or ("any" if args.platform == "local" else ""))
    if args.platform == "local":
        if args.disk:
            raise UserError(f"--disk: found {args.disk[0]}, expected no disk with --platform local")
        return Request(args.name, shape, ("local",), terms=args.terms)
    zones = parse_zones(args.zone)
    if not zones:
        raise UserError("--zone: found none, expected one or more, such as --zone us-central2-b")
    public_key = ""
    if not args.dry_run:
        workers.check_ssh()
        _, public_key = workers.find_public_key(args.ssh_key)
    return Request(
        args.name,
        shape,
        zones,
        terms=args.terms,
        runtime=args.runtime,
        wait=args.wait,
        disks=tuple(args.disk),
        internal_ips=args.internal_ips,
        public_key=public_key,
    )


def build_budget(args: Namespace, request: Request) -> cost.Budget:
    """The budget that --max-hours and --max-cost set, without a price for a slice on this machine."""
    budget = cost.make_budget(request, args.max_hours, args.max_cost, args.prices)
    return dataclasses.replace(budget, dollars_per_hour=None) if args.platform == "local" else budget


def require_shared_paths(cfg: TrainRecipe, platform: str) -> TrainRecipe:
    """Raise UserError unless the paths of a recipe mean the same on every worker, also of a later slice. On
    this machine they are made absolute instead."""
    if platform == "local":
        data = dataclasses.replace(cfg.data, path=to_absolute(cfg.data.path))
        init_from = cfg.init_from and (
            to_absolute(cfg.init_from) if Path(cfg.init_from).exists() else cfg.init_from
        )
        return dataclasses.replace(cfg, run_dir=to_absolute(cfg.run_dir), data=data, init_from=init_from)
    for key, path in (("run_dir", cfg.run_dir), ("data.path", cfg.data.path), ("init_from", cfg.init_from)):
        if path and "://" not in path and not path.startswith("/"):
            raise UserError(
                f"{key}: found {path}, expected a path that all workers share and that outlives a slice, "
                f"{key}=gs://BUCKET/FOLDER, or an absolute path on a shared disk"
            )
    return cfg


def check_run_writable(run_dir: str, disks: Sequence[str]) -> None:
    """Raise UserError if the run folder is on a data disk, which is read-only on the workers."""
    for name in disks:
        if Path(os.path.normpath(run_dir)).is_relative_to(f"/mnt/{name}"):
            raise UserError(
                f"run_dir: found {run_dir}, expected a path that all workers can write: --disk {name} is "
                "read-only there; use run_dir=gs://BUCKET/FOLDER"
            )


def to_absolute(path: str) -> str:
    """The absolute form of a local path; URLs as they are."""
    return path if "://" in path else str(Path(path).absolute())


def read_secret(name: str) -> str:
    """The value of the variable that --env names."""
    if "=" in name:  # its value is in the history of the shell now, and must not get into a log as well
        variable = name.partition("=")[0]
        raise UserError(f"--env {variable}: found a value with it, expected the name only: export it first")
    if name not in os.environ:
        raise UserError(f"--env {name}: found no such variable in the environment")
    return os.environ[name]


def open_cloud(args: Namespace) -> Cloud:
    """The cloud to look a slice up in: the zones of --zone, else the last one of its job, else all."""
    if args.platform == "local":
        return Local()
    project, name = google_auth.resolve_project(args.project), args.name
    last_zones = job_ledger.JobLedger(job_ledger.job_id(project, name)).last_zones() if name else ()
    return Gcp(project, parse_zones(args.zone) or last_zones)


def open_cloud_for_rent(args: Namespace) -> Cloud:
    """The cloud to request a slice from: the zones of --zone, and those where one of this name exists."""
    if args.platform == "local":
        return Local()
    project = google_auth.resolve_project(args.project)
    zones = list(job_ledger.JobLedger(job_ledger.job_id(project, args.name)).last_zones())
    with contextlib.suppress(UserError):  # some users may not list every zone
        slices, _ = Gcp(project, retry_seconds=0.0).list_slices()
        zones += [slice_.zone for slice_ in slices if slice_.name == args.name]
    return Gcp(project, tuple(dict.fromkeys((*parse_zones(args.zone), *zones))))


def find_slice(args: Namespace) -> tuple[Cloud, Slice]:
    """The slice that the argument NAME names, and its cloud. Raises UserError if there is none."""
    check_resource_name("NAME", args.name)
    cloud = open_cloud(args)
    slice_ = cloud.find(args.name)
    if slice_ is None and isinstance(cloud, Gcp) and not args.zone:
        cloud = Gcp(cloud.project)
        slice_ = cloud.find(args.name)
    if slice_ is None:
        raise UserError(f"{args.name}: found no slice of this name; `headrace tpu ls` lists them")
    return cloud, slice_


def make_connector(args: Namespace, cloud: Cloud) -> Connector:
    """A function that returns the workers of a slice, to be reached with the key of --ssh-key."""

    def connect(slice_: Slice) -> workers.Workers:
        if isinstance(cloud, Local):
            return workers.local_workers(slice_.workers, cloud.coordinator(slice_))
        key, _ = workers.find_public_key(args.ssh_key)
        folder = job_ledger.job_dir(job_ledger.job_id(cloud.scope, slice_.name))
        return workers.ssh_workers(slice_.workers, key, folder / f"known_hosts.{slice_.created_at:.0f}")

    return connect


def connect_to_slice(args: Namespace) -> tuple[Cloud, Slice, workers.Workers]:
    """The slice that the argument NAME names, its cloud and its workers. Raises UserError unless it is
    ready."""
    cloud, slice_ = find_slice(args)
    if slice_.state is not SliceState.READY:
        raise UserError(f"{args.name}: found it {slice_.status_text}, expected it to be ready")
    return cloud, slice_, make_connector(args, cloud)(slice_)


def location_flags(args: Namespace) -> str:
    """The options by which another command looks in the same place."""
    flags = " --platform local" if args.platform == "local" else ""
    flags += f" --project {args.project}" if args.project else ""
    return flags + "".join(f" --zone {zone}" for zone in args.zone or () if args.platform != "local")
