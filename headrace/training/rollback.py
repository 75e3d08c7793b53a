"""The record of rollbacks, and the reports about the data of bad steps.

When too many updates are skipped, the run rolls back to a checkpoint from before them and skips their data,
or stops if that was tried often enough (training/loop.py). RUN/bad-steps has a line for each time
(rollbacks.jsonl), from which a restarted run knows which rows to skip, and a report that names the
documents."""

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from headrace.data.batch_order import BatchOrder
from headrace.data.dataset import Dataset
from headrace.data.inspect import escape_control
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.errors import UserError
from headrace.storage import files

FILE = "rollbacks.jsonl"
MAX_ROLLBACKS = 2  # to one checkpoint, before the run stops
SHOWN_CHARS = 100  # of a document in a report
SHOWN_TOKENS = 64  # that are decoded for them


@dataclass(frozen=True)
class BadStretch:
    """The steps from `first` to `last`, among which too many updates were skipped."""

    first: int
    last: int
    skipped: list[tuple[int, list[float]]]  # steps whose updates were skipped, with their metrics
    metric_names: tuple[str, ...]  # of these metrics


class LogEntry(NamedTuple):
    """A line of rollbacks.jsonl. All but `step` are -1 if the run stopped instead of rolling back."""

    step: int  # last bad step
    to: int = -1  # step that the run rolled back to
    first: int = -1  # first stream row to skip
    rows: int = -1  # number of rows to skip

    @property
    def is_stop(self) -> bool:
        return self.rows < 0


class RollbackLog:
    """The rollbacks of a run so far. The file is read by the first host, and its content sent to all."""

    def __init__(self, run_dir: str) -> None:
        self.folder = files.join(run_dir, "bad-steps")
        self.entries = _broadcast(list(self._read_entries()) if jax.process_index() == 0 else [])

    def skipped_ranges(self) -> list[range]:
        """The stream rows that are never read again."""
        return [range(entry.first, entry.first + entry.rows) for entry in self.entries if entry.rows > 0]

    def has_rollback_to(self, step: int) -> bool:
        return any(entry.to == step for entry in self.entries)

    def rollbacks_to(self, step: int) -> int:
        """Count the rollbacks to `step` since the run last stopped because of bad steps."""
        stops = [index for index, entry in enumerate(self.entries) if entry.is_stop]
        recent = self.entries[stops[-1] + 1 :] if stops else self.entries
        return sum(entry.to == step for entry in recent)

    def add_rollback(self, last_step: int, *, to_step: int, rows: range) -> None:
        """Record that the run rolls back from `last_step` to `to_step`, and skips these stream rows."""
        self._add(LogEntry(last_step, to_step, rows.start, len(rows)))

    def add_stop(self, last_step: int) -> None:
        """Record that the run stops at `last_step`."""
        self._add(LogEntry(last_step))

    def write_report(self, message: str, lines: Iterable[str]) -> str:
        """Write the report about the latest entry, and return its path. For the first host."""
        path = files.join(self.folder, f"{len(self.entries):03}-step-{self.entries[-1].step}.txt")
        files.write(path, ("\n".join([message, *lines]) + "\n").encode())
        return path

    def _add(self, entry: LogEntry) -> None:
        """Write an entry before anything else happens: no step is trained without it."""
        self.entries.append(entry)
        if jax.process_index() == 0:
            record = entry._asdict() | {"time": round(time.time(), 3)}
            files.write(self._path, self._read() + json.dumps(record).encode() + b"\n")

    @property
    def _path(self) -> str:
        return files.join(self.folder, FILE)

    def _read(self) -> bytes:
        try:
            return files.read(self._path)
        except FileNotFoundError:
            return b""

    def _read_entries(self) -> Iterator[LogEntry]:
        """Parse the file. A damaged line is an error: without it the run would read the bad rows again."""
        for number, line in enumerate(self._read().splitlines(), 1):
            try:
                record = json.loads(line)
                entry = LogEntry(*(record.get(name, -1) for name in LogEntry._fields))
                if not all(type(value) is int for value in entry):
                    raise ValueError
            except (ValueError, AttributeError):
                raise UserError(
                    f"{self._path}:{number}: found a damaged line, expected JSON with whole numbers; remove "
                    "the line, and the rows that it skipped, if any, are read again"
                ) from None
            yield entry


