"""Packed files to shuffled shards, one set for each epoch, in bounded memory. Each row goes to a bucket drawn
for it alone and each bucket is permuted: together a uniform permutation (Rao 1961, Sandelius 1962) in one
round, however the rows lay before. `quality` measures it all the same."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.data.shards import Rows, Shard, atomic, pack_bits, padding_begins, read_rows, write_blocks

BUCKET = 128 << 20  # bytes of tokens in a shard, about: a worker holds one, and syncs while the others work
DIRECT = 2 << 30  # bytes of tokens that the page cache will hold: then random reads do, and one pass
BLOCK = 1 << 20  # bytes copied at a time: they are still in the cache when they are hashed and written
BATCH = 256  # rows among which the mixing of sources is looked at
STRETCHES = 10  # stand for sources where there is one only
SPLITS = ("train", "evaluation")
PURPOSES = ("count", "turns", "deal", "run", "bucket")


@dataclass(frozen=True)
class Input:
    """A packed file. A row comes `weight` times in an epoch: 2.5 is twice, and once more for half of them,
    which are others in the next epoch until all had their turn."""

    name: str  # as in packed/00003-train
    rows: int
    source: int = 0
    weight: float = 1.0
    loss: bool = False
    labels: tuple[
        int, ...
    ] = ()  # for each number in its column of labels that in the shards; () for no column


@dataclass(frozen=True)
class Round:
    """What all jobs of one round of one epoch have in common."""

    folder: str
    split: str
    seed: int
    inputs: tuple[Input, ...]
    filler: int = 0  # the id that fills rows
    counts: tuple[int, ...] = ()  # rows of each input in an epoch
    sizes: tuple[int, ...] = ()  # rows of each bucket
    sources: tuple[int, ...] = ()  # rows of each source
    epoch: int = 0
    number: int = 0
    last: bool = True
    direct: bool = True  # without runs, by random reads of the inputs; the bytes are the same

    @property
    def loss(self) -> bool:
        return any(one.loss for one in self.inputs)

    @property
    def labels(self) -> bool:
        return any(one.labels for one in self.inputs)

    @property
    def scratch(self) -> str:
        return f"scatter/{self.split}-{self.epoch}-{self.number}"

    def output(self, bucket: int) -> str:
        name = f"{self.split}-{self.epoch}-{bucket:05d}"
        return name if self.last else f"{self.scratch}/{name}"

    def run(self, number: int) -> str:
        return f"{self.scratch}/run-{number:05d}"


@dataclass(frozen=True)
class Job:
    """`number` is that of an input for `scatter`, of a bucket for `gather`."""

    round: Round
    number: int


@dataclass(frozen=True)
class Pass:
    """All of `scatter` comes before any of `gather`, and a pass before the next."""

    scatter: tuple[Job, ...]
    gather: tuple[Job, ...]


@dataclass(frozen=True)
class Quality:
    """What a uniform permutation has, in the mean, is 0, 1 and 1."""

    rank_correlation: float  # between the places of rows before and after
    displacement: float  # how far rows moved, of what they move in a uniform permutation: a third of all rows
    mixing: float | None  # of sources in batches: 0 where each has a single one; None where there is no batch


def plan_shuffle(
    inputs: Sequence[Input],
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
) -> tuple[Pass, ...]:
    """The work that shuffles a split, by arithmetic alone: `row_bytes` are those of a row's tokens. Runs and
    the shards of all rounds but the last lie in scatter/, which is the caller's to remove."""
    first = Round(folder, split, seed, inputs=tuple(one for one in inputs if one.rows), filler=filler)
    first = dataclasses.replace(first, counts=tuple(count(first, i) for i in range(len(first.inputs))))
    total = sum(first.counts)
    if not total:
        return ()
    sources = np.bincount([one.source for one in first.inputs], first.counts).astype(int)
    buckets = math.ceil(total * row_bytes / bucket_bytes)
    passes = []
    for epoch in range(epochs):
        now = dataclasses.replace(first, epoch=epoch, sources=tuple(sources.tolist()), sizes=(0,) * buckets)
        for number in range(rounds):
            direct = sum(one.rows for one in now.inputs) * row_bytes <= direct_bytes or buckets == 1
            now = dataclasses.replace(now, number=number, last=number == rounds - 1, direct=direct)
            sizes = np.sum([np.diff(deal(now, i)) for i in range(len(now.inputs))], axis=0)
            now = dataclasses.replace(now, sizes=tuple(sizes.tolist()))
            scatters = () if direct else tuple(Job(now, i) for i in range(len(now.inputs)))
            passes.append(Pass(scatters, tuple(Job(now, i) for i in range(buckets))))
            most = max((number for one in now.inputs for number in one.labels), default=-1)
            kept = tuple(range(most + 1))  # which are numbered for good from the first round on
            made = tuple(
                Input(now.output(i), size, loss=now.loss, labels=kept)
                for i, size in enumerate(now.sizes)
                if size
            )
            now = dataclasses.replace(now, inputs=made, counts=tuple(one.rows for one in made))
    return tuple(passes)


