"""Packed data to batches. The batch at step t is a pure function of (dataset, seed, t, global batch), so
resuming is starting at another step, and any number of hosts, each reading its slots, see the same batch."""

import functools
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import numpy as np

from millrace.data.pack import Index, Shard, choose_filler, crc32
from millrace.data.tokenise import sha256
from millrace.errors import UserError

T = TypeVar("T")


class Dataset:
    """Rows of `sequence_length` tokens in memory-mapped shards. `pad` is the id that fills rows, also where
    the tokenizer has no padding token of its own."""

    def __init__(self, index: Index, shards: dict[str, list[np.ndarray]]) -> None:
        self.index = index
        self.shards = shards
        self.starts = {name: np.cumsum([0, *map(len, parts)]) for name, parts in shards.items()}
        self.sequence_length: int = shards["train"][0].shape[1]
        self.vocab = index.vocab
        self.tokenizer_sha256 = index.tokenizer_sha256
        self.bos, self.eos, self.mask = index.special.bos, index.special.eos, index.special.mask
        self.pad = choose_filler(index.special)

    @classmethod
    def open(cls, path: str | Path, *, sequence_length: int | None = None) -> "Dataset":
        """Opens packed data. A `sequence_length` k times shorter than the packed one cuts each row in k."""
        folder = Path(path)
        index = read_index(folder)
        length = sequence_length or index.sequence_length
        if length < 1 or index.sequence_length % length:
            raise UserError(
                f"data.sequence_length: {length} does not divide {index.sequence_length}, the length of the "
                f"rows in {path}; choose a divisor of it, or pack again with pack.sequence_length={length}"
            )
        shards = {
            name: [open_shard(folder, shard, index).reshape(-1, length) for shard in split.shards]
            for name, split in index.splits.items()
        }
        return cls(index, shards)

    def rows(self, split: str) -> int:
        return int(self.starts[split][-1])

    def batch(
        self, step: int, *, split: str, sequences: int, seed: int, rows: slice = slice(None)
    ) -> np.ndarray:
        """The tokens (int32) of the batch at `step`, of which `rows` picks the slots wanted here.

        Training passes over the split in a new order each epoch. Evaluation goes once through it in plain
        order; past its end come rows of padding, so that the last batch has the shape of the others."""
        total = self.rows(split)
        if not total:
            raise UserError(f"data.path: the {split} split of this data is empty")
        numbers = step * sequences + np.arange(sequences)[rows]
        if split != "train":
            out = np.full((len(numbers), self.sequence_length), self.pad, np.int32)
            out[numbers < total] = self.take(split, numbers[numbers < total])
            return out
        chosen = np.empty_like(numbers)
        for epoch in np.unique(numbers // total).tolist():
            here = numbers // total == epoch
            chosen[here] = order(seed, epoch, total)[numbers[here] % total]
        return self.take(split, chosen)

    def take(self, split: str, rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), self.sequence_length), np.int32)
        starts = self.starts[split]
        where = np.searchsorted(starts, rows, side="right") - 1
        for number in np.unique(where).tolist():
            here = where == number
            # One indexing for all rows of a shard: a loop over rows of 2,048 is seven times slower.
            out[here] = self.shards[split][number][rows[here] - starts[number]]
        return out

    def segments(self, tokens: np.ndarray) -> np.ndarray:
        """Which document each token belongs to: 1 for the first in a row, be it whole or the rest of one,
        then 2, 3...; 0 on padding."""
        begins = np.zeros(tokens.shape, bool)
        padding = tokens == self.pad
        if self.bos is not None:
            begins[..., 1:] = tokens[..., 1:] == self.bos
        else:
            begins[..., 1:] = tokens[..., :-1] == self.eos
        if self.pad in (self.bos, self.eos):
            # The first of a run is a real token, those that follow are padding.
            padding[..., 1:] &= padding[..., :-1]
            padding[..., 0] = False
        return np.where(padding, 0, 1 + np.cumsum(begins, axis=-1)).astype(np.int32)

    @staticmethod
    def positions(segments: np.ndarray) -> np.ndarray:
        """The place of each token in its segment, from 0."""
        places = np.arange(segments.shape[-1], dtype=np.int32)
        begins = np.zeros(segments.shape, bool)
        begins[..., 1:] = segments[..., 1:] != segments[..., :-1]
        return places - np.maximum.accumulate(np.where(begins, places, 0), axis=-1)


@functools.lru_cache(maxsize=2)  # a batch can touch two epochs, hardly ever more
def order(seed: int, epoch: int, rows: int) -> np.ndarray:
    """The order of the rows in one epoch."""
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    permutation = random.permutation(rows)
    permutation.setflags(write=False)  # shared by all callers
    return permutation


def read_ahead(make: Callable[[int], T], start: int, stop: int) -> Iterator[T]:
    """make(start) ... make(stop - 1), from a thread at most two ahead. What it raises is raised here."""
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
            made, error = ready.get()
            if error is not None:
                raise error
            room.release()
            yield made[0]
    finally:
        closed.set()
        room.release()  # wakes the thread if it waits for room
        thread.join()


def verify(path: str | Path) -> None:
    """Reads all of the data and compares it with the checksums in the index. Raises UserError."""
    folder = Path(path)
    index = read_index(folder)
    for split in index.splits.values():
        for shard in split.shards:
            file = folder / shard.file
            if not file.is_file():
                raise UserError(f"{file} is missing")
            if crc32(file) != shard.crc32:
                raise UserError(f"{file} is damaged: its checksum is not the one in {folder / 'index.json'}")
    if sha256(folder) != index.tokenizer_sha256:
        raise UserError(f"{folder / 'tokenizer.json'} is not the tokenizer that this data was made with")


def read_index(folder: Path) -> Index:
    if not (folder / "index.json").is_file():
        raise UserError(f"data.path: no packed data in {folder}; make it with `millrace data prepare RECIPE`")
    return Index.read(folder)


def open_shard(folder: Path, shard: Shard, index: Index) -> np.ndarray:
    file, shape = folder / shard.file, (shard.rows, index.sequence_length)
    if not file.is_file():
        raise UserError(f"{file} is missing; make the data again with `millrace data prepare RECIPE`")
    try:
        rows = np.load(file, mmap_mode="r")
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"{file} is damaged: {error}") from None
    size, whole = file.stat().st_size, rows.offset + math.prod(shape) * np.dtype(index.dtype).itemsize
    if rows.shape != shape or rows.dtype != index.dtype or size != whole:
        raise UserError(
            f"{file} holds {rows.dtype} of shape {rows.shape} in {size} bytes, "
            f"and the index says {index.dtype} of shape {shape} in {whole}"
        )
    return rows
