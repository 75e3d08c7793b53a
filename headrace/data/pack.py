"""Token ids to rows of one length. Documents are joined and cut (`concat`), set on rows of their own
(`document`), or fitted together so that none shorter than a row is cut (`best_fit`, arXiv 2404.10830)."""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headrace.data.documents import Ragged
from headrace.data.shards import Rows, pack_bits

BLOCK = 1 << 20  # tokens handled at once: working copies stay in the cache and out of the memory's peak


@dataclass(frozen=True)
class Plan:
    """Which tokens go where: piece i is `size` tokens of `document` from `begin` on, at `column` of `row`.
    Pieces are in order of row and column and leave no gap, but for the end of a row."""

    document: np.ndarray
    begin: np.ndarray
    size: np.ndarray
    row: np.ndarray
    column: np.ndarray
    rows: int

    def take(self, rows: np.ndarray) -> "Plan":
        """The plan of the rows that a mask keeps, numbered anew."""
        kept, numbers = rows[self.row], np.cumsum(rows) - 1
        pieces = self.document[kept], self.begin[kept], self.size[kept]
        return Plan(*pieces, numbers[self.row[kept]], self.column[kept], int(np.count_nonzero(rows)))


def plan(lengths: np.ndarray, length: int, mode: str, seed: int, *, whole: bool = False) -> Plan:
    """Lays documents of `lengths` tokens out in rows of `length`. Empty documents get no place. With `whole`,
    none that a row has room for is cut, whatever the mode."""
    random = np.random.Generator(np.random.PCG64(seed))
    concat = plan_in_turn if whole else plan_concat
    planner = {"concat": concat, "document": plan_document, "best_fit": plan_best_fit}[mode]
    return planner(np.asarray(lengths, np.int64), length, random)


