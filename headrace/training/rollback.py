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

from headrace.config import run_length as lengths, sections
from headrace.storage import files as store
from headrace.data.tokenizer import tokenizer as tokenise
from headrace.data.inspect import visible
from headrace.data.dataset import Dataset
from headrace.errors import UserError

TRIES = 2  # from one checkpoint, before the run stops
SHOWN = 100  # characters of a document
READ = 64  # tokens that are read for them


@dataclass(frozen=True)
class Trouble:
    """The steps from `first` to `last` hold too many updates that were left out: these, with their losses and
    gradient norms, in the order of `names`."""

    first: int
    last: int
    left_out: list[tuple[int, list[float]]]
    names: tuple[str, ...]


class Record:
    """What happened so far, the same on all hosts: the first one's file is read."""

    def __init__(self, run: str) -> None:
        self.folder = store.join(run, "bad-steps")
        told = [] if jax.process_index() else list(self.told())
        # As numbers, which hosts can send each other: step, to, first row and rows, all -1 for a stop.
        self.rows = _from_first([[one.get(name, -1) for name in KEYS] for one in told])

    def passed(self) -> list[tuple[int, int]]:
        """The rows to pass over."""
        return [(first, count) for _, _, first, count in self.rows if count > 0]

    def back_to(self, step: int) -> bool:
        return any(row[1] == step for row in self.rows)

    def tries(self, to: int) -> int:
        """How often the run went back to a step since it last stopped."""
        stops = [number for number, row in enumerate(self.rows) if row[3] < 0]
        return sum(row[1] == to for row in self.rows[stops[-1] + 1 if stops else 0 :])

    def add(self, row: Sequence[int]) -> None:
        """Kept before anything else is done, so that nothing is trained on what is not on record."""
        self.rows.append(list(row))
        if jax.process_index() == 0:
            told = dict(zip(KEYS, row, strict=True)) | {"time": round(time.time(), 3)}
            store.write(store.join(self.folder, FILE), self.read() + json.dumps(told).encode() + b"\n")

    def read(self) -> bytes:
        try:
            return store.read(store.join(self.folder, FILE))
        except FileNotFoundError:
            return b""

    def told(self) -> Iterator[dict[str, int]]:
        """The lines of the file; without them the run would read the same rows again."""
        for number, line in enumerate(self.read().splitlines(), 1):
            try:
                found = json.loads(line)
                if not isinstance(found, dict) or not all(type(found.get(name, -1)) is int for name in KEYS):
                    raise ValueError
            except ValueError:
                raise UserError(
                    f"{store.join(self.folder, FILE)}:{number}: found something else than a line of ours; "
                    "take that line out: the rows it passed over, if any, are then read"
                ) from None
            yield found

    def report(self, said: str, pages: Iterator[str]) -> str:
        """Writes the report of what was just added; its path. For the first host."""
        path = store.join(self.folder, f"{len(self.rows):03}-step-{self.rows[-1][0]}.txt")
        store.write(path, ("\n".join([said, *pages]) + "\n").encode())
        return path


FILE = "rollbacks.jsonl"
KEYS = ("step", "to", "first", "rows")


def rows_of(cfg: sections.Run, dataset: Dataset, first: int, last: int) -> list[tuple[int, int]]:
    """Where the rows of these steps lie, in stretches."""
    begin, end = (lengths.tokens_until(cfg, step) // cfg.data.sequence_length for step in (first - 1, last))
    return dataset.lie(begin, end - begin, seed=cfg.seed)


def stretch(cfg: sections.Run, dataset: Dataset, first: int, last: int) -> tuple[int, int]:
    """As one, with what lies between and is passed over already."""
    found = rows_of(cfg, dataset, first, last)
    return found[0][0], sum(found[-1]) - found[0][0]


def pages(cfg: sections.Run, near: Path, dataset: Dataset, trouble: Trouble) -> Iterator[str]:
    """The bad steps, one after the other, with the documents that each was made of. `near` is a folder with
    the run's tokenizer."""
    tokenizer = tokenise.load(near) if (near / "tokenizer.json").is_file() else None
    total = dataset.ends["train"][-1]
    for number, values in trouble.left_out:
        measured = [f"{name} {value:.6g}" for name, value in zip(trouble.names, values, strict=True)]
        yield f"\nstep {number}: {', '.join(measured).replace('grad_norm', 'gradient norm')}"
        for first, count in rows_of(cfg, dataset, number, number):
            for row, (source, packed) in enumerate(dataset.read(first, count), first):
                yield f"  row {row % total:,} of the training data, from source {visible(source)}"
                yield from documents(packed.tokens, packed.segments, tokenizer)


def documents(
    tokens: np.ndarray, segments: np.ndarray, tokenizer: tokenise.Tokenizer | None
) -> Iterator[str]:
    for segment in range(1, int(segments.max(initial=0)) + 1):
        own = tokens[segments == segment]
        begins = own[:READ].tolist()
        text = " ".join(map(str, begins)) if tokenizer is None else tokenizer.inner.decode(begins)
        text = visible(text).replace("\n", "⏎")
        yield f"    {len(own):,} tokens: {text[:SHOWN]}{'…' * (len(text) > SHOWN or len(own) > READ)}"


def described(values: dict[str, float]) -> str:
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
