"""Packed data to batches, by reading alone. The batch at step t is a pure function of (dataset, seed, t,
global batch), so resuming is starting at another step, and any number of hosts, each reading its slots, see
the same batch."""

import contextlib
import copy
import functools
import hashlib
import json
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np

from headrace.runtime.malloc import keep_freed
from headrace.data.memory_map import Column, Folder, check, open_folder, read_index, stored
from headrace.data.shards import Index, Shard, unpack_bits
from headrace.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Packed:
    """Rows as a model takes them, [n s] each. Segments count the documents of a row from 1, be they whole or
    a piece; 0 is padding. Positions count from 0 in each. `loss` marks the tokens to be learnt; None means
    all. `labels` has a label's number plus one at the tokens that have one; None where the data has none."""

    tokens: np.ndarray  # int32
    segments: np.ndarray  # int32
    positions: np.ndarray  # int32
    loss: np.ndarray | None  # bool
    labels: np.ndarray | None = None  # int32


class Dataset:
    """Rows of `sequence_length` tokens. `pad` is the id that fills rows, also where the tokenizer has no
    padding token of its own. `has_loss` tells whether batches say which tokens are to be learnt.

    Training goes through the stored epochs one after the other, as they lie, and then begins again. Seed 0
    starts at the first row, any other at a row that it draws from all of them. `passed` are stretches of rows
    that training passes over, (first, count) each, numbered as `lie` does."""

    passed: tuple[tuple[int, int], ...] = ()

    def __init__(self, index: Index, folder: Folder, sequence_length: int) -> None:
        self.index, self.folder, self.sequence_length = index, folder, sequence_length
        self.cuts = index.sequence_length // sequence_length
        self.vocab, self.tokenizer_sha256 = index.vocab, index.tokenizer_sha256
        self.bos, self.eos, self.mask = index.special.bos, index.special.eos, index.special.mask
        self.pad = index.special.filler
        self.shards = {name: stored(index, name) for name in index.splits}
        self.ends = {
            name: list(accumulate(shard.rows * self.cuts for shard in shards))
            for name, shards in self.shards.items()
        }
        self.has_loss = any(".loss" in shard.checksums for shards in self.shards.values() for shard in shards)
        self.has_labels = bool(index.labels)
        by_name = {shard.name: shard for shards in self.shards.values() for shard in shards}
        # Some at a time: thousands of shards would use up the maps and descriptors that a process may have.
        self._column = functools.lru_cache(maxsize=128)(
            lambda name, suffix: Column(folder, index, by_name[name], suffix)
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """Names the rows to train on and their order, wherever they lie."""
        shards = [[shard.rows, shard.checksums] for shard in self.shards.get("train", [])]
        said = json.dumps([self.index.sequence_length, self.index.dtype, shards], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:16]

    @classmethod
    def open(
        cls, path: str | Path, *, sequence_length: int | None = None, tokenizer_sha256: str | None = None
    ) -> "Dataset":
        """Opens packed data in a folder or at a URL. A `sequence_length` k times shorter than the packed one
        cuts each row in k. Given a `tokenizer_sha256`, data made with another tokenizer is refused."""
        folder = open_folder(path)
        index = read_index(folder)
        length = sequence_length or index.sequence_length
        if length < 1 or index.sequence_length % length:
            raise UserError(
                f"data.sequence_length: {length} does not divide {index.sequence_length}, the length of the "
                f"rows in {path}; choose a divisor of it, or pack again with pack.sequence_length={length}"
            )
        if tokenizer_sha256 not in (None, index.tokenizer_sha256):
            raise UserError(
                f"data.path: {path} was made with tokenizer {index.tokenizer_sha256}, and {tokenizer_sha256} "
                "is expected here; use the data that belongs to it, or prepare this data with that tokenizer"
            )
        if length < index.sequence_length and (index.labelled or index.pairs):
            what = "pairs of answers" if index.pairs else "labelled texts"
            raise UserError(
                f"data.sequence_length: {length} would cut the {what} of {path}, which are whole in rows of "
                f"{index.sequence_length}; take that, or pack again with pack.sequence_length={length}"
            )
        check(index, folder)
        keep_freed(32 << 20)  # of the next batch: 32 x 2,048 tokens took 370 us of CPU, and take 120
        return cls(index, folder, length)

    def rows(self, split: str) -> int:
        """Of one epoch."""
        return self.index.splits[split].rows * self.cuts

    def passing(self, stretches: Sequence[tuple[int, int]]) -> "Dataset":
        """The same data, of which training passes over these rows as well."""
        other = copy.copy(self)
        other.passed = united([*self.passed, *stretches])
        return other

    def lie(self, first: int, count: int, *, seed: int) -> list[tuple[int, int]]:
        """Where these rows of training lie, which are counted from its start, in stretches of (first, count):
        counted over the stored epochs, and on from there when they begin again."""
        start = offset(seed, self.ends["train"][-1] // self.cuts) * self.cuts
        return list(around(self.passed, start + first, count))

    def read(self, first: int, count: int) -> Iterator[tuple[str, Packed]]:
        """Rows to train on by where they lie, each with the name of its source."""
        for shard, begin, end in self._runs("train", first, count, passed=()):
            packed = self._packed(shard, begin, end)
            sources = self._column(shard.name, ".sources").rows(self._whole(begin, end)[0])
            for row in range(end - begin):
                loss = None if packed.loss is None else packed.loss[row]
                number = sources[(begin + row) // self.cuts - begin // self.cuts]
                labels = None if packed.labels is None else packed.labels[row]
                one = Packed(packed.tokens[row], packed.segments[row], packed.positions[row], loss, labels)
                yield self.index.source(int(number)), one

    def batch(
        self,
        step: int,
        *,
        split: str,
        sequences: int,
        seed: int,
        rows: slice = slice(None),
        before: int | None = None,
    ) -> Packed:
        """The batch at `step`, of which `rows` picks the slots wanted here. `before` are the rows of all
        batches before it, where these were not all of its size.

        Evaluation goes once through its rows; past their end come rows of padding, so that the last batch has
        the shape of the others."""
        first, count = self._numbers(step, split, sequences, seed, rows)
        first += 0 if before is None else before - step * sequences
        parts = [self._packed(*run) for run in self._runs(split, first, count)]
        missing = count - sum(len(part.tokens) for part in parts)
        if missing:
            parts.append(self._padding(missing))
        self._look_ahead(split, first, count, sequences)
        return parts[0] if len(parts) == 1 else join(parts)

    def tokens(
        self,
        step: int,
        *,
        split: str,
        sequences: int,
        seed: int,
        rows: slice = slice(None),
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """The tokens of the batch alone, int32 [n s]; written to `out` if that is given."""
        first, count = self._numbers(step, split, sequences, seed, rows)
        out = np.empty((count, self.sequence_length), np.int32) if out is None else out
        done = 0
        for shard, begin, end in self._runs(split, first, count):
            whole, cut = self._whole(begin, end)
            stored = self._column(shard.name, "").rows(whole)
            if self.cuts > 1:
                stored = stored.reshape(-1, self.sequence_length)[cut]
            np.copyto(out[done : done + end - begin], stored, casting="same_kind")
            done += end - begin
        if done < count:
            out[done:] = self.pad
        self._look_ahead(split, first, count, sequences)
        return out

    def _numbers(self, step: int, split: str, sequences: int, seed: int, rows: slice) -> tuple[int, int]:
        """The first of the rows wanted, counted from where the split begins, and how many they are."""
        if not self.ends[split]:
            raise UserError(f"data.path: the {split} split of this data is empty")
        slots = range(sequences)[rows]
        assert slots.step == 1
        packed = self.ends[split][-1] // self.cuts
        start = offset(seed, packed) * self.cuts if split == "train" else 0
        return start + step * sequences + slots.start, len(slots)

    def _runs(
        self, split: str, first: int, count: int, passed: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[tuple[Shard, int, int]]:
        """Where those rows lie: in which shards, from row to row. Evaluation has none past its end."""
        ends = self.ends[split]
        passed = () if split != "train" else self.passed if passed is None else passed
        for start, many in around(passed, first, count):
            stop = start + many
            while start < stop:
                row = start % ends[-1] if split == "train" else start
                if row >= ends[-1]:
                    return
                number = bisect_right(ends, row)
                shard = self.shards[split][number]
                begin = row - (ends[number] - shard.rows * self.cuts)
                end = min(begin + stop - start, shard.rows * self.cuts)
                yield shard, begin, end
                start += end - begin

    def _whole(self, begin: int, end: int) -> tuple[slice, slice]:
        """The packed rows that such rows are cut from, and their place among all that are cut from these."""
        first, last = begin // self.cuts, -(-end // self.cuts)
        return slice(first, last), slice(begin - first * self.cuts, end - first * self.cuts)

    def _packed(self, shard: Shard, begin: int, end: int) -> Packed:
        whole, cut = self._whole(begin, end)
        tokens, length = self._column(shard.name, "").rows(whole), self.sequence_length
        if tokens.max(initial=0) >= self.vocab:  # a device would read some other embedding, and say nothing
            raise UserError(
                f"{shard.name}.npy holds token {tokens.max()}, expected less than {self.vocab}, which the "
                "vocabulary has; `headrace data verify` finds the row"
            )
        segments, positions = mark(tokens, self._column(shard.name, ".starts").rows(whole), length, self.pad)
        loss = None
        if ".loss" in shard.checksums:
            loss = unpack_bits(self._column(shard.name, ".loss").rows(whole), tokens.shape[1]).reshape(
                -1, length
            )[cut]
        elif self.has_loss:
            loss = np.ones((end - begin, length), bool)
        labels = None
        if self.has_labels:
            labels = np.zeros((end - begin, length), np.int32)
            if ".labels" in shard.checksums:
                labels[:] = self._column(shard.name, ".labels").rows(whole).reshape(-1, length)[cut]
        ids = tokens.reshape(-1, length)[cut].astype(np.int32)
        return Packed(ids, segments[cut], positions[cut], loss, labels)

    def _padding(self, count: int) -> Packed:
        shape = (count, self.sequence_length)
        positions = np.tile(np.arange(self.sequence_length, dtype=np.int32), (count, 1))
        loss = np.zeros(shape, bool) if self.has_loss else None
        labels = np.zeros(shape, np.int32) if self.has_labels else None
        return Packed(np.full(shape, self.pad, np.int32), np.zeros(shape, np.int32), positions, loss, labels)

    def _look_ahead(self, split: str, first: int, count: int, sequences: int) -> None:
        """Asks for what the coming batches need: so many bytes of rows, or this host's share of two batches
        if one is larger than that."""
        if not self.folder.ahead:
            return
        size = self.folder.ahead // (self.sequence_length * np.dtype(self.index.dtype).itemsize)
        coming = [(first + sequences, size)]
        if sequences > size:
            coming = [(first + sequences, count), (first + 2 * sequences, count)]
        for start, many in coming:
            for shard, begin, end in self._runs(split, start, min(many, self.ends[split][-1])):
                for suffix in {"", ".starts", ".loss", ".labels"} & shard.checksums.keys():
                    self._column(shard.name, suffix).want(self._whole(begin, end)[0])


def around(passed: Sequence[tuple[int, int]], first: int, count: int) -> Iterator[tuple[int, int]]:
    """The rows that are `first` and those after it if what is passed over does not count, in stretches."""
    for begin, many in passed:
        if first >= begin:
            first += many
        elif first + count > begin:
            yield first, begin - first
            first, count = begin + many, count - (begin - first)
    yield first, count


def united(stretches: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """In order, and those that touch as one."""
    found: list[tuple[int, int]] = []
    for first, count in sorted(stretches):
        if found and first <= sum(found[-1]):
            found[-1] = (found[-1][0], max(sum(found[-1]), first + count) - found[-1][0])
        else:
            found.append((first, count))
    return tuple(found)


def read_ahead(
    make: Callable[[int], T], start: int, stop: int, waiting: Callable[[], None] = lambda: None
) -> Iterator[T]:
    """make(start) ... make(stop - 1), from a thread at most two ahead. What it raises is raised here.
    `waiting` is called every now and then while one is waited for."""
    ready: SimpleQueue[tuple[list[T], BaseException | None]] = SimpleQueue()
    room = threading.Semaphore(2)
    closed = threading.Event()

    def work() -> None:
        try:
            for step in range(start, stop):
                room.acquire()
                if closed.is_set():
                    return
                ready.put(([make(step)], None))
        except BaseException as error:
            ready.put(([], error))

    thread = threading.Thread(target=work, name="read-ahead", daemon=True)
    thread.start()
    try:
        for _ in range(start, stop):
            while True:
                with contextlib.suppress(Empty):
                    made, error = ready.get(timeout=0.002)
                    break
                waiting()
            if error is not None:
                raise error
            room.release()
            yield made[0]
    finally:
        closed.set()
        room.release()  # wakes the thread if it waits for room
        thread.join()


def mark(tokens: np.ndarray, starts: np.ndarray, length: int, filler: int) -> tuple[np.ndarray, np.ndarray]:
    """Segments and positions of whole packed rows, cut to `length`. All is worked out for the pieces of
    documents, which are few, and spread over their tokens at the end: 15 times faster than running sums."""
    rows, packed = tokens.shape
    flags = unpack_bits(starts, packed)
    flags[:, 0] = True
    pieces = np.flatnonzero(flags)
    padding = padding_begins(tokens, pieces, filler)
    if length < packed:
        flags.reshape(-1, length)[:, 0] = True
        pieces = np.flatnonzero(flags)
    sizes = np.diff(pieces, append=rows * packed)
    firsts = np.flatnonzero(pieces % length == 0)
    numbers = 1 + np.arange(len(pieces)) - np.repeat(firsts, np.diff(firsts, append=len(pieces)))
    numbers[pieces >= padding[pieces // packed]] = 0
    segments = np.repeat(numbers.astype(np.int32), sizes)
    begins = np.repeat(pieces.astype(np.int32), sizes)
    positions = np.subtract(places(rows * packed), begins, out=begins)
    return segments.reshape(-1, length), positions.reshape(-1, length)


@functools.lru_cache(maxsize=4)
def places(count: int) -> np.ndarray:
    numbers = np.arange(count, dtype=np.int32)
    numbers.setflags(write=False)  # shared by all callers
    return numbers


def padding_begins(tokens: np.ndarray, pieces: np.ndarray, filler: int) -> np.ndarray:
    """The place, counted over all rows, at which each row's padding begins: its last piece, if that is
    nothing but filler; else its end."""
    ends = np.arange(1, len(tokens) + 1) * tokens.shape[1]
    begins = ends.copy()
    ended = np.flatnonzero(tokens[:, -1] == filler)
    if len(ended):
        last = pieces[np.searchsorted(pieces, ends[ended]) - 1]
        between = np.stack([last, ends[ended] - 1], axis=1).ravel()  # the token at the end is known already
        other = np.logical_or.reduceat((tokens != filler).ravel(), between)[::2]
        begins[ended[~other]] = last[~other]
    return begins


def join(parts: list[Packed]) -> Packed:
    def one(name: str) -> Any:
        found = [getattr(part, name) for part in parts]
        return None if found[0] is None else np.concatenate(found)

    return Packed(*map(one, ("tokens", "segments", "positions", "loss", "labels")))


@functools.lru_cache(maxsize=8)
def offset(seed: int, rows: int) -> int:
    """The row at which a seed starts. By a hash, which no version of a library changes."""
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8]) % rows if seed else 0
