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
from headrace.checkpoint.manifest import Damaged, Tier
from headrace.config.sections import CheckpointKeys
from headrace.errors import UserError
from headrace.storage import files

Say = Callable[[str], None]
T = TypeVar("T")

QUARANTINE = "quarantine"
QUARANTINE_KEEP = 2  # of the steps put aside that are kept
REMOVED = ".removed"
UNFINISHED = (".orbax-checkpoint-tmp", REMOVED)  # in the names of what is half written, or half gone
UNSEALED = "it has no manifest: its save was cut off before the end"
OR_NOT_DONE = ", or is not done yet"  # for those who look on while others train
BUCKET_THREADS = 8  # that ask a bucket
READ_ATTEMPTS = 5  # at a run that goes on, before what is seen is taken for true


class StepVanished(Exception):
    """A step that went while it was looked at, since its run goes on."""


@dataclass(frozen=True)
class ResumePoint:
    """The step to go on from, None if there is no checkpoint at all, and what speaks against newer ones."""

    step: int | None
    rejected: dict[int, str]
    is_sealed: bool = True


@dataclass(frozen=True)
class StoredStep:
    step: int
    tier: Tier | Literal["unknown"]
    size: int
    written_at: float  # seconds since 1970
    problem: str | None  # what is wrong with it, as far as its manifest was looked at


def checkpoints_dir(run: str) -> epath.Path:
    path = epath.Path(run)
    return (path if files.is_url(run) else path.absolute()) / "checkpoints"


def tier_due(checkpoint: CheckpointKeys, step: int) -> Tier | None:
    """Which kind of checkpoint is to be saved after a step, if any. A save is written behind the loop, which
    waits at the next until it is whole. With one half-way, the last whole step is at no time more than
    `checkpoint.every` back, and the loop goes on while they are written."""
    if checkpoint.keep_every and step % checkpoint.keep_every == 0:
        return "permanent"
    passed = step % checkpoint.every
    return "temporary" if passed == 0 else "interim" if passed == checkpoint.every // 2 else None


def step_numbers(run: str) -> list[int]:
    """All steps there are, whole or not, the newest last."""
    found = sorted(int(name) for name in files.list_names(checkpoints_dir(run)) if name.isdecimal())
    if not files.is_url(run):
        return [number for number in found if (checkpoints_dir(run) / str(number)).is_dir()]
    return [number for number, counts in zip(found, _counting(run, found), strict=True) if counts]


def latest_step(run: str) -> int | None:
    """Find the newest complete checkpoint: -1 if there is none, None if that cannot be seen."""
    try:
        return max((step.step for step in list_steps(run) if step.problem is None), default=-1)
    except (OSError, UserError):
        return None


def list_steps(run: str) -> list[StoredStep]:
    """All that are there, by their manifests, without reading the rest."""
    with ThreadPoolExecutor(BUCKET_THREADS, "steps") as pool:
        each = pool.map(lambda number: list(inspect_each(run, [number], describe_step)), step_numbers(run))
        return [step for found in each for _, step in found]


def find_resume_point(run: str, order: Sequence[int] | None = None) -> ResumePoint:
    """The newest step, or the first in an order, of which every byte is as it was written; where there is
    none, the newest without a manifest, of which nothing is known to be wrong. Reads all of it, and moves
    nothing."""
    unsealed: list[int] = []
    wrong: dict[int, str] = {}
    for number, problem in inspect_each(run, step_numbers(run)[::-1] if order is None else order, check_step):
        if problem is None:
            return ResumePoint(number, wrong)
        wrong[number] = problem
        if problem == UNSEALED:
            unsealed.append(number)
    if unsealed:
        newer = {number: said for number, said in wrong.items() if number > unsealed[0]}
        return ResumePoint(unsealed[0], newer, is_sealed=False)
    where, aside = checkpoints_dir(run), checkpoints_dir(run) / QUARANTINE
    if not wrong and not files.list_names(aside):
        return ResumePoint(None, {})
    told = [f"step {number}: {said}" for number, said in wrong.items()]
    told += [] if wrong else [f"{aside} holds {', '.join(files.list_names(aside))}"]
    raise UserError(
        f"{where}: no checkpoint in it can be trusted, and the run does not begin anew by itself. "
        + "; ".join(told)
        + f". Put a copy of a whole one there if you have one; {restart_hint(run)}"
    )


