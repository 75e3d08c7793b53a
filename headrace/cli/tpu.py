"""`headrace tpu ...`: a function for each command. What the user got wrong raises UserError before anything
is rented."""

import argparse
import os
import shlex
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.cli import tpu_status
from headrace.config.sections import TrainRecipe
from headrace.errors import UserError
from headrace.tpu import (
    bundle,
    clock,
    cost,
    disk,
    gcloud,
    google_auth,
    install,
    job,
    job_ledger,
    launch,
    region,
    timeouts,
    workers,
)
from headrace.tpu.arguments import (
    build_budget,
    build_request,
    check_run_writable,
    connect_to_slice,
    find_slice,
    location_flags,
    make_connector,
    open_cloud_for_rent,
    read_secret,
    require_shared_paths,
)
from headrace.tpu.cloud import Cloud, Slice, SliceState
from headrace.tpu.console import Console, print_quietly
from headrace.tpu.delete import delete_until_gone
from headrace.tpu.gcp_slices import STATES
from headrace.tpu.provision import IDLE_LIMIT, Provisioner
from headrace.tpu.request import Request, make_slice_name

Namespace = argparse.Namespace


def run(args: Namespace) -> int:
    """`tpu run`: train a recipe on a rented slice. Returns the exit code."""
    from headrace.config import reader, recipe

    cfg = recipe.load_train(args.recipe, args.overrides)
    args.name = args.name or make_slice_name(Path(args.recipe).stem)
    request = build_request(args)
    cfg = require_shared_paths(cfg, args.platform)
    check_run_writable(cfg.run_dir, request.disks)
    budget = build_budget(args, request)
    secrets = {name: read_secret(name) for name in args.env}
    check_zones = make_zone_check(args, cfg, request)
    print_cost(args, request, budget)
    if args.dry_run:
        return print_commands(args, request, budget, install.extras_for(cfg))
    if args.platform != "local":
        check_zones(*request.zones)
        disk.check_disks_exist(google_auth.resolve_project(args.project), request.zones, request.disks)
    cloud = open_cloud_for_rent(args)
    task = job.Job(request.name, reader.to_yaml(cfg), secrets)
    if cfg.log.wandb and "WANDB_API_KEY" not in secrets:
        print("warning: log.wandb is on, but the workers have no key for it: --env WANDB_API_KEY", flush=True)
    provisioner = Provisioner(
        cloud,
        request,
        budget,
        job_ledger.JobLedger(job_ledger.job_id(cloud.scope, request.name), cfg.run_dir),
        console=Console(),
        keep=args.keep,
        adopt=args.adopt,
        region_guard=check_zones,
    )
    launcher = launch.Launcher(
        provisioner,
        task,
        tree=bundle.find_repository(),
        connect=make_connector(args, cloud),
        extras=install.extras_for(cfg),
    )
    return launcher.run()


def print_cost(args: Namespace, request: Request, budget: cost.Budget) -> None:
    """Print what the slice costs. Slices of this machine cost nothing."""
    if args.platform != "local":
        is_user_price = cost.has_user_price(request, args.prices)
        print(cost.format_cost(request, budget, is_user_price=is_user_price), flush=True)


def make_zone_check(args: Namespace, cfg: TrainRecipe, request: Request) -> Callable[..., None]:
    """A function that takes zones and raises UserError for one that is far from the buckets of the run, or
    whose prices are not known; or prints a warning where --far-bucket allows it."""
    urls = [cfg.run_dir, cfg.data.path, cfg.init_from or ""]

    def check_zones(*zones: str) -> None:
        if args.max_cost is not None:
            for zone in zones:
                cost.check_zone_price(request, zone, args.prices)
        if args.platform != "local":
            for warning in region.check_bucket_regions(urls, zones, allow_far=args.far_bucket):
                print(f"warning: {warning}", flush=True)

    return check_zones


def print_commands(args: Namespace, request: Request, budget: cost.Budget, extras: Sequence[str]) -> int:
    """Print the gcloud commands that do the same as `tpu run`. Returns the exit code."""
    if args.platform == "local":
        return print_local_plan(request)
    recipe, root = Path(args.recipe).resolve(), bundle.find_repository()
    is_inside = recipe.is_relative_to(root)
    for line in gcloud.make_shell_lines(
        google_auth.resolve_project(args.project),
        request,
        time_limit=budget.hours * 3600,
        idle_limit=None if args.keep else IDLE_LIMIT,
        tree=root,
        recipe=None if is_inside else recipe,
        extras=extras,
        train_args=[
            "train",
            str(recipe.relative_to(root)) if is_inside else ".recipe.yaml",
            *args.overrides,
        ],
    ):
        print(line)
    return 0


