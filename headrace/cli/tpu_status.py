"""`headrace tpu status`, `logs` and `ls`: what there is, what it does, and what may be forgotten."""

import argparse
from collections.abc import Sequence

from headrace.errors import UserError
from headrace.tpu import clock, cost, disk, job, job_ledger, timeouts, timer_health
from headrace.tpu.arguments import connect_to_slice, find_slice, location_flags, make_connector, open_cloud
from headrace.tpu.cloud import Cloud, Slice, SliceState
from headrace.tpu.gcp import Gcp

Namespace = argparse.Namespace
OVERDUE_SECONDS = 15 * 60  # after its limit; until then its timer may let the trainer save, and delete it


def logs(args: Namespace) -> int:
    """`tpu logs`: follow the output of all workers until the job or the slice ends. Returns the exit code.
    Ctrl-C only stops following."""
    cloud, slice_, machines = connect_to_slice(args)
    states = job.try_query_workers(machines, slice_.name)
    if not any(state.identity for state in states):
        if error := job.first_error(states):
            raise UserError(f"{slice_.name}: its workers do not respond: {error}")
        raise UserError(f"{slice_.name}: found no job on it; `headrace tpu run` starts one")
    offsets = [0 if args.whole else state.recent for state in states]
    monitor = job.JobMonitor(machines, slice_.name, offsets, lambda line: print(line, flush=True))
    polled_at = clock.monotonic()
    try:
        while not monitor.all_ended:
            monitor.print_lines_for(1.0)
            if monitor.any_disconnected and clock.monotonic() - polled_at > timeouts.POLL:
                polled_at = clock.monotonic()
                if (end := describe_end(cloud, slice_.name)) is not None:
                    print(f"{slice_.name}: {end}", flush=True)
                    return 1
        monitor.print_lines_for(0.0)
    finally:
        monitor.close()
    return max(code or 0 for code in monitor.exit_codes)


def describe_end(cloud: Cloud, name: str) -> str | None:
    """Describe the end of a slice that is no longer ready. None if it may still be, also if the cloud does
    not answer."""
    try:
        slice_ = cloud.find(name)
    except UserError:
        return None
    if slice_ is None:
        return "it was deleted"
    is_alive = slice_.state in (SliceState.READY, SliceState.WAITING)
    return None if is_alive else f"it is {slice_.status_text}"


def status(args: Namespace) -> None:
    """`tpu status`: print the state of a slice and of the job on each worker."""
    cloud, slice_ = find_slice(args)
    print(f"{slice_.name}  {slice_.accelerator} {slice_.terms} in {slice_.zone}: {slice_.status_text}")
    print(f"{'':{len(slice_.name)}}  {format_age(slice_)}")
    if slice_.state is not SliceState.READY:
        return
    warn_about_timer(args, cloud, slice_)
    for worker, state in enumerate(job.try_query_workers(make_connector(args, cloud)(slice_), slice_.name)):
        print(f"[w{worker}] {describe_worker(state)}")


def describe_worker(state: job.WorkerState) -> str:
    """Describe in one line what a worker does."""
    if state.error:
        return f"does not respond: {state.error}"
    if state.running:
        return f"training: {state.last}"
    if state.exit is not None:
        return f"ended with exit code {state.exit}: {state.last}"
    return "has no job"


def warn_about_timer(args: Namespace, cloud: Cloud, slice_: Slice, retry_seconds: float = 0.0) -> None:
    """Print a warning if it is not certain that the timer of a slice will delete it."""
    if not slice_.is_managed or slice_.zone == "local":
        return
    try:
        problem = timer_health.find_timer_problem(make_connector(args, cloud)(slice_), retry_seconds)
    except UserError as error:  # no ssh key, so the workers cannot be reached
        problem = str(error)
    if problem:
        print(timer_health.format_warning(slice_.name, problem), flush=True)