def restart_hint(run: str) -> str:
    return f"to begin anew, use another `run_dir`, or remove {run} with all that is in it"


def find_intact_before(run: str, step: int) -> int | None:
    """The newest whole step before one; where all are later, the oldest of them. None if there is none."""
    every = step_numbers(run)
    order = [n for n in reversed(every) if n < step] + [n for n in every if n >= step]
    for number, problem in inspect_each(run, order, check_step):
        if problem is None:
            return number
    if every:
        hint = f"`headrace checkpoint verify {run}` says why"
        raise UserError(f"{checkpoints_dir(run)}: no checkpoint in it can be trusted; {hint}")
    return None


def quarantine(run: str, passed: dict[int, str]) -> list[str]:
    """Moves damaged steps out of the way of those that come again. The last few stay there: a run that is
    killed in every other save would fill its disk. Says what was done."""
    told = []
    for number, said in passed.items():
        name = f"{number}-{time.strftime('%Y%m%d-%H%M%S')}"
        while files.exists(checkpoints_dir(run) / QUARANTINE / name):  # put aside in this very second
            name += "+"
        aside = checkpoints_dir(run) / QUARANTINE / name
        files.move(checkpoints_dir(run) / str(number), aside, last=(manifest.NAME, files.COMMITTED))
        told.append(f"step {number}: this checkpoint is not used: {said}; it is now in {aside}")
    older = list_quarantine(run)[: -max(QUARANTINE_KEEP, len(passed))] if passed else []
    for name in older:
        files.remove(checkpoints_dir(run) / QUARANTINE / name)
        told.append(
            f"{checkpoints_dir(run) / QUARANTINE / name} removed: only the last {QUARANTINE_KEEP} put aside "
            "are kept"
        )
    return told


def list_quarantine(run: str) -> list[str]:
    """What lies in quarantine, the latest last."""
    return sorted(
        files.list_names(checkpoints_dir(run) / QUARANTINE), key=lambda name: name.partition("-")[2]
    )


def remove_unfinished(run: str) -> list[str]:
    """What a save or a removal that was cut off has left. Only for the one who writes here, while nothing is
    being written. Says what could not be removed."""
    there = files.list_names(checkpoints_dir(run))
    left = [name for name in there if any(mark in name for mark in UNFINISHED)]
    if files.is_url(run):  # where folders cannot be renamed, such a step has its name already
        left += map(str, sorted({int(name) for name in there if name.isdecimal()} - set(step_numbers(run))))
    return [said for name in left for said in _try_removal(name, files.remove, checkpoints_dir(run) / name)]


def apply_retention(run: str, keep: int) -> list[str]:
    """What there are enough newer ones of, and what earlier removals have left. Says what could not go."""
    left = [name for name in files.list_names(checkpoints_dir(run)) if name.endswith(REMOVED)]
    told = [said for name in left for said in _try_removal(name, files.remove, checkpoints_dir(run) / name)]
    old = [step.step for step in find_removable(run, keep)]
    return told + [
        said for number in old for said in _try_removal(f"step {number}", remove_step, run, number)
    ]


def _try_removal(name: str, removal: Callable[..., None], *what: object) -> list[str]:
    """Why something could not be removed, in a line; none if it was."""
    try:
        removal(*what)
    except (OSError, UserError) as error:
        return [f"{name} could not be removed ({short_error(error)})"]
    return []


