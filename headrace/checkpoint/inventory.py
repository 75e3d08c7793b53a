"""The checkpoints of a run: which steps exist, which are intact, which to resume from, which to remove.

A step is saved to RUN_DIR/checkpoints/STEP, and then sealed: manifest.txt, with the size and checksum of
every file, is written last, when all other bytes are on the disk (manifest.py). A step is

- intact, if it is sealed and every file is as its manifest says;
- damaged, if it is sealed and some file is not, or the manifest itself is not;
- unsealed, if it has no manifest: its save was interrupted, or is still running.

The rules that a crash, a full disk or a bad disk cannot break, and where to check them:

1. A run resumes from an intact step; from an unsealed one only if none is intact; never from a damaged one;
   and if all are damaged it stops instead of restarting from scratch (`find_resume_point`).
2. A damaged step is never removed: it is moved to RUN_DIR/checkpoints/quarantine, and a message says so
   (`quarantine`). Quarantine is emptied with a message, too: all but the last two, or all on a full disk.
3. The newest sealed step is never removed, and no other unless a newer one is sealed (`find_removable`).
4. A move or removal that is interrupted leaves nothing that looks intact (`quarantine`, `remove_step`).

On a disk, folders are renamed, which is atomic. A bucket has no rename, so there two files decide: Orbax
writes commit_success.txt last, and a folder with neither that nor a manifest is not a step.

Functions that change files are for the process that holds the lock of the run: the trainer or `headrace
checkpoint prune`. Needs neither JAX nor Orbax."""

import contextlib
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

T = TypeVar("T")

QUARANTINE = "quarantine"
QUARANTINE_KEEP = 2  # steps in quarantine; older ones are removed
REMOVED = ".removed"  # suffix of a step that is being removed
UNFINISHED = (
    ".orbax-checkpoint-tmp",
    REMOVED,
)  # in names of folders that are partly written or partly removed
MARKERS = (manifest.NAME, files.COMMITTED)  # a folder in a bucket is a step if it has one of them
BUCKET_THREADS = 8  # parallel requests
READ_ATTEMPTS = 5  # to choose a step while another process trains


class StepVanished(Exception):
    """A step was removed by its run while this process was reading it."""


@dataclass(frozen=True)
class Problem:
    """Reason why a step is not intact: it is damaged, or else unsealed."""

    text: str
    is_damage: bool = True

    @property
    def text_for_reader(self) -> str:
        """The text for a process that does not hold the lock: an unsealed step may be one being written."""
        return self.text if self.is_damage else f"{self.text}, or is still running"


UNSEALED = Problem("it has no manifest: its save was interrupted", is_damage=False)


@dataclass(frozen=True)
class StoredStep:
    """One step as its manifest describes it. Its other files have not been read."""

    step: int
    tier: Tier | Literal["unknown"]
    size: int  # bytes
    written_at: float  # seconds since 1970
    problem: Problem | None  # unsealed, or a damaged manifest


@dataclass(frozen=True)
class ResumePoint:
    """The step to resume from, None if there is no checkpoint at all, and why others were rejected."""

    step: int | None
    rejected: dict[int, Problem]
    is_sealed: bool = True


def checkpoints_dir(run_dir: str) -> epath.Path:
    path = epath.Path(run_dir)
    return (path if files.is_url(run_dir) else path.absolute()) / "checkpoints"


def step_dir(run_dir: str, step: int) -> epath.Path:
    return checkpoints_dir(run_dir) / str(step)


def tier_due(config: CheckpointKeys, step: int) -> Tier | None:
    """The kind of checkpoint to save after `step`, or None.

    Saves are written while training continues, one at a time: training waits at a save until the one before
    is sealed. With an interim save halfway between two others, the newest sealed step is never more than
    `checkpoint.every` steps behind (docs/decisions/0007)."""
    if config.keep_every and step % config.keep_every == 0:
        return "permanent"
    offset = step % config.every
    if offset == 0:
        return "temporary"
    return "interim" if offset == config.every // 2 else None