def scatter(job: Job) -> None:
    """Writes an input's rows in random order, as a run of which each bucket has a slice."""
    now, name = job.round, job.round.run(job.number)
    folder = Path(now.folder)
    (folder / now.scratch).mkdir(parents=True, exist_ok=True)
    chosen, places = draw(now, job.number)
    write_taken(folder, name, read_rows(folder, now.inputs[job.number].name, mmap=False), chosen)
    write_array(folder / f"{name}.origins.npy", origins(now, job.number)[places])


def gather(job: Job) -> dict[str, Any]:
    """Writes a bucket: its slices of all inputs, permuted. Returns its shard and, after the last round, what
    `quality` needs to know of it. Both can be kept as JSON."""
    now, size = job.round, job.round.sizes[job.number]
    folder = Path(now.folder)
    (folder if now.last else folder / now.scratch).mkdir(parents=True, exist_ok=True)
    like = read_rows(folder, now.inputs[0].name if now.direct else now.run(0))
    rows = room_for(size, like, loss=now.loss, labels=now.labels)
    before = np.empty(size, np.int64)
    done = 0
    for number, one in enumerate(now.inputs):
        begin, end = deal(now, number)[job.number : job.number + 2].tolist()
        here = slice(done, done + end - begin)
        done = here.stop
        lacks = {".loss": not one.loss, ".labels": not one.labels}
        targets = {suffix: array[here] for suffix, array in rows.arrays().items() if not lacks.get(suffix)}
        if now.direct:
            chosen, places = draw(now, number)
            packed = read_rows(folder, one.name).arrays()
            for suffix, target in targets.items():
                np.take(packed[suffix], chosen[begin:end], axis=0, out=target, mode="clip")
            before[here] = origins(now, number)[places[begin:end]]
        else:
            for suffix, target in (targets | {".origins": before[here]}).items():
                read_slice(folder / f"{now.run(number)}{suffix}.npy", begin, target)
        if rows.loss is not None and not one.loss:  # of plain text all is to be learnt, but not the padding
            begins = padding_begins(rows.tokens[here], rows.starts[here], now.filler)
            rows.loss[here] = pack_bits(np.arange(rows.tokens.shape[1]) < begins[:, None])
        if rows.labels is not None:
            numbers = np.array(one.labels, np.uint16)
            rows.labels[here] = numbers[rows.labels[here]] if one.labels else 0
    assert done == size

    order = generator(now, "bucket", job.number).permutation(size)
    shard = dataclasses.asdict(write_taken(folder, now.output(job.number), rows, order))
    if not now.last:
        write_array(folder / f"{now.output(job.number)}.origins.npy", before[order])
        return {"shard": shard}
    first = sum(now.sizes[: job.number])
    return {"shard": shard, "quality": measure(before[order], rows.sources[order], first, now.sources)}


def measure(origins: np.ndarray, sources: np.ndarray, first: int, counts: Sequence[int]) -> dict[str, float]:
    """Sums over rows that stand from place `first` on, of which each came from a place in `origins`; `counts`
    are the rows of each source in all shards together.

    For a batch of b rows, k_i of them from source i, which has a share p_i of all, the distance is that of
    Pearson's test, the sum of (k_i - b p_i)^2 / (b p_i)."""
    total = sum(counts)
    centre = (total - 1) / 2
    now = first + np.arange(len(origins))
    if np.count_nonzero(counts) > 1:
        groups, size = sources.astype(np.int64), np.array(counts)
    else:
        parts = min(STRETCHES, total)
        groups, size = origins * parts // total, np.bincount(np.arange(total) * parts // total)
    batch = max(1, min(BATCH, total // 8))
    batches = len(origins) // batch
    index = np.arange(batches * batch) // batch * len(size) + groups[: batches * batch]
    found = np.bincount(index, minlength=batches * len(size)).reshape(batches, len(size))[:, size > 0]
    expected = batch * size[size > 0] / total
    return {
        "rows": len(origins),
        "total": total,
        "products": float(((origins - centre) * (now - centre)).sum()),
        "moves": float(np.abs(origins - now).sum()),
        "batch": batch,
        "batches": batches,
        "groups": len(expected),
        "distances": float(((found - expected) ** 2 / expected).sum()),
    }


def quality(measured: Iterable[dict[str, float]]) -> Quality:
    """Of one epoch, from what `measure` found in each of its shards.

    With s sources, batches of b of n rows and the distance of `measure`, its mean is (s - 1)(n - b)/(n - 1)
    under a uniform permutation and b (s - 1) where every batch is of one source. Mixing is 1 at the first, 0
    at the second, linear between, and at most 1. Where there is one source, tenths of the data as it came
    stand for sources."""
    parts = list(measured)
    total, batch, groups = (parts[0][name] for name in ("total", "batch", "groups"))
    sums = {name: sum(part[name] for part in parts) for name in ("products", "moves", "batches", "distances")}
    if total < 2:
        return Quality(0.0, 1.0, None)  # nothing to mix
    uniform, worst = (groups - 1) * (total - batch) / (total - 1), batch * (groups - 1)
    mixing = None
    if worst > uniform and sums["batches"]:
        distance = sums["distances"] / sums["batches"]
        mixing = min(1.0, max(0.0, 1 - (distance - uniform) / (worst - uniform)))
    return Quality(
        rank_correlation=sums["products"] / (total * (total**2 - 1) / 12),
        displacement=sums["moves"] / ((total**2 - 1) / 3),
        mixing=mixing,
    )


def generator(now: Round, purpose: str, number: int, *, every_epoch: bool = True) -> np.random.Generator:
    """Random numbers of an input or a bucket: the same whoever asks, and in whatever order."""
    when = (now.epoch, now.number) if every_epoch else ()
    seed = (now.seed, SPLITS.index(now.split), PURPOSES.index(purpose), number, *when)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))


