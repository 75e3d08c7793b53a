"""What becomes of a run with too many bad steps: it goes back to a checkpoint from before them and passes
over the data they were made with, or stops if that was tried often enough. RUN/bad-steps holds a line for
each time (rollbacks.jsonl), by which a run that is started again passes over the same, and a report that
names the documents."""

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from headrace.data.batch_order import BatchOrder
from headrace.data.dataset import Dataset
from headrace.data.inspect import escape_control
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.errors import UserError
from headrace.storage import files

MAX_ROLLBACKS = 2  # from one checkpoint, before the run stops
SHOWN = 100  # characters of a document
READ = 64  # tokens that are read for them


@dataclass(frozen=True)
class BadStretch:
    """The steps from `first` to `last` hold too many updates that were left out: these, with their losses and
    gradient norms, in the order of `names`."""

    first: int
    last: int
    skipped: list[tuple[int, list[float]]]
    metric_names: tuple[str, ...]


class RollbackLog:
    """What happened so far, the same on all hosts: the first one's file is read."""

    def __init__(self, run: str) -> None:
        self.folder = files.join(run, "bad-steps")
        told = [] if jax.process_index() else list(self.read_lines())
        # As numbers, which hosts can send each other: step, to, first row and rows, all -1 for a stop.
        self.rows = _from_first([[one.get(name, -1) for name in KEYS] for one in told])

    def skipped_ranges(self) -> list[range]:
        """The rows to pass over."""
        return [range(first, first + count) for _, _, first, count in self.rows if count > 0]

    def has_rollback_to(self, step: int) -> bool:
        return any(row[1] == step for row in self.rows)

    def rollbacks_to(self, to: int) -> int:
        """How often the run went back to a step since it last stopped."""
        stops = [number for number, row in enumerate(self.rows) if row[3] < 0]
        return sum(row[1] == to for row in self.rows[stops[-1] + 1 if stops else 0 :])

    def add(self, row: Sequence[int]) -> None:
        """Kept before anything else is done, so that nothing is trained on what is not on record."""
        self.rows.append(list(row))
        if jax.process_index() == 0:
            told = dict(zip(KEYS, row, strict=True)) | {"time": round(time.time(), 3)}
            files.write(files.join(self.folder, FILE), self.read() + json.dumps(told).encode() + b"\n")

    def read(self) -> bytes:
        try:
            return files.read(files.join(self.folder, FILE))
        except FileNotFoundError:
            return b""

    def read_lines(self) -> Iterator[dict[str, int]]:
        """The lines of the file; without them the run would read the same rows again."""
        for number, line in enumerate(self.read().splitlines(), 1):
            try:
                found = json.loads(line)
                if not isinstance(found, dict) or not all(type(found.get(name, -1)) is int for name in KEYS):
                    raise ValueError
            except ValueError:
                raise UserError(
                    f"{files.join(self.folder, FILE)}:{number}: found something else than a line of ours; "
                    "take that line out: the rows it passed over, if any, are then read"
                ) from None
            yield found

    def write_report(self, said: str, pages: Iterator[str]) -> str:
        """Writes the report of what was just added; its path. For the first host."""
        path = files.join(self.folder, f"{len(self.rows):03}-step-{self.rows[-1][0]}.txt")
        files.write(path, ("\n".join([said, *pages]) + "\n").encode())
        return path


FILE = "rollbacks.jsonl"
KEYS = ("step", "to", "first", "rows")


def rows_of(order: BatchOrder, first: int, last: int) -> list[range]:
    """Stream rows that steps `first` to `last` read, in order. The first step is 1."""
    batch_rows = range(order.batch_rows(first - 1).start, order.batch_rows(last - 1).stop)
    return order.stream_ranges(batch_rows)


def row_span(order: BatchOrder, first: int, last: int) -> tuple[int, int]:
    """First and number of the smallest range of stream rows that contains those of steps `first` to
    `last`."""
    ranges = rows_of(order, first, last)
    return ranges[0].start, ranges[-1].stop - ranges[0].start


def report_lines(order: BatchOrder, near: Path, dataset: Dataset, trouble: BadStretch) -> Iterator[str]:
    """The bad steps, one after the other, with the documents that each was made of. `near` is a folder with
    the run's tokenizer."""
    tokenizer = tokenizer_io.load(near) if (near / "tokenizer.json").is_file() else None
    for number, values in trouble.skipped:
        measured = [f"{name} {value:.6g}" for name, value in zip(trouble.metric_names, values, strict=True)]
        yield f"\nstep {number}: {', '.join(measured).replace('grad_norm', 'gradient norm')}"
        for rows in rows_of(order, number, number):
            for row, (source, packed) in zip(rows, dataset.iter_train_rows(rows), strict=True):
                number_in_data = f"row {row % order.stored_rows:,} of the training data"
                yield f"  {number_in_data}, from source {escape_control(source)}"
                yield from documents(packed.tokens, packed.segments, tokenizer)


def documents(
    tokens: np.ndarray, segments: np.ndarray, tokenizer: tokenizer_io.Tokenizer | None
) -> Iterator[str]:
    for segment in range(1, int(segments.max(initial=0)) + 1):
        own = tokens[segments == segment]
        begins = own[:READ].tolist()
        text = " ".join(map(str, begins)) if tokenizer is None else tokenizer.inner.decode(begins)
        text = escape_control(text).replace("\n", "⏎")
        yield f"    {len(own):,} tokens: {text[:SHOWN]}{'…' * (len(text) > SHOWN or len(own) > READ)}"


def reason_text(values: dict[str, float]) -> str:
    """Why an update was left out, by the metrics of its step."""
    names = [name for end in ("loss", "grad_norm") for name in values if name.endswith(end)]
    watched = {name: values[name] for name in names}
    wrong = [name for name, value in watched.items() if not math.isfinite(value)]
    if wrong:
        return f"{' and '.join(wrong).replace('grad_norm', 'gradient norm')} not finite"
    told = ", ".join(f"{name} {value:.4g}" for name, value in watched.items())
    return f"{told.replace('grad_norm', 'gradient norm')}, far above what is usual"


def _from_first(rows: list[list[int]]) -> list[list[int]]:
    if jax.process_count() == 1:
        return rows
    count = int(multihost_utils.broadcast_one_to_all(np.int64(len(rows))))
    if not count:
        return []
    sent = np.array(rows if rows else [[0] * len(KEYS)] * count, np.int64)
    return np.asarray(multihost_utils.broadcast_one_to_all(sent)).tolist()
