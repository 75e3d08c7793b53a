"""Duplicates among all documents: the same id, the same text, or nearly the same text (MinHash with banding).
The first in order stays. Works on the fingerprints that lie beside normalised parts, in bounded memory."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.data.clean import minhash as fingerprints, normalize as normalise
from headrace.data import shards
from headrace.data.documents import SAMPLES, Problems
from headrace.data.clean.normalize import Unit, has_ids

PARTITION = 1 << 22  # documents sorted at a time, by the first bits of their keys: 20 M take 525 MB in all
NEIGHBOURS = 16  # documents before it in its bucket, and the first, that a document is compared with
PAIRS = 1 << 15  # compared at a time: 32 MB of signatures


@dataclass(frozen=True)
class Found:
    """By part, the rows to remove and how many of them for which reason."""

    rows: dict[int, np.ndarray]
    counts: dict[int, dict[str, int]]
    problems: dict[str, Any]


def are_sought(recipe: Any) -> bool:
    cfg = recipe.normalize
    return cfg.exact or cfg.near is not None or any(map(has_ids, recipe.sources.values()))


def find(folder: Path | str, units: Sequence[Unit], cfg: Any, policy: Any) -> Found:
    """`cfg` is the recipe's normalize section. An id that comes twice in a source is bad input; with the
    policy to skip it, the later document goes. What one step removes, the next does not compare with."""
    search = Search(Path(folder), units)
    problems = Problems(policy)
    search.drop("duplicate id", search.find_ids(problems))
    if cfg.exact:
        search.drop("exact duplicate", search.find_equal("texts", search.parts)[0])
    if cfg.near is not None:
        search.drop("near duplicate", search.find_near(cfg.near))
    rows, counts = {}, {}
    for unit, (start, stop) in zip(units, itertools.pairwise(search.starts), strict=True):
        reasons = search.reasons[start:stop]
        rows[unit.number] = np.flatnonzero(reasons)
        tally = Counter(reasons[reasons > 0].tolist())
        counts[unit.number] = {search.names[reason]: count for reason, count in sorted(tally.items())}
    return Found(rows, counts, problems.summary())


def remove(
    number: int, rows: np.ndarray, counts: dict[str, int], folder_in: Path | str, folder_out: Path | str
) -> dict[str, Any]:
    """Writes a part anew without these rows, the same bytes as if they had never been there. Returns its
    summary."""
    folder_in, folder_out = Path(folder_in), Path(folder_out)
    summary = read_summary(folder_in, number)
    with shards.atomic(normalise.place(folder_out, number)) as file:
        written = normalise.write_documents(file, without(normalise.place(folder_in, number), rows))
    dropped = summary["dropped"] | counts
    return summary | {"documents": written.documents, "bytes": written.bytes, "dropped": dropped}


def without(path: Path, rows: np.ndarray) -> Iterator[pa.Table]:
    with pq.ParquetFile(path) as file:
        start = 0
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, use_threads=False)
            keep = np.ones(len(table), bool)
            keep[rows[(rows >= start) & (rows < start + len(table))] - start] = False
            start += len(table)
            yield table if keep.all() else table.filter(pa.array(keep))


class Search:
    """Documents are numbered through all parts, in order; `reasons` has 0 for those that stay."""

    def __init__(self, folder: Path, units: Sequence[Unit]) -> None:
        self.folder, self.units, self.parts = folder, units, range(len(units))
        documents = [read_summary(folder, unit.number)["documents"] for unit in units]
        self.starts = np.append(0, np.cumsum(documents)).astype(np.int64)
        self.reasons = np.zeros(self.starts[-1], np.uint8)
        self.names = ["kept"]

    def drop(self, reason: str, numbers: np.ndarray) -> None:
        self.names.append(reason)
        self.reasons[numbers] = len(self.names) - 1

    def find_ids(self, problems: Problems) -> np.ndarray:
        """Each source by itself, since many number their documents from 0."""
        found = [np.empty(0, np.int64)]
        for source in dict.fromkeys(unit.source for unit in self.units if has_ids(unit.cfg)):
            later, first = self.find_equal(
                "ids", [at for at in self.parts if self.units[at].source == source]
            )
            order = np.argsort(later)[:SAMPLES]
            for number, earlier in zip(later[order], first[order], strict=True):
                (where, id), (other, _) = self.origin(number), self.origin(earlier)
                problems.bad("duplicate id", where, f"the id {id!r} is also that of {other}")
            if len(later) > SAMPLES:
                problems.counts["duplicate id"] += len(later) - SAMPLES
            found.append(later)
        return np.concatenate(found)

    def find_equal(self, kind: str, parts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of documents whose key came before, and of the first with that key."""
        later, first = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for numbers, alike in self.buckets(kind, parts):
            begins = np.append(True, ~alike)[: len(numbers)]
            later.append(numbers[~begins])
            first.append(firsts(numbers, begins)[~begins])
        return np.concatenate(later), np.concatenate(first)

    def find_near(self, threshold: float) -> np.ndarray:
        parents = np.arange(len(self.reasons))
        for band in range(fingerprints.bands(threshold)[0]):
            for numbers, alike in self.buckets("bands", self.parts, band):
                for earlier, later in candidates(numbers, alike):
                    for start in range(0, len(earlier), PAIRS):
                        self.compare(
                            earlier[start : start + PAIRS], later[start : start + PAIRS], parents, threshold
                        )
        return np.flatnonzero(parents != np.arange(len(parents)))

    def compare(self, earlier: np.ndarray, later: np.ndarray, parents: np.ndarray, threshold: float) -> None:
        """Unites the pairs whose signatures agree often enough; those of one cluster need no look."""
        apart = roots(parents, earlier) != roots(parents, later)
        earlier, later = earlier[apart], later[apart]
        near = np.mean(self.signatures(earlier) == self.signatures(later), axis=1) >= threshold
        unite(parents, earlier[near], later[near])

    def buckets(
        self, kind: str, parts: Sequence[int], band: int | None = None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The documents left in these parts, sorted by key and then by number, in partitions by the first
        bits of the keys; and for each but the first whether it has the key of the one before."""
        total = sum(int(self.starts[at + 1] - self.starts[at]) for at in parts)
        bits = max(0, (total - 1) // PARTITION).bit_length()
        for prefix in range(1 << bits):
            keys, numbers = [], []
            for at in parts:
                array = self.load(kind, at)
                columns = array[band][None] if band is not None else array[:, :2].T
                mask = self.reasons[self.starts[at] : self.starts[at + 1]] == 0
                if bits:
                    mask &= columns[0] >> np.uint64(64 - bits) == prefix
                keys.append(columns[:, mask])
                numbers.append(self.starts[at] + np.flatnonzero(mask))
            joined, number = np.concatenate(keys, axis=1), np.concatenate(numbers)
            order = np.lexsort(joined[::-1])
            joined = joined[:, order]
            yield number[order], np.all(joined[:, 1:] == joined[:, :-1], axis=0)

    def load(self, kind: str, at: int) -> np.ndarray:
        return np.load(fingerprints.place(self.folder, self.units[at].number, kind), mmap_mode="r")

    def signatures(self, numbers: np.ndarray) -> np.ndarray:
        found = np.empty((len(numbers), fingerprints.PERMUTATIONS), np.uint32)
        parts = np.searchsorted(self.starts, numbers, "right") - 1
        for at in np.unique(parts):
            mask = parts == at
            found[mask] = self.load("signatures", at)[numbers[mask] - self.starts[at]]
        return found

    def origin(self, number: int) -> tuple[str, str]:
        """Where a document came from, and its id."""
        at = int(np.searchsorted(self.starts, number, "right")) - 1
        part, row = self.units[at].part, int(number - self.starts[at])
        read = int(self.load("ids", at)[row, 2]) + 1
        start = f" from {part.start} on" if part.start else ""
        more = f" and the {len(part.more)} files after it" if part.more else ""
        ids = pq.read_table(normalise.place(self.folder, self.units[at].number), columns=["id"])["id"]
        return f"document {read} of {part.file}{start}{more}", ids[row].as_py()


def candidates(numbers: np.ndarray, alike: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs of one bucket, the earlier first: each document with its neighbours and with the bucket's first.
    All pairs of a bucket of thousands of alike documents would be millions."""
    begins = np.append(True, ~alike)[: len(numbers)]
    places = np.arange(len(numbers))
    first = firsts(places, begins)
    for distance in range(1, NEIGHBOURS + 1):
        later = np.flatnonzero(places - first >= distance)
        if not len(later):
            return
        yield numbers[later - distance], numbers[later]
    later = np.flatnonzero(places - first > NEIGHBOURS)
    yield numbers[first[later]], numbers[later]


def firsts(values: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """For each value the first of its run."""
    return values[np.flatnonzero(begins)][np.cumsum(begins) - 1]


def unite(parents: np.ndarray, some: np.ndarray, others: np.ndarray) -> None:
    """Union-find on all pairs at once. A cluster's root is its first document."""
    while len(some):
        some, others = roots(parents, some), roots(parents, others)
        low, high = np.minimum(some, others), np.maximum(some, others)
        apart = low != high
        some, others = low[apart], high[apart]
        np.minimum.at(parents, others, some)  # of several for one root the least; the others come round again


def roots(parents: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    found = parents[numbers]
    while not np.array_equal(found, above := parents[found]):
        found = above
    parents[numbers] = found
    return found


def read_summary(folder: Path, number: int) -> dict[str, Any]:
    return orjson.loads(normalise.summary_place(folder, number).read_bytes())
