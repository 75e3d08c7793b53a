"""The steps that lie in RUN/checkpoints: which of them can be trusted, which may go, and what room they take.
Needs neither JAX nor Orbax."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from etils import epath

from millrace import manifest
from millrace.errors import UserError
from millrace.manifest import Damaged

Say = Callable[[str], None]

QUARANTINE = "quarantine"
UNFINISHED = (".orbax-checkpoint-tmp", ".removed")  # in the names of what is half written, or half gone
UNSEALED = "it has no manifest: its save was cut off before the end"


@dataclass(frozen=True)
class Chosen:
    """The step to go on from, None if there is no checkpoint at all, and what speaks against newer ones."""

    step: int | None
    passed: dict[int, str]
    sealed: bool = True


@dataclass(frozen=True)
class Step:
    number: int
    tier: Literal["permanent", "temporary", "unknown"]
    size: int
    written: float  # seconds since 1970
    problem: str | None  # what is wrong with it, as far as its manifest was looked at


def folder(run: str) -> epath.Path:
    path = epath.Path(run)
    return (path if "://" in run else path.absolute()) / "checkpoints"


def numbers(run: str) -> list[int]:
    """All steps there are, whole or not, the newest last."""
    try:
        return sorted(int(path.name) for path in folder(run).iterdir() if path.name.isdecimal())
    except (FileNotFoundError, NotADirectoryError):
        return []


def choose(run: str) -> Chosen:
    """The newest step of which every byte is as it was written; where there is none, the newest without a
    manifest, of which nothing is known to be wrong. Reads all of it, and moves nothing."""
    unsealed: list[int] = []
    wrong: dict[int, str] = {}
    for number in reversed(numbers(run)):
        try:
            if manifest.verify(folder(run) / str(number)) is not None:
                return Chosen(number, wrong)
            unsealed.append(number)
            wrong[number] = UNSEALED
        except Damaged as damage:
            wrong[number] = str(damage)
    if unsealed:
        newer = {number: said for number, said in wrong.items() if number > unsealed[0]}
        return Chosen(unsealed[0], newer, sealed=False)
    where, aside = folder(run), folder(run) / QUARANTINE
    if not wrong and not (aside.exists() and any(aside.iterdir())):
        return Chosen(None, {})
    told = [f"step {number}: {said}" for number, said in wrong.items()]
    told += [] if wrong else [f"{aside} holds {', '.join(sorted(path.name for path in aside.iterdir()))}"]
    raise UserError(
        f"{where}: no checkpoint in it can be trusted, and the run does not begin anew by itself. "
        + "; ".join(told)
        + f". Put a copy of a whole one there if you have one; to begin anew, remove {where} or use another "
        "`run`"
    )


def set_aside(run: str, passed: dict[int, str]) -> list[str]:
    """Moves damaged steps out of the way of those that come again; nothing is deleted. Says what was done."""
    told = []
    for number, said in passed.items():
        aside = folder(run) / QUARANTINE / f"{number}-{time.strftime('%Y%m%d-%H%M%S')}"
        aside.parent.mkdir(parents=True, exist_ok=True)
        (folder(run) / str(number)).rename(aside)
        told.append(f"step {number}: this checkpoint is not used: {said}; it is now in {aside}")
    return told


def clear_unfinished(run: str) -> None:
    """What a save or a removal that was cut off has left. Only for the one who writes here."""
    if folder(run).exists():
        for path in list(folder(run).iterdir()):
            if any(mark in path.name for mark in UNFINISHED):
                path.rmtree(missing_ok=True)


def described(run: str, number: int) -> Step:
    """By its manifest, without reading the rest."""
    path = folder(run) / str(number)
    try:
        known = manifest.read(path)
    except Damaged as damage:
        return Step(number, "unknown", _size(path), path.stat().mtime, str(damage))
    if known is None:
        return Step(number, "unknown", _size(path), path.stat().mtime, UNSEALED)
    written = (path / manifest.NAME).stat().mtime
    return Step(number, "permanent" if known.permanent else "temporary", known.size, written, None)


def spare(run: str, keep: int) -> list[Step]:
    """What may go: of the temporary steps all but the newest `keep`, and of those without a manifest the ones
    that are older than one with it. What is damaged stays, since it tells what happened."""
    every = [described(run, number) for number in numbers(run)]
    temporary = [step for step in every if step.tier == "temporary"]
    newest = max((step.number for step in every if step.problem is None), default=-1)
    cut_off = [step for step in every if step.problem == UNSEALED and step.number < newest]
    return sorted(temporary[: max(len(temporary) - keep, 0)] + cut_off, key=lambda step: step.number)


def remove(run: str, number: int) -> None:
    """By another name first: a removal that is cut off leaves no step that looks damaged."""
    gone = folder(run) / f"{number}.removed"
    gone.rmtree(missing_ok=True)
    (folder(run) / str(number)).rename(gone)
    gone.rmtree()


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
    """The newest whole step, for those who only read: what is passed over is told and left in its place."""
    check_run(run)
    chosen = choose(run)
    for number, said in chosen.passed.items():
        say(f"{folder(run)}/{number} is not used: {said}")
    assert chosen.step is not None
    return chosen.step


def listed(run: str, say: Say) -> None:
    """A table. Says `whole` only of what it has read."""
    check_run(run)
    rows = [("step", "tier", "size", "age", "state")]
    for number in numbers(run):
        step = described(run, number)
        age = f"{max(time.time() - step.written, 0) / 3600:,.1f} h"
        rows.append((str(number), step.tier, f"{step.size / 1e9:,.3f} GB", age, _state(run, number)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        say("  ".join([*cells, row[-1]]))
    aside = folder(run) / QUARANTINE
    for path in sorted(aside.iterdir()) if aside.exists() else ():
        say(f"put aside: {path}")


def verified(run: str, step: str | None, say: Say) -> bool:
    """Whether all that were asked for are whole; says it of each."""
    check_run(run)
    states = {number: _state(run, number) for number in ([one(run, step)] if step else numbers(run))}
    for number, state in states.items():
        say(f"step {number}: {state}")
    return all(state == "whole" for state in states.values())


def pruned(run: str, keep: int, say: Say, *, dry_run: bool = False) -> None:
    gone = spare(run, keep)
    for step in gone:
        if not dry_run:
            remove(run, step.number)
        say(f"step {step.number}: {'would be removed' if dry_run else 'removed'}, {step.size / 1e9:,.3f} GB")
    if not gone:
        say(f"{run}: nothing to remove")


def free(run: str) -> int | None:
    """Bytes on the disk of a run; None if it has none of its own."""
    if "://" in run:
        return None
    path = folder(run)
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _state(run: str, number: int) -> str:
    try:
        known = manifest.verify(folder(run) / str(number))
    except Damaged as damage:
        return f"damaged: {damage}"
    return f"unverified: {UNSEALED}" if known is None else "whole"


def _size(path: epath.Path) -> int:
    return sum(_size(one) if one.is_dir() else one.stat().length for one in path.iterdir())
