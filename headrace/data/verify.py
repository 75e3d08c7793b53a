"""Verification of a packed dataset against its index: checksums, shapes, token ids, document starts, and
counts.

All of it is read. Each fault names its file and row. All epochs must hold the same rows."""

import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from headrace.data.formats import open as formats_open
from headrace.data.pipeline.progress import Bar
from headrace.data.shards import (
    Index,
    Rows,
    Shard,
    Split,
    crc32_hex,
    filler_start_columns,
    last_start_columns,
    unpack_bits,
)
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.errors import UserError

MAX_SHOWN = 5  # faults in the message; all are counted
BLOCK = 1 << 22  # tokens checked at once: 8 MB of uint16, and as much again for comparisons
MAX_THREADS = 4  # more do not make a disk faster


@dataclass
class ShardReport:
    """Counts and faults of one shard, or of all shards of an epoch."""

    rows: int = 0
    tokens: int = 0  # without padding
    pieces: int = 0  # documents and parts of documents
    documents: int = 0  # pieces that begin with the token that begins texts
    unsure: int = 0  # single end tokens at the end of a row: padding, or the end of a document that was cut
    bytes: int = 0  # on the disk
    rows_of: dict[int, int] = field(
        default_factory=dict
    )  # by source: sum of the checksums of its rows, in any order
    faults: list[str] = field(default_factory=list)

    def add(self, other: "ShardReport") -> None:
        """Add the counts and faults of another report to this one."""
        for name in ("rows", "tokens", "pieces", "documents", "unsure", "bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.add_row_checksums(other.rows_of)
        self.faults += other.faults

    def add_row_checksums(self, sums: dict[int, int]) -> None:
        """Add sums of row checksums, by source."""
        for source, crc in sums.items():
            self.rows_of[source] = (self.rows_of.get(source, 0) + crc) % 2**64


def verify(path: str | Path, report: Callable[[str], None]) -> None:
    """Check all files of a local dataset. Raises UserError with the first faults if there are any.

    `report` receives a line about each split, and one about the whole."""
    folder = formats_open.require_local(path)
    index_file = folder / "index.json"
    if not index_file.is_file():
        raise UserError(
            f"{folder} is not packed data: it has no index.json; `headrace data prepare RECIPE` makes it"
        )
    index = Index.parse(index_file.read_bytes(), str(index_file))
    faults = list(find_tokenizer_faults(folder, index))
    shards = [shard for split in index.splits.values() for epoch in split.epochs for shard in epoch]
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    reports: dict[str, ShardReport] = {}
    with Bar("verify", len(shards)) as bar, ThreadPoolExecutor(threads) as pool:
        checked = pool.map(lambda shard: ShardChecker(folder, shard, index).check(), shards)
        for shard, shard_report in zip(shards, checked, strict=True):
            reports[shard.name] = shard_report
            bar.advance({"bytes": shard_report.bytes, "tokens": shard_report.tokens})
    lines = []
    for name, split in index.splits.items():
        epochs = [combine_reports([reports[shard.name] for shard in epoch]) for epoch in split.epochs]
        shard_faults = [fault for epoch in epochs for fault in epoch.faults]
        # Rows that are missing in a damaged shard are missing in the sums as well: one message is enough.
        faults += shard_faults or find_sum_faults(f"{index_file}: {name} epoch", split, epochs, index)
        rows = f"{split.rows:,} rows, {split.tokens:,} tokens, {split.documents:,} documents"
        lines.append(f"{name}: {len(epochs)} epoch{'s' * (len(epochs) != 1)} of {rows}")
    if faults:
        raise UserError(describe_faults(folder, faults))
    for line in lines:
        report(line)
    size = sum(shard_report.bytes for shard_report in reports.values()) / 1e6
    speed = f"{size / bar.seconds:,.0f} MB/s"
    report(f"{folder}: {len(shards)} shards, {size:,.1f} MB, all checksums match ({speed})")


def combine_reports(reports: list[ShardReport]) -> ShardReport:
    """Add up the reports of the shards of an epoch."""
    total = ShardReport()
    for report in reports:
        total.add(report)
    return total


def describe_faults(folder: Path, faults: list[str]) -> str:
    """The message for a damaged dataset: the number of faults, and the first of them."""
    count = "1 fault" if len(faults) == 1 else f"{len(faults):,} faults"
    listing = "".join(f"\n  {fault}" for fault in faults[:MAX_SHOWN])
    omitted = f"\n  and {len(faults) - MAX_SHOWN:,} more" if len(faults) > MAX_SHOWN else ""
    return f"{folder}: {count}; make the data again, or copy it again{listing}{omitted}"


def find_tokenizer_faults(folder: Path, index: Index) -> Iterator[str]:
    """Yield faults of tokenizer.json: missing, another one, or another size of the vocabulary."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        yield f"{file}: no such file, expected the tokenizer {index.tokenizer_sha256[:16]}"
        return
    sha256 = tokenizer_io.file_sha256(folder)
    if sha256 != index.tokenizer_sha256:
        yield f"{file}: found sha256 {sha256[:16]}, expected {index.tokenizer_sha256[:16]}"
    elif (vocab := tokenizer_io.load(folder).vocab_size) != index.vocab:
        yield f"{folder / 'index.json'}: found vocab {index.vocab:,}, expected the tokenizer's {vocab:,}"


class ShardChecker:
    """Checks of one shard, whose results are collected in `report`."""

    def __init__(self, folder: Path, shard: Shard, index: Index) -> None:
        self.folder, self.shard, self.index = folder, shard, index
        self.report = ShardReport()

    def check(self) -> ShardReport:
        """Check the files of the shard and, if all can be read, their rows."""
        arrays = self._load_columns()
        if arrays is not None:
            rows = Rows(
                arrays[""], arrays[".starts"], arrays.get(".loss"), arrays[".sources"], arrays.get(".labels")
            )
            step = max(1, BLOCK // self.index.sequence_length)
            name = str(self.folder / self.shard.name)
            for first in range(0, len(rows), step):
                block = rows.select(slice(first, first + step))
                BlockChecker(block, self.index, first, name, self.report).check()
        return self.report

    def _load_columns(self) -> dict[str, np.ndarray] | None:
        """Read the arrays of the shard by suffix, and compare their checksums. None if one cannot be read."""
        shard, length = self.shard, self.index.sequence_length
        bytes_per_row = -(-length // 8)
        layouts: dict[str, tuple[str, tuple[int, ...]]] = {
            "": (self.index.dtype, (shard.rows, length)),
            ".starts": ("uint8", (shard.rows, bytes_per_row)),
            ".loss": ("uint8", (shard.rows, bytes_per_row)),
            ".sources": ("uint16", (shard.rows,)),
            ".labels": ("uint16", (shard.rows, length)),
        }
        absent = {".loss", ".labels"} - shard.checksums.keys()
        arrays = {}
        for suffix, (dtype, shape) in layouts.items():
            file = self.folder / f"{shard.name}{suffix}.npy"
            if suffix in absent:
                if file.exists():
                    self.report.faults.append(
                        f"{file}: found a file, expected none, since the index has no checksum of it"
                    )
                continue
            array = self._load(file, np.dtype(dtype), shape)
            if array is None:
                continue
            self.report.bytes += array.nbytes
            arrays[suffix] = array
            checksum = crc32_hex(np.ascontiguousarray(array).data)
            if checksum != shard.checksums.get(suffix):
                expected = shard.checksums.get(suffix)
                self.report.faults.append(f"{file}: found checksum {checksum}, expected {expected}")
        return arrays if len(arrays) == len(layouts) - len(absent) else None

    def _load(self, file: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray | None:
        """Map an array, or None if it is not as expected."""
        faults = self.report.faults
        try:
            array = np.lib.format.open_memmap(file, mode="r") if np.prod(shape) else np.load(file)
        except FileNotFoundError:
            faults.append(f"{file}: no such file, expected {dtype} of shape {shape}")
            return None
        except Exception as error:  # any: numpy parses a damaged header as Python
            size = file.stat().st_size
            faults.append(
                f"{file}: not a valid .npy file ({size:,} bytes: {error}), expected {dtype} of {shape}"
            )
            return None
        if array.shape != shape or array.dtype != dtype:
            faults.append(f"{file}: found {array.dtype} of shape {array.shape}, expected {dtype} of {shape}")
            return None
        if isinstance(array, np.memmap):
            excess = file.stat().st_size - array.offset - array.nbytes
            if excess:
                faults.append(f"{file}: found {excess:,} bytes after the array, expected none")
                return None
        return array


class BlockChecker:
    """Checks of some rows of a shard, the first of which is row `first` of it."""

    def __init__(self, rows: Rows, index: Index, first: int, name: str, report: ShardReport) -> None:
        self.rows, self.index, self.first, self.name, self.report = rows, index, first, name, report

    def check(self) -> None:
        """Check the rows, and add their counts to the report."""
        rows, length, special = self.rows, self.index.sequence_length, self.index.special
        self._check_ids()
        self._check_starts()
        last = last_start_columns(rows.starts)
        filler_start = filler_start_columns(rows.tokens, special.filler)
        is_padded = filler_start <= last  # padding is a last piece of nothing but filler
        padding = np.where(is_padded, length - last, 0)
        if special.filler in (special.bos, special.eos):
            self.report.unsure += int(np.count_nonzero(padding == 1))
        else:
            self._add_fault(
                (filler_start < length) & (filler_start != last),
                "",
                lambda row: (
                    f"found padding from {filler_start[row]}, the last mark at {last[row]}, expected a mark "
                    "where padding begins, and no padding before it"
                ),
            )
        self._check_annotations(padding)
        if rows.loss_bits is not None:
            self._check_loss(rows.loss_bits, padding)

        self.report.rows += len(rows)
        self.report.tokens += rows.tokens.size - int(padding.sum())
        self.report.pieces += int(np.bitwise_count(rows.starts).sum(dtype=np.int64)) - int(is_padded.sum())
        if special.bos is not None:
            is_start = unpack_bits(rows.starts, length)
            self.report.documents += int(np.count_nonzero(is_start & (rows.tokens == special.bos)))
        self.report.add_row_checksums(sum_row_checksums(rows))

    def _add_fault(self, is_bad: np.ndarray, suffix: str, describe: Callable[[int], str]) -> None:
        """Report the first of the bad rows, and how many there are. `is_bad` has a flag for each row."""
        if is_bad.any():
            row, count = int(is_bad.argmax()), int(is_bad.sum())
            suffix_text = f" (and {count - 1:,} more)" if count > 1 else ""
            self.report.faults.append(
                f"{self.name}{suffix}.npy row {self.first + row}: {describe(row)}{suffix_text}"
            )

    def _check_ids(self) -> None:
        """Token ids, sources and labels must be below the numbers in the index."""
        rows, index = self.rows, self.index
        self._check_limit(rows.tokens.max(axis=1), index.vocab, "", "token")
        self._check_limit(rows.sources, len(index.sources), ".sources", "source")
        if rows.labels is not None:
            self._check_limit(rows.labels.max(axis=1), 1 + len(index.labels), ".labels", "label")

    def _check_limit(self, largest: np.ndarray, limit: int, suffix: str, kind: str) -> None:
        self._add_fault(
            largest >= limit, suffix, lambda row: f"found {kind} {largest[row]}, expected less than {limit}"
        )

    def _check_starts(self) -> None:
        """The first token of a row must be marked as a start. No bits may be set past the last token."""
        rows, length = self.rows, self.index.sequence_length
        is_unmarked = (rows.starts[:, 0] & 1) == 0
        self._add_fault(is_unmarked, ".starts", lambda row: "found no mark at the first token, expected one")
        if length % 8:
            message = f"found bits past token {length - 1}, expected none"
            for suffix, bits in ((".starts", rows.starts), (".loss", rows.loss_bits)):
                if bits is not None:
                    excess = bits[:, -1] >> (length % 8) != 0
                    self._add_fault(excess, suffix, lambda row: message)

    def _check_loss(self, loss_bits: np.ndarray, padding: np.ndarray) -> None:
        """Padding must not be trained on."""
        length = self.index.sequence_length
        padded = np.flatnonzero(padding)
        is_trained = unpack_bits(loss_bits[padded], length)
        is_padding = np.arange(length) >= length - padding[padded, None]
        trained = np.zeros(len(loss_bits), np.int64)
        trained[padded] = (is_trained & is_padding).sum(axis=1)
        self._add_fault(
            trained > 0,
            ".loss",
            lambda row: f"found {trained[row]} tokens of padding to train on, expected none",
        )

    def _check_annotations(self, padding: np.ndarray) -> None:
        """Labels of texts must be at first tokens, none on padding. Both texts of a pair must be in one
        row."""
        rows, index, length = self.rows, self.index, self.index.sequence_length
        is_start = unpack_bits(rows.starts, length)
        if rows.labels is not None:
            is_text: np.ndarray = np.arange(length) < length - padding[:, None]
            is_allowed = is_start & is_text if index.labelled == "text" else is_text
            is_stray = (rows.labels > 0) & ~is_allowed
            expected = "the first token of a text" if index.labelled == "text" else "a text"
            self._add_fault(
                np.asarray(is_stray.any(axis=1)),
                ".labels",
                lambda row: f"found a label at {is_stray[row].argmax()}, expected {expected}",
            )
        if index.pairs:
            texts = is_start.sum(axis=1) - (padding > 0)
            self._add_fault(
                np.asarray(texts % 2 == 1),
                ".starts",
                lambda row: f"found {texts[row]} texts, expected two of each pair",
            )


def sum_row_checksums(rows: Rows) -> dict[int, int]:
    """Sum of the checksums of rows, by source: the same for any order of the rows.

    The loop is over rows, of kilobytes each. A call takes 0.3 µs."""
    arrays = [
        np.ascontiguousarray(array)
        for array in (rows.tokens, rows.starts, rows.loss_bits, rows.labels)
        if array is not None
    ]
    sums: dict[int, int] = {}
    for source, *columns in zip(rows.sources.tolist(), *map(iter_row_buffers, arrays), strict=True):
        crc = 0
        for buffer in columns:
            crc = zlib.crc32(buffer, crc)
        sums[source] = sums.get(source, 0) + crc
    return sums


def iter_row_buffers(array: np.ndarray) -> Iterator[memoryview]:
    """Yield the rows of a matrix as buffers, which are cheaper to make than arrays."""
    view, row_bytes = array.data.cast("B"), array.shape[1] * array.itemsize
    return (view[first : first + row_bytes] for first in range(0, array.nbytes, row_bytes))


def find_sum_faults(location: str, split: Split, epochs: list[ShardReport], index: Index) -> Iterator[str]:
    """Yield differences between the sums of epochs and the index, or among epochs.

    `location` is the start of the messages, which the number of the epoch follows."""
    weights = [float((source or {}).get("weight", 1)) for source in index.recipe.get("sources", {}).values()]
    has_whole_weights = all(weight.is_integer() for weight in weights)
    has_loss = any(".loss" in shard.checksums for epoch in split.epochs for shard in epoch)
    # Documents look like parts of documents where a chat template begins texts in its own way, or where parts
    # of a document are in several splits.
    is_countable = all(weight == 1 for weight in weights) and not has_loss and index.special.bos is not None
    for number, epoch in enumerate(epochs):
        counts = {"rows": (epoch.rows, split.rows, 0)}  # found, expected, uncertainty
        if has_whole_weights:  # a fraction of a source is another one in each epoch
            counts["tokens"] = (epoch.tokens, split.tokens, epoch.unsure)
            if is_countable:
                counts["documents"] = (epoch.documents, split.documents, 0)
        for name, (found, expected, uncertainty) in counts.items():
            if not found <= expected <= found + uncertainty:
                yield f"{location} {number}: found {found:,} {name}, expected {expected:,} as in the index"
        if has_whole_weights and epoch.pieces + epoch.unsure < split.documents:
            yield f"{location} {number}: found {epoch.pieces:,} pieces, expected {split.documents:,} or more"
        if has_whole_weights and epoch.rows_of != epochs[0].rows_of:
            sources = epoch.rows_of.keys() | epochs[0].rows_of.keys()
            changed = [n for n in sorted(sources) if epoch.rows_of.get(n) != epochs[0].rows_of.get(n)]
            names = ", ".join(index.source_name(n) for n in changed)
            yield f"{location} {number}: found other rows of {names} than in epoch 0, expected the same"