def step_numbers(run_dir: str) -> list[int]:
    """List all steps that exist, intact or not, the newest last.

    On a disk every folder with a number counts: Orbax gives it that name when all files are written. In a
    bucket Orbax writes into the final folder, so only one with commit_success.txt counts, or with a
    manifest: what was sealed once and now lacks a file is damaged, not partly written."""
    directory = checkpoints_dir(run_dir)
    steps = sorted(int(name) for name in files.list_names(directory) if name.isdecimal())
    if not files.is_url(run_dir):
        return [step for step in steps if (directory / str(step)).is_dir()]
    has_marker = lambda step: not set(MARKERS).isdisjoint(files.list_names(directory / str(step)))
    with ThreadPoolExecutor(BUCKET_THREADS, "steps") as pool:
        return [step for step, is_step in zip(steps, pool.map(has_marker, steps), strict=True) if is_step]


def list_steps(run_dir: str) -> list[StoredStep]:
    """Describe all steps that exist, the newest last. Reads only their manifests."""
    describe = lambda step: list(inspect_each(run_dir, [step], describe_step))
    with ThreadPoolExecutor(BUCKET_THREADS, "steps") as pool:
        return [stored for found in pool.map(describe, step_numbers(run_dir)) for _, stored in found]


def newest_sealed_step(run_dir: str, *, default: int = -1) -> int | None:
    """Find the newest step with a valid manifest. `default` if there is none, None if that cannot be read.

    For callers that only report the step, or compare it before and after a crash, and must not fail when a
    disk or a bucket does."""
    try:
        return max((stored.step for stored in list_steps(run_dir) if stored.problem is None), default=default)
    except (OSError, UserError):
        return None


def inspect_each(
    run_dir: str, steps: Sequence[int], inspect: Callable[[str, int], T]
) -> Iterator[tuple[int, T]]:
    """Yield each step with the result of `inspect(run_dir, step)`, skipping steps that vanish meanwhile."""
    for step in steps:
        with contextlib.suppress(StepVanished):
            yield step, inspect(run_dir, step)


def describe_step(run_dir: str, step: int) -> StoredStep:
    """Read the manifest of a step, and no other file. Raises StepVanished."""
    directory = step_dir(run_dir, step)
    problem = UNSEALED
    try:
        record = manifest.read(directory)
    except Damaged as damage:
        record, problem = None, Problem(str(damage))
    infos = files.list_files(directory)
    if record is not None and manifest.NAME in infos:
        return StoredStep(step, record.tier, record.size, infos[manifest.NAME].modified_at, problem=None)
    if step not in step_numbers(run_dir):
        raise StepVanished
    written_at = max((info.modified_at for info in infos.values()), default=0.0)
    return StoredStep(step, "unknown", sum(info.size for info in infos.values()), written_at, problem)


def check_step(run_dir: str, step: int) -> Problem | None:
    """Compare every byte of a step with its manifest. None if it is intact. Raises StepVanished.

    In a bucket nothing is downloaded but the manifest: the server keeps the checksums of its files."""
    try:
        problem = UNSEALED if manifest.verify(step_dir(run_dir, step)) is None else None
    except (Damaged, FileNotFoundError) as error:
        problem = Problem(str(error))
    if problem is not None and step not in step_numbers(run_dir):
        raise StepVanished
    return problem


def find_resume_point(run_dir: str, order: Sequence[int] | None = None) -> ResumePoint:
    """Choose the newest intact step, or the first intact one in `order`. If none is, the newest unsealed one.

    Reads every byte of each step it considers, and changes nothing. Raises UserError if there are
    checkpoints and none can be used: only the user may decide to restart from scratch."""
    rejected: dict[int, Problem] = {}
    newest_first = step_numbers(run_dir)[::-1] if order is None else order
    for step, problem in inspect_each(run_dir, newest_first, check_step):
        if problem is None:
            return ResumePoint(step, rejected)
        rejected[step] = problem

    unsealed = next((step for step, problem in rejected.items() if not problem.is_damage), None)
    if unsealed is not None:
        newer = {step: problem for step, problem in rejected.items() if step > unsealed}
        return ResumePoint(unsealed, newer, is_sealed=False)

    quarantined = sorted(list_quarantine(run_dir))
    if not rejected and not quarantined:
        return ResumePoint(None, {})
    directory = checkpoints_dir(run_dir)
    reasons = [f"step {step}: {problem.text}" for step, problem in rejected.items()]
    if not reasons:
        reasons = [f"{directory / QUARANTINE} holds {', '.join(quarantined)}"]
    raise UserError(
        f"{directory}: no checkpoint here is intact, and a run does not restart from scratch by itself. "
        f"{'; '.join(reasons)}. If you have an intact copy, put it there; {restart_hint(run_dir)}"
    )


