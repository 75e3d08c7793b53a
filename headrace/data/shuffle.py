"""Shuffle packed files into shards, one set for each epoch, in bounded memory.

Each row goes to a random bucket, and each bucket is permuted. Together that is a uniform permutation (Rao
1961, Sandelius 1962) in one round, whatever the order of the rows was before. `combine_measures` measures it
anyway."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headrace.data.shards import (
    Rows,
    Shard,
    open_atomic,
    pack_bits,
    padding_start_columns,
    read_rows,
    write_shard,
)

BUCKET = 128 << 20  # bytes of tokens in a shard, about: a worker holds one, and syncs it while others work
DIRECT = 2 << 30  # bytes of tokens that the page cache holds: up to here, random reads in one pass are faster
BLOCK = 1 << 20  # bytes copied at a time: they are still in the cache when they are hashed and written
BATCH = 256  # rows of a batch, for the measure of mixing
SEGMENTS = 10  # of the data, which stand for sources where there is only one
SPLITS = ("train", "evaluation")

# Purposes of random numbers. The position of each is part of its seed: append, never reorder.
PURPOSES = ("count", "turns", "deal", "run", "bucket")
Purpose = Literal["count", "turns", "deal", "run", "bucket"]


@dataclass(frozen=True)
class ShuffleInput:
    """A packed file to shuffle.

    Each row comes `weight` times in an epoch. 2.5 is twice, and a third time for half of the rows: another
    half in the next epoch, until all had their turn."""

    name: str  # path in the data folder, without suffix: packed/00003-train
    rows: int
    source: int = 0  # number of its source
    weight: float = 1.0
    loss: bool = False  # has a column of loss bits
    labels: tuple[int, ...] = ()  # label number in the shards, by the number in its column; () for no column


@dataclass(frozen=True)
class ShuffleRound:
    """One round of one epoch: the part that all its jobs have in common."""

    folder: str  # of the data
    split: str
    seed: int
    inputs: tuple[ShuffleInput, ...]
    filler: int = 0  # token id that fills rows
    counts: tuple[int, ...] = ()  # rows of each input in an epoch
    sizes: tuple[int, ...] = ()  # rows of each bucket
    sources: tuple[int, ...] = ()  # rows of each source
    epoch: int = 0
    number: int = 0
    last: bool = True
    direct: bool = True  # buckets are read from the inputs at random, without runs; the result is the same

    @property
    def loss(self) -> bool:
        """Whether any input has loss bits."""
        return any(source_file.loss for source_file in self.inputs)

    @property
    def labels(self) -> bool:
        """Whether any input has labels."""
        return any(source_file.labels for source_file in self.inputs)

    @property
    def scratch(self) -> str:
        """The folder of temporary files, relative to `folder`."""
        return f"scatter/{self.split}-{self.epoch}-{self.number}"

    def output(self, bucket: int) -> str:
        """Name of a bucket's shard, relative to `folder`: temporary in all rounds but the last."""
        name = f"{self.split}-{self.epoch}-{bucket:05d}"
        return name if self.last else f"{self.scratch}/{name}"

    def run(self, number: int) -> str:
        """Name of the run of an input, relative to `folder`."""
        return f"{self.scratch}/run-{number:05d}"


@dataclass(frozen=True)
class ShuffleJob:
    """The work of one worker at a time."""

    round: ShuffleRound
    number: int  # of an input for `scatter_input`, of a bucket for `gather_bucket`


@dataclass(frozen=True)
class ShufflePass:
    """The jobs of a round. All of `scatter` come before any of `gather`, and a pass before the next."""

    scatter: tuple[ShuffleJob, ...]
    gather: tuple[ShuffleJob, ...]


@dataclass(frozen=True)
class ShuffleQuality:
    """Measures of a shuffle. A uniform permutation has 0, 1 and 1 on average."""

    rank_correlation: float  # between the positions of rows before and after
    displacement: (
        float  # how far rows moved, relative to a uniform permutation, where it is a third of all rows
    )
    mixing: float | None  # of sources in batches: 0 if each batch has one source; None without a full batch