def short_error(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def describe_step(run: str, number: int) -> StoredStep:
    """By its manifest, without reading the rest. Raises Gone."""
    path = checkpoints_dir(run) / str(number)
    problem: str | None = UNSEALED
    try:
        known = manifest.read(path)
    except Damaged as damage:
        known, problem = None, str(damage)
    there = files.list_files(path)
    if known is None or manifest.NAME not in there:
        if number not in step_numbers(run):
            raise StepVanished
        written = max((entry.modified_at for entry in there.values()), default=0.0)
        return StoredStep(number, "unknown", sum(entry.size for entry in there.values()), written, problem)
    return StoredStep(number, known.tier, known.size, there[manifest.NAME].modified_at, None)


def find_removable(
    run: str, keep: int, is_intact: Callable[[int], bool] = lambda number: True
) -> list[StoredStep]:
    """What may go: of the temporary steps all but the newest `keep` that are whole, and those from half-way
    or without a manifest that are older than a whole one. The newest whole one always stays. So does what
    is damaged, since it tells what happened."""
    kept, newest, gone = 0, -1, []
    for step in reversed(list_steps(run)):
        if step.problem is not None:
            if step.problem == UNSEALED and step.step < newest:
                gone.append(step)
        elif newest >= 0 and (step.tier == "interim" or step.tier == "temporary" and kept >= keep):
            gone.append(step)
        elif is_intact(step.step):
            newest, kept = max(newest, step.step), kept + (step.tier == "temporary")
    return gone[::-1]


def free_space(run: str) -> Iterator[str]:
    """Removes what the newest whole step can do without, a thing each time it is asked, and says what went:
    first what was put aside, since the run's own work comes first, then the oldest steps."""
    for name in list_quarantine(run):
        if not _try_removal(name, files.remove, checkpoints_dir(run) / QUARANTINE / name):
            yield f"{QUARANTINE}/{name}"
    for old in find_removable(run, 0):
        if not _try_removal("", remove_step, run, old.step):
            yield f"step {old.step}: checkpoint"


def remove_step(run: str, number: int) -> None:
    """By another name first, or in a bucket what says that it is all there: a removal that is cut off leaves
    no step that looks damaged."""
    path = checkpoints_dir(run) / str(number)
    if not files.is_url(run):
        other = checkpoints_dir(run) / f"{number}{REMOVED}"
        files.remove(other)
        files.move(path, other)
        path = other
    files.remove(path, first=(manifest.NAME, files.COMMITTED))


def require_steps(run: str) -> None:
    if not step_numbers(run):
        raise UserError(
            f"{run}: found no checkpoint in {checkpoints_dir(run)}, expected a run folder with some"
        )


def resolve_step(run: str, step: str) -> int:
    """A step that a user names."""
    require_steps(run)
    if not step.isdecimal() or int(step) not in step_numbers(run):
        raise UserError(
            f"{run}: found no step {step}, expected one of {', '.join(map(str, step_numbers(run)))}"
        )
    return int(step)


def find_readable_step(run: str, say: Say) -> int:
    """The newest whole step, for those who only read: what is passed over is told and left in its place. One
    from half-way, which goes while the run goes on, is taken only where no other is whole."""
    require_steps(run)
    chosen = _find_step_while_training(run)
    for number, said in chosen.rejected.items():
        say(f"{checkpoints_dir(run)}/{number} is not used: {said}{OR_NOT_DONE if said == UNSEALED else ''}")
    if chosen.step is None:
        raise UserError(f"{run}: its checkpoints went while they were looked at; try again")
    if not chosen.is_sealed:
        say(f"{checkpoints_dir(run)}/{chosen.step} is used since no other is whole: {UNSEALED}{OR_NOT_DONE}")
    return chosen.step


def _find_step_while_training(run: str) -> ResumePoint:
    """Looks again where steps came or went meanwhile, before it believes that none is whole."""
    for look in range(READ_ATTEMPTS):
        there = list_steps(run)
        by_stay = sorted(there, key=lambda step: (step.tier != "interim", step.step), reverse=True)
        try:
            chosen = find_resume_point(run, [step.step for step in by_stay])
        except UserError:
            if look == READ_ATTEMPTS - 1 or list_steps(run) == there:
                raise
            continue
        if chosen.step is not None and chosen.is_sealed or list_steps(run) == there:
            break
    return chosen


def ls(run: str, say: Say) -> None:
    """A table. Says `whole` only of what it has read."""
    require_steps(run)
    rows = [("step", "tier", "size", "age", "state")]
    for _, (step, state) in inspect_each(
        run, step_numbers(run), lambda run, n: (describe_step(run, n), _state(run, n))
    ):
        age = f"{max(time.time() - step.written_at, 0) / 3600:,.1f} h" if step.written_at else "-"
        rows.append((str(step.step), step.tier, f"{step.size / 1e9:,.3f} GB", age, state))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        say("  ".join([*cells, row[-1]]))
    aside = checkpoints_dir(run) / QUARANTINE
    for name in files.list_names(aside):
        say(f"put aside: {aside / name}")


def verify(run: str, step: str | None, say: Say) -> bool:
    """Whether all that were asked for are whole; says it of each."""
    require_steps(run)
    asked = [resolve_step(run, step)] if step else step_numbers(run)
    states = dict(inspect_each(run, asked, _state))
    for number, state in states.items():
        say(f"step {number}: {state}")
    return all(state == "whole" for state in states.values())


def prune(run: str, keep: int, say: Say, *, dry_run: bool = False) -> None:
    """Reads what is to stay before anything goes: what is damaged counts for nothing."""
    states: dict[int, str] = {}

    def is_whole(number: int) -> bool:
        states.update(inspect_each(run, [number], _state))
        return states.get(number) == "whole"

    gone = find_removable(run, keep, is_whole)
    for number, state in states.items():
        if state != "whole":
            say(f"step {number}: {state}; it stays, and does not count")
    for step in gone:
        if not dry_run:
            remove_step(run, step.step)
        say(f"step {step.step}: {'would be removed' if dry_run else 'removed'}, {step.size / 1e9:,.3f} GB")
    aside = list_quarantine(run) if "whole" in states.values() else []
    for name in aside:
        if not dry_run:
            files.remove(checkpoints_dir(run) / QUARANTINE / name)
        say(f"{QUARANTINE}/{name}: {'would be removed' if dry_run else 'removed'}")
    if not gone and not aside:
        say(f"{run}: nothing to remove")


def available_bytes(run: str) -> int | None:
    """Bytes on the disk of a run; None if it has none of its own."""
    if files.is_url(run):
        return None
    path = checkpoints_dir(run)
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def inspect_each(run: str, asked: Sequence[int], look: Callable[[str, int], T]) -> Iterator[tuple[int, T]]:
    """What a look at each step finds, less those that go meanwhile."""
    for number in asked:
        with contextlib.suppress(StepVanished):
            yield number, look(run, number)


def check_step(run: str, number: int) -> str | None:
    """What speaks against a step, all of it read; None if it is whole. Raises Gone."""
    try:
        known = manifest.verify(checkpoints_dir(run) / str(number))
        problem = UNSEALED if known is None else None
    except (Damaged, FileNotFoundError) as damage:
        problem = str(damage)
    if problem is not None and number not in step_numbers(run):
        raise StepVanished
    return problem


def _state(run: str, number: int) -> str:
    problem = check_step(run, number)
    if problem == UNSEALED:
        return f"unverified: {UNSEALED}{OR_NOT_DONE}"
    return "whole" if problem is None else f"damaged: {problem}"


def _counting(run: str, found: list[int]) -> list[bool]:
    """Of each step in a bucket, whether Orbax has written the last of it, or it was whole once: one that has
    a manifest and lacks anything else is damaged, and not half written."""
    marks = {files.COMMITTED, manifest.NAME}
    with ThreadPoolExecutor(BUCKET_THREADS, "steps") as pool:
        return list(
            pool.map(lambda n: bool(marks & set(files.list_names(checkpoints_dir(run) / str(n)))), found)
        )
