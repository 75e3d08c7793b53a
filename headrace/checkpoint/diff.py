"""How two checkpoints differ: in their recipes, and in their weights, one tensor at a time."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from headrace.checkpoint.manager import Checkpoints
from headrace.config import reader

ITEMS = ("params", "ema", "rest")


def diff_checkpoints(run: str, step: int, other_run: str, other_step: int) -> Iterator[str]:
    """A line for each thing that differs; none if the two are the same."""
    ours, theirs = Checkpoints(run), Checkpoints(other_run)
    try:
        yield from _recipes(ours.read_meta(step), theirs.read_meta(other_step))
        for item in ITEMS:
            here, there = ours.has_item(step, item), theirs.has_item(other_step, item)
            if here != there:
                yield f"{item}: only in the {'first' if here else 'second'}"
            elif here:
                yield from _tensors(ours, step, theirs, other_step, item)
    finally:
        ours.close()
        theirs.close()


def _recipes(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
    one, other = reader.flatten(ours["recipe"]), reader.flatten(theirs["recipe"])
    data = ours.get("data", {}), theirs.get("data", {})
    one["tokenizer"], other["tokenizer"] = ours["tokenizer_sha256"], theirs["tokenizer_sha256"]
    one["data.fingerprint"], other["data.fingerprint"] = (about.get("fingerprint") for about in data)
    for key in one | other:
        if one.get(key) != other.get(key):
            yield f"recipe: {key}: {one.get(key)} -> {other.get(key)}"


def _tensors(ours: Checkpoints, step: int, theirs: Checkpoints, other: int, item: str) -> Iterator[str]:
    one, two = ours.array_metadata(step, item), theirs.array_metadata(other, item)
    same = 0
    for path in one | two:
        name = f"{item}: {path}"
        if path not in one or path not in two:
            yield f"{name}: only in the {'first' if path in one else 'second'}"
        elif tuple(one[path].shape) != tuple(two[path].shape):
            yield f"{name}: shape {tuple(one[path].shape)} -> {tuple(two[path].shape)}"
        elif said := _values(_tensor(ours, step, item, path), _tensor(theirs, other, item, path)):
            yield f"{name}: {said}"
        else:
            same += 1
    if same:
        yield f"{item}: {same:,} of {len(one | two):,} tensors are the same, bit for bit"


def _values(one: np.ndarray, two: np.ndarray) -> str:
    if one.dtype == two.dtype and one.tobytes() == two.tobytes():
        return ""
    a, b = one.astype(np.float64), two.astype(np.float64)
    largest, norm = np.abs(b - a).max(), np.linalg.norm(a)
    share = f"{np.linalg.norm(b - a) / norm:.3g}" if norm else "all"
    changed = np.count_nonzero(a != b) / max(a.size, 1)
    return f"{changed:.1%} of its values differ, by {largest:.3g} at most, {share} of its norm"


def _tensor(checkpoints: Checkpoints, step: int, item: str, path: str) -> np.ndarray:
    """One at a time, so that models need not fit into memory twice."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        args = ocp.args.PyTreeRestore(
            item={path: 0},
            restore_args={path: ocp.RestoreArgs(restore_type=np.ndarray)},
            partial_restore=True,
        )
        return np.asarray(reader.restore(checkpoints.directory / str(step) / item, args=args)[path])
