"""By what duplicates are known: a hash of each text, and MinHash signatures (Broder 1997) for texts that are
nearly alike. They lie beside a normalised part, so that duplicates are found without reading texts again."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.data import shards
from headrace.data.clean import words

PERMUTATIONS = 128
SHINGLE = 5  # words, as in datatrove
RECALL = 0.98  # share of pairs exactly at the threshold that some band brings together
SHINGLES = 1 << 15  # at a time: 128 KB of 4-byte hashes stay in the cache for all permutations

# Odd, so that multiplying modulo 2^32 is a permutation of hashes, which are as good as random already.
MULTIPLIERS = words.mix(np.arange(1, PERMUTATIONS + 1, dtype=np.uint64)).astype(np.uint32) | np.uint32(1)


class Fingerprints:
    """Those of a part's documents, gathered table by table and written as PART.KIND.npy:
    texts [n 2] the 128-bit hash, ids [n 3] that of the id and the document's number in the input,
    signatures [n 128], bands [bands n] a hash of each band of the signature."""

    def __init__(self, cfg: Any, ids: bool) -> None:
        self.near = cfg.near
        self.kinds = ["texts"] * cfg.exact + ["ids"] * ids + ["signatures", "bands"] * (cfg.near is not None)
        self.gathered: dict[str, list[np.ndarray]] = {kind: [] for kind in self.kinds}

    def add(self, table: pa.Table, contents: pa.LargeStringArray, numbers: np.ndarray) -> None:
        """`contents` is what people read of each document, `numbers` their numbers in the input."""
        if "texts" in self.kinds:
            whole = (
                table["text"] if not table["text"].null_count else table["text"].fill_null(table["messages"])
            )
            self.gathered["texts"].append(digests(whole.cast(pa.large_string())))
        if "ids" in self.kinds:
            keys = digests(table["id"].cast(pa.large_string()))
            self.gathered["ids"].append(np.column_stack([keys, numbers.astype(np.uint64)]))
        if self.near is not None:
            signed = signatures(contents)
            self.gathered["signatures"].append(signed)
            self.gathered["bands"].append(band_keys(signed, self.near))

    def write(self, folder: Path, part: int) -> None:
        for kind, arrays in self.gathered.items():
            with shards.atomic(place(folder, part, kind)) as file:
                np.save(
                    file, np.concatenate([empty(kind, self.near), *arrays], axis=-1 if kind == "bands" else 0)
                )


def place(folder: Path, part: int, kind: str) -> Path:
    return folder / f"{part:05}.{kind}.npy"


def digests(texts: pa.ChunkedArray) -> np.ndarray:
    """128 bits of the SHA-256 of each text, as two numbers."""
    found = []
    for chunk in texts.chunks:
        _, places, values = chunk.buffers()
        offsets = np.frombuffer(places, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1].tolist()
        data = memoryview(values or b"")
        found += [
            hashlib.sha256(data[start:stop]).digest()[:16]
            for start, stop in zip(offsets[:-1], offsets[1:], strict=True)
        ]
    return np.frombuffer(b"".join(found), ">u8").astype(np.uint64).reshape(-1, 2)


def signatures(texts: pa.LargeStringArray) -> np.ndarray:
    """[n PERMUTATIONS] uint32: the least hash of each text's shingles under each permutation. The share of
    places where two signatures agree estimates the Jaccard index of the texts' shingles, +- 0.035 at 0.8."""
    signed = np.full((len(texts), PERMUTATIONS), np.iinfo(np.uint32).max)
    for block in words.blocks(texts):
        shingles = words.grams(words.split(block), SHINGLE)
        hashes = (shingles.hashes >> np.uint64(32)).astype(np.uint32)
        for begin in range(0, len(hashes), SHINGLES):
            some = hashes[begin : begin + SHINGLES]
            offsets = np.clip(shingles.offsets - begin, 0, len(some))
            filled = np.flatnonzero(np.diff(offsets))
            least, permuted = np.empty((PERMUTATIONS, len(filled)), np.uint32), np.empty_like(some)
            for row, multiplier in zip(least, MULTIPLIERS, strict=True):
                np.multiply(some, multiplier, out=permuted)
                np.minimum.reduceat(permuted, offsets[filled], out=row)
            texts_of = block.texts[filled]
            signed[texts_of] = np.minimum(signed[texts_of], least.T)
    return signed


def bands(threshold: float) -> tuple[int, int]:
    """How many bands of how many rows: the most rows, so the fewest false candidates, that still bring RECALL
    of the pairs at the threshold together."""
    for rows in range(PERMUTATIONS, 0, -1):
        if 1 - (1 - threshold**rows) ** (PERMUTATIONS // rows) >= RECALL:
            return PERMUTATIONS // rows, rows
    return PERMUTATIONS, 1


def band_keys(signed: np.ndarray, threshold: float) -> np.ndarray:
    """[bands n] uint64: texts whose signatures agree in all rows of a band have the same key there."""
    number, rows = bands(threshold)
    values = signed[:, : number * rows].astype(np.uint64).reshape(-1, number, rows)
    keys = np.zeros(values.shape[:2], np.uint64)
    for row in range(rows):
        keys = words.mix(keys + values[:, :, row] + np.uint64(row + 1))
    return np.ascontiguousarray(keys.T)


def empty(kind: str, near: float | None) -> np.ndarray:
    if kind == "bands":
        assert near is not None
        return np.empty((bands(near)[0], 0), np.uint64)
    width = {"texts": 2, "ids": 3, "signatures": PERMUTATIONS}[kind]
    return np.empty((0, width), np.uint32 if kind == "signatures" else np.uint64)
