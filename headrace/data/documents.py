"""Types shared by all stages: the columns of normalized documents, the parts of sources that workers read,
tokenized documents, and how bad input is handled."""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from headrace.errors import UserError

# A document has either text or messages. Messages are JSON: [{"role": ..., "content": ...}, ...].
SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("text", pa.large_string()),
        pa.field("messages", pa.large_string()),
        pa.field("source", pa.string(), nullable=False),
        pa.field("meta", pa.large_string()),  # JSON, or null
    ]
)

JsonObject: TypeAlias = dict[str, Any]

MAX_SAMPLES = 20  # problems that a report quotes; all are counted


@dataclass(frozen=True)
class FilePart:
    """A piece of a source that one worker reads at a time: a file, a range of it, or several small files.
    `start` and `stop` count bytes, row groups or record batches, depending on the format of the file."""

    file: str
    start: int = 0
    stop: int | None = None
    more_files: tuple[str, ...] = ()  # read to their end after `file`


@dataclass
class Problems:
    """Bad input found so far. With the policy "stop" the first problem raises; with "skip" each is
    counted."""

    policy: Literal["stop", "skip"] = "stop"
    counts: Counter[str] = field(default_factory=Counter)
    samples: list[str] = field(default_factory=list)

    def report(self, kind: str, location: str, message: str) -> None:
        """Raise UserError, or count the problem, depending on the policy. `kind` is the category it is
        counted under, `location` is FILE:LINE, `message` is the full description."""
        if self.policy == "stop":
            raise UserError(f"{location}: {message}; fix it, or skip such input with on_error: skip")
        self.counts[kind] += 1
        if len(self.samples) < MAX_SAMPLES:
            self.samples.append(f"{location}: {message}")

    def to_json(self) -> JsonObject:
        return {"counts": dict(self.counts), "samples": self.samples}


@dataclass(frozen=True)
class Ragged:
    """Token ids of many documents, concatenated: document i is values[offsets[i] : offsets[i + 1]].

    `loss_mask` is True where the model is trained to predict the token; None means everywhere. `labels` is
    uint16: the number of the label plus 1 at tokens that have a label, else 0. `second_starts` is the
    position in each document at which its second text starts; 0 for a document of one text."""

    values: np.ndarray
    offsets: np.ndarray
    loss_mask: np.ndarray | None = None
    labels: np.ndarray | None = None
    second_starts: np.ndarray | None = None

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def slice(self, first: int, stop: int) -> "Ragged":
        """Documents from `first` up to but excluding `stop`."""
        start, end = self.offsets[[first, stop]]
        loss_mask = None if self.loss_mask is None else self.loss_mask[start:end]
        labels = None if self.labels is None else self.labels[start:end]
        second_starts = None if self.second_starts is None else self.second_starts[first:stop]
        offsets = self.offsets[first : stop + 1] - start
        return Ragged(self.values[start:end], offsets, loss_mask, labels, second_starts)

    def __len__(self) -> int:
        return len(self.offsets) - 1


def lengths_to_offsets(lengths: np.ndarray) -> np.ndarray:
    """[n + 1] int64: where each of n items of these lengths starts when concatenated, and the total
    length."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def is_held_out(id: str, share: float) -> bool:
    """Whether a document belongs to the evaluation split, which holds `share` of all documents. Depends on
    the id alone, so that neither the order, the seed nor the other documents matter."""
    return int.from_bytes(hashlib.sha256(id.encode("utf-8", "surrogatepass")).digest()[:8]) < share * 2.0**64
