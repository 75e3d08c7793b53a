"""The order in which training and evaluation read the rows of a dataset."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headrace.config.durations import Ramp

SplitName = Literal["train", "evaluation"]

FULL_BATCH = Ramp(first=1, last=1)


@dataclass(frozen=True)
class BatchOrder:
    """The rows of the batch of every step.

    A row has three numbers. For example, with 23 stored rows, 4 rows per batch, a seed that starts at row 18,
    and rows 22 to 25 skipped:

        step          0             1             2
        batch rows    0  1  2  3    4  5  6  7    8  9 10 11   counted from the start of the run
        stream rows  18 19 20 21   26 27 28 29   30 31 32 33   plus the offset, without the skipped rows
        stored rows  18 19 20 21    3  4  5  6    7  8  9 10   modulo 23: the stored epochs are read again

    Rows were shuffled when the data was prepared. Here nothing is random, and nothing is remembered from one
    step to the next: the rows of a step follow from its number and the fields below. So they are the same

    - after a resume: the run continues with the next step, and there is no reader state to restore;
    - on any number of hosts: rows are numbered for the global batch, and each host reads the rows that its
      devices need (`training.batch.device_batch`);
    - past a rollback: the rows of the bad steps are added to `skipped`, and later rows move up. The run
      folder lists them (RUN/bad-steps/rollbacks.jsonl), so a restarted run skips the same rows. They are
      stream rows, which never wrap around: when the epochs are read again, they are not skipped again.

    Evaluation reads every row of its split once, as stored, and ends there."""

    split: SplitName
    stored_rows: int  # rows of all stored epochs of the split
    batch_size: int  # rows of a global batch, at the end of the ramp
    offset: int = 0  # stored row that a run reads first
    ramp: Ramp = FULL_BATCH  # batch-size ramp: of a batch's `last` microbatches, early steps read fewer
    skipped: tuple[range, ...] = ()  # stream rows that are never read; sorted and disjoint

    def batch_rows(self, step: int) -> range:
        """Rows of the global batch of `step`. The first step is 0, which logs call step 1."""
        microbatch = self.batch_size // self.ramp.last
        first = microbatch * self.ramp.microbatches_before(step)
        return range(first, first + microbatch * self.ramp.microbatches_at(step))

    def stream_ranges(self, batch_rows: range) -> list[range]:
        """Stream rows that belong to these batch rows, in order. Evaluation has none past its last row."""
        assert batch_rows.step == 1
        if self.split == "evaluation":
            return [range(batch_rows.start, min(batch_rows.stop, self.stored_rows))]
        rows = range(self.offset + batch_rows.start, self.offset + batch_rows.stop)
        return list(skip_ranges(rows, self.skipped))

    def skip(self, stream_ranges: Sequence[range]) -> "BatchOrder":
        """Return this order with more stream rows skipped."""
        return replace(self, skipped=merge_ranges([*self.skipped, *stream_ranges]))


def seed_offset(seed: int, packed_rows: int) -> int:
    """Pick the packed row at which a run with this seed starts. Seed 0 starts at the first.

    A hash, not a random generator: the numbers of a generator may change with the version of its library."""
    if seed == 0:
        return 0
    digest = hashlib.sha256(str(seed).encode()).digest()
    return int.from_bytes(digest[:8], "big") % packed_rows


def skip_ranges(rows: range, skipped: Sequence[range]) -> Iterator[range]:
    """Yield the rows to read in place of `rows` when `skipped` rows are omitted: as many, but later ones.

    `skipped` is sorted and disjoint. With 22 to 25 skipped, rows 20 to 23 become 20 to 21 and 26 to 27."""
    for gap in skipped:
        if gap.start <= rows.start:
            rows = range(rows.start + len(gap), rows.stop + len(gap))
        elif gap.start < rows.stop:
            yield range(rows.start, gap.start)
            rows = range(gap.stop, rows.stop + len(gap))
    yield rows


def merge_ranges(ranges: Sequence[range]) -> tuple[range, ...]:
    """Sort ranges and join those that overlap or touch."""
    merged: list[range] = []
    for rows in sorted(ranges, key=lambda rows: (rows.start, rows.stop)):
        if merged and rows.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, rows.stop))
        else:
            merged.append(rows)
    return tuple(merged)
