"""`millrace tpu ...`: one short function a command. Everything that can be wrong is told before a machine is
rented."""

import argparse
import importlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
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
from millrace.tpu.arguments import (
    budgeted,
    connector,
    found_by_name,
    opened,
    opened_to_rent,
    reachable,
    reached,
    requested,
    secret,
    told,
)
from millrace.tpu.cloud import Cloud, Rented, State
from millrace.tpu.gcp import Gcp
from millrace.tpu.rent import IDLE, Renter
from millrace.tpu.request import Request, check_name, name_from
from millrace.tpu.times import POLL, REACH
from millrace.tpu.voice import Voice

Namespace = argparse.Namespace


def run(args: Namespace) -> int:
    from millrace import config, recipe

    cfg = recipe.load_train(args.recipe, args.overrides)
    args.name = args.name or name_from(Path(args.recipe).stem)
    request = requested(args)
    cfg = reachable(cfg, args.platform)
    allowed = budgeted(args, request)
    secrets = {name: secret(name) for name in args.env}
    near = nearness(args, cfg)
    if args.platform != "local":
        print(cost.spoken(request, allowed, own_prices=args.prices is not None), flush=True)
        if not args.dry_run:
            near(*request.zones)
            disk.check(google.project(args.project), request.zones, request.disks)
    if args.dry_run:
        return show_commands(args, request, allowed, needed(cfg))
    cloud = opened_to_rent(args)
    task = job.Job(request.name, config.to_yaml(cfg), cfg.run, secrets)
    if cfg.log.wandb and "WANDB_API_KEY" not in secrets:
        print("warning: log.wandb is on, but the workers have no key for it: --env WANDB_API_KEY", flush=True)
    ledger = place.Ledger(request.name, cfg.run)
    renter = Renter(
        cloud, request, allowed, ledger, voice=Voice(), keep=args.keep, adopt=args.adopt, near=near
    )
    connect = connector(args, cloud)
    return launch.Launcher(renter, task, tree=bundle.root(), connect=connect, extras=needed(cfg)).run()


def nearness(args: Namespace, cfg: Any) -> Callable[..., None]:
    """Refuses zones that are far from the buckets of a run, or warns of them."""
    paths = [cfg.run, cfg.data.path, cfg.start or ""]

    def near(*zones: str) -> None:
        for words in region.check(paths, zones, allowed=args.far_bucket) if args.platform != "local" else ():
            print(f"warning: {words}", flush=True)

    return near


def needed(cfg: Any) -> list[str]:
    """Extras of pyproject.toml that not every job needs."""
    return ["wandb"] * cfg.log.wandb + ["torch"] * (cfg.model.use == "torch")


def show_commands(args: Namespace, request: Request, allowed: cost.Budget, extras: Sequence[str]) -> int:
    if args.platform == "local":
        return show_local(request)
    project = google.project(args.project)
    recipe = Path(args.recipe).resolve()
    inside = recipe.is_relative_to(bundle.root())
    train = ["train", str(recipe.relative_to(bundle.root())) if inside else ".recipe.yaml", *args.overrides]
    for line in gcloud.by_hand(
        project,
        request,
        seconds=allowed.hours * 3600,
        idle=None if args.keep else IDLE,
        tree=bundle.root(),
        recipe=None if inside else recipe,
        extras=extras,
        train=train,
    ):
        print(line)
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
    ledger = place.Ledger(request.name, "")
    renter = Renter(opened_to_rent(args), request, allowed, ledger, voice=Voice(), keep=True)
    with place.watching(request.name), renter.voice.signals():
        try:
            found = renter.ensure()
        except BaseException:
            if renter.mine and renter.made:  # and not one that somebody asked for before
                renter.voice.gentle = True
                renter.delete()
            raise
        renter.timed(found)
    print(f"{found.name} is ready in {found.zone}, {len(found.workers)} workers; next:")
    terms = "" if found.terms == "on-demand" else f" --{found.terms}"
    print(f"  millrace tpu run --name {found.name} --slice {args.slice}{terms} --keep{told(args)} RECIPE")
    print(f"  millrace tpu delete {found.name}{told(args)}")
    return 0


def install_all(args: Namespace) -> None:
    _, found, machines = reached(args)
    bundle.push(machines, bundle.make(bundle.root()), REACH)
    install.install(machines, bundle.root(), REACH)
    print(f"{found.name}: {install.stamp(bundle.root())} on {len(machines)} workers")


def push(args: Namespace) -> None:
    _, found, machines = reached(args)
    packed = bundle.make(bundle.root())
    for name in packed.left_out:
        print(f"not sent, since it is secret or large: {name}")
    bundle.push(machines, packed, REACH)
    print(f"{found.name}: {packed.files} files as {packed.name} on {len(machines)} workers")