def ls(args: Namespace) -> int:
    """`tpu ls`: list slices, or with --orphans those that may be forgotten. Returns the exit code: 1 if there
    are forgotten ones, for a nightly check, or if a zone does not answer."""
    cloud = open_cloud(args)
    all_slices, unreachable = cloud.list_slices()
    shown = (
        [item for item in all_slices if may_be_forgotten(args, cloud, item)] if args.orphans else all_slices
    )
    print_table(
        [
            (item.name, item.zone, item.accelerator, item.terms, item.status_text, format_age(item))
            for item in shown
        ]
    )
    for zone, reason in unreachable.items():
        print(f"warning: {zone} does not answer, so its slices are not listed: {reason}")
    if not args.orphans:
        if not shown and not unreachable:
            print("no slices")
        return 1 if unreachable else 0
    orphans = sum(print_advice(args, cloud, item) for item in shown)
    if not args.everybody:
        disk.print_omitted("slice", sum(bool(item.other_owner) for item in all_slices if item not in shown))
    if isinstance(cloud, Gcp):
        used = {(item.zone, name) for item in all_slices for name in item.disks}
        disk.print_unused_disks(args, cloud, used)
    return 1 if orphans or unreachable else 0


def may_be_forgotten(args: Namespace, cloud: Cloud, slice_: Slice) -> bool:
    """Whether a slice is overdue, or is the current user's and no launcher on this machine watches it. With
    --everybody other users' slices count too."""
    is_candidate = slice_.is_managed and (args.everybody or not slice_.other_owner)
    is_watched = job_ledger.is_watched(job_ledger.job_id(cloud.scope, slice_.name))
    return (is_candidate and not is_watched) or hours_overdue(slice_) > 0


def print_advice(args: Namespace, cloud: Cloud, slice_: Slice) -> bool:
    """Print what to do about a slice that may be forgotten. Return False if it needs nothing: a slice with a
    training is watched from elsewhere, or is found again, or deletes itself."""
    owner = slice_.other_owner
    if hours_overdue(slice_) > 0:
        made_by = f" and was made by {owner}" if owner else ""
        print(f"{slice_.name} should have deleted itself, costs money{made_by}; to delete it:")
    elif is_training(args, cloud, slice_):
        print(
            f"{slice_.name} is training; if no other machine of yours watches it, `headrace tpu run` "
            "adopts it"
        )
        return False
    elif owner:
        print(f"{slice_.name} was made by {owner} and is not watched from this machine; ask {owner} before:")
    else:
        print(f"{slice_.name} is not watched from this machine: `headrace tpu run` adopts it, or delete it:")
    print(f"  headrace tpu delete {slice_.name}{location_flags(args)}{' --force' if owner else ''}")
    return True


def is_training(args: Namespace, cloud: Cloud, slice_: Slice) -> bool:
    """Whether a trainer is known to run on a slice."""
    if slice_.state is not SliceState.READY:
        return False
    try:
        states = job.try_query_workers(make_connector(args, cloud)(slice_), slice_.name)
    except UserError:  # no ssh key, so the workers cannot be reached
        return False
    return any(state.running or state.elsewhere for state in states)


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def format_age(slice_: Slice) -> str:
    """The age of a slice, and when it deletes itself."""
    if not slice_.created_at:
        return "no machines yet"
    hours = (clock.now() - slice_.created_at) / 3600
    age = f"{cost.format_hours(hours)} old"
    if slice_.time_limit is None or slice_.zone == "local":  # no timer
        return age
    if overdue := hours_overdue(slice_):
        return f"{age}, SHOULD HAVE DELETED ITSELF {cost.format_hours(overdue)} AGO"
    remaining = slice_.time_limit / 3600 - hours
    if slice_.state is SliceState.STOPPED:  # its timer does not run
        if remaining > 0:
            return f"{age}, its hours end in {cost.format_hours(remaining)}; started later, it deletes itself"
        return f"{age}, its hours are used up; if it is started, it deletes itself"
    if slice_.state is SliceState.READY:
        return f"{age}, deletes itself in {cost.format_hours(max(0.0, remaining))}"
    return age


def hours_overdue(slice_: Slice) -> float:
    """Hours since a slice should have been deleted by its timer; 0 if it is not overdue by more than
    `OVERDUE_SECONDS`."""
    has_timer = slice_.time_limit is not None and slice_.zone != "local"
    if not slice_.created_at or not has_timer or slice_.state is SliceState.STOPPED:
        return 0.0
    seconds = clock.now() - slice_.created_at - (slice_.time_limit or 0.0)
    return seconds / 3600 if seconds > OVERDUE_SECONDS else 0.0
