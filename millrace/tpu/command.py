"""`millrace tpu ...`: one short function a command. Everything that can be wrong is told before a machine is
rented."""

import argparse
import contextlib
import dataclasses
import importlib
import os
import shlex
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from millrace.errors import UserError
from millrace.tpu import (
    bundle,
    cost,
    disk,
    ending,
    gcloud,
    google,
    install,
    job,
    launch,
    place,
    region,
    workers,
)
from millrace.tpu.cloud import Cloud, Rented, State
from millrace.tpu.gcp import Gcp
from millrace.tpu.local import Local
from millrace.tpu.request import Request, check_disk, name_from, sliced, zones_from

Namespace = argparse.Namespace


def run(args: Namespace) -> int:
    from millrace import config, recipe

    cfg = recipe.load_train(args.recipe, args.overrides)
    args.name = args.name or name_from(Path(args.recipe).stem)
    request = requested(args)
    cfg = reachable(cfg, args.platform)
    allowed = budgeted(args, request)
    secrets = {name: secret(name) for name in args.env}
    if args.platform != "local":
        print(cost.spoken(request, allowed, own_prices=args.prices is not None), flush=True)
        if not args.dry_run:
            paths = [cfg.run, cfg.data.path, cfg.start or ""]
            for words in region.check(paths, request.zones, allowed=args.far_bucket):
                print(f"warning: {words}", flush=True)
            disk.check(google.project(args.project), request.zones, request.disks)
    if args.dry_run:
        return show_commands(args, request, allowed)
    cloud = opened_to_rent(args)
    task = job.Job(request.name, config.to_yaml(cfg), cfg.run, secrets)
    if cfg.log.wandb and "WANDB_API_KEY" not in secrets:
        print("warning: log.wandb is on, but the workers have no key for it: --env WANDB_API_KEY", flush=True)
    launcher = launch.Launcher(
        cloud,
        request,
        task,
        allowed,
        tree=bundle.root(),
        connect=connector(args, cloud),
        extras=needed(cfg),
        keep=args.keep,
    )
    return launcher.run()


def needed(cfg: Any) -> list[str]:
    """Extras of pyproject.toml that not every job needs."""
    return ["wandb"] * cfg.log.wandb + ["torch"] * (cfg.model.use == "torch")


def show_commands(args: Namespace, request: Request, allowed: cost.Budget) -> int:
    if args.platform == "local":
        return show_local(request)
    project, zone = google.project(args.project), request.zones[0]
    tree = '"$HOME/.millrace/tree"'
    train = shlex.join(["-m", "millrace", "train", str(args.recipe), *args.overrides])
    idle = None if args.keep else launch.IDLE
    where = gcloud.where(project, zone)
    send = ["gcloud", "compute", "tpus", "tpu-vm", "scp", "--recurse", ".", f"{request.name}:.millrace/tree"]
    for command in (
        gcloud.create(project, request, zone, allowed.hours * 3600, idle),
        gcloud.describe(project, request.name, zone),
        [*send, *where, "--worker=all"],
        gcloud.ssh(project, request.name, zone, install.script(bundle.root())),
        gcloud.ssh(project, request.name, zone, f"cd {tree} && $HOME/.millrace/env/bin/python {train}"),
        gcloud.delete(project, request.name, zone),
    ):
        print(gcloud.written(command))
    return 0


def show_local(request: Request) -> int:
    print(f"{request.name}: {request.slice.hosts} processes of this machine; no gcloud command does the same")
    return 0


def create(args: Namespace) -> int:
    """A slice that stays until its hours are over, or until it is deleted."""
    args.name = args.name or name_from(args.slice)
    request = requested(args)
    allowed = budgeted(args, request)
    if args.platform != "local":
        print(cost.spoken(request, allowed, own_prices=args.prices is not None), flush=True)
        if not args.dry_run:
            disk.check(google.project(args.project), request.zones, request.disks)
    if args.dry_run and args.platform == "local":
        return show_local(request)
    if args.dry_run:
        project, zone = google.project(args.project), request.zones[0]
        print(gcloud.written(gcloud.create(project, request, zone, allowed.hours * 3600, None)))
        return 0
    nothing = job.Job(request.name, "", "")
    cloud = opened_to_rent(args)
    made = launch.Launcher(
        cloud, request, nothing, allowed, tree=Path(), connect=connector(args, cloud), keep=True
    )
    with place.watching(request.name), made.signals():
        try:
            found = made.ensure()
        except BaseException:
            if made.mine:
                made.gentle = True
                made.delete_and_wait()
            raise
    print(f"{found.name} is ready in {found.zone}, {len(found.workers)} workers; next:")
    terms = "" if found.terms == "on-demand" else f" --{found.terms}"
    print(f"  millrace tpu run --name {found.name} --slice {args.slice}{terms} --keep{told(args)} RECIPE")
    print(f"  millrace tpu delete {found.name}{told(args)}")
    return 0


