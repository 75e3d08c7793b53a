"""Packed data on disk: rows of one length in .npy shards, described by index.json.

Any tool can read the shards. The index, which is written last, makes a folder of files a dataset."""

import contextlib
import dataclasses
import errno
import json
import os
import re
import tokenize
import uuid
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from headrace.errors import UserError

VERSION = 2
COLUMN_SUFFIXES = {"", ".starts", ".loss", ".sources", ".labels"}
HIGHEST_BIT = np.array([max(byte.bit_length() - 1, 0) for byte in range(256)])  # of each byte, from 0
DTYPE_LIMITS = {"uint16": 1 << 16, "uint32": 1 << 32}


@dataclass(frozen=True)
class SpecialTokenIds:
    """Ids of a tokenizer's special tokens; None for those that it lacks."""

    bos: int | None
    eos: int | None
    pad: int | None
    mask: int | None

    @property
    def filler(self) -> int:
        """The id that fills rows: padding, or the end token where there is none, as is usual."""
        return next(token for token in (self.pad, self.eos, self.bos) if token is not None)


@dataclass(frozen=True)
class Rows:
    """Packed rows, n of them, of s tokens.

    Bits are eight to a byte, the first in the lowest; each row begins on a byte. Padding comes last in a row.
    It is marked in `starts` like a document, and recognized by being nothing but filler."""

    tokens: np.ndarray  # [n s] uint16 or uint32
    starts: (
        np.ndarray
    )  # [n ceil(s/8)] uint8; bits of the first tokens of documents, and of parts of documents
    loss_bits: np.ndarray | None  # [n ceil(s/8)] uint8; bits of the tokens to train on; None: all of them
    sources: np.ndarray  # [n] uint16; number of the source of each row
    labels: np.ndarray | None = (
        None  # [n s] uint16; number of a label + 1, 0 for none; None: no row has labels
    )

    def __len__(self) -> int:
        return len(self.tokens)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that are not None, by the suffix of their file: SHARD.npy, SHARD.starts.npy..."""
        by_suffix = {
            "": self.tokens,
            ".starts": self.starts,
            ".loss": self.loss_bits,
            ".sources": self.sources,
            ".labels": self.labels,
        }
        return {suffix: array for suffix, array in by_suffix.items() if array is not None}

    def select(self, rows: np.ndarray | slice) -> "Rows":
        """Return some of the rows, by their indices or as a slice."""
        loss_bits = None if self.loss_bits is None else self.loss_bits[rows]
        labels = None if self.labels is None else self.labels[rows]
        return Rows(self.tokens[rows], self.starts[rows], loss_bits, self.sources[rows], labels)


@dataclass(frozen=True)
class Shard:
    """The files NAME.npy, NAME.starts.npy... of some rows, as index.json lists them."""

    name: str
    rows: int
    checksums: dict[str, str]  # CRC-32 in hex, by the suffix of the file


@dataclass(frozen=True)
class Split:
    """Sizes and shards of one split, as index.json lists them. All sizes are of one epoch."""

    rows: int
    documents: int
    tokens: int  # without padding; approximate where the weight of a source is not a whole number
    bytes: int  # of text
    epochs: tuple[tuple[Shard, ...], ...]  # the same rows, in another order for each epoch


@dataclass(frozen=True)
class Index:
    """The content of index.json."""

    sequence_length: int
    dtype: str
    vocab: int
    special: SpecialTokenIds
    tokenizer_sha256: str
    unigram_entropy: float  # in nats, of the training tokens: the loss of a model that ignores context
    sources: tuple[str, ...]  # names, by their number in Rows.sources
    splits: dict[str, Split]  # train, and evaluation, which may have no rows
    recipe: dict[str, Any]
    inputs: dict[str, str] = dataclasses.field(default_factory=dict)  # checksums: sources, tokenizer
    labels: tuple[str, ...] = ()  # names, by their number
    labelled: Literal["", "text", "tokens"] = (
        ""  # a text has its label at its first token, or each token has one
    )
    pairs: bool = False  # documents come in pairs: the preferred answer, then the rejected one
    version: int = VERSION

    def write(self, folder: Path) -> None:
        write_json(folder / "index.json", dataclasses.asdict(self))

    def source_name(self, number: int) -> str:
        """The name of a source, from its number in `DelimitedReader.sources`."""
        if number >= len(self.sources):
            raise UserError(
                f"a row has source {number}, but the index has only {len(self.sources)} sources; "
                "`headrace data verify` finds the file"
            )
        return self.sources[number]

    @classmethod
    def parse(cls, text: str | bytes, location: str) -> "Index":
        """Parse the content of an index.json. `location` is its path or URL, for messages."""
        try:
            values = json.loads(text)
            if values["version"] != VERSION:
                raise UserError(
                    f"{location} has version {values['version']}, expected {VERSION}; make the data again "
                    "with `headrace data prepare RECIPE`"
                )
            splits = {name: _parse_split(split, location) for name, split in values["splits"].items()}
            parsed = {
                "special": SpecialTokenIds(**values["special"]),
                "sources": tuple(values["sources"]),
                "labels": tuple(values.get("labels", ())),
                "splits": splits,
            }
            index = cls(**values | parsed)
            _check_values(index)
            return index
        except UserError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise UserError(f"{location} is not an index of packed data") from None


def _parse_split(values: dict[str, Any], location: str) -> Split:
    epochs = tuple(tuple(Shard(**shard) for shard in epoch) for epoch in values["epochs"])
    for epoch in epochs:
        for shard in epoch:
            check_shard_name(shard, location)
    return Split(**values | {"epochs": epochs})


def check_shard_name(shard: Shard, location: str) -> None:
    """Refuse names of files outside of the dataset's folder: an index may come from anywhere."""
    is_plain = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", shard.name)
    if not is_plain or not set(shard.checksums) <= COLUMN_SUFFIXES:
        raise UserError(
            f"{location} names the shard {shard.name!r}, expected a plain name such as train-0-00000"
        )


