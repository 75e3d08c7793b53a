"""Open a packed dataset and read the rows of a batch from its shards.

The reader has no position: batches are read by step, in the order of data/batch_order.py."""

import functools
import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path

import numpy as np

from headrace.config.durations import Ramp
from headrace.data.batch_order import FULL_BATCH, BatchOrder, SplitName, seed_offset
from headrace.data.memory_map import Column, Folder, check_files, open_folder, read_index, stored_shards
from headrace.data.shards import Index, Shard, unpack_bits
from headrace.errors import UserError
from headrace.runtime.malloc import keep_freed

ALL_SLOTS = slice(None)
BATCH_COLUMNS = ("", ".starts", ".loss", ".labels")  # files of a shard that a batch is made from


@dataclass(frozen=True)
class PackedRows:
    """Rows of tokens as the model reads them: arrays [n s], or [s] for a single row."""

    tokens: np.ndarray  # int32
    segments: np.ndarray  # int32; the documents of a row, whole or cut, counted from 1; 0 is padding
    positions: np.ndarray  # int32; counted from 0 in each document
    loss_mask: np.ndarray | None = None  # bool; tokens to train on; None: all of them
    labels: np.ndarray | None = None  # int32; label number + 1, 0 for no label; None: the data has none

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that are not None, by field name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: array for name, array in named.items() if array is not None}

    def row(self, index: int) -> "PackedRows":
        return PackedRows(**{name: array[index] for name, array in self.arrays().items()})


@dataclass(frozen=True)
class ShardSlice:
    """Consecutive rows of one shard, as the packed rows to read and the part of them to keep."""

    shard: Shard
    packed: slice  # packed rows of the shard
    cut: slice  # of the rows into which these are cut

    def __len__(self) -> int:
        return self.cut.stop - self.cut.start


