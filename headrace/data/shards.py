"""Packed data on disk: rows of one length in .npy shards, beside an index.json that says all there is to know
about them. Any tool reads them; the index makes a folder of files a dataset."""

import contextlib
import dataclasses
import json
import os
import re
import tokenize
import uuid
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headrace.errors import UserError

VERSION = 2
SUFFIXES = {"", ".starts", ".loss", ".sources", ".labels"}
HIGHEST = np.array([max(byte.bit_length() - 1, 0) for byte in range(256)])
LIMITS = {"uint16": 1 << 16, "uint32": 1 << 32}


@dataclass(frozen=True)
class Special:
    """Ids of the special tokens a tokenizer has; None for those it lacks."""

    bos: int | None
    eos: int | None
    pad: int | None
    mask: int | None

    @property
    def filler(self) -> int:
        """What fills rows. A tokenizer without a padding token pads with its end token, as is the custom."""
        return next(token for token in (self.pad, self.eos, self.bos) if token is not None)


@dataclass(frozen=True)
class Rows:
    """Packed rows, n of them. Bits are eight to a byte, the first in the lowest, and a row begins on a byte.

    `starts` marks the first token of each document or piece of one in a row. Padding comes last in a row, is
    marked like a document and is known by being nothing but filler. `loss` marks the tokens to be learnt;
    None means all. `sources` says which source a row is from. `labels` has, at a token with a label, its
    number in the index plus one; None where no row has any."""

    tokens: np.ndarray  # [n s] uint16 or uint32
    starts: np.ndarray  # [n ceil(s/8)] uint8
    loss: np.ndarray | None  # [n ceil(s/8)] uint8
    sources: np.ndarray  # [n] uint16
    labels: np.ndarray | None = None  # [n s] uint16

    def __len__(self) -> int:
        return len(self.tokens)

    def arrays(self) -> dict[str, np.ndarray]:
        """By the suffix of the file that holds each: SHARD.npy, SHARD.starts.npy..."""
        named = {"": self.tokens, ".starts": self.starts, ".loss": self.loss, ".sources": self.sources}
        named |= {".labels": self.labels}
        return {suffix: array for suffix, array in named.items() if array is not None}

    def take(self, rows: np.ndarray | slice) -> "Rows":
        loss = None if self.loss is None else self.loss[rows]
        labels = None if self.labels is None else self.labels[rows]
        return Rows(self.tokens[rows], self.starts[rows], loss, self.sources[rows], labels)


@dataclass(frozen=True)
class Shard:
    """`name` stands before the suffixes of Rows.arrays; `checksums` are CRC-32, in hex, by suffix."""

    name: str
    rows: int
    checksums: dict[str, str]


@dataclass(frozen=True)
class Split:
    rows: int  # of one epoch
    documents: int
    tokens: int  # without padding, of one epoch; about, where a source's weight is not a whole number
    bytes: int  # of text, of one epoch
    epochs: tuple[tuple[Shard, ...], ...]  # the same rows in another order each


@dataclass(frozen=True)
class Index:
    """What index.json holds."""

    sequence_length: int
    dtype: str
    vocab: int
    special: Special
    tokenizer_sha256: str
    unigram_entropy: float  # in nats, of the training tokens: the loss of a model that ignores context
    sources: tuple[str, ...]  # names, by their number in Rows.sources
    splits: dict[str, Split]  # train, and evaluation, which may have no rows
    recipe: dict[str, Any]
    inputs: dict[str, str] = dataclasses.field(default_factory=dict)  # checksums: sources, tokenizer
    labels: tuple[str, ...] = ()  # names, by their number
    labelled: Literal["", "text", "tokens"] = ""  # what has them: a text, at its first token, or each token
    pairs: bool = False  # whether documents come in twos, the answer that was preferred and then the other
    version: int = VERSION

    def write(self, folder: Path) -> None:
        write_json(folder / "index.json", dataclasses.asdict(self))

    def source(self, number: int) -> str:
        """The name of a row's source."""
        if number >= len(self.sources):
            known = f"the index has {len(self.sources)} sources"
            raise UserError(
                f"a row is of source {number}, and {known}; `headrace data verify` finds the file"
            )
        return self.sources[number]

    @classmethod
    def parse(cls, text: str | bytes, where: str) -> "Index":
        try:
            values = json.loads(text)
            if values["version"] != VERSION:
                raise UserError(
                    f"{where} has version {values['version']}, this program reads {VERSION}; make the data "
                    "again with `headrace data prepare RECIPE`"
                )
            splits = {
                name: Split(
                    **split
                    | {"epochs": tuple(tuple(Shard(**shard) for shard in epoch) for epoch in split["epochs"])}
                )
                for name, split in values["splits"].items()
            }
            for shard in (one for split in splits.values() for epoch in split.epochs for one in epoch):
                check_name(shard, where)
            index = cls(
                **values
                | {
                    "special": Special(**values["special"]),
                    "sources": tuple(values["sources"]),
                    "labels": tuple(values.get("labels", ())),
                    "splits": splits,
                }
            )
            _check_values(index)
            return index
        except UserError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise UserError(f"{where} is not an index of packed data") from None


