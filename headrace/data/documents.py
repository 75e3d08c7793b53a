"""What all stages agree on: the columns of normalised documents, the parts that sources hand to workers,
and what happens to bad input."""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from headrace.errors import UserError

# Every document has a text or messages, never both. Messages are JSON: [{"role": ..., "content": ...}, ...].
SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("text", pa.large_string()),
        pa.field("messages", pa.large_string()),
        pa.field("source", pa.string(), nullable=False),
        pa.field("meta", pa.large_string()),  # JSON, or null
    ]
)

SAMPLES = 20  # bad places that a report names; all are counted


@dataclass(frozen=True)
class Part:
    """A piece of a source that one worker reads at a time: a file, some of it, or several small ones. `start`
    and `stop` are bytes or row groups, as the format of the file has it."""

    file: str
    start: int = 0
    stop: int | None = None
    more: tuple[str, ...] = ()  # files read after it, whole


@dataclass
class Problems:
    """Bad input met on the way: the first ends the work, or each is left out and counted."""

    policy: Literal["stop", "skip"] = "stop"
    counts: Counter[str] = field(default_factory=Counter)
    samples: list[str] = field(default_factory=list)

    def bad(self, kind: str, where: str, what: str) -> None:
        """`kind` names the trouble in a word or two, `where` is file:line, `what` says it in full."""
        if self.policy == "stop":
            raise UserError(f"{where}: {what}; mend it, or leave such input out with errors: skip")
        self.counts[kind] += 1
        if len(self.samples) < SAMPLES:
            self.samples.append(f"{where}: {what}")

    def summary(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "samples": self.samples}


@dataclass(frozen=True)
class Ragged:
    """Token ids of many documents, end to end: document i is values[offsets[i] : offsets[i + 1]]. `loss` says
    for each token whether a model is to learn to say it; None if all are. `labels` has a label's number plus
    one at the tokens that have one, uint16. `seconds` tells of a document of two texts where in it the second
    begins; 0 for one text."""

    values: np.ndarray
    offsets: np.ndarray
    loss: np.ndarray | None = None
    labels: np.ndarray | None = None
    seconds: np.ndarray | None = None

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def take(self, first: int, last: int) -> "Ragged":
        """Documents from one up to another."""
        begin, end = self.offsets[[first, last]]
        loss = None if self.loss is None else self.loss[begin:end]
        labels = None if self.labels is None else self.labels[begin:end]
        seconds = None if self.seconds is None else self.seconds[first:last]
        return Ragged(self.values[begin:end], self.offsets[first : last + 1] - begin, loss, labels, seconds)

    def __len__(self) -> int:
        return len(self.offsets) - 1


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def is_held_out(id: str, share: float) -> bool:
    """Decided by a document's id alone, so that neither order, seed nor the other documents matter."""
    return int.from_bytes(hashlib.sha256(id.encode("utf-8", "surrogatepass")).digest()[:8]) < share * 2.0**64