def count(now: Round, number: int) -> int:
    """How many rows of an input an epoch has: in each as many, so a rest is rounded by a draw for all."""
    one = now.inputs[number]
    more = (one.weight - int(one.weight)) * one.rows
    return int(one.weight) * one.rows + int(
        more + generator(now, "count", number, every_epoch=False).random()
    )


def deal(now: Round, number: int) -> np.ndarray:
    """Where the slices of a run begin and end, by bucket: each row draws its bucket, and they are alike."""
    buckets = len(now.sizes)
    sizes = generator(now, "deal", number).multinomial(now.counts[number], np.full(buckets, 1 / buckets))
    return np.concatenate([[0], np.cumsum(sizes)])


def draw(now: Round, number: int) -> tuple[np.ndarray, np.ndarray]:
    """A run: the rows of an input in random order, and the place of each if they were in order."""
    one, size = now.inputs[number], now.counts[number]
    more = size - int(one.weight) * one.rows
    turns = generator(now, "turns", number, every_epoch=False).permutation(one.rows)
    chosen = turns[(now.epoch * more + np.arange(more)) % one.rows]
    chosen = np.sort(np.concatenate([np.tile(np.arange(one.rows), int(one.weight)), chosen]))
    places = generator(now, "run", number).permutation(size)
    return chosen[places], places


def origins(now: Round, number: int) -> np.ndarray:
    """Where the rows of an input stood before the first round."""
    if now.number:
        return np.load(Path(now.folder) / f"{now.inputs[number].name}.origins.npy")
    return sum(now.counts[:number]) + np.arange(now.counts[number])


def room_for(size: int, like: Rows, *, loss: bool, labels: bool) -> Rows:
    """Rows to be read into."""
    tokens = np.empty((size, like.tokens.shape[1]), like.tokens.dtype)
    starts = np.empty((size, like.starts.shape[1]), np.uint8)
    learnt = np.empty_like(starts) if loss else None
    told = np.empty(tokens.shape, np.uint16) if labels else None
    return Rows(tokens, starts, learnt, np.empty(size, np.uint16), told)


def read_slice(path: Path, begin: int, out: np.ndarray) -> None:
    """Rows of a .npy file from `begin` on, without a memory map: its pages would count as ours."""
    with path.open("rb", buffering=0) as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        assert shape[1:] == out.shape[1:] and dtype == out.dtype and begin + len(out) <= shape[0]
        file.seek(begin * out[:1].nbytes, 1)
        left = out.reshape(-1).view(np.uint8).data
        while left:  # one read gives at most 2 GiB
            size = file.readinto(left)
            assert size, f"{path} ends too soon"
            left = left[size:]


def write_taken(folder: Path, name: str, rows: Rows, order: np.ndarray) -> Shard:
    """shards.write_rows(folder, name, rows.take(order)), without a second copy in memory."""
    step = max(1, BLOCK // max(1, rows.tokens[:1].nbytes))
    blocks = (rows.take(order[begin : begin + step]) for begin in range(0, max(1, len(order)), step))
    return write_blocks(folder, name, blocks, len(order))


def write_array(path: Path, array: np.ndarray) -> None:
    with atomic(path) as file:
        np.save(file, array)