def restart_hint(run_dir: str) -> str:
    return f"to restart from scratch, use another `run_dir`, or delete {run_dir} and everything in it"


def find_readable_step(run_dir: str) -> tuple[int, list[str]]:
    """Choose the step that evaluation, export and other readers use. Returns it with warnings about others.

    The newest intact step, but an interim one only if no other is intact: the run removes it soon. Damaged
    steps stay where they are."""
    require_steps(run_dir)
    point = _find_step_while_training(run_dir)
    if point.step is None:
        raise UserError(f"{run_dir}: its checkpoints were removed while they were read; try again")
    directory = checkpoints_dir(run_dir)
    warnings = [
        f"{directory / str(step)} is not used: {problem.text_for_reader}"
        for step, problem in point.rejected.items()
    ]
    if not point.is_sealed:
        reason = f"no other step is intact, but {UNSEALED.text_for_reader}"
        warnings.append(f"{directory / str(point.step)} is used because {reason}")
    return point.step, warnings


def _find_step_while_training(run_dir: str) -> ResumePoint:
    """Choose a step to read while another process may add and remove steps.

    That no step is intact is believed only if the list of steps has not changed meanwhile."""
    for attempt in range(READ_ATTEMPTS):
        before = list_steps(run_dir)
        lasting_first = sorted(before, key=lambda stored: (stored.tier == "interim", -stored.step))
        try:
            point = find_resume_point(run_dir, [stored.step for stored in lasting_first])
        except UserError:
            if attempt == READ_ATTEMPTS - 1 or list_steps(run_dir) == before:
                raise
            continue
        if (point.step is not None and point.is_sealed) or list_steps(run_dir) == before:
            break
    return point


def find_intact_before(run_dir: str, step: int) -> int | None:
    """Find the newest intact step before `step`, else the oldest later one. None if the run has no steps."""
    steps = step_numbers(run_dir)
    earlier, later = [n for n in steps if n < step], [n for n in steps if n >= step]
    for candidate, problem in inspect_each(run_dir, earlier[::-1] + later, check_step):
        if problem is None:
            return candidate
    if steps:
        hint = f"`headrace checkpoint verify {run_dir}` shows why"
        raise UserError(f"{checkpoints_dir(run_dir)}: no checkpoint here is intact; {hint}")
    return None


def quarantine(run_dir: str, reasons: dict[int, str]) -> list[str]:
    """Move steps to the quarantine folder, which frees their numbers for new ones. Returns what was done.

    The last two stay there, or all of this call: a run that is killed in every other save would otherwise
    fill its disk. In a bucket files move one by one, the manifest and commit_success.txt last: an interrupted
    move leaves a damaged step, or at the very end an unsealed one, and the next start moves the rest."""
    messages = []
    quarantine_dir = checkpoints_dir(run_dir) / QUARANTINE
    for step, reason in reasons.items():
        name = f"{step}-{time.strftime('%Y%m%d-%H%M%S')}"
        while files.exists(quarantine_dir / name):  # moved there in the same second
            name += "+"
        files.move(step_dir(run_dir, step), quarantine_dir / name, last=MARKERS)
        messages.append(f"step {step}: checkpoint not used: {reason}; moved to {quarantine_dir / name}")
    excess = list_quarantine(run_dir)[: -max(QUARANTINE_KEEP, len(reasons))] if reasons else []
    for name in excess:
        files.remove(quarantine_dir / name)
        messages.append(f"{quarantine_dir / name} removed: quarantine keeps only the last {QUARANTINE_KEEP}")
    return messages


