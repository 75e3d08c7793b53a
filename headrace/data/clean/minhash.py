"""Fingerprints for deduplication: a hash of each text, and MinHash signatures (Broder 1997) for texts that
are nearly equal. They are stored next to a normalized part, so that duplicates are found without reading
texts again."""

import hashlib
import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa

from headrace.config.sections import NormalizeKeys
from headrace.data import shards
from headrace.data.clean import words

PERMUTATIONS = 128
SHINGLE_WORDS = 5  # as in datatrove
RECALL = 0.98  # share of the pairs exactly at the threshold that at least one band finds
SHINGLES_PER_BATCH = 1 << 15  # 128 KB of 4-byte hashes: they stay in the cache for all permutations

# Odd, so that multiplication modulo 2^32 permutes the hashes, which are as good as random before.
MULTIPLIERS = words.mix_bits(np.arange(1, PERMUTATIONS + 1, dtype=np.uint64)).astype(np.uint32) | np.uint32(1)


class Fingerprints:
    """Fingerprints of the documents of a part, added table by table and written as PART.KIND.npy:
    texts [n 2] the 128-bit hash, ids [n 3] the hash of the id and the index of the document in the input,
    signatures [n 128], bands [bands n] a hash of each band of the signature."""

    def __init__(self, cfg: NormalizeKeys, ids: bool) -> None:
        self.near = cfg.dedup_jaccard
        near_kinds = ["signatures", "bands"] * (self.near is not None)
        self.kinds = ["texts"] * cfg.dedup_exact + ["ids"] * ids + near_kinds
        self.arrays: dict[str, list[np.ndarray]] = {kind: [] for kind in self.kinds}

    def add(self, table: pa.Table, contents: pa.LargeStringArray, indices: np.ndarray) -> None:
        """Add documents: `contents` are their readable texts, `indices` their indices in the input."""
        if "texts" in self.kinds:
            texts = table["text"]
            documents = texts if not texts.null_count else texts.fill_null(table["messages"])
            self.arrays["texts"].append(hash_texts(documents.cast(pa.large_string())))
        if "ids" in self.kinds:
            keys = hash_texts(table["id"].cast(pa.large_string()))
            self.arrays["ids"].append(np.column_stack([keys, indices.astype(np.uint64)]))
        if self.near is not None:
            signatures = minhash_signatures(contents)
            self.arrays["signatures"].append(signatures)
            self.arrays["bands"].append(band_keys(signatures, self.near))

    def write(self, folder: Path, part: int) -> None:
        """Write one file of each kind for part number `part`."""
        for kind, arrays in self.arrays.items():
            axis = -1 if kind == "bands" else 0
            with shards.open_atomic(fingerprint_path(folder, part, kind)) as file:
                np.save(file, np.concatenate([empty_fingerprints(kind, self.near), *arrays], axis=axis))


def fingerprint_path(folder: Path, part: int, kind: str) -> Path:
    return folder / f"{part:05}.{kind}.npy"


def hash_texts(texts: pa.ChunkedArray) -> np.ndarray:
    """[n 2] uint64: the first 128 bits of the SHA-256 of each text."""
    digests = []
    for chunk in texts.chunks:
        _, starts, values = chunk.buffers()
        offsets = np.frombuffer(starts, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1].tolist()
        data = memoryview(values or b"")
        digests += [
            hashlib.sha256(data[start:stop]).digest()[:16] for start, stop in itertools.pairwise(offsets)
        ]
    return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64).reshape(-1, 2)


def minhash_signatures(texts: pa.LargeStringArray) -> np.ndarray:
    """[n PERMUTATIONS] uint32: the minimal hash of each text's shingles under each permutation. The share of
    positions where two signatures agree estimates the Jaccard index of the shingles, +- 0.035 at 0.8."""
    signatures = np.full((len(texts), PERMUTATIONS), np.iinfo(np.uint32).max)
    for block in words.iter_blocks(texts):
        shingles = words.make_ngrams(words.split_words(block), SHINGLE_WORDS)
        hashes = (shingles.hashes >> np.uint64(32)).astype(np.uint32)
        for start in range(0, len(hashes), SHINGLES_PER_BATCH):
            batch = hashes[start : start + SHINGLES_PER_BATCH]
            offsets = np.clip(shingles.offsets - start, 0, len(batch))
            non_empty = np.flatnonzero(np.diff(offsets))
            minima, permuted = np.empty((PERMUTATIONS, len(non_empty)), np.uint32), np.empty_like(batch)
            for row, multiplier in zip(minima, MULTIPLIERS, strict=True):
                np.multiply(batch, multiplier, out=permuted)
                np.minimum.reduceat(permuted, offsets[non_empty], out=row)
            indices = block.text_indices[non_empty]
            signatures[indices] = np.minimum(signatures[indices], minima.T)
    return signatures


def choose_bands(threshold: float) -> tuple[int, int]:
    """The number of bands and the rows of each: the most rows, and so the fewest false candidates, with which
    bands still find RECALL of the pairs at the threshold."""
    for rows in range(PERMUTATIONS, 0, -1):
        if 1 - (1 - threshold**rows) ** (PERMUTATIONS // rows) >= RECALL:
            return PERMUTATIONS // rows, rows
    return PERMUTATIONS, 1


def band_keys(signatures: np.ndarray, threshold: float) -> np.ndarray:
    """[bands n] uint64: texts whose signatures agree in all rows of a band have equal keys there."""
    num_bands, rows = choose_bands(threshold)
    values = signatures[:, : num_bands * rows].astype(np.uint64).reshape(-1, num_bands, rows)
    keys = np.zeros(values.shape[:2], np.uint64)
    for row in range(rows):
        keys = words.mix_bits(keys + values[:, :, row] + np.uint64(row + 1))
    return np.ascontiguousarray(keys.T)


def empty_fingerprints(kind: str, near: float | None) -> np.ndarray:
    """An array of fingerprints of no documents. `near` is the threshold of near duplicates."""
    if kind == "bands":
        assert near is not None
        return np.empty((choose_bands(near)[0], 0), np.uint64)
    width = {"texts": 2, "ids": 3, "signatures": PERMUTATIONS}[kind]
    return np.empty((0, width), np.uint32 if kind == "signatures" else np.uint64)
