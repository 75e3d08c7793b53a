"""Packing: arrange documents of token ids in rows of one length.

Documents are joined and cut (`concat`), put in rows of their own (`document`), or combined so that none
shorter than a row is cut (`best_fit`, arXiv 2404.10830)."""

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headrace.data.documents import Ragged
from headrace.data.shards import Rows, pack_bits

BLOCK = 1 << 20  # tokens handled at once: working copies stay in the cache, and the memory peak low


@dataclass(frozen=True)
class PackPlan:
    """The place of every token: piece i is `size` tokens of `document` from `begin` on, at `column` of `row`.

    Pieces are in the order of row and column, and leave no gap except at the end of a row. All arrays are
    [n]."""

    document: np.ndarray
    begin: np.ndarray
    size: np.ndarray
    row: np.ndarray
    column: np.ndarray
    rows: int  # number of rows

    def select_rows(self, mask: np.ndarray) -> "PackPlan":
        """The plan of only those rows that are True in `mask`, numbered from 0."""
        selected, new_rows = mask[self.row], np.cumsum(mask) - 1
        return PackPlan(
            self.document[selected],
            self.begin[selected],
            self.size[selected],
            new_rows[self.row[selected]],
            self.column[selected],
            int(np.count_nonzero(mask)),
        )


Planner = Callable[[np.ndarray, int, np.random.Generator], PackPlan]


def plan_rows(
    doc_lengths: np.ndarray, row_length: int, mode: str, seed: int, *, keep_whole: bool = False
) -> PackPlan:
    """Arrange documents in rows by one of the modes "concat", "document" and "best_fit".

    Empty documents get no place. With `keep_whole` no document that fits in a row is cut, in any mode."""
    planners: dict[str, Planner] = {
        "concat": plan_whole_in_random_order if keep_whole else plan_concat,
        "document": plan_document,
        "best_fit": plan_best_fit,
    }
    random = np.random.Generator(np.random.PCG64(seed))
    return planners[mode](np.asarray(doc_lengths, np.int64), row_length, random)


