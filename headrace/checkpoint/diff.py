"""Differences between two checkpoints: in their recipes, tokenizers and data, and in every tensor."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import orbax.checkpoint as ocp

from headrace.checkpoint.manager import ITEMS, Checkpoints, Metadata
from headrace.config import reader


@dataclass(frozen=True)
class CheckpointReader:
    """One step of a run, opened to read its metadata and its tensors."""

    checkpoints: Checkpoints
    step: int

    def read_tensor(self, item: str, path: str) -> np.ndarray:
        """Read a single tensor, since two whole models may not fit into memory."""
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
            args = ocp.args.PyTreeRestore(
                item={path: 0},
                restore_args={path: ocp.RestoreArgs(restore_type=np.ndarray)},
                partial_restore=True,
            )
            folder = self.checkpoints.directory / str(self.step) / item
            return np.asarray(orbax.restore(folder, args=args)[path])


def diff_checkpoints(run_dir: str, step: int, other_run_dir: str, other_step: int) -> Iterator[str]:
    """Yield a line for each setting and tensor that differs, and one per item with the number of tensors that
    are the same."""
    first = CheckpointReader(Checkpoints(run_dir), step)
    second = CheckpointReader(Checkpoints(other_run_dir), other_step)
    try:
        yield from _diff_metadata(first.checkpoints.read_meta(step), second.checkpoints.read_meta(other_step))
        for item in ITEMS:
            in_first = first.checkpoints.has_item(step, item)
            in_second = second.checkpoints.has_item(other_step, item)
            if in_first != in_second:
                yield f"{item}: only in the {'first' if in_first else 'second'}"
            elif in_first:
                yield from _diff_tensors(first, second, item)
    finally:
        first.checkpoints.close()
        second.checkpoints.close()


def _diff_metadata(first: Metadata, second: Metadata) -> Iterator[str]:
    before, after = _flat_settings(first), _flat_settings(second)
    for key in before | after:
        if before.get(key) != after.get(key):
            yield f"recipe: {key}: {before.get(key)} -> {after.get(key)}"


def _flat_settings(meta: Metadata) -> dict[str, object]:
    """The recipe's settings by dotted key, with the hashes of tokenizer and data."""
    return reader.flatten(meta["recipe"]) | {
        "tokenizer": meta["tokenizer_sha256"],
        "data.fingerprint": meta.get("data", {}).get("fingerprint"),
    }


def _diff_tensors(first: CheckpointReader, second: CheckpointReader, item: str) -> Iterator[str]:
    """Compare the arrays of an item, one at a time."""
    stored = first.checkpoints.array_metadata(first.step, item)
    other_stored = second.checkpoints.array_metadata(second.step, item)
    num_equal = 0
    for path in stored | other_stored:
        name = f"{item}: {path}"
        if path not in stored or path not in other_stored:
            yield f"{name}: only in the {'first' if path in stored else 'second'}"
            continue
        shape, other_shape = tuple(stored[path].shape), tuple(other_stored[path].shape)
        if shape != other_shape:
            yield f"{name}: shape {shape} -> {other_shape}"
        elif text := _diff_values(first.read_tensor(item, path), second.read_tensor(item, path)):
            yield f"{name}: {text}"
        else:
            num_equal += 1
    if num_equal:
        yield f"{item}: {num_equal:,} of {len(stored | other_stored):,} tensors are the same, bit for bit"


def _diff_values(before: np.ndarray, after: np.ndarray) -> str:
    """Describe the difference between two tensors of one shape. Empty if they are the same bit for bit."""
    if before.dtype == after.dtype and before.tobytes() == after.tobytes():
        return ""
    first, second = before.astype(np.float64), after.astype(np.float64)
    largest, norm = np.abs(second - first).max(), np.linalg.norm(first)
    relative = f"{np.linalg.norm(second - first) / norm:.3g}" if norm else "all"
    share = np.count_nonzero(first != second) / max(first.size, 1)
    return f"{share:.1%} of its values differ, by {largest:.3g} at most, {relative} of its norm"
