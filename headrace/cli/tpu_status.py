"""`headrace tpu status`, `logs` and `ls`: what there is, how it is, and what nobody looks after any more."""

import argparse
import time
from collections.abc import Sequence

from headrace.errors import UserError
from headrace.tpu import timer_health as alarm, cost, disk, job, job_ledger as place
from headrace.tpu.arguments import connector, found_by_name, opened, reached, told
from headrace.tpu.cloud import Cloud, Rented, State
from headrace.tpu.gcp import Gcp
from headrace.tpu.timeouts import POLL

Namespace = argparse.Namespace
LATE = 15 * 60  # seconds that a timer has to let a trainer save, and to delete


def logs(args: Namespace) -> int:
    """Until the job ends, or the slice. Ctrl-C ends the looking on alone."""
    cloud, found, machines = reached(args)
    states = job.states(machines, found.name)
    if not any(state.identity for state in states):
        for number, state in enumerate(states):
            if state.unknown:
                raise UserError(f"{found.name}: [w{number}] cannot be asked: {state.unknown}")
        raise UserError(f"{found.name}: found no job on it; `headrace tpu run` starts one")
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
    doubt(args, cloud, found)
    for number, state in enumerate(job.states(connector(args, cloud)(found), found.name)):
        if state.unknown:
            print(f"[w{number}] cannot be asked: {state.unknown}")
        elif state.running:
            print(f"[w{number}] trains: {state.last}")
        elif state.exit is not None:
            print(f"[w{number}] ended with {state.exit}: {state.last}")
        else:
            print(f"[w{number}] has no job")


def doubt(args: Namespace, cloud: Cloud, found: Rented, patience: float = 0.0) -> None:
    """Warns where nobody knows that the timer of a slice will end it."""
    if not found.ours or found.zone == "local":
        return
    try:
        why = alarm.doubt(connector(args, cloud)(found), patience)
    except UserError as error:  # no key, so that nobody can be asked
        why = str(error)
    if why:
        print(alarm.warning(found.name, why), flush=True)


def ls(args: Namespace) -> int:
    """With --orphans the exit code is 1 if there are slices among them, for whoever asks every night."""
    cloud = opened(args)
    every, silent = cloud.survey()
    found = [one for one in every if forgotten(args, cloud, one)] if args.orphans else every
    table([(one.name, one.zone, one.accelerator, one.terms, one.said, aged(one)) for one in found])
    for zone, why in silent.items():
        print(f"warning: {zone} does not answer, so that slices there are not listed: {why}")
    if not args.orphans:
        if not found and not silent:
            print("no slices")
        return 1 if silent else 0
    left = sum(orphaned(args, cloud, one) for one in found)
    if not args.everybody:
        disk.say_left_out("slice", sum(bool(one.theirs) for one in every if one not in found))
    if isinstance(cloud, Gcp):
        disk.show_unused(args, cloud, {(one.zone, name) for one in every for name in one.disks})
    return 1 if left or silent else 0


def forgotten(args: Namespace, cloud: Cloud, one: Rented) -> bool:
    """Whether it may be: nobody here watches it, though it is ours, or its timer has not ended it."""
    asked = one.ours and (args.everybody or not one.theirs)
    return asked and not place.watched(place.key(cloud.scope, one.name)) or overdue(one) > 0


def orphaned(args: Namespace, cloud: Cloud, one: Rented) -> bool:
    """Says what to do about it, and whether anything is to be done: what trains is watched elsewhere, or
    is adopted, or ends itself when it is done."""
    if overdue(one) > 0:
        whose = f": {one.theirs} made it" if one.theirs else ""
        print(f"{one.name} should have deleted itself, and costs{whose}; delete it?")
    elif working(args, cloud, one):
        print(f"{one.name} trains; if no other machine of yours watches it, `headrace tpu run` adopts it")
        return False
    elif one.theirs:
        print(f"{one.theirs} made {one.name}, and nobody here watches it; after a word with {one.theirs},")
    else:
        print(f"nobody here watches {one.name}: `headrace tpu run` adopts it, or")
    print(f"  headrace tpu delete {one.name}{told(args)}{' --force' if one.theirs else ''}")
    return True


def working(args: Namespace, cloud: Cloud, one: Rented) -> bool:
    """Whether a trainer is known to be at work there."""
    try:
        return one.state is State.READY and any(
            state.running or state.elsewhere for state in job.states(connector(args, cloud)(one), one.name)
        )
    except UserError:  # no key, so that nobody can be asked
        return False


def table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def aged(found: Rented) -> str:
    if not found.created:
        return "no machines yet"
    age = (time.time() - found.created) / 3600
    words = f"{cost.hours(age)} old"
    if found.seconds is None or found.zone == "local":  # where there is no timer
        return words
    if late := overdue(found):
        return f"{words}, SHOULD HAVE DELETED ITSELF {cost.hours(late)} AGO"
    left = found.seconds / 3600 - age
    if found.state is State.STOPPED:  # nobody is at home who would delete it
        over = f"end in {cost.hours(left)}; started after that" if left > 0 else "are over: started again"
        return f"{words}, its hours {over}, it deletes itself"
    return f"{words}, deletes itself in {cost.hours(max(0.0, left))}" if found.state is State.READY else words


def overdue(found: Rented) -> float:
    """Hours since its timer should have ended it, if that is so long ago that it did not."""
    if not found.created or found.seconds is None or found.zone == "local" or found.state is State.STOPPED:
        return 0.0
    late = time.time() - found.created - found.seconds
    return late / 3600 if late > LATE else 0.0
