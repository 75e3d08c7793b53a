"""Deduplication of all documents: by id, by text, or by nearly equal text (MinHash with banding). The first
document in order is kept. Works on the fingerprints stored next to normalized parts, in bounded memory."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.config.sections import DataRecipe, NormalizeKeys
from headrace.data import shards
from headrace.data.clean import minhash, normalize
from headrace.data.clean.normalize import SourcePart, has_user_ids
from headrace.data.documents import MAX_SAMPLES, Problems

PARTITION_ROWS = (
    1 << 22
)  # documents sorted at a time, by the first bits of their keys: 20 M take 525 MB in all
MAX_NEIGHBORS = 16  # earlier documents of its bucket, besides the first, that a document is compared with
PAIRS_PER_BATCH = 1 << 15  # compared at a time: 32 MB of signatures


@dataclass(frozen=True)
class DuplicateRows:
    """The rows to remove from each part, and their number by reason; keys are the numbers of the parts."""

    rows: dict[int, np.ndarray]
    counts: dict[int, dict[str, int]]
    problems: dict[str, Any]


def is_dedup_enabled(recipe: DataRecipe) -> bool:
    """Whether a recipe requires a search for duplicates: of texts, or of ids that come from the data."""
    cfg = recipe.normalize
    return cfg.dedup_exact or cfg.dedup_jaccard is not None or any(map(has_user_ids, recipe.sources.values()))


def find_duplicates(
    folder: Path | str,
    source_parts: Sequence[SourcePart],
    cfg: NormalizeKeys,
    policy: Literal["stop", "skip"],
) -> DuplicateRows:
    """Find the duplicates in normalized parts. An id that occurs twice in a source is bad input, handled by
    `policy`: UserError, or the later document is removed. Documents removed by one step are not compared in
    the next."""
    search = DuplicateSearch(Path(folder), source_parts)
    problems = Problems(policy)
    search.mark_removed("duplicate id", search.find_repeated_ids(problems))
    if cfg.dedup_exact:
        search.mark_removed("exact duplicate", search.find_equal_keys("texts", search.parts)[0])
    if cfg.dedup_jaccard is not None:
        search.mark_removed("near duplicate", search.find_near_duplicates(cfg.dedup_jaccard))
    rows, counts = {}, {}
    for source_part, (start, stop) in zip(source_parts, itertools.pairwise(search.starts), strict=True):
        reasons = search.reasons[start:stop]
        rows[source_part.number] = np.flatnonzero(reasons)
        totals = Counter(reasons[reasons > 0].tolist())
        counts[source_part.number] = {
            search.reason_names[reason]: count for reason, count in sorted(totals.items())
        }
    return DuplicateRows(rows, counts, problems.to_json())


def remove_rows(
    number: int, rows: np.ndarray, counts: dict[str, int], folder_in: Path | str, folder_out: Path | str
) -> dict[str, Any]:
    """Write part `number` to another folder without these rows; the bytes are the same as if the rows had
    never existed. Returns the updated summary."""
    folder_in, folder_out = Path(folder_in), Path(folder_out)
    summary = read_part_summary(folder_in, number)
    with shards.open_atomic(normalize.part_path(folder_out, number)) as file:
        written = normalize.write_documents(
            file, read_without_rows(normalize.part_path(folder_in, number), rows)
        )
    dropped = summary["dropped"] | counts
    return summary | {"documents": written.documents, "bytes": written.text_bytes, "dropped": dropped}


def read_without_rows(path: Path, rows: np.ndarray) -> Iterator[pa.Table]:
    """The row groups of a parquet file without some of its rows."""
    with pq.ParquetFile(path) as file:
        start = 0
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, use_threads=False)
            keep = np.ones(len(table), bool)
            keep[rows[(rows >= start) & (rows < start + len(table))] - start] = False
            start += len(table)
            yield table if keep.all() else table.filter(pa.array(keep))


class DuplicateSearch:
    """A search over the documents of all parts, which are numbered in order. `reasons` has the index into
    `reason_names` of why each document is removed; 0 for those that are kept."""

    def __init__(self, folder: Path, source_parts: Sequence[SourcePart]) -> None:
        self.folder, self.source_parts, self.parts = folder, source_parts, range(len(source_parts))
        documents = [read_part_summary(folder, part.number)["documents"] for part in source_parts]
        self.starts = np.append(0, np.cumsum(documents)).astype(np.int64)
        self.reasons = np.zeros(self.starts[-1], np.uint8)
        self.reason_names = ["kept"]

    def mark_removed(self, reason: str, numbers: np.ndarray) -> None:
        self.reason_names.append(reason)
        self.reasons[numbers] = len(self.reason_names) - 1

    def find_repeated_ids(self, problems: Problems) -> np.ndarray:
        """The documents whose id occurs before in the same source; different sources may use the same ids.
        Reports each as a problem."""
        repeated = [np.empty(0, np.int64)]
        for source in dict.fromkeys(part.source for part in self.source_parts if has_user_ids(part.cfg)):
            later, first = self.find_equal_keys(
                "ids", [part for part in self.parts if self.source_parts[part].source == source]
            )
            order = np.argsort(later)[:MAX_SAMPLES]
            for number, earlier in zip(later[order], first[order], strict=True):
                (location, id), (other, _) = self.describe_origin(number), self.describe_origin(earlier)
                problems.report("duplicate id", location, f"the id {id!r} is also that of {other}")
            if len(later) > MAX_SAMPLES:
                problems.counts["duplicate id"] += len(later) - MAX_SAMPLES
            repeated.append(later)
        return np.concatenate(repeated)

    def find_equal_keys(self, kind: str, parts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The documents whose fingerprint of this kind occurs before, and for each the first with it."""
        later, first = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for numbers, same_as_previous in self.iter_sorted_keys(kind, parts):
            is_first = np.append(True, ~same_as_previous)[: len(numbers)]
            later.append(numbers[~is_first])
            first.append(run_starts(numbers, is_first)[~is_first])
        return np.concatenate(later), np.concatenate(first)

    def find_near_duplicates(self, threshold: float) -> np.ndarray:
        """The documents that are nearly equal to an earlier one: at least `threshold` of their signature
        agrees."""
        parents = np.arange(len(self.reasons))
        for band in range(minhash.choose_bands(threshold)[0]):
            for numbers, same_as_previous in self.iter_sorted_keys("bands", self.parts, band):
                for earlier, later in iter_candidate_pairs(numbers, same_as_previous):
                    for start in range(0, len(earlier), PAIRS_PER_BATCH):
                        pairs = slice(start, start + PAIRS_PER_BATCH)
                        self.unite_similar(earlier[pairs], later[pairs], parents, threshold)
        return np.flatnonzero(parents != np.arange(len(parents)))

    def unite_similar(
        self, earlier: np.ndarray, later: np.ndarray, parents: np.ndarray, threshold: float
    ) -> None:
        """Unite the clusters of pairs whose signatures agree in at least `threshold` of their positions.
        Skips pairs that are in one cluster already. Changes `parents` in place."""
        is_separate = find_roots(parents, earlier) != find_roots(parents, later)
        earlier, later = earlier[is_separate], later[is_separate]
        agreement = np.mean(self.load_signatures(earlier) == self.load_signatures(later), axis=1)
        is_similar = agreement >= threshold
        union(parents, earlier[is_similar], later[is_similar])

    def iter_sorted_keys(
        self, kind: str, parts: Sequence[int], band: int | None = None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The documents of these parts that are not yet removed, sorted by key and number, in partitions by
        the first bits of the keys. With each partition, whether each document but the first has the key of
        the one before it."""
        total = sum(int(self.starts[part + 1] - self.starts[part]) for part in parts)
        bits = max(0, (total - 1) // PARTITION_ROWS).bit_length()
        for prefix in range(1 << bits):
            keys, numbers = [], []
            for part in parts:
                array = self.load_fingerprints(kind, part)
                columns = array[band][None] if band is not None else array[:, :2].T
                mask = self.reasons[self.starts[part] : self.starts[part + 1]] == 0
                if bits:
                    mask &= columns[0] >> np.uint64(64 - bits) == prefix
                keys.append(columns[:, mask])
                numbers.append(self.starts[part] + np.flatnonzero(mask))
            all_keys, all_numbers = np.concatenate(keys, axis=1), np.concatenate(numbers)
            order = np.lexsort(all_keys[::-1])
            all_keys = all_keys[:, order]
            yield all_numbers[order], np.all(all_keys[:, 1:] == all_keys[:, :-1], axis=0)

    def load_fingerprints(self, kind: str, part: int) -> np.ndarray:
        path = minhash.fingerprint_path(self.folder, self.source_parts[part].number, kind)
        return np.load(path, mmap_mode="r")

    def load_signatures(self, numbers: np.ndarray) -> np.ndarray:
        """[n PERMUTATIONS]: the signatures of these documents."""
        signatures = np.empty((len(numbers), minhash.PERMUTATIONS), np.uint32)
        parts = np.searchsorted(self.starts, numbers, "right") - 1
        for part in np.unique(parts):
            mask = parts == part
            signatures[mask] = self.load_fingerprints("signatures", part)[numbers[mask] - self.starts[part]]
        return signatures

    def describe_origin(self, number: int) -> tuple[str, str]:
        """The place where a document was read, for messages, and its id."""
        index = int(np.searchsorted(self.starts, number, "right")) - 1
        source_part, row = self.source_parts[index], int(number - self.starts[index])
        part = source_part.part
        position = int(self.load_fingerprints("ids", index)[row, 2]) + 1
        start = f", counted from {part.start}" if part.start else ""
        following = f" and the {len(part.more_files)} files after it" if part.more_files else ""
        path = normalize.part_path(self.folder, source_part.number)
        ids = pq.read_table(path, columns=["id"])["id"]
        return f"document {position} of {part.file}{start}{following}", ids[row].as_py()


def iter_candidate_pairs(
    numbers: np.ndarray, same_as_previous: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs (earlier, later) of documents with equal keys: each document with its neighbors and with the
    first. All pairs of thousands of equal keys would be millions."""
    is_first = np.append(True, ~same_as_previous)[: len(numbers)]
    positions = np.arange(len(numbers))
    first = run_starts(positions, is_first)
    for distance in range(1, MAX_NEIGHBORS + 1):
        later = np.flatnonzero(positions - first >= distance)
        if not len(later):
            return
        yield numbers[later - distance], numbers[later]
    later = np.flatnonzero(positions - first > MAX_NEIGHBORS)
    yield numbers[first[later]], numbers[later]


def run_starts(values: np.ndarray, is_first: np.ndarray) -> np.ndarray:
    """The first value of the run of each value."""
    return values[np.flatnonzero(is_first)][np.cumsum(is_first) - 1]


def union(parents: np.ndarray, first: np.ndarray, second: np.ndarray) -> None:
    """Unite the clusters of all pairs (first[i], second[i]) in place (union-find). The root of a cluster is
    its first document."""
    while len(first):
        first, second = find_roots(parents, first), find_roots(parents, second)
        low, high = np.minimum(first, second), np.maximum(first, second)
        is_separate = low != high
        first, second = low[is_separate], high[is_separate]
        np.minimum.at(
            parents, second, first
        )  # of several new parents of a root, the least; the next pass does others


def find_roots(parents: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The root of the cluster of each document. Shortens the paths in `parents`."""
    roots = parents[numbers]
    while not np.array_equal(roots, above := parents[roots]):
        roots = above
    parents[numbers] = roots
    return roots


def read_part_summary(folder: Path, number: int) -> dict[str, Any]:
    return orjson.loads(normalize.summary_path(folder, number).read_bytes())
