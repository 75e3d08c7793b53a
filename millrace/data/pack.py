"""Token ids to rows of one length, in .npy shards beside an index.json that says all there is to know
about them. Documents are joined and cut: only the last row is padded, at the price of split documents."""

import dataclasses
import hashlib
import json
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from millrace.data.tokenise import Encoded, Special, write_json
from millrace.errors import UserError

VERSION = 1
SHARD_BYTES = 256 << 20
LIMITS = {"uint16": 1 << 16, "uint32": 1 << 32}
SPLITS = ("train", "evaluation")


@dataclass(frozen=True)
class Shard:
    file: str
    rows: int
    crc32: int  # of the file's bytes


@dataclass(frozen=True)
class Split:
    rows: int
    documents: int
    tokens: int  # without padding
    bytes: int  # of text
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Index:
    """What index.json holds."""

    sequence_length: int
    dtype: str
    vocab: int
    special: Special
    tokenizer_sha256: str
    unigram_entropy: float  # in nats, of the training tokens: the loss of a model that ignores context
    splits: dict[str, Split]
    recipe: dict[str, Any]
    version: int = VERSION

    def write(self, folder: Path) -> None:
        write_json(folder / "index.json", dataclasses.asdict(self))

    @classmethod
    def read(cls, folder: Path) -> "Index":
        file = folder / "index.json"
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            if values["version"] != VERSION:
                raise UserError(f"{file} has version {values['version']}, this program reads {VERSION}")
            splits = {
                name: Split(**split | {"shards": tuple(Shard(**shard) for shard in split["shards"])})
                for name, split in values["splits"].items()
            }
            return cls(**values | {"special": Special(**values["special"]), "splits": splits})
        except UserError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UserError(f"{file} is not an index of packed data") from None


@dataclass(frozen=True)
class Packed:
    splits: dict[str, Split]
    unigram_entropy: float


def pack(
    documents: Iterable[Encoded],
    folder: Path,
    *,
    cfg: Any,
    seed: int,
    filler: int,
    shard_bytes: int = SHARD_BYTES,
) -> Packed:
    """Shuffles documents, cuts them into rows, shuffles the rows and writes them. `cfg` has sequence_length
    and evaluation; `filler` fills the last row of each split."""
    found: dict[str, list[Encoded]] = {name: [] for name in SPLITS}
    for document in documents:
        found["evaluation" if is_held_out(document.id, cfg.evaluation) else "train"].append(document)
    check_split(len(found["train"]), len(found["evaluation"]), cfg.evaluation)

    splits: dict[str, Split] = {}
    entropy = 0.0
    for number, name in enumerate(SPLITS):
        if not found[name]:
            splits[name] = Split(0, 0, 0, 0, ())
            continue
        random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, number])))
        stream = np.concatenate([found[name][i].tokens for i in random.permutation(len(found[name]))])
        count = len(found[name])
        size = sum(document.bytes for document in found.pop(name))  # popped: the stream holds the tokens now
        if name == "train":
            entropy = unigram_entropy(stream)
        rows = cut(stream, cfg.sequence_length, filler)
        shards = write_shards(rows, random.permutation(len(rows)), folder / name, shard_bytes)
        splits[name] = Split(len(rows), count, len(stream), size, shards)
    return Packed(splits, entropy)


def choose_dtype(asked: str, vocab: int) -> str:
    """The smallest dtype that holds every id, or the one asked for if it does."""
    dtype = next(name for name, limit in LIMITS.items() if vocab <= limit) if asked == "auto" else asked
    if vocab > LIMITS[dtype]:
        raise UserError(f"pack.dtype: {dtype} holds {LIMITS[dtype]} ids, the tokenizer has {vocab}; use auto")
    return dtype


def is_held_out(id: str, share: float) -> bool:
    """Decided by a document's id alone, so that neither order, seed nor the other documents matter."""
    return int.from_bytes(hashlib.sha256(id.encode("utf-8")).digest()[:8]) < share * 2.0**64


def choose_filler(special: Special) -> int:
    """The padding id. A tokenizer without one pads with its end token, as is the custom."""
    choices = (special.pad, special.eos, special.bos)
    return next(token for token in choices if token is not None)


def crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            value = zlib.crc32(chunk, value)
    return value


def check_split(train: int, held_out: int, share: float) -> None:
    if not train and not held_out:
        raise UserError("source: it gives no documents")
    if not train:
        raise UserError(f"pack.evaluation: {share} holds out all {held_out} documents; lower it")
    if share and not held_out:
        raise UserError(f"pack.evaluation: {share} holds out none of {train} documents; raise it, or set 0.0")


def unigram_entropy(stream: np.ndarray) -> float:
    step = 1 << 24  # bincount widens to 64 bits, so a part at a time
    size = int(stream.max()) + 1
    counts = sum(np.bincount(stream[i : i + step], minlength=size) for i in range(0, len(stream), step))
    share = counts[counts > 0] / len(stream)  # type: ignore[index]
    return float(-(share * np.log(share)).sum())


def cut(stream: np.ndarray, length: int, filler: int) -> np.ndarray:
    missing = math.ceil(len(stream) / length) * length - len(stream)
    return np.pad(stream, (0, missing), constant_values=filler).reshape(-1, length)


def write_shards(rows: np.ndarray, order: np.ndarray, stem: Path, shard_bytes: int) -> tuple[Shard, ...]:
    step = max(1, shard_bytes // rows[0].nbytes)
    shards = []
    for number, start in enumerate(range(0, len(order), step)):
        file = stem.with_name(f"{stem.name}-{number:05d}.npy")
        part = rows[order[start : start + step]]
        np.save(file, part)
        shards.append(Shard(file.name, len(part), crc32(file)))
    return tuple(shards)