def _check_values(index: Index) -> None:
    """Raise ValueError for values of a type or range that we never write: readers of the index rely on it."""
    splits = list(index.splits.values())
    shards = [shard for split in splits for epoch in split.epochs for shard in epoch]
    special = [token for token in dataclasses.astuple(index.special) if token is not None]
    sizes = [index.sequence_length, index.vocab, *special, *(shard.rows for shard in shards)]
    sizes += [size for split in splits for size in (split.rows, split.documents, split.tokens, split.bytes)]
    texts = [*index.sources, *index.labels, index.tokenizer_sha256, *index.inputs.values()]
    texts += [crc for shard in shards for crc in shard.checksums.values()]
    weights = [(source or {}).get("weight", 1) for source in index.recipe.get("sources", {}).values()]
    numbers = [index.unigram_entropy, *weights]
    if (
        not all(type(size) is int and 0 <= size < 2**48 for size in sizes)
        or not all(isinstance(text, str) for text in texts)
        or not all(type(number) in (int, float) and abs(number) < 1e9 for number in numbers)
        or index.labelled not in ("", "text", "tokens")
        or type(index.pairs) is not bool
        or not (special and index.sequence_length and index.dtype in DTYPE_LIMITS and "train" in index.splits)
    ):
        raise ValueError


def smallest_dtype(vocab: int) -> str:
    """The smallest type that holds the token ids of a vocabulary: "uint16" or "uint32"."""
    return next(name for name, limit in DTYPE_LIMITS.items() if vocab <= limit)


def pack_bits(flags: np.ndarray) -> np.ndarray:
    return np.packbits(flags, axis=-1, bitorder="little")