def print_local_plan(request: Request) -> int:
    """Print what --dry-run means with --platform local. Returns the exit code."""
    print(f"{request.name}: {request.slice.hosts} processes of this machine; no gcloud command does the same")
    return 0


def create(args: Namespace) -> int:
    """`tpu create`: rent a slice that stays until its hours are used up or it is deleted. Returns the exit
    code."""
    args.name = args.name or make_slice_name(args.slice)
    request = build_request(args)
    budget = build_budget(args, request)
    print_cost(args, request, budget)
    if args.dry_run and args.platform == "local":
        return print_local_plan(request)
    if args.dry_run:
        project, zone = google_auth.resolve_project(args.project), request.zones[0]
        print(shlex.join(gcloud.make_create_args(project, request, zone, budget.hours * 3600, None)))
        return 0
    if args.platform != "local":
        disk.check_disks_exist(google_auth.resolve_project(args.project), request.zones, request.disks)
    cloud = open_cloud_for_rent(args)
    ledger = job_ledger.JobLedger(job_ledger.job_id(cloud.scope, request.name), "")
    provisioner = Provisioner(cloud, request, budget, ledger, console=Console(), keep=True)
    with job_ledger.watch_lock(ledger.job), provisioner.console.signal_handlers():
        slice_ = provide_slice(provisioner)
        print_next_steps(args, slice_)  # before anything else takes time: Ctrl-C leaves the slice running now
        provisioner.set_timer(slice_)
    tpu_status.warn_about_timer(args, cloud, slice_, timeouts.AUTH_RETRY)
    return 0


def provide_slice(provisioner: Provisioner) -> Slice:
    """Rent a slice or find it. On an error or Ctrl-C, a slice that was requested here is deleted."""
    try:
        if provisioner.find_slice() is None:  # the hours of an earlier slice of this name do not count
            provisioner.ledger.clear()
        slice_ = provisioner.ensure_ready()
        if slice_.state is SliceState.DELETING:
            raise UserError(f"{slice_.name}: somebody else deleted it; the same command requests another")
        return slice_
    except BaseException:
        if provisioner.ownership.is_new:
            provisioner.console.finish_gracefully = True
            provisioner.delete()
        raise


def print_next_steps(args: Namespace, slice_: Slice) -> None:
    """Print that a slice is ready, and the commands that use and delete it."""
    print(f"{slice_.name} is ready in {slice_.zone}, {len(slice_.workers)} workers; next:")
    terms = "" if slice_.terms == "on-demand" else f" --{slice_.terms}"
    flags = f"--slice {args.slice}{terms} --keep{location_flags(args)}"
    print(f"  headrace tpu run --name {slice_.name} {flags} RECIPE")
    print(f"  headrace tpu delete {slice_.name}{location_flags(args)}", flush=True)


def install_all(args: Namespace) -> None:
    """`tpu install`: send the working tree and install the environment."""
    _, slice_, machines = connect_to_slice(args)
    root, retry_seconds = bundle.find_repository(), timeouts.CONNECT_TIMEOUT
    bundle.send_if_missing(machines, bundle.make_bundle(root), retry_seconds=retry_seconds)
    install.install(machines, root, retry_seconds=retry_seconds)
    print(f"{slice_.name}: {install.environment_stamp(root)} on {len(machines)} workers")


def push(args: Namespace) -> None:
    """`tpu push`: send the working tree."""
    _, slice_, machines = connect_to_slice(args)
    packed = bundle.make_bundle(bundle.find_repository())
    for name in packed.skipped:
        print(f"not sent, since it may be secret or is too large: {name}")
    bundle.send_if_missing(machines, packed, retry_seconds=timeouts.CONNECT_TIMEOUT)
    print(f"{slice_.name}: {packed.files} files as {packed.name} on {len(machines)} workers")