def plan_shuffle(
    inputs: Sequence[ShuffleInput],
    *,
    folder: str,
    split: str,
    seed: int,
    epochs: int = 1,
    rounds: int = 1,
    row_bytes: int,
    filler: int = 0,
    bucket_bytes: int = BUCKET,
    direct_bytes: int = DIRECT,
) -> tuple[ShufflePass, ...]:
    """Plan the jobs that shuffle a split. Nothing is read; `row_bytes` is the size of a row's tokens.

    Temporary files are in FOLDER/scatter, which the caller removes."""
    first_round = ShuffleRound(
        folder, split, seed, inputs=tuple(file for file in inputs if file.rows), filler=filler
    )
    counts = tuple(count_rows(first_round, i) for i in range(len(first_round.inputs)))
    total = sum(counts)
    if not total:
        return ()
    sources = np.bincount([file.source for file in first_round.inputs], counts).astype(int)
    buckets = math.ceil(total * row_bytes / bucket_bytes)
    passes = []
    for epoch in range(epochs):
        round_ = dataclasses.replace(
            first_round, counts=counts, epoch=epoch, sources=tuple(sources.tolist()), sizes=(0,) * buckets
        )
        for number in range(rounds):
            direct = buckets == 1 or sum(file.rows for file in round_.inputs) * row_bytes <= direct_bytes
            round_ = dataclasses.replace(round_, number=number, last=number == rounds - 1, direct=direct)
            sizes = np.sum([np.diff(bucket_bounds(round_, i)) for i in range(len(round_.inputs))], axis=0)
            round_ = dataclasses.replace(round_, sizes=tuple(sizes.tolist()))
            scatter_jobs = () if direct else tuple(ShuffleJob(round_, i) for i in range(len(round_.inputs)))
            passes.append(ShufflePass(scatter_jobs, tuple(ShuffleJob(round_, i) for i in range(buckets))))
            outputs = output_files(round_)
            round_ = dataclasses.replace(round_, inputs=outputs, counts=tuple(file.rows for file in outputs))
    return tuple(passes)


def output_files(round_: ShuffleRound) -> tuple[ShuffleInput, ...]:
    """The shards that a round writes, as inputs of the next one. Their labels have their final numbers."""
    labels = range(1 + max((label for file in round_.inputs for label in file.labels), default=-1))
    return tuple(
        ShuffleInput(round_.output(bucket), size, loss=round_.loss, labels=tuple(labels))
        for bucket, size in enumerate(round_.sizes)
        if size
    )


def scatter_input(job: ShuffleJob) -> None:
    """Write the rows of an input in random order: a run, of which each bucket gets a slice."""
    round_, run = job.round, job.round.run(job.number)
    folder = Path(round_.folder)
    (folder / round_.scratch).mkdir(parents=True, exist_ok=True)
    rows, positions = draw_run(round_, job.number)
    write_reordered(folder, run, read_rows(folder, round_.inputs[job.number].name, mmap=False), rows)
    write_array(folder / f"{run}.origins.npy", original_positions(round_, job.number)[positions])


def gather_bucket(job: ShuffleJob) -> dict[str, Any]:
    """Write a bucket: its slices of all inputs, permuted.

    Returns {"shard": ...}, and after the last round also {"quality": ...}, the result of `measure_shard`.
    Both are JSON values."""
    round_, size = job.round, job.round.sizes[job.number]
    folder = Path(round_.folder)
    (folder if round_.last else folder / round_.scratch).mkdir(parents=True, exist_ok=True)
    template = read_rows(folder, round_.inputs[0].name if round_.direct else round_.run(0))
    rows = allocate_rows(size, template, loss=round_.loss, labels=round_.labels)
    origins = np.empty(size, np.int64)
    filled = 0
    for number in range(len(round_.inputs)):
        begin, end = bucket_bounds(round_, number)[job.number : job.number + 2].tolist()
        target = slice(filled, filled + end - begin)
        read_bucket_slice(round_, number, begin, end, rows, origins, target)
        fill_missing_columns(round_, number, rows, target)
        filled = target.stop
    assert filled == size

    order = make_generator(round_, "bucket", job.number).permutation(size)
    shard = dataclasses.asdict(write_reordered(folder, round_.output(job.number), rows, order))
    if not round_.last:
        write_array(folder / f"{round_.output(job.number)}.origins.npy", origins[order])
        return {"shard": shard}
    first = sum(round_.sizes[: job.number])
    return {
        "shard": shard,
        "quality": measure_shard(origins[order], rows.sources[order], first, round_.sources),
    }


