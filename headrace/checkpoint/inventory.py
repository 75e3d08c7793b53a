"""The steps that lie in RUN/checkpoints: which of them can be trusted, which may go, and what room they take.
Needs neither JAX nor Orbax."""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeVar

from etils import epath

from headrace.checkpoint import manifest
from headrace.storage import files as store
from headrace.errors import UserError
from headrace.checkpoint.manifest import Damaged, Tier
from headrace.config.sections import Checkpoint

Say = Callable[[str], None]
T = TypeVar("T")

QUARANTINE = "quarantine"
ASIDE = 2  # of the steps put aside that are kept
REMOVED = ".removed"
UNFINISHED = (".orbax-checkpoint-tmp", REMOVED)  # in the names of what is half written, or half gone
UNSEALED = "it has no manifest: its save was cut off before the end"
OR_NOT_DONE = ", or is not done yet"  # for those who look on while others train
THREADS = 8  # that ask a bucket
LOOKS = 5  # at a run that goes on, before what is seen is taken for true


class Gone(Exception):
    """A step that went while it was looked at, since its run goes on."""


@dataclass(frozen=True)
class Chosen:
    """The step to go on from, None if there is no checkpoint at all, and what speaks against newer ones."""

    step: int | None
    passed: dict[int, str]
    sealed: bool = True


@dataclass(frozen=True)
class Step:
    number: int
    tier: Tier | Literal["unknown"]
    size: int
    written: float  # seconds since 1970
    problem: str | None  # what is wrong with it, as far as its manifest was looked at


def folder(run: str) -> epath.Path:
    path = epath.Path(run)
    return (path if store.is_url(run) else path.absolute()) / "checkpoints"


def due(checkpoint: Checkpoint, step: int) -> Tier | None:
    """Which kind of checkpoint is to be saved after a step, if any. A save is written behind the loop, which
    waits at the next until it is whole. With one half-way, the last whole step is at no time more than
    `checkpoint.every` back, and the loop goes on while they are written."""
    if checkpoint.permanent and step % checkpoint.permanent == 0:
        return "permanent"
    passed = step % checkpoint.every
    return "temporary" if passed == 0 else "interim" if passed == checkpoint.every // 2 else None


def numbers(run: str) -> list[int]:
    """All steps there are, whole or not, the newest last."""
    found = sorted(int(name) for name in store.names(folder(run)) if name.isdecimal())
    if not store.is_url(run):
        return [number for number in found if (folder(run) / str(number)).is_dir()]
    return [number for number, counts in zip(found, _counting(run, found), strict=True) if counts]


def steps(run: str) -> list[Step]:
    """All that are there, by their manifests, without reading the rest."""
    with ThreadPoolExecutor(THREADS, "steps") as pool:
        each = pool.map(lambda number: list(_each(run, [number], described)), numbers(run))
        return [step for found in each for _, step in found]


def choose(run: str, order: Sequence[int] | None = None) -> Chosen:
    """The newest step, or the first in an order, of which every byte is as it was written; where there is
    none, the newest without a manifest, of which nothing is known to be wrong. Reads all of it, and moves
    nothing."""
    unsealed: list[int] = []
    wrong: dict[int, str] = {}
    for number, problem in _each(run, numbers(run)[::-1] if order is None else order, _problem):
        if problem is None:
            return Chosen(number, wrong)
        wrong[number] = problem
        if problem == UNSEALED:
            unsealed.append(number)
    if unsealed:
        newer = {number: said for number, said in wrong.items() if number > unsealed[0]}
        return Chosen(unsealed[0], newer, sealed=False)
    where, aside = folder(run), folder(run) / QUARANTINE
    if not wrong and not store.names(aside):
        return Chosen(None, {})
    told = [f"step {number}: {said}" for number, said in wrong.items()]
    told += [] if wrong else [f"{aside} holds {', '.join(store.names(aside))}"]
    raise UserError(
        f"{where}: no checkpoint in it can be trusted, and the run does not begin anew by itself. "
        + "; ".join(told)
        + f". Put a copy of a whole one there if you have one; {begin_anew(run)}"
    )


def begin_anew(run: str) -> str:
    return f"to begin anew, use another `run`, or remove {run} with all that is in it"


def newest_before(run: str, step: int) -> int | None:
    """The newest whole step before one; where all are later, the oldest of them. None if there is none."""
    every = numbers(run)
    order = [n for n in reversed(every) if n < step] + [n for n in every if n >= step]
    for number, problem in _each(run, order, _problem):
        if problem is None:
            return number
    if every:
        hint = f"`headrace checkpoint verify {run}` says why"
        raise UserError(f"{folder(run)}: no checkpoint in it can be trusted; {hint}")
    return None