def fill(plan: Plan, ragged: Ragged, *, length: int, filler: int, source: int) -> Iterator[Rows]:
    """The rows of a plan, some at a time. They end in `filler` where the plan has nothing for them."""
    used = np.bincount(plan.row, plan.size, plan.rows).astype(np.int32)
    values = Pieces(plan, ragged.offsets, ragged.values)
    losses = None if ragged.loss is None else Pieces(plan, ragged.offsets, ragged.loss.view(np.uint8))
    labels = None if ragged.labels is None else Pieces(plan, ragged.offsets, ragged.labels)
    second = None if ragged.seconds is None else np.flatnonzero(ragged.seconds[plan.document])
    step = max(1, BLOCK // length)
    for first in range(0, plan.rows, step):
        here = used[first : first + step]
        begin, end = np.searchsorted(plan.row, (first, first + len(here)))
        tokens = spread(values.take(begin, end), here, length, filler)
        loss = None if losses is None else pack_bits(spread(losses.take(begin, end), here, length, 0))
        marks = np.zeros(tokens.shape, bool)
        marks[plan.row[begin:end] - first, plan.column[begin:end]] = True
        if second is not None:
            these = second[np.searchsorted(second, begin) : np.searchsorted(second, end)]
            places = plan.column[these] + ragged.seconds[plan.document[these]]  # type: ignore[index]
            marks[plan.row[these] - first, places] = True
        padded = np.flatnonzero(here < length)
        marks[padded, here[padded]] = True  # padding is marked like a document
        label = None if labels is None else spread(labels.take(begin, end), here, length, 0)
        yield Rows(tokens, pack_bits(marks), loss, np.full(len(here), source, np.uint16), label)


def plan_concat(lengths: np.ndarray, length: int, random: np.random.Generator) -> Plan:
    order = random.permutation(len(lengths))
    order = order[lengths[order] > 0]
    ends = np.cumsum(lengths[order])
    begins = ends - lengths[order]
    index, part = expand((ends - 1) // length - begins // length + 1)
    row = begins[index] // length + part
    begin = np.maximum(begins[index], row * length)
    size = np.minimum(ends[index], (row + 1) * length) - begin
    rows = -(-int(ends[-1]) // length) if len(ends) else 0
    return Plan(order[index], begin - begins[index], size, row, begin - row * length, rows)


def plan_in_turn(lengths: np.ndarray, length: int, random: np.random.Generator) -> Plan:
    """Full rows of the documents that are too long, then all that is left in random order, each row as far as
    whole documents fill it."""
    document, part = expand(lengths // length)
    full = len(document)
    order = random.permutation(len(lengths))
    order = order[lengths[order] % length > 0]
    sizes = lengths[order] % length
    ends = np.cumsum(sizes)
    firsts = [0] if len(order) else []  # of each row
    while firsts and (
        following := int(np.searchsorted(ends, ends[firsts[-1]] - sizes[firsts[-1]] + length, "right"))
    ) < len(order):
        firsts.append(following)
    row = np.repeat(np.arange(len(firsts)), np.diff([*firsts, len(order)]))
    begun = (ends - sizes)[firsts][row] if firsts else ends
    return Plan(
        document=np.concatenate([document, order]),
        begin=np.concatenate([part * length, lengths[order] // length * length]),
        size=np.concatenate([np.full(full, length), sizes]),
        row=np.concatenate([np.arange(full), full + row]),
        column=np.concatenate([np.zeros(full, np.int64), ends - sizes - begun]),
        rows=full + len(firsts),
    )


def plan_document(lengths: np.ndarray, length: int, random: np.random.Generator) -> Plan:
    document, part = expand(-(-lengths // length))
    begin = part * length
    row = np.arange(len(document))
    return Plan(
        document, begin, np.minimum(lengths[document] - begin, length), row, np.zeros_like(row), len(row)
    )


def plan_best_fit(lengths: np.ndarray, length: int, random: np.random.Generator) -> Plan:
    """Full rows of the documents that are too long, then best-fit-decreasing of all that is left."""
    document, part = expand(lengths // length)
    full = np.arange(len(document))

    order = random.permutation(len(lengths))
    order = order[lengths[order] % length > 0]
    sizes, by_size = sort(lengths[order] % length)
    row, rows = fit(sizes[::-1], length)

    # Documents stand in a row in random order, not the longest always first.
    order = order[by_size[::-1]]
    shuffled = random.permutation(len(row))
    row, by_row = sort(row[shuffled])
    pieces = order[shuffled[by_row]]
    sizes = lengths[pieces] % length
    ends = np.cumsum(sizes)
    filled = np.concatenate([[0], np.cumsum(np.bincount(row, sizes, rows).astype(np.int64))])
    return Plan(
        document=np.concatenate([document, pieces]),
        begin=np.concatenate([part * length, lengths[pieces] // length * length]),
        size=np.concatenate([np.full(len(full), length), sizes]),
        row=np.concatenate([full, len(full) + row]),
        column=np.concatenate([np.zeros_like(full), ends - sizes - filled[row]]),
        rows=len(full) + rows,
    )


def fit(sizes: np.ndarray, length: int) -> tuple[np.ndarray, int]:
    """The row of each of the sizes, which decrease, and how many rows there are: each goes where it leaves
    least room, as best-fit-decreasing has it.

    Rows with equally much room are alike, and so are documents of one size. So the loop is over the sizes
    that occur, and runs of rows with equal room: where a row has room for k of a size, then after the first
    it still is the one with least room that fits, and takes all k."""
    values, counts = np.unique(sizes, return_counts=True)
    runs: dict[int, list[tuple[int, int]]] = {}  # by the room in them: first row, number of rows
    rooms: list[int] = []  # the keys of runs, sorted
    placed: list[tuple[int, int, int]] = []  # first row, number of rows, documents in each
    opened = 0

    def leave(room: int, first: int, number: int) -> None:
        if number and room:
            if room not in runs:
                bisect.insort(rooms, room)
                runs[room] = []
            runs[room].append((first, number))

    for size, left in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while left:
            place = bisect.bisect_left(rooms, size)
            if place < len(rooms):
                room = rooms[place]
                first, number = runs[room].pop()
                if not runs[room]:
                    del runs[room], rooms[place]
            else:
                room, first, number = length, opened, -(-left // (length // size))
                opened += number
            each = room // size
            whole = min(number, left // each)
            if whole:
                placed.append((first, whole, each))
                leave(room - each * size, first, whole)
                left -= whole * each
            if whole < number and left:  # fewer than `each` are left: they share one row
                placed.append((first + whole, 1, left))
                leave(room - left * size, first + whole, 1)
                whole, left = whole + 1, 0
            leave(room, first + whole, number - whole)
    firsts, numbers, shared = np.array(placed, np.int64).reshape(-1, 3).T
    index, part = expand(numbers * shared)
    return firsts[index] + part // shared[index], opened


def sort(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The values in order, equal ones as they were, and where each stood. They must be small: numpy sorts
    numbers 8 times faster than it finds the order of them, so each carries its place in its low bits."""
    bits = len(values).bit_length()
    assert not len(values) or int(values.max()) < 1 << 62 - bits
    together = np.sort((values << bits) | np.arange(len(values)))
    return together >> bits, together & ((1 << bits) - 1)


def expand(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For counts [2, 0, 3] the indices [0, 0, 2, 2, 2] and the places [0, 1, 0, 1, 2]."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - (np.cumsum(counts) - counts)[index]


class Pieces:
    """Tokens of the pieces of a plan, any run of them end to end. Arrow copies values of any length in one
    call: 370 to 950 M tokens/s for pieces of 22 to 600, where an index for each token gives 150 to 290."""

    def __init__(self, plan: Plan, offsets: np.ndarray, values: np.ndarray) -> None:
        self.dtype, self.sizes = values.dtype, plan.size
        begins = (offsets[plan.document] + plan.begin) * self.dtype.itemsize
        _, order = sort(begins)
        # What lies between two pieces is a value too, at the odd places, often empty.
        bounds = np.zeros(2 * len(begins) + 1, np.int64)
        bounds[:-1:2] = begins[order]
        bounds[1::2] = begins[order] + plan.size[order] * self.dtype.itemsize
        bounds[-1] = bounds[-2] if len(begins) else 0
        buffers = [None, pa.py_buffer(bounds), pa.py_buffer(np.ascontiguousarray(values))]
        self.values = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(bounds) - 1, buffers)
        self.places = np.empty(len(begins), np.int64)
        self.places[order] = 2 * np.arange(len(begins))

    def take(self, begin: int, end: int) -> np.ndarray:
        taken = self.values.take(pa.array(self.places[begin:end]))
        return np.frombuffer(taken.buffers()[2], self.dtype, int(self.sizes[begin:end].sum()))


def spread(values: np.ndarray, used: np.ndarray, length: int, filler: int) -> np.ndarray:
    """Rows of which the first `used` columns are the values, in order, and the others filler."""
    if len(values) == len(used) * length:
        return values.reshape(-1, length)
    rows = np.full((len(used), length), filler, values.dtype)
    partial = np.flatnonzero(used < length)
    if len(partial) > len(used) // 16:
        rows[np.arange(length, dtype=np.int32) < used[:, None]] = values
        return rows
    # Where most rows are full, stretches of full rows and one that is not are copied: 20 times faster.
    begin = done = 0
    for end in [*(partial * length + used[partial]).tolist(), rows.size]:
        size = min(end - begin, len(values) - done)
        rows.reshape(-1)[begin : begin + size] = values[done : done + size]
        begin, done = -(-end // length) * length, done + size
    return rows