def unpack_bits(bits: np.ndarray, length: int) -> np.ndarray:
    return np.unpackbits(bits, axis=-1, count=length, bitorder="little").view(bool)


def last_start_columns(starts: np.ndarray) -> np.ndarray:
    """Column of the last set bit of each row, [n], from the bits of `DelimitedReader.starts`."""
    bytes_back = (starts[:, ::-1] != 0).argmax(axis=1)
    byte = starts.shape[1] - 1 - bytes_back
    return 8 * byte + HIGHEST_BIT[starts[np.arange(len(starts)), byte]]


def filler_start_columns(tokens: np.ndarray, filler: int) -> np.ndarray:
    """Column from which each row is nothing but filler, [n]; its length if it ends in another token."""
    length = tokens.shape[1]
    columns = np.full(len(tokens), length)
    candidates = np.flatnonzero(tokens[:, -1] == filler)  # few, unless documents have rows of their own
    is_text = tokens[candidates] != filler
    columns[candidates] = np.where(is_text.any(axis=1), length - is_text[:, ::-1].argmax(axis=1), 0)
    return columns


def padding_start_columns(tokens: np.ndarray, starts: np.ndarray, filler: int) -> np.ndarray:
    """Column from which each row is padding, [n]; its length if it has none."""
    last = last_start_columns(starts)
    return np.where(filler_start_columns(tokens, filler) <= last, last, tokens.shape[1])


def crc32_hex(content: bytes | memoryview) -> str:
    """CRC-32 of a buffer, as 8 hexadecimal digits: 2 GB/s, and in the standard library."""
    return f"{zlib.crc32(content):08x}"


def write_rows(folder: Path, name: str, rows: Rows) -> Shard:
    """Write rows as a shard."""
    return write_shard(folder, name, [rows], len(rows))


def write_shard(folder: Path, name: str, blocks: Iterable[Rows], count: int) -> Shard:
    """Write a shard of `count` rows, which come in blocks.

    Each file is written atomically, and synced to the disk before this returns."""
    files: dict[str, BinaryIO] = {}
    checksums: dict[str, int] = {}
    rows_written = 0
    with contextlib.ExitStack() as stack:
        for block in blocks:
            rows_written += len(block)
            for suffix, array in block.arrays().items():
                if suffix not in files:
                    files[suffix] = stack.enter_context(open_atomic(folder / f"{name}{suffix}.npy"))
                    shape = (count, *array.shape[1:])
                    header = {"descr": array.dtype.str, "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(files[suffix], header)
                data = np.ascontiguousarray(array).data
                checksums[suffix] = zlib.crc32(data, checksums.get(suffix, 0))
                files[suffix].write(data)
        assert rows_written == count
    return Shard(name, count, {suffix: f"{value:08x}" for suffix, value in checksums.items()})


def read_rows(folder: Path, name: str, *, mmap: bool = True) -> Rows:
    """Open the arrays of a shard on a local disk, as memory maps or (`mmap=False`) in memory."""

    def load(suffix: str) -> np.ndarray:
        file = folder / f"{name}{suffix}.npy"
        try:
            return np.load(file, mmap_mode="r" if mmap else None)
        except tokenize.TokenError as error:  # not caught by numpy where a header is damaged
            raise UserError(f"{file} is damaged: {error.args[0]}") from None

    loss_bits, labels = (
        load(suffix) if (folder / f"{name}{suffix}.npy").exists() else None for suffix in (".loss", ".labels")
    )
    return Rows(load(""), load(".starts"), loss_bits, load(".sources"), labels)


@contextlib.contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that replaces `path` only when all of it is on the disk.

    A disk error is raised as an OSError with this path and an errno, whatever wrote to the file."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        if error.errno is None and error.args and "requested and" in str(error.args[0]):
            # numpy's "8192 requested and 4096 written", which drops the cause: the disk was full.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        if error.filename is None:
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Write a value as indented JSON, atomically."""
    with open_atomic(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8"))
