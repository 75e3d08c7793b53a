"""Room for the next checkpoint on the disk of a run. Needs neither JAX nor Orbax.

A bucket has no limit of its own: there is always room."""

import shutil
from collections.abc import Iterator

from headrace.checkpoint import inventory
from headrace.storage import files


def available_bytes(run_dir: str) -> int | None:
    """Free bytes on the disk of a run. None for a bucket."""
    if files.is_url(run_dir):
        return None
    path = inventory.checkpoints_dir(run_dir)
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def find_shortage(run_dir: str, needed_bytes: int, *, may_remove: bool) -> str | None:
    """The error message if the disk has no room for `needed_bytes`, else None. Removes nothing.

    With `may_remove`, what `remove_one_by_one` would remove counts as room."""
    available = available_bytes(run_dir)
    if available is None:
        return None
    removable = 0
    if may_remove:
        quarantine_dir = inventory.checkpoints_dir(run_dir) / inventory.QUARANTINE
        removable = sum(stored.size for stored in inventory.find_removable(run_dir, keep=0))
        removable += sum(info.size for info in files.list_files(quarantine_dir).values())
    if needed_bytes <= available + removable:
        return None
    gain = f", and {_gb(removable)} more without older checkpoints" if removable else ""
    return (
        f"run_dir: a checkpoint takes {_gb(needed_bytes)}, and the disk of {run_dir} has {_gb(available)} "
        f"free{gain}; make room, or put `run_dir` on a larger disk"
    )


def make_room(run_dir: str, step: int, needed_bytes: int, *, may_remove: bool) -> tuple[bool, list[str]]:
    """Make room for a checkpoint of `needed_bytes`. Returns whether there is room, and warnings.

    Removes as little as possible: leftovers of interrupted saves, then quarantine, then older steps one by
    one. If that is not enough, this save is skipped: training is worth more than a checkpoint."""
    warnings: list[str] = []
    available = available_bytes(run_dir)
    if available is None or available >= needed_bytes:
        return True, warnings
    if may_remove:
        warnings += inventory.remove_unfinished(run_dir)
        removals = remove_one_by_one(run_dir)
        while (available_bytes(run_dir) or 0) < needed_bytes and (name := next(removals, None)):
            warnings.append(f"{name} removed, since the disk is full")
    available = available_bytes(run_dir) or 0
    if available < needed_bytes:
        warnings.append(
            f"step {step}: checkpoint skipped: it takes {_gb(needed_bytes)}, and the disk of {run_dir} has "
            f"{_gb(available)} free; make room, the next save tries again"
        )
    return available >= needed_bytes, warnings


def remove_one_by_one(run_dir: str) -> Iterator[str]:
    """Remove one thing per iteration that training can do without, and yield its name.

    First what is in quarantine, then steps, the oldest first. The newest sealed step stays."""
    for name in inventory.list_quarantine(run_dir):
        folder = inventory.checkpoints_dir(run_dir) / inventory.QUARANTINE / name
        if not inventory.try_removal(name, files.remove, folder):
            yield f"{inventory.QUARANTINE}/{name}"
    for stored in inventory.find_removable(run_dir, keep=0):
        if not inventory.try_removal(f"step {stored.step}", inventory.remove_step, run_dir, stored.step):
            yield f"step {stored.step}: checkpoint"


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB"
