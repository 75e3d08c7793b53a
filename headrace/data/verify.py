"""Reads all of a packed dataset and compares it with its index: checksums, shapes, token ids, marks, counts,
and that each epoch holds the same rows. Says in which file and row something is amiss."""

import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.data.tokenizer import tokenizer as tokenise
from headrace.data.formats import open as storage
from headrace.data.pipeline.progress import Bar
from headrace.data.shards import Index, Rows, Shard, Split, checksum, filler_begins, last_starts, unpack_bits
from headrace.errors import UserError

Check = Callable[[np.ndarray, str, Callable[[int], str]], None]

SHOWN = 5  # faults told; all are counted
BLOCK = 1 << 22  # tokens looked at together: 8 MB of uint16, and as much again for what is compared
THREADS = 4  # at most: a disk serves no more
# The highest bit set in a byte, as a number from 0.


@dataclass
class Seen:
    """What was found in one shard, or in the shards of an epoch together."""

    rows: int = 0
    tokens: int = 0  # without padding
    pieces: int = 0  # documents and parts of documents
    documents: int = 0  # pieces that begin with the token that begins texts
    unsure: int = 0  # lone end tokens at the end of a row: padding, or the rest of a document that was cut
    bytes: int = 0  # on the disk
    # By source: the sum of the checksums of its rows, which no order of the rows changes.
    rows_of: dict[int, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def add(self, other: "Seen") -> None:
        for name in ("rows", "tokens", "pieces", "documents", "unsure", "bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for source, crc in other.rows_of.items():
            self.rows_of[source] = (self.rows_of.get(source, 0) + crc) % 2**64
        self.faults += other.faults


def verify(path: str | Path, report: Callable[[str], None]) -> None:
    """Raises UserError with the first faults if there are any."""
    folder = storage.here(path)
    file = folder / "index.json"
    if not file.is_file():
        raise UserError(
            f"{folder} is no packed data: it has no index.json; `headrace data prepare RECIPE` makes it"
        )
    index = Index.parse(file.read_bytes(), str(file))
    faults = list(_tokenizer_faults(folder, index))
    shards = [shard for split in index.splits.values() for epoch in split.epochs for shard in epoch]
    with Bar("verify", len(shards)) as bar, ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        seen = {}
        for shard, found in zip(
            shards, pool.map(lambda shard: _look(folder, shard, index), shards), strict=True
        ):
            seen[shard.name] = found
            bar.advance({"bytes": found.bytes, "tokens": found.tokens})
    told = []
    for name, split in index.splits.items():
        epochs = []
        for epoch in split.epochs:
            epochs.append(Seen())
            for shard in epoch:
                epochs[-1].add(seen[shard.name])
        damaged = [fault for epoch in epochs for fault in epoch.faults]
        # What is missing in a damaged shard is missing in the sums too, and needs no telling twice.
        faults += damaged or _sum_faults(f"{file}: {name} epoch", split, epochs, index)
        rows = f"{split.rows:,} rows, {split.tokens:,} tokens, {split.documents:,} documents"
        told.append(f"{name}: {len(epochs)} epoch{'s' * (len(epochs) != 1)} of {rows}")
    if faults:
        more = f"\n  and {len(faults) - SHOWN:,} more" if len(faults) > SHOWN else ""
        count = "1 fault" if len(faults) == 1 else f"{len(faults):,} faults"
        listed = "".join(f"\n  {fault}" for fault in faults[:SHOWN])
        raise UserError(f"{folder}: {count}; make the data again, or copy it again{listed}{more}")
    for line in told:
        report(line)
    size = sum(found.bytes for found in seen.values()) / 1e6
    report(f"{folder}: {len(shards)} shards, {size:,.1f} MB as written ({size / bar.seconds:,.0f} MB/s)")


def _tokenizer_faults(folder: Path, index: Index) -> Iterator[str]:
    file = folder / "tokenizer.json"
    if not file.is_file():
        yield f"{file}: no such file, expected the tokenizer {index.tokenizer_sha256[:16]}"
        return
    found = tokenise.sha256(folder)
    if found != index.tokenizer_sha256:
        yield f"{file}: found sha256 {found[:16]}, expected {index.tokenizer_sha256[:16]}"
    elif (vocab := tokenise.load(folder).vocab) != index.vocab:
        yield f"{folder / 'index.json'}: found vocab {index.vocab:,}, expected the tokenizer's {vocab:,}"


def _look(folder: Path, shard: Shard, index: Index) -> Seen:
    """A shard, file by file, and if these are as written, row by row."""
    seen = Seen()
    width = -(-index.sequence_length // 8)
    expected: dict[str, tuple[str, tuple[int, ...]]] = {
        "": (index.dtype, (shard.rows, index.sequence_length)),
        ".starts": ("uint8", (shard.rows, width)),
        ".loss": ("uint8", (shard.rows, width)),
        ".sources": ("uint16", (shard.rows,)),
        ".labels": ("uint16", (shard.rows, index.sequence_length)),
    }
    optional = {".loss", ".labels"} - shard.checksums.keys()
    arrays = {}
    for suffix, (dtype, shape) in expected.items():
        file = folder / f"{shard.name}{suffix}.npy"
        if suffix in optional:
            if file.exists():
                seen.faults.append(
                    f"{file}: found a file, expected none, since the index has no checksum of it"
                )
            continue
        array = _load(file, np.dtype(dtype), shape, seen)
        if array is None:
            continue
        seen.bytes += array.nbytes
        arrays[suffix] = array
        found = checksum(np.ascontiguousarray(array).data)
        written = shard.checksums.get(suffix)
        if found != written:
            seen.faults.append(f"{file}: found checksum {found}, expected {written}")
    if len(arrays) == len(expected) - len(optional):
        rows = Rows(
            arrays[""], arrays[".starts"], arrays.get(".loss"), arrays[".sources"], arrays.get(".labels")
        )
        step = max(1, BLOCK // index.sequence_length)
        for first in range(0, len(rows), step):
            block, name = rows.take(slice(first, first + step)), str(folder / shard.name)
            _look_at_rows(block, index, first=first, name=name, seen=seen)
    return seen


def _load(file: Path, dtype: np.dtype, shape: tuple[int, ...], seen: Seen) -> np.ndarray | None:
    try:
        array = np.lib.format.open_memmap(file, mode="r") if np.prod(shape) else np.load(file)
    except FileNotFoundError:
        seen.faults.append(f"{file}: no such file, expected {dtype} of shape {shape}")
    except Exception as error:  # a broken header may lead to any: numpy parses it as Python
        size = file.stat().st_size
        seen.faults.append(
            f"{file}: not a whole .npy file ({size:,} bytes: {error}), expected {dtype} of {shape}"
        )
    else:
        excess = file.stat().st_size - getattr(array, "offset", 0) - array.nbytes
        if array.shape != shape or array.dtype != dtype:
            seen.faults.append(
                f"{file}: found {array.dtype} of shape {array.shape}, expected {dtype} of {shape}"
            )
        elif isinstance(array, np.memmap) and excess:
            seen.faults.append(f"{file}: found {excess:,} bytes after the array, expected none")
        else:
            return array
    return None


def _look_at_rows(rows: Rows, index: Index, *, first: int, name: str, seen: Seen) -> None:
    """Adds what some rows hold to `seen`. `first` is the number of the first of them in its shard."""

    def check(bad: np.ndarray, suffix: str, say: Callable[[int], str]) -> None:
        """`bad` has a flag a row; one fault tells the first of them and how many more there are."""
        if bad.any():
            row, count = int(bad.argmax()), int(bad.sum())
            more = f" (and {count - 1:,} more)" if count > 1 else ""
            seen.faults.append(f"{name}{suffix}.npy row {first + row}: {say(row)}{more}")

    length, special = index.sequence_length, index.special
    _check_ids(rows, index, check)
    _check_marks(rows, length, check)
    last, begins = last_starts(rows.starts), filler_begins(rows.tokens, special.filler)
    padded = begins <= last  # padding is a last piece of nothing but filler
    padding = np.where(padded, length - last, 0)
    if special.filler in (special.bos, special.eos):
        seen.unsure += int(np.count_nonzero(padding == 1))
    else:
        says = "expected a mark where padding begins, and no padding before it"
        unmarked = (begins < length) & (begins != last)
        check(
            unmarked,
            "",
            lambda row: f"found padding from {begins[row]}, the last mark at {last[row]}, {says}",
        )
    _check_annotations(rows, index, padding, check)
    if rows.loss is not None:
        _check_loss(rows.loss, padding, length, check)

    seen.rows += len(rows)
    seen.tokens += rows.tokens.size - int(padding.sum())
    seen.pieces += int(np.bitwise_count(rows.starts).sum(dtype=np.int64)) - int(padded.sum())
    if special.bos is not None:
        marks = unpack_bits(rows.starts, length)
        seen.documents += int(np.count_nonzero(marks & (rows.tokens == special.bos)))
    for source, crc in _row_checksums(rows).items():
        seen.rows_of[source] = (seen.rows_of.get(source, 0) + crc) % 2**64


def _check_ids(rows: Rows, index: Index, check: Check) -> None:
    def compare(largest: np.ndarray, limit: int, suffix: str, kind: str) -> None:
        check(
            largest >= limit, suffix, lambda row: f"found {kind} {largest[row]}, expected less than {limit}"
        )

    compare(rows.tokens.max(axis=1), index.vocab, "", "token")
    compare(rows.sources, len(index.sources), ".sources", "source")
    if rows.labels is not None:
        compare(rows.labels.max(axis=1), 1 + len(index.labels), ".labels", "label")


def _check_marks(rows: Rows, length: int, check: Check) -> None:
    unmarked = (rows.starts[:, 0] & 1) == 0
    check(unmarked, ".starts", lambda row: "found no mark at the first token, expected one")
    if length % 8:
        for suffix, bits in ((".starts", rows.starts), (".loss", rows.loss)):
            if bits is not None:
                past = bits[:, -1] >> (length % 8) != 0
                check(past, suffix, lambda row: f"found bits past token {length - 1}, expected none")


def _check_loss(loss: np.ndarray, padding: np.ndarray, length: int, check: Check) -> None:
    """Padding is not to be learnt."""
    padded = np.flatnonzero(padding)
    flags = unpack_bits(loss[padded], length)
    learnt = np.zeros(len(loss), np.int64)
    learnt[padded] = (flags * (np.arange(length) >= length - padding[padded, None])).sum(axis=1)
    check(
        learnt > 0, ".loss", lambda row: f"found {learnt[row]} tokens of padding to be learnt, expected none"
    )


def _check_annotations(rows: Rows, index: Index, padding: np.ndarray, check: Check) -> None:
    """Labels of texts stand at first tokens, none at padding; of a pair, both answers are in one row."""
    length = index.sequence_length
    marks = unpack_bits(rows.starts, length)
    if rows.labels is not None:
        text: np.ndarray = np.arange(length) < length - padding[:, None]
        may = marks & text if index.labelled == "text" else text
        stray = (rows.labels > 0) & ~may
        what = "the first token of a text" if index.labelled == "text" else "a text"
        check(
            np.asarray(stray.any(axis=1)),
            ".labels",
            lambda row: f"found a label at {stray[row].argmax()}, expected {what}",
        )
    if index.pairs:
        texts = marks.sum(axis=1) - (padding > 0)
        check(
            np.asarray(texts % 2 == 1),
            ".starts",
            lambda row: f"found {texts[row]} texts, expected two of each pair",
        )


def _row_checksums(rows: Rows) -> dict[int, int]:
    """By source, the sum of its rows' checksums. The loop is over rows: each is kilobytes, a call 0.3 µs."""
    arrays = [
        np.ascontiguousarray(array)
        for array in (rows.tokens, rows.starts, rows.loss, rows.labels)
        if array is not None
    ]
    sums: dict[int, int] = {}
    for source, *parts in zip(rows.sources.tolist(), *map(_lines, arrays), strict=True):
        crc = 0
        for part in parts:
            crc = zlib.crc32(part, crc)
        sums[source] = sums.get(source, 0) + crc
    return sums


def _lines(array: np.ndarray) -> Iterator[Any]:
    """The rows of a matrix as buffers, which cost less to make than arrays do."""
    view, width = array.data.cast("B"), array.shape[1] * array.itemsize
    return (view[first : first + width] for first in range(0, array.nbytes, width))


def _sum_faults(where: str, split: Split, epochs: list[Seen], index: Index) -> Iterator[str]:
    """Where the sums of whole epochs differ from the index or from one another."""
    weights = [float((source or {}).get("weight", 1)) for source in index.recipe.get("sources", {}).values()]
    is_whole = all(weight.is_integer() for weight in weights)
    has_loss = any(".loss" in shard.checksums for epoch in split.epochs for shard in epoch)
    # A chat template begins texts as it likes, and an end may lie in the rows of another split than its
    # beginning: then documents cannot be told from pieces of them.
    is_countable = all(weight == 1 for weight in weights) and not has_loss and index.special.bos is not None
    for number, epoch in enumerate(epochs):
        expected = {"rows": split.rows, "tokens": split.tokens, "documents": split.documents}
        if not is_whole:  # a fraction of a source is another fraction in each epoch
            expected = {"rows": split.rows}
        elif not is_countable:
            del expected["documents"]
        for name, count in expected.items():
            found, slack = getattr(epoch, name), epoch.unsure if name == "tokens" else 0
            if not found <= count <= found + slack:
                yield f"{where} {number}: found {found:,} {name}, expected {count:,} as the index says"
        if is_whole and epoch.pieces + epoch.unsure < split.documents:
            yield f"{where} {number}: found {epoch.pieces:,} pieces, expected {split.documents:,} or more"
        if is_whole and epoch.rows_of != epochs[0].rows_of:
            both = epoch.rows_of.keys() | epochs[0].rows_of.keys()
            other = [n for n in sorted(both) if epoch.rows_of.get(n) != epochs[0].rows_of.get(n)]
            names = ", ".join(index.source(n) for n in other)
            yield f"{where} {number}: found other rows of {names} than in epoch 0, expected the same"