def ssh(args: Namespace) -> int:  # noqa: RET503 (exec does not return)
    """`tpu ssh`: open a shell on one worker, or run a command on one or all. Returns the exit code."""
    _, _, machines = connect_to_slice(args)
    is_all = args.worker == "all"
    if not is_all and not (args.worker.isdigit() and int(args.worker) < len(machines)):
        raise UserError(f"--worker: found {args.worker}, expected 0 to {len(machines) - 1}, or all")
    if args.words:
        script = shlex.join(args.words) if len(args.words) > 1 else args.words[0]
        return stream_command(machines, range(len(machines)) if is_all else [int(args.worker)], script)
    if is_all:
        raise UserError("--worker all: expected a command to run on them")
    address = machines.addresses[int(args.worker)]
    os.execvpe(address.shell[0], address.shell, os.environ | address.env)


def stream_command(machines: workers.Workers, numbers: Sequence[int], script: str) -> int:
    """Run a script on these workers, print each line as it arrives, and return the highest exit code."""

    def stream(number: int) -> int:
        process = machines.start_script(number, script)
        machines.processes.add(process)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        for line in process.stdout:
            print(f"[w{number}] {line.decode(errors='replace').rstrip()}", flush=True)
        return process.wait()

    with ThreadPoolExecutor(len(numbers)) as pool:
        try:
            return max(pool.map(stream, numbers))
        except BaseException:  # Ctrl-C: without this the command would have to end first
            for process in [process for process in machines.processes if process.poll() is None]:
                os.killpg(process.pid, signal.SIGKILL)
            raise


def delete(args: Namespace) -> int:
    """`tpu delete`: let the trainer save, and delete the slice; with --force at once, whoever created it.
    Returns the exit code."""
    cloud, slice_ = find_slice(args)
    job_id = job_ledger.job_id(cloud.scope, args.name)
    if not args.force:
        if not slice_.is_managed:
            raise UserError(f"{args.name}: not created by Headrace; --force deletes it anyway")
        if slice_.other_owner:
            raise UserError(
                f"{args.name}: created by {slice_.other_owner}; --force deletes it anyway, without a save"
            )
        if job_ledger.is_watched(job_id):
            raise UserError(
                f"{args.name}: a `headrace tpu run` on this machine watches it; stop that with Ctrl-C first"
            )
        save_before_delete(args, cloud, slice_)
    if not delete_until_gone(cloud, args.name, print, slice_.zone):
        return 1  # its hours still count
    job_ledger.JobLedger(job_id).clear()
    return 0


def save_before_delete(args: Namespace, cloud: Cloud, slice_: Slice) -> None:
    """Let a trainer on the slice save: it may be followed from another machine. Raises UserError if another
    job trains there, or if that cannot be found out."""
    advice = "--force deletes it anyway, without a save"
    is_queued = STATES.get(slice_.status_text) is SliceState.WAITING
    if slice_.state is SliceState.WAITING and slice_.created_at and not is_queued:
        raise UserError(
            f"{slice_.name}: found it {slice_.status_text}, and its workers cannot be reached to check "
            f"whether anything trains there; {advice}"
        )
    if slice_.state is not SliceState.READY:
        return
    try:
        machines = make_connector(args, cloud)(slice_)
        states = job.try_query_workers(machines, slice_.name)
        error_text = next((state.error for state in states if state.error), "")
    except UserError as error:
        error_text = str(error)
    if error_text:
        raise UserError(
            f"{slice_.name}: cannot check whether anything trains there, since its workers do not respond "
            f"({error_text}); {advice}"
        )
    if other := next((state.elsewhere for state in states if state.elsewhere), ""):
        raise UserError(f"{slice_.name}: found another training there ({other}); {advice}")
    if any(state.running for state in states):
        wait_for_save(machines, slice_.name)


def wait_for_save(machines: workers.Workers, name: str) -> None:
    """Stop the trainers and wait until they have saved, for `SHUTDOWN_GRACE` at most."""
    print_quietly(print, f"{name}: waiting for the trainer to save")
    job.stop_trainers(machines, name)
    deadline = clock.monotonic() + timeouts.SHUTDOWN_GRACE
    while any(state.running for state in job.try_query_workers(machines, name)):
        if clock.monotonic() > deadline:
            seconds = timeouts.SHUTDOWN_GRACE
            print_quietly(print, f"{name}: the trainer has not ended within {seconds:.0f} s")
            return
        clock.sleep(min(timeouts.POLL, 0.5))


def tensorboard(args: Namespace) -> int:
    """`tpu tensorboard`: show the curves of a run. Returns the exit code."""
    from headrace.tpu import tensorboard

    return tensorboard.serve_run(args.run, args.port)
