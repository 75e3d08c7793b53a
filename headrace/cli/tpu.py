"""`headrace tpu ...`: one short function a command. Everything that can be wrong is told before a machine is
rented."""

import argparse
import os
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headrace.errors import UserError
from headrace.tpu import (
    bundle,
    cost,
    disk,
    outcome as ending,
    gcloud,
    google_auth as google,
    install,
    job,
    launch,
    job_ledger as place,
    region,
    workers,
)
from headrace.cli import tpu_status as look_command
from headrace.tpu.arguments import (
    budgeted,
    check_written,
    connector,
    found_by_name,
    opened_to_rent,
    reachable,
    reached,
    requested,
    secret,
    told,
)
from headrace.tpu.cloud import Cloud, Rented, State
from headrace.tpu.gcp import STATES
from headrace.tpu.provision import IDLE, Renter
from headrace.tpu.request import Request, name_from
from headrace.tpu.timeouts import DENIED, POLL, REACH, REST
from headrace.tpu.console import Voice, whisper

Namespace = argparse.Namespace


def run(args: Namespace) -> int:
    from headrace.config import reader as config, recipe

    cfg = recipe.load_train(args.recipe, args.overrides)
    args.name = args.name or name_from(Path(args.recipe).stem)
    request = requested(args)
    cfg = reachable(cfg, args.platform)
    check_written(cfg.run, request.disks)
    allowed = budgeted(args, request)
    secrets = {name: secret(name) for name in args.env}
    near = nearness(args, cfg, request)
    if args.platform != "local":
        print(cost.spoken(request, allowed, own_prices=cost.own(request, args.prices)), flush=True)
        if not args.dry_run:
            near(*request.zones)
            disk.check(google.project(args.project), request.zones, request.disks)
    if args.dry_run:
        return show_commands(args, request, allowed, install.needed(cfg))
    cloud = opened_to_rent(args)
    task = job.Job(request.name, config.to_yaml(cfg), cfg.run, secrets)
    if cfg.log.wandb and "WANDB_API_KEY" not in secrets:
        print("warning: log.wandb is on, but the workers have no key for it: --env WANDB_API_KEY", flush=True)
    ledger = place.Ledger(place.key(cloud.scope, request.name), cfg.run)
    renter = Renter(
        cloud, request, allowed, ledger, voice=Voice(), keep=args.keep, adopt=args.adopt, near=near
    )
    connect = connector(args, cloud)
    return launch.Launcher(
        renter, task, tree=bundle.root(), connect=connect, extras=install.needed(cfg)
    ).run()


def nearness(args: Namespace, cfg: Any, request: Request) -> Callable[..., None]:
    """Refuses zones that are far from the buckets of a run, or warns of them; and those of unknown prices."""
    paths = [cfg.run, cfg.data.path, cfg.start or ""]

    def near(*zones: str) -> None:
        for zone in zones if args.max_cost is not None else ():
            cost.check_zone(request, zone, args.prices)
        for words in region.check(paths, zones, allowed=args.far_bucket) if args.platform != "local" else ():
            print(f"warning: {words}", flush=True)

    return near


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
        print(cost.spoken(request, allowed, own_prices=cost.own(request, args.prices)), flush=True)
        if not args.dry_run:
            disk.check(google.project(args.project), request.zones, request.disks)
    if args.dry_run and args.platform == "local":
        return show_local(request)
    if args.dry_run:
        project, zone = google.project(args.project), request.zones[0]
        print(gcloud.written(gcloud.create(project, request, zone, allowed.hours * 3600, None)))
        return 0
    cloud = opened_to_rent(args)
    ledger = place.Ledger(place.key(cloud.scope, request.name), "")
    renter = Renter(cloud, request, allowed, ledger, voice=Voice(), keep=True)
    with place.watching(ledger.key), renter.voice.signals():
        try:
            if renter.look() is None:  # an earlier one of that name is over, with its hours
                ledger.clear()
            found = renter.ensure()
            if found.state is State.DELETING:
                raise UserError(f"{found.name}: somebody else deleted it; the same command asks anew")
        except BaseException:
            if renter.mine and renter.made:  # and not one that somebody asked for before
                renter.voice.gentle = True
                renter.delete()
            raise
        say_ready(args, found)  # before anything else takes time: who ends it now knows what stays
        renter.timed(found)
    look_command.doubt(args, cloud, found, DENIED)
    return 0