def fill_rows(plan: PackPlan, ragged: Ragged, *, length: int, filler: int, source: int) -> Iterator[Rows]:
    """Yield the rows of a plan, in blocks of about BLOCK tokens, padded with `filler`.

    `source` is the number of the source of all rows."""
    used = np.bincount(plan.row, plan.size, plan.rows).astype(np.int32)  # tokens of each row
    token_pieces = PieceReader(plan, ragged.offsets, ragged.values)
    loss_pieces = (
        None
        if ragged.loss_mask is None
        else PieceReader(plan, ragged.offsets, ragged.loss_mask.view(np.uint8))
    )
    label_pieces = None if ragged.labels is None else PieceReader(plan, ragged.offsets, ragged.labels)
    rows_per_block = max(1, BLOCK // length)
    for first in range(0, plan.rows, rows_per_block):
        block_used = used[first : first + rows_per_block]
        begin, end = np.searchsorted(plan.row, (first, first + len(block_used)))
        tokens = pad_rows(token_pieces.read(begin, end), block_used, length, filler)
        loss_bits = labels = None
        if loss_pieces is not None:
            loss_bits = pack_bits(pad_rows(loss_pieces.read(begin, end), block_used, length, 0))
        if label_pieces is not None:
            labels = pad_rows(label_pieces.read(begin, end), block_used, length, 0)
        is_start = np.zeros(tokens.shape, bool)
        is_start[plan.row[begin:end] - first, plan.column[begin:end]] = True
        if ragged.second_starts is not None:
            mark_second_texts(is_start, plan, ragged.second_starts, slice(begin, end), first)
        padded = np.flatnonzero(block_used < length)
        is_start[padded, block_used[padded]] = True  # padding is marked like a document
        sources = np.full(len(block_used), source, np.uint16)
        yield Rows(tokens, pack_bits(is_start), loss_bits, sources, labels)


def mark_second_texts(
    is_start: np.ndarray, plan: PackPlan, second_starts: np.ndarray, pieces: slice, first_row: int
) -> None:
    """Mark in `is_start` where the second text of each document begins, for documents of two texts.

    `second_starts` is that position in each document, 0 for documents of one text."""
    starts = second_starts[plan.document[pieces]]
    has_second = starts > 0
    rows, columns = plan.row[pieces] - first_row, plan.column[pieces] + starts
    is_start[rows[has_second], columns[has_second]] = True


def plan_concat(doc_lengths: np.ndarray, row_length: int, random: np.random.Generator) -> PackPlan:
    """Join documents in random order, and cut them at the ends of rows."""
    order = random.permutation(len(doc_lengths))
    order = order[doc_lengths[order] > 0]
    ends = np.cumsum(doc_lengths[order])  # counted over the tokens of all rows
    begins = ends - doc_lengths[order]
    index, part = repeat_index((ends - 1) // row_length - begins // row_length + 1)
    row = begins[index] // row_length + part
    begin = np.maximum(begins[index], row * row_length)
    size = np.minimum(ends[index], (row + 1) * row_length) - begin
    rows = -(-int(ends[-1]) // row_length) if len(ends) else 0
    return PackPlan(order[index], begin - begins[index], size, row, begin - row * row_length, rows)


def plan_whole_in_random_order(
    doc_lengths: np.ndarray, row_length: int, random: np.random.Generator
) -> PackPlan:
    """Put documents in random order, and begin a new row where the next one does not fit.

    Documents longer than a row first fill rows of their own; what is left of them is a document like
    others."""
    document, part = repeat_index(doc_lengths // row_length)
    full_rows = len(document)
    order = random.permutation(len(doc_lengths))
    order = order[doc_lengths[order] % row_length > 0]
    sizes = doc_lengths[order] % row_length
    ends = np.cumsum(sizes)
    firsts = [0] if len(order) else []  # the first document of each row
    while firsts:
        row_begin = ends[firsts[-1]] - sizes[firsts[-1]]
        next_first = int(np.searchsorted(ends, row_begin + row_length, "right"))
        if next_first == len(order):
            break
        firsts.append(next_first)
    row = np.repeat(np.arange(len(firsts)), np.diff([*firsts, len(order)]))
    row_begins = (ends - sizes)[firsts][row] if firsts else ends
    return PackPlan(
        document=np.concatenate([document, order]),
        begin=np.concatenate([part * row_length, doc_lengths[order] // row_length * row_length]),
        size=np.concatenate([np.full(full_rows, row_length), sizes]),
        row=np.concatenate([np.arange(full_rows), full_rows + row]),
        column=np.concatenate([np.zeros(full_rows, np.int64), ends - sizes - row_begins]),
        rows=full_rows + len(firsts),
    )


def plan_document(doc_lengths: np.ndarray, row_length: int, random: np.random.Generator) -> PackPlan:
    """Begin each document in a row of its own."""
    document, part = repeat_index(-(-doc_lengths // row_length))
    begin = part * row_length
    size = np.minimum(doc_lengths[document] - begin, row_length)
    row = np.arange(len(document))
    return PackPlan(document, begin, size, row, np.zeros_like(row), len(row))


def plan_best_fit(doc_lengths: np.ndarray, row_length: int, random: np.random.Generator) -> PackPlan:
    """Combine documents by best-fit-decreasing. Those longer than a row first fill rows of their own."""
    document, part = repeat_index(doc_lengths // row_length)
    full_rows = np.arange(len(document))

    order = random.permutation(len(doc_lengths))
    order = order[doc_lengths[order] % row_length > 0]
    sizes, by_size = sort_with_index(doc_lengths[order] % row_length)
    row, rows = best_fit(sizes[::-1], row_length)

    # Documents are in random order within a row, not the longest always first.
    order = order[by_size[::-1]]
    shuffled = random.permutation(len(row))
    row, by_row = sort_with_index(row[shuffled])
    pieces = order[shuffled[by_row]]
    sizes = doc_lengths[pieces] % row_length
    ends = np.cumsum(sizes)
    row_begins = np.concatenate([[0], np.cumsum(np.bincount(row, sizes, rows).astype(np.int64))])
    return PackPlan(
        document=np.concatenate([document, pieces]),
        begin=np.concatenate([part * row_length, doc_lengths[pieces] // row_length * row_length]),
        size=np.concatenate([np.full(len(full_rows), row_length), sizes]),
        row=np.concatenate([full_rows, len(full_rows) + row]),
        column=np.concatenate([np.zeros_like(full_rows), ends - sizes - row_begins[row]]),
        rows=len(full_rows) + rows,
    )


class OpenRows:
    """Rows with free space, as runs (first row, number of rows) by the space that is left in each row."""

    def __init__(self) -> None:
        self.runs: dict[int, list[tuple[int, int]]] = {}
        self.spaces: list[int] = []  # the keys of `runs`, sorted

    def push(self, space: int, first: int, count: int) -> None:
        """Add `count` rows from `first` on. Full rows are dropped."""
        if count and space:
            if space not in self.runs:
                bisect.insort(self.spaces, space)
                self.runs[space] = []
            self.runs[space].append((first, count))

    def pop_tightest(self, size: int) -> tuple[int, int, int] | None:
        """Remove a run of the rows with the least space that still fits `size`: (space, first row, count)."""
        position = bisect.bisect_left(self.spaces, size)
        if position == len(self.spaces):
            return None
        space = self.spaces[position]
        first, count = self.runs[space].pop()
        if not self.runs[space]:
            del self.runs[space], self.spaces[position]
        return space, first, count


def best_fit(sizes: np.ndarray, length: int) -> tuple[np.ndarray, int]:
    """Assign documents to rows by best-fit-decreasing: each goes where it leaves the least space.

    `sizes` must decrease. Returns the row of each document, and the number of rows.

    Rows with equal space are interchangeable, and so are documents of equal size. So the loop is over
    distinct sizes and runs of rows: where a row fits k documents of a size, it remains the tightest fit after
    the first of them, and takes all k."""
    values, counts = np.unique(sizes, return_counts=True)
    open_rows = OpenRows()
    placed: list[tuple[int, int, int]] = []  # first row, number of rows, documents in each
    rows = 0
    for size, remaining in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while remaining:
            run = open_rows.pop_tightest(size)
            if run is None:
                run = length, rows, -(-remaining // (length // size))
                rows += run[2]
            space, first, count = run
            per_row = space // size
            filled = min(count, remaining // per_row)
            if filled:
                placed.append((first, filled, per_row))
                open_rows.push(space - per_row * size, first, filled)
                remaining -= filled * per_row
            if filled < count and remaining:  # fewer than `per_row` remain, and share one row
                placed.append((first + filled, 1, remaining))
                open_rows.push(space - remaining * size, first + filled, 1)
                filled, remaining = filled + 1, 0
            open_rows.push(space, first + filled, count - filled)
    firsts, row_counts, docs_per_row = np.array(placed, np.int64).reshape(-1, 3).T
    index, part = repeat_index(row_counts * docs_per_row)
    return firsts[index] + part // docs_per_row[index], rows


def sort_with_index(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort small numbers. Returns them, and the index of each in `values`; equal ones keep their order.

    numpy sorts numbers 8 times faster than it finds their order, so each carries its index in its low
    bits."""
    bits = len(values).bit_length()
    assert not len(values) or int(values.max()) < 1 << 62 - bits
    combined = np.sort((values << bits) | np.arange(len(values)))
    return combined >> bits, combined & ((1 << bits) - 1)


def repeat_index(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Repeat each index by its count, and number the repetitions.

    Counts [2, 0, 3] give the indices [0, 0, 2, 2, 2] and the numbers [0, 1, 0, 1, 2]."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - (np.cumsum(counts) - counts)[index]


class PieceReader:
    """Values of the pieces of a plan, concatenated for any range of pieces.

    Arrow copies values of any length in one call: 370 to 950 M tokens/s for pieces of 22 to 600 tokens, where
    an index for each token gives 150 to 290."""

    def __init__(self, plan: PackPlan, offsets: np.ndarray, values: np.ndarray) -> None:
        self.dtype, self.sizes = values.dtype, plan.size
        begins = (offsets[plan.document] + plan.begin) * self.dtype.itemsize
        _, order = sort_with_index(begins)
        # An Arrow array of binary values covers its buffer without gaps. So what is between two pieces, often
        # nothing, is a value as well, at the odd positions.
        bounds = np.zeros(2 * len(begins) + 1, np.int64)
        bounds[:-1:2] = begins[order]
        bounds[1::2] = begins[order] + plan.size[order] * self.dtype.itemsize
        bounds[-1] = bounds[-2] if len(begins) else 0
        buffers = [None, pa.py_buffer(bounds), pa.py_buffer(np.ascontiguousarray(values))]
        self.values = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(bounds) - 1, buffers)
        self.positions = np.empty(len(begins), np.int64)
        self.positions[order] = 2 * np.arange(len(begins))

    def read(self, begin: int, end: int) -> np.ndarray:
        """Return the values of pieces `begin` to `end`, one after the other."""
        joined = self.values.take(pa.array(self.positions[begin:end]))
        return np.frombuffer(joined.buffers()[2], self.dtype, int(self.sizes[begin:end].sum()))


def pad_rows(values: np.ndarray, used: np.ndarray, length: int, filler: int) -> np.ndarray:
    """Distribute values over rows of `length`: row i gets the next `used[i]` of them, then `filler`."""
    if len(values) == len(used) * length:
        return values.reshape(-1, length)
    rows = np.full((len(used), length), filler, values.dtype)
    partial = np.flatnonzero(used < length)
    if len(partial) > len(used) // 16:
        rows[np.arange(length, dtype=np.int32) < used[:, None]] = values
        return rows
    # Most rows are full. Runs of full rows, with the partial one that ends them, are copied: 20 times faster.
    begin = copied = 0
    for end in [*(partial * length + used[partial]).tolist(), rows.size]:
        size = min(end - begin, len(values) - copied)
        rows.reshape(-1)[begin : begin + size] = values[copied : copied + size]
        begin, copied = -(-end // length) * length, copied + size
    return rows