def list_quarantine(run_dir: str) -> list[str]:
    """List the names of folders in quarantine, as STEP-TIME, the latest last."""
    names = files.list_names(checkpoints_dir(run_dir) / QUARANTINE)
    return sorted(names, key=lambda name: name.partition("-")[2])


def find_removable(
    run_dir: str, keep: int, is_intact: Callable[[int], bool] = lambda step: True
) -> list[StoredStep]:
    """List the steps that may be removed, the oldest first.

    These are temporary steps beyond the newest `keep`, and interim and unsealed steps older than an intact
    one. The newest intact step always stays, and so do permanent ones. Damaged steps stay as evidence.
    `is_intact` can check a sealed step before it counts; by default its manifest is trusted."""
    removable: list[StoredStep] = []
    has_newer_intact = False
    num_temporary = 0
    for stored in reversed(list_steps(run_dir)):
        if stored.problem is not None:
            if has_newer_intact and not stored.problem.is_damage:
                removable.append(stored)
        elif has_newer_intact and (
            stored.tier == "interim" or (stored.tier == "temporary" and num_temporary >= keep)
        ):
            removable.append(stored)
        elif is_intact(stored.step):
            has_newer_intact = True
            num_temporary += stored.tier == "temporary"
    return removable[::-1]


def apply_retention(run_dir: str, keep: int) -> list[str]:
    """Remove what `find_removable` lists, and what is left of earlier removals. Returns what failed."""
    directory = checkpoints_dir(run_dir)
    leftovers = [name for name in files.list_names(directory) if name.endswith(REMOVED)]
    errors = [try_removal(name, files.remove, directory / name) for name in leftovers]
    errors += [
        try_removal(f"step {stored.step}", remove_step, run_dir, stored.step)
        for stored in find_removable(run_dir, keep)
    ]
    return [error for error in errors if error]


def remove_unfinished(run_dir: str) -> list[str]:
    """Remove what interrupted saves and removals have left. Returns what failed.

    Call it only while no save is in progress: its files would look like leftovers."""
    directory = checkpoints_dir(run_dir)
    names = files.list_names(directory)
    leftovers = [name for name in names if any(mark in name for mark in UNFINISHED)]
    if files.is_url(run_dir):  # leftovers in a bucket have the final name
        numbered = {int(name) for name in names if name.isdecimal()}
        leftovers += map(str, sorted(numbered - set(step_numbers(run_dir))))
    errors = [try_removal(name, files.remove, directory / name) for name in leftovers]
    return [error for error in errors if error]


def remove_step(run_dir: str, step: int) -> None:
    """Remove a step such that an interrupted removal leaves nothing that looks like a damaged step.

    On a disk the folder is renamed first. In a bucket the manifest and commit_success.txt go first."""
    doomed = step_dir(run_dir, step)
    if not files.is_url(run_dir):
        doomed = checkpoints_dir(run_dir) / f"{step}{REMOVED}"
        files.remove(doomed)  # left by an earlier removal of this step
        files.move(step_dir(run_dir, step), doomed)
    files.remove(doomed, first=MARKERS)


def try_removal(name: str, remove: Callable[..., None], *args: object) -> str | None:
    """Call `remove(*args)`. Returns None, or why it failed, so that the caller can continue with the rest."""
    try:
        remove(*args)
    except (OSError, UserError) as error:
        return f"{name} could not be removed ({short_error(error)})"
    return None


def short_error(error: Exception) -> str:
    """The text of an exception on one line, cut to 200 characters."""
    return " ".join(str(error).split())[:200]


def require_steps(run_dir: str) -> None:
    """Raise UserError if a run has no checkpoints."""
    if not step_numbers(run_dir):
        directory = checkpoints_dir(run_dir)
        raise UserError(f"{run_dir}: found no checkpoint in {directory}, expected a run folder with some")


def resolve_step(run_dir: str, text: str) -> int:
    """Convert a step number that a user typed, checking that this step exists."""
    require_steps(run_dir)
    steps = step_numbers(run_dir)
    if not text.isdecimal() or int(text) not in steps:
        raise UserError(f"{run_dir}: found no step {text}, expected one of {', '.join(map(str, steps))}")
    return int(text)