def read_bucket_slice(
    round_: ShuffleRound, number: int, begin: int, end: int, rows: Rows, origins: np.ndarray, target: slice
) -> None:
    """Read rows `begin` to `end` of the run of an input into `rows[target]`, and where they came from.

    Columns that the input does not have are left as they are."""
    folder, source_file = Path(round_.folder), round_.inputs[number]
    missing = {".loss": not source_file.loss, ".labels": not source_file.labels}
    targets = {suffix: array[target] for suffix, array in rows.arrays().items() if not missing.get(suffix)}
    if round_.direct:
        input_rows, positions = draw_run(round_, number)
        columns = read_rows(folder, source_file.name).arrays()
        for suffix, out in targets.items():
            np.take(columns[suffix], input_rows[begin:end], axis=0, out=out, mode="clip")
        origins[target] = original_positions(round_, number)[positions[begin:end]]
    else:
        for suffix, out in (targets | {".origins": origins[target]}).items():
            read_slice(folder / f"{round_.run(number)}{suffix}.npy", begin, out)


def fill_missing_columns(round_: ShuffleRound, number: int, rows: Rows, target: slice) -> None:
    """Complete the rows of one input with columns that only other inputs have, and renumber its labels."""
    source_file = round_.inputs[number]
    if (
        rows.loss_bits is not None and not source_file.loss
    ):  # plain text: train on all of it, but not on padding
        padding = padding_start_columns(rows.tokens[target], rows.starts[target], round_.filler)
        rows.loss_bits[target] = pack_bits(np.arange(rows.tokens.shape[1]) < padding[:, None])
    if rows.labels is not None:
        numbers = np.array(source_file.labels, np.uint16)
        rows.labels[target] = numbers[rows.labels[target]] if source_file.labels else 0