def logs(args: Namespace) -> int:
    """Until the job ends, or the slice. Ctrl-C ends the looking on alone."""
    cloud, found, machines = reached(args)
    states = job.states(machines, found.name)
    if not any(state.identity for state in states):
        for number, state in enumerate(states):
            if state.unknown:
                raise UserError(f"{found.name}: [w{number}] cannot be asked: {state.unknown}")
        raise UserError(f"{found.name}: found no job on it; `millrace tpu run` starts one")
    offsets = [0 if args.whole else state.recent for state in states]
    following = job.Following(machines, found.name, offsets, lambda line: print(line, flush=True))
    looked = time.monotonic()
    try:
        while not following.done:
            following.show(1.0)
            if following.broken and time.monotonic() - looked > POLL:
                looked = time.monotonic()
                if (said := unless_there(cloud, found.name)) is not None:
                    print(f"{found.name}: {said}", flush=True)
                    return 1
        following.show(0.0)
    finally:
        following.end()
    return max(code or 0 for code in following.codes)


def unless_there(cloud: Cloud, name: str) -> str | None:
    """What has become of a slice that is ready no more; nothing is concluded where the cloud is silent."""
    try:
        now = cloud.find(name)
    except UserError:
        return None
    if now is None:
        return "it is deleted"
    return None if now.state in (State.READY, State.WAITING) else f"it is {now.said}"


def status(args: Namespace) -> None:
    cloud, found = found_by_name(args)
    print(f"{found.name}  {found.accelerator} {found.terms} in {found.zone}: {found.said}")
    print(f"{'':{len(found.name)}}  {aged(found)}")
    if found.state is not State.READY:
        return
    for number, state in enumerate(job.states(connector(args, cloud)(found), found.name)):
        if state.unknown:
            print(f"[w{number}] cannot be asked: {state.unknown}")
        elif state.running:
            print(f"[w{number}] trains: {state.last}")
        elif state.exit is not None:
            print(f"[w{number}] ended with {state.exit}: {state.last}")
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
    if not ending.give_back(cloud, args.name, print, found.zone):
        return 1  # and its hours are counted on
    place.Ledger(args.name).clear()
    return 0


def ls(args: Namespace) -> int:
    """With --orphans the exit code is 1 if there are slices among them, for whoever asks every night."""
    cloud = opened(args)
    every = cloud.all()
    found = [one for one in every if one.ours and not place.watched(one.name)] if args.orphans else every
    table([(one.name, one.zone, one.accelerator, one.terms, one.said, aged(one)) for one in found])
    if not args.orphans:
        if not found:
            print("no slices")
        return 0
    for one in found:
        print(f"nobody here watches {one.name}: `millrace tpu run` adopts it, or")
        print(f"  millrace tpu delete {one.name}{told(args)}")
    if isinstance(cloud, Gcp):
        disk.show_unused(cloud, {(one.zone, name) for one in every for name in one.disks})
    return 1 if found else 0


def table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def export(args: Namespace) -> None:
    from millrace import recipe
    from millrace.plan import slices
    from millrace.tpu.exports import Exported

    cfg = recipe.load_train(args.recipe, args.overrides)
    where = slices.parse(args.slice)
    name = args.name or name_from(Path(args.recipe).stem)
    check_name(name)
    cost.check("--max-hours", args.max_hours)
    request = Request(name, where, (), runtime=args.runtime) if where.chip.is_tpu else None
    if args.to == "jobset" and not args.image:
        raise UserError("--image: found none, expected a container with Millrace and the recipe in it")
    if args.to in ("jobset", "skypilot"):
        lasting(args.to, cfg)
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


def lasting(to: str, cfg: Any) -> None:
    """Machines of these come and go, with what is on them."""
    if "://" not in cfg.run:
        raise UserError(
            f"run: found {cfg.run}, expected run=gs://BUCKET/FOLDER: with --to {to} the checkpoints would go "
            "with the machine that wrote them"
        )
    if "://" not in cfg.data.path:
        words = (
            f"warning: data.path is {cfg.data.path}, which must be on every machine; or gs://BUCKET/FOLDER"
        )
        print(words, file=sys.stderr)


def tensorboard(args: Namespace) -> int:
    from millrace.tpu import board

    return board.serve(args.run, args.port)


def aged(found: Rented) -> str:
    if not found.created:
        return "no machines yet"
    age = (time.time() - found.created) / 3600
    words = f"{cost.hours(age)} old"
    if found.seconds is not None and found.zone != "local":  # where there is no timer
        words += f", deletes itself in {cost.hours(max(0.0, found.seconds / 3600 - age))}"
    return words