def set_aside(run: str, passed: dict[int, str]) -> list[str]:
    """Moves damaged steps out of the way of those that come again. The last few stay there: a run that is
    killed in every other save would fill its disk. Says what was done."""
    told = []
    for number, said in passed.items():
        name = f"{number}-{time.strftime('%Y%m%d-%H%M%S')}"
        while store.exists(folder(run) / QUARANTINE / name):  # put aside in this very second
            name += "+"
        aside = folder(run) / QUARANTINE / name
        store.move(folder(run) / str(number), aside, last=(manifest.NAME, store.COMMITTED))
        told.append(f"step {number}: this checkpoint is not used: {said}; it is now in {aside}")
    older = put_aside(run)[: -max(ASIDE, len(passed))] if passed else []
    for name in older:
        store.remove(folder(run) / QUARANTINE / name)
        told.append(f"{folder(run) / QUARANTINE / name} removed: only the last {ASIDE} put aside are kept")
    return told


def put_aside(run: str) -> list[str]:
    """What lies in quarantine, the latest last."""
    return sorted(store.names(folder(run) / QUARANTINE), key=lambda name: name.partition("-")[2])


def clear_unfinished(run: str) -> list[str]:
    """What a save or a removal that was cut off has left. Only for the one who writes here, while nothing is
    being written. Says what could not be removed."""
    there = store.names(folder(run))
    left = [name for name in there if any(mark in name for mark in UNFINISHED)]
    if store.is_url(run):  # where folders cannot be renamed, such a step has its name already
        left += map(str, sorted({int(name) for name in there if name.isdecimal()} - set(numbers(run))))
    return [said for name in left for said in _failure(name, store.remove, folder(run) / name)]


def clear_old(run: str, keep: int) -> list[str]:
    """What there are enough newer ones of, and what earlier removals have left. Says what could not go."""
    left = [name for name in store.names(folder(run)) if name.endswith(REMOVED)]
    told = [said for name in left for said in _failure(name, store.remove, folder(run) / name)]
    old = [step.number for step in spare(run, keep)]
    return told + [said for number in old for said in _failure(f"step {number}", remove, run, number)]


def _failure(name: str, removal: Callable[..., None], *what: object) -> list[str]:
    """Why something could not be removed, in a line; none if it was."""
    try:
        removal(*what)
    except (OSError, UserError) as error:
        return [f"{name} could not be removed ({short(error)})"]
    return []


def short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def described(run: str, number: int) -> Step:
    """By its manifest, without reading the rest. Raises Gone."""
    path = folder(run) / str(number)
    problem: str | None = UNSEALED
    try:
        known = manifest.read(path)
    except Damaged as damage:
        known, problem = None, str(damage)
    there = store.entries(path)
    if known is None or manifest.NAME not in there:
        if number not in numbers(run):
            raise Gone
        written = max((entry.written for entry in there.values()), default=0.0)
        return Step(number, "unknown", sum(entry.size for entry in there.values()), written, problem)
    return Step(number, known.tier, known.size, there[manifest.NAME].written, None)


def spare(run: str, keep: int, is_whole: Callable[[int], bool] = lambda number: True) -> list[Step]:
    """What may go: of the temporary steps all but the newest `keep` that are whole, and those from half-way
    or without a manifest that are older than a whole one. The newest whole one always stays. So does what
    is damaged, since it tells what happened."""
    kept, newest, gone = 0, -1, []
    for step in reversed(steps(run)):
        if step.problem is not None:
            if step.problem == UNSEALED and step.number < newest:
                gone.append(step)
        elif newest >= 0 and (step.tier == "interim" or step.tier == "temporary" and kept >= keep):
            gone.append(step)
        elif is_whole(step.number):
            newest, kept = max(newest, step.number), kept + (step.tier == "temporary")
    return gone[::-1]


def let_go(run: str) -> Iterator[str]:
    """Removes what the newest whole step can do without, a thing each time it is asked, and says what went:
    first what was put aside, since the run's own work comes first, then the oldest steps."""
    for name in put_aside(run):
        if not _failure(name, store.remove, folder(run) / QUARANTINE / name):
            yield f"{QUARANTINE}/{name}"
    for old in spare(run, 0):
        if not _failure("", remove, run, old.number):
            yield f"step {old.number}: checkpoint"


def remove(run: str, number: int) -> None:
    """By another name first, or in a bucket what says that it is all there: a removal that is cut off leaves
    no step that looks damaged."""
    path = folder(run) / str(number)
    if not store.is_url(run):
        other = folder(run) / f"{number}{REMOVED}"
        store.remove(other)
        store.move(path, other)
        path = other
    store.remove(path, first=(manifest.NAME, store.COMMITTED))


def check_run(run: str) -> None:
    if not numbers(run):
        raise UserError(f"{run}: found no checkpoint in {folder(run)}, expected a run folder with some")


def one(run: str, step: str) -> int:
    """A step that a user names."""
    check_run(run)
    if not step.isdecimal() or int(step) not in numbers(run):
        raise UserError(f"{run}: found no step {step}, expected one of {', '.join(map(str, numbers(run)))}")
    return int(step)