def measure_shard(
    origins: np.ndarray, sources: np.ndarray, first: int, counts: Sequence[int]
) -> dict[str, float]:
    """Sums over the rows of one shard, for `combine_measures`.

    Row i is now at position `first` + i, and was at `origins[i]`. `counts` are the rows of each source in all
    shards.

    For a batch of b rows, k_i of them from source i with a share p_i of all rows, the distance is that of
    Pearson's test, the sum of (k_i - b p_i)^2 / (b p_i)."""
    total = sum(counts)
    center = (total - 1) / 2
    positions = first + np.arange(len(origins))
    if np.count_nonzero(counts) > 1:
        groups, group_sizes = sources.astype(np.int64), np.array(counts)
    else:
        segments = min(SEGMENTS, total)
        groups = origins * segments // total
        group_sizes = np.bincount(np.arange(total) * segments // total)
    batch = max(1, min(BATCH, total // 8))
    batches = len(origins) // batch
    index = np.arange(batches * batch) // batch * len(group_sizes) + groups[: batches * batch]
    table = np.bincount(index, minlength=batches * len(group_sizes)).reshape(batches, len(group_sizes))
    observed, expected = table[:, group_sizes > 0], batch * group_sizes[group_sizes > 0] / total
    return {
        "rows": len(origins),
        "total": total,
        "products": float(((origins - center) * (positions - center)).sum()),
        "moves": float(np.abs(origins - positions).sum()),
        "batch": batch,
        "batches": batches,
        "groups": len(expected),
        "distances": float(((observed - expected) ** 2 / expected).sum()),
    }


def combine_measures(measures: Iterable[dict[str, float]]) -> ShuffleQuality:
    """Quality of the shuffle of one epoch, from the results of `measure_shard` for all its shards.

    With s sources, and batches of b of n rows, the mean distance of `measure_shard` is (s - 1)(n - b)/(n - 1)
    under a uniform permutation, and b (s - 1) if every batch has a single source. Mixing is 1 at the first, 0
    at the second, linear between them, and at most 1. Tenths of the data stand for sources if there is only
    one."""
    parts = list(measures)
    total, batch, groups = (parts[0][name] for name in ("total", "batch", "groups"))
    sums = {name: sum(part[name] for part in parts) for name in ("products", "moves", "batches", "distances")}
    if total < 2:
        return ShuffleQuality(0.0, 1.0, None)  # nothing to mix
    uniform, worst = (groups - 1) * (total - batch) / (total - 1), batch * (groups - 1)
    mixing = None
    if worst > uniform and sums["batches"]:
        distance = sums["distances"] / sums["batches"]
        mixing = min(1.0, max(0.0, 1 - (distance - uniform) / (worst - uniform)))
    return ShuffleQuality(
        rank_correlation=sums["products"] / (total * (total**2 - 1) / 12),
        displacement=sums["moves"] / ((total**2 - 1) / 3),
        mixing=mixing,
    )


def make_generator(
    round_: ShuffleRound, purpose: Purpose, number: int, *, every_epoch: bool = True
) -> np.random.Generator:
    """Random generator for an input or a bucket: the same in all workers, whatever the order of the jobs.

    With `every_epoch` each epoch and round has another one."""
    when = (round_.epoch, round_.number) if every_epoch else ()
    seed = (round_.seed, SPLITS.index(round_.split), PURPOSES.index(purpose), number, *when)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))


def count_rows(round_: ShuffleRound, number: int) -> int:
    """Rows of an input in an epoch. All epochs have as many, so a fraction is rounded by one random
    number."""
    source_file = round_.inputs[number]
    full_copies = int(source_file.weight)
    extra = (source_file.weight - full_copies) * source_file.rows
    random = make_generator(round_, "count", number, every_epoch=False)
    return full_copies * source_file.rows + int(extra + random.random())


def bucket_bounds(round_: ShuffleRound, number: int) -> np.ndarray:
    """Bounds of the slices of a run that go to each bucket, [buckets + 1].

    Each row draws its bucket, all with the same chance."""
    buckets = len(round_.sizes)
    random = make_generator(round_, "deal", number)
    sizes = random.multinomial(round_.counts[number], np.full(buckets, 1 / buckets))
    return np.concatenate([[0], np.cumsum(sizes)])


def draw_run(round_: ShuffleRound, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of an input in random order, and the position of each of them if they were in order.

    Rows come as often as the weight says: those of the fractional part take turns from epoch to epoch."""
    source_file, size = round_.inputs[number], round_.counts[number]
    full_copies, rows = int(source_file.weight), source_file.rows
    extra = size - full_copies * rows
    turns = make_generator(round_, "turns", number, every_epoch=False).permutation(rows)
    extra_rows = turns[(round_.epoch * extra + np.arange(extra)) % rows]
    ordered = np.sort(np.concatenate([np.tile(np.arange(rows), full_copies), extra_rows]))
    positions = make_generator(round_, "run", number).permutation(size)
    return ordered[positions], positions


def original_positions(round_: ShuffleRound, number: int) -> np.ndarray:
    """Positions of the rows of an input before the first round."""
    if round_.number:
        return np.load(Path(round_.folder) / f"{round_.inputs[number].name}.origins.npy")
    return sum(round_.counts[:number]) + np.arange(round_.counts[number])


def allocate_rows(size: int, template: Rows, *, loss: bool, labels: bool) -> Rows:
    """Uninitialized rows with the length and type of `template`, with or without loss bits and labels."""
    tokens = np.empty((size, template.tokens.shape[1]), template.tokens.dtype)
    starts = np.empty((size, template.starts.shape[1]), np.uint8)
    return Rows(
        tokens,
        starts,
        np.empty_like(starts) if loss else None,
        np.empty(size, np.uint16),
        np.empty(tokens.shape, np.uint16) if labels else None,
    )


def read_slice(path: Path, begin: int, out: np.ndarray) -> None:
    """Read rows of a .npy file, from `begin` on, into `out`.

    Not by a memory map, whose pages would count as memory of this process."""
    with path.open("rb", buffering=0) as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        assert shape[1:] == out.shape[1:] and dtype == out.dtype and begin + len(out) <= shape[0]
        file.seek(begin * out[:1].nbytes, 1)
        remaining = out.reshape(-1).view(np.uint8).data
        while remaining:  # one read returns at most 2 GiB
            size = file.readinto(remaining)
            assert size, f"{path} ends too soon"
            remaining = remaining[size:]


def write_reordered(folder: Path, name: str, rows: Rows, order: np.ndarray) -> Shard:
    """Write rows in another order as a shard, without a second copy of them in memory."""
    step = max(1, BLOCK // max(1, rows.tokens[:1].nbytes))
    blocks = (rows.select(order[begin : begin + step]) for begin in range(0, max(1, len(order)), step))
    return write_shard(folder, name, blocks, len(order))


def write_array(path: Path, array: np.ndarray) -> None:
    with open_atomic(path) as file:
        np.save(file, array)