def install_all(args: Namespace) -> None:
    _, found, machines = reached(args)
    bundle.push(machines, bundle.make(bundle.root()), launch.REACH)
    install.install(machines, bundle.root(), launch.REACH)
    print(f"{found.name}: {install.stamp(bundle.root())} on {len(machines)} workers")


def push(args: Namespace) -> None:
    _, found, machines = reached(args)
    packed = bundle.make(bundle.root())
    for name in packed.left_out:
        print(f"not sent, since it is secret or large: {name}")
    bundle.push(machines, packed, launch.REACH)
    print(f"{found.name}: {packed.files} files as {packed.name} on {len(machines)} workers")


def logs(args: Namespace) -> int:
    """Until the job ends. Ctrl-C ends the looking on alone."""
    _, found, machines = reached(args)
    states = job.states(machines, found.name)
    if not any(state and state["identity"] for state in states):
        raise UserError(f"{found.name}: found no job on it; `millrace tpu run` starts one")
    offsets = [state["recent"] if state and not args.whole else 0 for state in states]
    following = job.Following(machines, found.name, offsets, lambda line: print(line, flush=True))
    try:
        while not following.done:
            following.show(1.0)
        following.show(0.0)
    finally:
        following.end()
    return max(code or 0 for code in following.codes)


def status(args: Namespace) -> None:
    cloud, found = found_by_name(args)
    print(f"{found.name}  {found.accelerator} {found.terms} in {found.zone}: {found.said}")
    print(f"{'':{len(found.name)}}  {aged(found)}")
    if found.state is not State.READY:
        return
    for number, state in enumerate(job.states(connector(args, cloud)(found), found.name)):
        if state is None:
            print(f"[w{number}] cannot be reached, or has nothing installed")
        elif state["running"]:
            print(f"[w{number}] trains: {state['last']}")
        elif state["exit"] is not None:
            print(f"[w{number}] ended with {state['exit']}: {state['last']}")
        else:
            print(f"[w{number}] has no job")


def ssh(args: Namespace) -> int:
    """A shell on one worker, or a command on one or all, each line with its worker's number."""
    _, found, machines = reached(args)
    every = args.worker == "all"
    if not every and not (args.worker.isdigit() and int(args.worker) < len(machines)):
        raise UserError(f"--worker: found {args.worker}, expected 0 to {len(machines) - 1}, or all")
    if args.words:
        chosen = range(len(machines)) if every else [int(args.worker)]
        text = shlex.join(args.words) if len(args.words) > 1 else args.words[0]
        with ThreadPoolExecutor(len(chosen)) as pool:
            return max(pool.map(lambda number: streamed(machines, number, text), chosen))
    if every:
        raise UserError("--worker all: expected a command to run on them")
    where = machines.places[int(args.worker)]
    os.execvpe(where.shell[0], where.shell, os.environ | where.env)


def streamed(machines: workers.Workers, number: int, script: str) -> int:
    """Each line as it comes; returns the exit code."""
    process = machines.start(number, script)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    for line in process.stdout:
        print(f"[w{number}] {line.decode(errors='replace').rstrip()}", flush=True)
    return process.wait()


def delete(args: Namespace) -> int:
    cloud, found = found_by_name(args)
    if not found.ours and not args.force:
        raise UserError(f"{args.name}: Millrace did not make it; --force deletes it all the same")
    if place.watched(args.name) and not args.force:
        raise UserError(
            f"{args.name}: a `millrace tpu run` here watches it, and would take another; end that by Ctrl-C"
        )
    gone = ending.give_back(cloud, args.name, print, found.zone)
    place.Ledger(args.name).clear()
    return 0 if gone else 1