def say_ready(args: Namespace, found: Rented) -> None:
    print(f"{found.name} is ready in {found.zone}, {len(found.workers)} workers; next:")
    terms = "" if found.terms == "on-demand" else f" --{found.terms}"
    print(f"  headrace tpu run --name {found.name} --slice {args.slice}{terms} --keep{told(args)} RECIPE")
    print(f"  headrace tpu delete {found.name}{told(args)}", flush=True)


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
            try:
                return max(pool.map(lambda number: streamed(machines, number, text), chosen))
            except BaseException:  # Ctrl-C: nobody waits for the end of the command
                for process in [one for one in machines.live if one.poll() is None]:
                    os.killpg(process.pid, signal.SIGKILL)
                raise
    if every:
        raise UserError("--worker all: expected a command to run on them")
    where = machines.places[int(args.worker)]
    os.execvpe(where.shell[0], where.shell, os.environ | where.env)


def streamed(machines: workers.Workers, number: int, script: str) -> int:
    """Each line as it comes; returns the exit code."""
    process = machines.start(number, script)
    machines.live.add(process)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    for line in process.stdout:
        print(f"[w{number}] {line.decode(errors='replace').rstrip()}", flush=True)
    return process.wait()


def delete(args: Namespace) -> int:
    """With --force at once and whosever it is; else whoever trains there saves first."""
    cloud, found = found_by_name(args)
    key = place.key(cloud.scope, args.name)
    if not args.force:
        if not found.ours:
            raise UserError(f"{args.name}: Headrace did not make it; --force deletes it all the same")
        if found.theirs:
            raise UserError(f"{args.name}: {found.theirs} made it; --force deletes it all the same, unsaved")
        if place.watched(key):
            raise UserError(f"{args.name}: a `headrace tpu run` here watches it; end that by Ctrl-C first")
        let_save(args, cloud, found)
    if not ending.give_back(cloud, args.name, print, found.zone):
        return 1  # and its hours are counted on
    place.Ledger(key).clear()
    return 0


def let_save(args: Namespace, cloud: Cloud, found: Rented) -> None:
    """Another machine may follow a training there, of which nothing is known here."""
    if found.state is State.WAITING and found.created and STATES.get(found.said) is not State.WAITING:
        raise UserError(
            f"{found.name}: found it {found.said}, so that nobody can be asked whether anything trains "
            "there; --force deletes it all the same, unsaved"
        )
    if found.state is not State.READY:
        return
    try:
        machines = connector(args, cloud)(found)
        states = job.states(machines, found.name)
        unknown = next((state.unknown for state in states if state.unknown), "")
    except UserError as why:
        unknown = str(why)
    if unknown:
        raise UserError(
            f"{found.name}: cannot be asked whether anything trains there ({unknown}); --force deletes it "
            "all the same, unsaved"
        )
    if other := next((state.elsewhere for state in states if state.elsewhere), ""):
        raise UserError(
            f"{found.name}: found another training there ({other}); --force deletes it all the same, unsaved"
        )
    if not any(state.running for state in states):
        return
    whisper(print, f"{found.name}: lets the trainer save")
    job.stop(machines, found.name)
    until = time.monotonic() + REST
    while any(state.running for state in job.states(machines, found.name)):
        if time.monotonic() > until:
            whisper(print, f"{found.name}: the trainer has not ended within {REST:.0f} s")
            return
        time.sleep(min(POLL, 0.5))


def tensorboard(args: Namespace) -> int:
    from headrace.tpu import tensorboard as board

    return board.serve(args.run, args.port)