def check_name(shard: Shard, where: str) -> None:
    """A dataset may come from anywhere: its index names no file outside of its folder."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", shard.name) or not set(shard.checksums) <= SUFFIXES:
        raise UserError(f"{where} names the shard {shard.name!r}, expected a plain name, as train-0-00000")


def _check_values(index: Index) -> None:
    """ValueError where a value is of another kind than we write: what reads the index relies on it."""
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
        or not (special and index.sequence_length and index.dtype in LIMITS and "train" in index.splits)
    ):
        raise ValueError


def smallest_dtype(vocab: int) -> str:
    return next(name for name, limit in LIMITS.items() if vocab <= limit)


def pack_bits(flags: np.ndarray) -> np.ndarray:
    return np.packbits(flags, axis=-1, bitorder="little")


def unpack_bits(bits: np.ndarray, length: int) -> np.ndarray:
    return np.unpackbits(bits, axis=-1, count=length, bitorder="little").view(bool)


def last_starts(starts: np.ndarray) -> np.ndarray:
    """The column of the last mark of each row, from its bits."""
    bytes_back = (starts[:, ::-1] != 0).argmax(axis=1)
    byte = starts.shape[1] - 1 - bytes_back
    return 8 * byte + HIGHEST[starts[np.arange(len(starts)), byte]]


def filler_begins(tokens: np.ndarray, filler: int) -> np.ndarray:
    """The column from which a row is nothing but filler; its length if it ends in something else."""
    length = tokens.shape[1]
    begins = np.full(len(tokens), length)
    ending = np.flatnonzero(tokens[:, -1] == filler)  # few, unless documents have rows of their own
    other = tokens[ending] != filler
    begins[ending] = np.where(other.any(axis=1), length - other[:, ::-1].argmax(axis=1), 0)
    return begins


def padding_begins(tokens: np.ndarray, starts: np.ndarray, filler: int) -> np.ndarray:
    """The column from which each row is padding; its length if none is."""
    last = last_starts(starts)
    return np.where(filler_begins(tokens, filler) <= last, last, tokens.shape[1])


def checksum(content: Any) -> str:
    """CRC-32 of a buffer: 2 GB/s, and in the standard library."""
    return f"{zlib.crc32(content):08x}"


def write_rows(folder: Path, name: str, rows: Rows) -> Shard:
    return write_blocks(folder, name, [rows], len(rows))


def write_blocks(folder: Path, name: str, blocks: Iterable[Rows], count: int) -> Shard:
    """Writes a shard of `count` rows as they come, each file whole or not at all, and on the disk when this
    returns."""
    files: dict[str, Any] = {}
    checksums: dict[str, int] = {}
    written = 0
    with contextlib.ExitStack() as stack:
        for block in blocks:
            written += len(block)
            for suffix, array in block.arrays().items():
                if suffix not in files:
                    files[suffix] = stack.enter_context(atomic(folder / f"{name}{suffix}.npy"))
                    shape = (count, *array.shape[1:])
                    header = {"descr": array.dtype.str, "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(files[suffix], header)
                data = np.ascontiguousarray(array).data
                checksums[suffix] = zlib.crc32(data, checksums.get(suffix, 0))
                files[suffix].write(data)
        assert written == count
    return Shard(name, count, {suffix: f"{value:08x}" for suffix, value in checksums.items()})


def read_rows(folder: Path, name: str, *, mmap: bool = True) -> Rows:
    """A shard's arrays as they lie on a local disk."""

    def load(suffix: str) -> np.ndarray:
        file = folder / f"{name}{suffix}.npy"
        try:
            return np.load(file, mmap_mode="r" if mmap else None)
        except tokenize.TokenError as error:  # numpy lets it through where a header is damaged
            raise UserError(f"{file} is damaged: {error.args[0]}") from None

    loss, labels = (
        load(suffix) if (folder / f"{name}{suffix}.npy").exists() else None for suffix in (".loss", ".labels")
    )
    return Rows(load(""), load(".starts"), loss, load(".sources"), labels)


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Any]:
    """Opens a file for writing that takes its name only once all of it is on the disk."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)  # a full disk is told with the file that did not fit
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    with atomic(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8"))