class Dataset:
    """Rows of `sequence_length` tokens, cut from packed rows of that length or a multiple of it.

    All row numbers count rows after cutting. `pad_id` fills up rows; a tokenizer without a padding token pads
    with its end-of-text token. `has_loss_mask` and `has_labels` say which arrays the batches have.

    Example:
        >>> dataset = hr.Dataset.open("data/demo")
        >>> rows = dataset.batch(dataset.train_order(4, seed=0), step=0)
        >>> rows.tokens.shape
        (4, 128)
    """

    def __init__(self, index: Index, folder: Folder, sequence_length: int) -> None:
        self.index, self.folder, self.sequence_length = index, folder, sequence_length
        self.vocab, self.tokenizer_sha256 = index.vocab, index.tokenizer_sha256
        self.pad_id = index.special.filler
        self.rows_per_packed_row = index.sequence_length // sequence_length
        self.shards = {split: stored_shards(index, split) for split in index.splits}
        self._shard_ends = {
            split: list(accumulate(shard.rows * self.rows_per_packed_row for shard in shards))
            for split, shards in self.shards.items()
        }
        all_shards = [shard for shards in self.shards.values() for shard in shards]
        self.has_loss_mask = any(".loss" in shard.checksums for shard in all_shards)
        self.has_labels = bool(index.labels)
        by_name = {shard.name: shard for shard in all_shards}

        def open_column(shard_name: str, suffix: str) -> Column:
            return Column(folder, index, by_name[shard_name], suffix)

        # Not all at once: thousands of shards would use up a process's memory maps and file descriptors.
        self._column = functools.lru_cache(maxsize=128)(open_column)

    @classmethod
    def open(
        cls, path: str | Path, *, sequence_length: int | None = None, tokenizer_sha256: str | None = None
    ) -> "Dataset":
        """Open packed data in a folder or at a URL.

        Args:
            path: Folder that `headrace data prepare` wrote, or its gs:// URL.
            sequence_length: Length of the rows: a divisor of the packed length, which is the default.
            tokenizer_sha256: Checksum of the tokenizer that the data must have been made with, if given.

        Returns:
            The dataset. Shards are opened when they are read.

        Raises:
            UserError: If there is no such data, it is damaged, or it does not suit the other arguments.

        Example:
            >>> hr.Dataset.open("data/demo", sequence_length=64)
        """
        folder = open_folder(path)
        index = read_index(folder)
        sequence_length = sequence_length or index.sequence_length
        check_usable(index, path, sequence_length, tokenizer_sha256)
        check_files(index, folder)
        # Batches reuse the memory of earlier ones: 32 x 2,048 tokens took 370 us of CPU without, 120 with.
        keep_freed(32 << 20)
        return cls(index, folder, sequence_length)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the training rows and their order, which does not depend on their path.

        A run resumes only on data with the fingerprint that it started with."""
        shards = [[shard.rows, shard.checksums] for shard in self.shards.get("train", [])]
        content = json.dumps([self.index.sequence_length, self.index.dtype, shards], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def rows_per_epoch(self, split: SplitName) -> int:
        return self.index.splits[split].rows * self.rows_per_packed_row

    def stored_rows(self, split: SplitName) -> int:
        """Rows of all stored epochs. An empty split is an error."""
        if not self._shard_ends[split]:
            raise UserError(f"data.path: the {split} split of this data is empty")
        return self._shard_ends[split][-1]

    def train_order(self, batch_size: int, *, seed: int, ramp: Ramp = FULL_BATCH) -> BatchOrder:
        """The order in which a run with this seed reads the training rows."""
        stored_rows = self.stored_rows("train")
        # In packed rows: a seed starts at the same text for every sequence length.
        offset = seed_offset(seed, stored_rows // self.rows_per_packed_row) * self.rows_per_packed_row
        return BatchOrder("train", stored_rows, batch_size, offset, ramp)

    def eval_order(self, batch_size: int) -> BatchOrder:
        """The order in which evaluation reads the held-out rows: as stored, once."""
        return BatchOrder("evaluation", self.stored_rows("evaluation"), batch_size)

    def batch(self, order: BatchOrder, step: int, slots: slice = ALL_SLOTS) -> PackedRows:
        """Read the batch of `step`, or only some slots of it: the positions that the devices of a host hold.

        Evaluation has padding past its last row, so that its last batch is as large as the others."""
        global_rows = order.batch_rows(step)
        rows = global_rows[slots]
        parts = [self._read(part) for part in self._shard_slices(order.split, order.stream_ranges(rows))]
        missing = len(rows) - sum(len(part.tokens) for part in parts)
        if missing:
            parts.append(self._make_padding(missing))
        self._prefetch_next(order, rows, len(global_rows))
        return concat(parts)

    def batch_tokens(
        self, order: BatchOrder, step: int, slots: slice = ALL_SLOTS, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Read only the tokens of a batch, int32 [n s], into `out` if given."""
        global_rows = order.batch_rows(step)
        rows = global_rows[slots]
        out = np.empty((len(rows), self.sequence_length), np.int32) if out is None else out
        filled = 0
        for part in self._shard_slices(order.split, order.stream_ranges(rows)):
            packed = self._column(part.shard.name, "").read(part.packed)
            tokens = packed.reshape(-1, self.sequence_length)[part.cut]
            np.copyto(out[filled : filled + len(part)], tokens, casting="same_kind")
            filled += len(part)
        out[filled:] = self.pad_id
        self._prefetch_next(order, rows, len(global_rows))
        return out

    def iter_train_rows(self, stream_rows: range) -> Iterator[tuple[str, PackedRows]]:
        """Yield training rows one by one, each with the name of its source: the documents of a bad step."""
        for part in self._shard_slices("train", [stream_rows]):
            rows = self._read(part)
            sources = self._column(part.shard.name, ".sources").read(part.packed)
            for i in range(len(part)):
                source = sources[(part.cut.start + i) // self.rows_per_packed_row]
                yield self.index.source_name(int(source)), rows.row(i)

    def _shard_slices(self, split: SplitName, stream_ranges: Iterable[range]) -> Iterator[ShardSlice]:
        """Find the shards that stream rows are in. After the last shard comes the first one again."""
        shard_ends, cuts = self._shard_ends[split], self.rows_per_packed_row
        for rows in stream_ranges:
            next_row = rows.start
            while next_row < rows.stop:
                stored_row = next_row % shard_ends[-1]
                number = bisect_right(shard_ends, stored_row)
                shard = self.shards[split][number]
                shard_rows = shard.rows * cuts
                first = stored_row - (shard_ends[number] - shard_rows)  # counted from the start of the shard
                stop = min(first + rows.stop - next_row, shard_rows)
                packed = slice(first // cuts, -(-stop // cuts))
                cut = slice(first - packed.start * cuts, stop - packed.start * cuts)
                yield ShardSlice(shard, packed, cut)
                next_row += stop - first

    def _read(self, part: ShardSlice) -> PackedRows:
        """Read rows of one shard."""
        shard, length = part.shard, self.sequence_length
        packed = self._column(shard.name, "").read(part.packed)
        if packed.max(initial=0) >= self.vocab:  # a device would look up some other embedding, without error
            raise UserError(
                f"{shard.name}.npy holds token {packed.max()}, expected less than {self.vocab}, the size of "
                "the vocabulary; `headrace data verify` finds the row"
            )
        starts = self._column(shard.name, ".starts").read(part.packed)
        segments, positions = segments_and_positions(packed, starts, length, self.pad_id)
        return PackedRows(
            packed.reshape(-1, length)[part.cut].astype(np.int32),
            segments[part.cut],
            positions[part.cut],
            self._read_loss_mask(part) if self.has_loss_mask else None,
            self._read_labels(part) if self.has_labels else None,
        )

    def _read_loss_mask(self, part: ShardSlice) -> np.ndarray:
        """Read which tokens to train on: all of them in a shard without a mask."""
        if ".loss" not in part.shard.checksums:
            return np.ones((len(part), self.sequence_length), bool)
        bits = self._column(part.shard.name, ".loss").read(part.packed)
        mask = unpack_bits(bits, self.index.sequence_length)
        return mask.reshape(-1, self.sequence_length)[part.cut]

    def _read_labels(self, part: ShardSlice) -> np.ndarray:
        """Read the labels of tokens: none in a shard without labels."""
        labels = np.zeros((len(part), self.sequence_length), np.int32)
        if ".labels" in part.shard.checksums:
            packed = self._column(part.shard.name, ".labels").read(part.packed)
            labels[:] = packed.reshape(-1, self.sequence_length)[part.cut]
        return labels

    def _make_padding(self, count: int) -> PackedRows:
        shape = (count, self.sequence_length)
        return PackedRows(
            np.full(shape, self.pad_id, np.int32),
            np.zeros(shape, np.int32),
            np.tile(np.arange(self.sequence_length, dtype=np.int32), (count, 1)),
            np.zeros(shape, bool) if self.has_loss_mask else None,
            np.zeros(shape, np.int32) if self.has_labels else None,
        )

    def _prefetch_next(self, order: BatchOrder, rows: range, batch_size: int) -> None:
        """Start to fetch what the next steps read, if the files are remote.

        That is a fixed number of bytes, or this host's part of two batches where one batch is larger."""
        if not self.folder.prefetch_bytes:
            return
        row_bytes = self.sequence_length * np.dtype(self.index.dtype).itemsize
        window = self.folder.prefetch_bytes // row_bytes
        if batch_size <= window:
            upcoming = [(rows.start + batch_size, window)]
        else:
            upcoming = [(rows.start + ahead * batch_size, len(rows)) for ahead in (1, 2)]
        for first, count in upcoming:
            rows_ahead = range(first, first + min(count, order.stored_rows))
            for part in self._shard_slices(order.split, order.stream_ranges(rows_ahead)):
                for suffix in BATCH_COLUMNS:
                    if suffix in part.shard.checksums:
                        self._column(part.shard.name, suffix).prefetch(part.packed)


def check_usable(index: Index, path: str | Path, sequence_length: int, tokenizer_sha256: str | None) -> None:
    """Refuse data of another tokenizer, and rows that cannot be cut to this length."""
    packed = index.sequence_length
    if sequence_length < 1 or packed % sequence_length:
        raise UserError(
            f"data.sequence_length: {sequence_length} does not divide {packed}, the length of the rows in "
            f"{path}; choose a divisor of it, or pack again with pack.sequence_length={sequence_length}"
        )
    if tokenizer_sha256 not in (None, index.tokenizer_sha256):
        raise UserError(
            f"data.path: {path} was made with tokenizer {index.tokenizer_sha256}, and {tokenizer_sha256} is "
            "expected; use data made with that tokenizer, or prepare this data again with it"
        )
    if sequence_length < packed and (index.labelled or index.pairs):
        content = "pairs of answers" if index.pairs else "labelled texts"
        raise UserError(
            f"data.sequence_length: {sequence_length} would cut the {content} in {path}, each of which is "
            f"whole in its row of {packed}; use {packed}, or pack again with "
            f"pack.sequence_length={sequence_length}"
        )


def segments_and_positions(
    tokens: np.ndarray, starts: np.ndarray, length: int, filler: int
) -> tuple[np.ndarray, np.ndarray]:
    """Segments and positions, int32 [n length], of packed rows [m s] that are cut into rows of `length`.

    `starts` are bits that mark where documents begin. A document that is cut counts once in each row.

    Both are computed per document, of which there are few, and repeated for their tokens at the end: 15
    times faster than running sums over the tokens."""
    packed_length = tokens.shape[1]
    is_start = unpack_bits(starts, packed_length)
    is_start[:, 0] = True
    doc_starts = np.flatnonzero(is_start)  # counted over the tokens of all rows
    padding = find_padding_offsets(tokens, doc_starts, filler)
    if length < packed_length:
        is_start.reshape(-1, length)[:, 0] = True
        doc_starts = np.flatnonzero(is_start)
    doc_lengths = np.diff(doc_starts, append=tokens.size)

    first_docs = np.flatnonzero(doc_starts % length == 0)  # the first document of each row
    docs_per_row = np.diff(first_docs, append=len(doc_starts))
    doc_segments = 1 + np.arange(len(doc_starts)) - np.repeat(first_docs, docs_per_row)
    doc_segments[doc_starts >= padding[doc_starts // packed_length]] = 0

    segments = np.repeat(doc_segments.astype(np.int32), doc_lengths)
    positions = np.repeat(doc_starts.astype(np.int32), doc_lengths)
    np.subtract(cached_arange(tokens.size), positions, out=positions)
    return segments.reshape(-1, length), positions.reshape(-1, length)


def find_padding_offsets(tokens: np.ndarray, doc_starts: np.ndarray, filler: int) -> np.ndarray:
    """Start of the padding of each packed row, counted over the tokens of all rows.

    Padding is the last document of a row if that is nothing but filler. Without it, this is the row's end."""
    row_ends = np.arange(1, len(tokens) + 1) * tokens.shape[1]
    starts = row_ends.copy()
    candidates = np.flatnonzero(tokens[:, -1] == filler)  # rows
    if len(candidates):
        last_tokens = row_ends[candidates] - 1
        last_docs = doc_starts[np.searchsorted(doc_starts, row_ends[candidates]) - 1]
        # reduceat looks at last_doc to last_token of each candidate, and at what is between two candidates,
        # which [::2] drops. The last token itself is known to be filler.
        bounds = np.stack([last_docs, last_tokens], axis=1).ravel()
        has_text = np.logical_or.reduceat((tokens != filler).ravel(), bounds)[::2]
        starts[candidates[~has_text]] = last_docs[~has_text]
    return starts


@functools.lru_cache(maxsize=4)
def cached_arange(count: int) -> np.ndarray:
    numbers = np.arange(count, dtype=np.int32)
    numbers.setflags(write=False)  # shared by all callers
    return numbers


def concat(parts: Sequence[PackedRows]) -> PackedRows:
    """The rows of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    arrays = [part.arrays() for part in parts]
    joined = {name: np.concatenate([part[name] for part in arrays]) for name in arrays[0]}
    return PackedRows(**joined)