def ls(args: Namespace) -> int:
    """With --orphans the exit code is 1 if there are any, for whoever asks every night."""
    found = opened(args).all()
    if args.orphans:
        found = [one for one in found if one.ours and not place.watched(one.name)]
    rows = [(one.name, one.zone, one.accelerator, one.terms, one.said, aged(one)) for one in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if args.orphans:
        for one in found:
            print(f"nobody here watches {one.name}: `millrace tpu run` adopts it, or")
            print(f"  millrace tpu delete {one.name}{told(args)}")
        return 1 if found else 0
    if not found:
        print("no slices")
    return 0


def disk_(args: Namespace) -> None:
    """create, attach, detach and delete."""
    check_disk("DISK", args.disk)
    project = google.project(args.project)
    zone = (args.zone or [""])[0]
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
                f"{args.disk}: {args.size} GB of {kind} in {zone}; it costs until `millrace tpu disk delete`"
            )
        else:
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
    install.mount(machines, args.disk, number, "rw" if args.write else "ro", launch.REACH)
    print(f"{args.disk} is /mnt/{args.disk} on {len(machines)} workers of {found.name}")


def export(args: Namespace) -> None:
    from millrace import recipe
    from millrace.plan import slices
    from millrace.tpu.exports import Exported

    recipe.load_train(args.recipe, args.overrides)
    where = slices.parse(args.slice)
    name = args.name or name_from(Path(args.recipe).stem)
    request = Request(name, where, (), runtime=args.runtime) if where.chip.is_tpu else None
    if args.to == "jobset" and not args.image:
        raise UserError("--image: found none, expected a container with Millrace and the recipe in it")
    told = Exported(
        name=name,
        command=("millrace", "train", str(args.recipe), *args.overrides),
        slice=where,
        spot=args.spot,
        hours=args.max_hours or cost.HOURS,
        image=args.image,
        accelerator=request.accelerator if request else "",
        runtime=request.image if request and (args.runtime or args.to == "skypilot") else "",
    )
    text = importlib.import_module(f"millrace.tpu.exports.{args.to}").write(told)
    if args.out is None:
        print(text, end="")
    else:
        args.out.write_text(text)
        print(f"{args.out}: written")


def tensorboard(args: Namespace) -> int:
    from millrace.tpu import board

    return board.serve(args.run, args.port)


# What the commands share.


def requested(args: Namespace) -> Request:
    slice_ = sliced(args.slice, args.runtime or ("any" if args.platform == "local" else ""))
    if args.platform == "local":
        return Request(args.name, slice_, ("local",), terms=args.terms)
    zones = zones_from(args.zone)
    if not zones:
        raise UserError("--zone: found none, expected one or more, such as --zone us-central2-b")
    key = ""
    if not args.dry_run:
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
    known = place.Ledger(args.name).zones() if getattr(args, "name", None) else ()
    return Gcp(google.project(args.project), zones_from(args.zone) or known)


def opened_to_rent(args: Namespace) -> Cloud:
    """Looks in the zones that are asked for, and where there is one of that name from an earlier time."""
    if args.platform == "local":
        return Local()
    project, asked = google.project(args.project), zones_from(args.zone)
    elsewhere = list(place.Ledger(args.name).zones())
    with contextlib.suppress(UserError):  # not everybody may list every zone
        elsewhere += [one.zone for one in Gcp(project, patience=0.0).all() if one.name == args.name]
    return Gcp(project, tuple(dict.fromkeys((*asked, *elsewhere))))


def found_by_name(args: Namespace) -> tuple[Cloud, Rented]:
    cloud = opened(args)
    found = cloud.find(args.name)
    if found is None and isinstance(cloud, Gcp) and not args.zone:
        cloud = Gcp(cloud.project)
        found = cloud.find(args.name)
    if found is None:
        raise UserError(f"{args.name}: found no slice of that name; `millrace tpu ls` lists them")
    return cloud, found


def connector(args: Namespace, cloud: Cloud) -> Callable[[Rented], workers.Workers]:
    def connect(found: Rented) -> workers.Workers:
        if isinstance(cloud, Local):
            return workers.on_this_machine(found.workers, cloud.coordinator(found))
        key, _ = workers.public_key(args.ssh_key)
        known = place.folder(found.name) / f"known_hosts.{found.created:.0f}"
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


def aged(found: Rented) -> str:
    if not found.created:
        return "no machines yet"
    age = (time.time() - found.created) / 3600
    words = f"{cost.hours(age)} old"
    if found.seconds is not None:
        words += f", deletes itself in {cost.hours(max(0.0, found.seconds / 3600 - age))}"
    return words