def ranges_of_steps(order: BatchOrder, first: int, last: int) -> list[range]:
    """Stream rows that steps `first` to `last` read, in order. The first step is 1."""
    batch_rows = range(order.batch_rows(first - 1).start, order.batch_rows(last - 1).stop)
    return order.stream_ranges(batch_rows)


def row_span(order: BatchOrder, first: int, last: int) -> range:
    """The smallest range of stream rows that contains all those of steps `first` to `last`."""
    ranges = ranges_of_steps(order, first, last)
    return range(ranges[0].start, ranges[-1].stop)


def report_lines(dataset: Dataset, order: BatchOrder, local_dir: Path, bad: BadStretch) -> Iterator[str]:
    """Describe each skipped step, and the documents that its batch was made of. `local_dir` has the run's
    tokenizer."""
    tokenizer = tokenizer_io.load(local_dir) if (local_dir / "tokenizer.json").is_file() else None
    for step, values in bad.skipped:
        metrics = [f"{name} {value:.6g}" for name, value in zip(bad.metric_names, values, strict=True)]
        yield f"\nstep {step}: {', '.join(metrics).replace('grad_norm', 'gradient norm')}"
        for stream_rows in ranges_of_steps(order, step, step):
            numbered = zip(stream_rows, dataset.iter_train_rows(stream_rows), strict=True)
            for stream_row, (source, row) in numbered:
                stored_row = stream_row % order.stored_rows
                yield f"  row {stored_row:,} of the training data, from source {escape_control(source)}"
                yield from document_lines(row.tokens, row.segments, tokenizer)


def document_lines(
    tokens: np.ndarray, segments: np.ndarray, tokenizer: tokenizer_io.Tokenizer | None
) -> Iterator[str]:
    """Describe each document of a row by its length and its first words, or token ids without a tokenizer."""
    for segment in range(1, int(segments.max(initial=0)) + 1):
        doc_tokens = tokens[segments == segment]
        shown = doc_tokens[:SHOWN_TOKENS].tolist()
        text = " ".join(map(str, shown)) if tokenizer is None else tokenizer.inner.decode(shown)
        text = escape_control(text).replace("\n", "⏎")
        is_cut = len(text) > SHOWN_CHARS or len(doc_tokens) > SHOWN_TOKENS
        yield f"    {len(doc_tokens):,} tokens: {text[:SHOWN_CHARS]}{'…' * is_cut}"


def skip_reason(metrics: Mapping[str, float]) -> str:
    """Explain why the update of a step was skipped, from its metrics."""
    names = [name for end in ("loss", "grad_norm") for name in metrics if name.endswith(end)]
    not_finite = [name for name in names if not math.isfinite(metrics[name])]
    if not_finite:
        return f"{' and '.join(not_finite).replace('grad_norm', 'gradient norm')} not finite"
    values = ", ".join(f"{name} {metrics[name]:.4g}" for name in names)
    return f"{values.replace('grad_norm', 'gradient norm')}, far above the usual"


def _broadcast(entries: list[LogEntry]) -> list[LogEntry]:
    """Send the first host's entries to all hosts."""
    if jax.process_count() == 1:
        return entries
    count = int(multihost_utils.broadcast_one_to_all(np.int64(len(entries))))
    if not count:
        return []
    sent = np.array(entries or [LogEntry(0)] * count, np.int64)
    received = np.asarray(multihost_utils.broadcast_one_to_all(sent)).tolist()
    return [LogEntry(*values) for values in received]