def newest(run: str, say: Say) -> int:
    """The newest whole step, for those who only read: what is passed over is told and left in its place. One
    from half-way, which goes while the run goes on, is taken only where no other is whole."""
    check_run(run)
    chosen = _chosen_to_read(run)
    for number, said in chosen.passed.items():
        say(f"{folder(run)}/{number} is not used: {said}{OR_NOT_DONE if said == UNSEALED else ''}")
    if chosen.step is None:
        raise UserError(f"{run}: its checkpoints went while they were looked at; try again")
    if not chosen.sealed:
        say(f"{folder(run)}/{chosen.step} is used since no other is whole: {UNSEALED}{OR_NOT_DONE}")
    return chosen.step


def _chosen_to_read(run: str) -> Chosen:
    """Looks again where steps came or went meanwhile, before it believes that none is whole."""
    for look in range(LOOKS):
        there = steps(run)
        by_stay = sorted(there, key=lambda step: (step.tier != "interim", step.number), reverse=True)
        try:
            chosen = choose(run, [step.number for step in by_stay])
        except UserError:
            if look == LOOKS - 1 or steps(run) == there:
                raise
            continue
        if chosen.step is not None and chosen.sealed or steps(run) == there:
            break
    return chosen


def listed(run: str, say: Say) -> None:
    """A table. Says `whole` only of what it has read."""
    check_run(run)
    rows = [("step", "tier", "size", "age", "state")]
    for _, (step, state) in _each(run, numbers(run), lambda run, n: (described(run, n), _state(run, n))):
        age = f"{max(time.time() - step.written, 0) / 3600:,.1f} h" if step.written else "-"
        rows.append((str(step.number), step.tier, f"{step.size / 1e9:,.3f} GB", age, state))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        say("  ".join([*cells, row[-1]]))
    aside = folder(run) / QUARANTINE
    for name in store.names(aside):
        say(f"put aside: {aside / name}")


def verified(run: str, step: str | None, say: Say) -> bool:
    """Whether all that were asked for are whole; says it of each."""
    check_run(run)
    asked = [one(run, step)] if step else numbers(run)
    states = dict(_each(run, asked, _state))
    for number, state in states.items():
        say(f"step {number}: {state}")
    return all(state == "whole" for state in states.values())


def pruned(run: str, keep: int, say: Say, *, dry_run: bool = False) -> None:
    """Reads what is to stay before anything goes: what is damaged counts for nothing."""
    states: dict[int, str] = {}

    def is_whole(number: int) -> bool:
        states.update(_each(run, [number], _state))
        return states.get(number) == "whole"

    gone = spare(run, keep, is_whole)
    for number, state in states.items():
        if state != "whole":
            say(f"step {number}: {state}; it stays, and does not count")
    for step in gone:
        if not dry_run:
            remove(run, step.number)
        say(f"step {step.number}: {'would be removed' if dry_run else 'removed'}, {step.size / 1e9:,.3f} GB")
    aside = put_aside(run) if "whole" in states.values() else []
    for name in aside:
        if not dry_run:
            store.remove(folder(run) / QUARANTINE / name)
        say(f"{QUARANTINE}/{name}: {'would be removed' if dry_run else 'removed'}")
    if not gone and not aside:
        say(f"{run}: nothing to remove")


def free(run: str) -> int | None:
    """Bytes on the disk of a run; None if it has none of its own."""
    if store.is_url(run):
        return None
    path = folder(run)
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _each(run: str, asked: Sequence[int], look: Callable[[str, int], T]) -> Iterator[tuple[int, T]]:
    """What a look at each step finds, less those that go meanwhile."""
    for number in asked:
        with contextlib.suppress(Gone):
            yield number, look(run, number)


def _problem(run: str, number: int) -> str | None:
    """What speaks against a step, all of it read; None if it is whole. Raises Gone."""
    try:
        known = manifest.verify(folder(run) / str(number))
        problem = UNSEALED if known is None else None
    except (Damaged, FileNotFoundError) as damage:
        problem = str(damage)
    if problem is not None and number not in numbers(run):
        raise Gone
    return problem


def _state(run: str, number: int) -> str:
    problem = _problem(run, number)
    if problem == UNSEALED:
        return f"unverified: {UNSEALED}{OR_NOT_DONE}"
    return "whole" if problem is None else f"damaged: {problem}"


def _counting(run: str, found: list[int]) -> list[bool]:
    """Of each step in a bucket, whether Orbax has written the last of it, or it was whole once: one that has
    a manifest and lacks anything else is damaged, and not half written."""
    marks = {store.COMMITTED, manifest.NAME}
    with ThreadPoolExecutor(THREADS, "steps") as pool:
        return list(pool.map(lambda n: bool(marks & set(store.names(folder(run) / str(n)))), found))
