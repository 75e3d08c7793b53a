"""Positions and hashes of the words of many texts, for deduplication and for filters against repetition. Uses
numpy on the bytes of many texts at once; no text becomes a Python object."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import pyarrow as pa

BLOCK_BYTES = 1 << 18  # text processed at a time: arrays of 8-byte integers then fit in a 2 MB cache
# Share of spaces below which each character counts as a word: English has 0.17, Finnish 0.12, most code over
# 0.08.
MIN_SPACE_SHARE = 0.02
UNSPACED_SCRIPT_SHARE = 0.3  # share of characters of scripts without spaces above which each counts as a word


@dataclass(frozen=True)
class TextBlock:
    """Concatenated texts: piece i is data[offsets[i] : offsets[i + 1]]. A text longer than a block is divided
    among several. `text_indices` has the index of each piece's text, `is_start` whether it is its
    beginning."""

    data: np.ndarray
    offsets: np.ndarray
    text_indices: np.ndarray
    is_start: np.ndarray

    def __len__(self) -> int:
        return len(self.text_indices)


@dataclass(frozen=True)
class HashedWords:
    """Words of several texts; those of text i are hashes[offsets[i] : offsets[i + 1]]. `lengths` are in
    bytes."""

    hashes: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray


def iter_blocks(texts: pa.LargeStringArray, size: int = BLOCK_BYTES) -> Iterator[TextBlock]:
    """Divide texts into blocks of `size` bytes, up to 3 more. Where a text is divided depends on that text
    alone."""
    assert texts.null_count == 0
    _, starts, values = texts.buffers()
    starts = np.frombuffer(starts, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    data = np.frombuffer(values or b"", np.uint8)
    counts = np.maximum(1, -(-np.diff(starts) // size))
    text_indices = np.repeat(np.arange(len(texts)), counts)
    piece = np.arange(len(text_indices)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = np.append(starts[text_indices] + piece * size, starts[-1])
    for _ in range(3):  # a character has at most three continuation bytes
        inner = np.flatnonzero(piece)
        offsets[inner[is_continuation_byte(data[offsets[inner]])]] -= 1
    first = 0
    while first < len(text_indices):
        end = max(first + 1, int(np.searchsorted(offsets, offsets[first] + size, "right")) - 1)
        start, stop = offsets[first], offsets[end]
        yield TextBlock(
            data[start:stop],
            offsets[first : end + 1] - start,
            text_indices[first:end],
            piece[first:end] == 0,
        )
        first = end


def split_words(block: TextBlock) -> HashedWords:
    """Split texts into words: runs of letters and digits of any script, compared without ASCII case. In texts
    without spaces each character is a word. A text without letters and digits is one word."""
    data, offsets = block.data, block.offsets
    non_empty = offsets[:-1][np.diff(offsets) > 0]
    in_word = is_word_byte(data)
    starts_word = in_word.copy()
    starts_word[1:] &= ~in_word[:-1]
    starts_word[non_empty] = in_word[non_empty]
    unspaced = is_unspaced(block)
    if unspaced.any():
        starts_word |= in_word & ~is_continuation_byte(data) & np.repeat(unspaced, np.diff(offsets))
    ends_word = in_word
    ends_word[:-1] &= ~in_word[1:] | starts_word[1:]
    starts, stops = np.flatnonzero(starts_word), np.flatnonzero(ends_word) + 1
    wordless = np.flatnonzero((np.diff(np.searchsorted(starts, offsets)) == 0) & (np.diff(offsets) > 0))
    if len(wordless):
        starts = np.sort(np.append(starts, offsets[wordless]))
        stops = np.sort(np.append(stops, offsets[wordless + 1]))
    hashes = hash_spans(lower_ascii(data), starts, stops)
    return HashedWords(hashes, stops - starts, np.searchsorted(starts, offsets))


def make_ngrams(words: HashedWords, n: int) -> HashedWords:
    """The sequences of `n` consecutive words, hashed. A text of fewer words has one, of all its words."""
    counts = np.diff(words.offsets)
    text_ends = np.repeat(words.offsets[1:], counts)
    positions = np.arange(len(words.hashes))
    hashes, lengths = words.hashes * NGRAM_WEIGHTS[0], words.lengths.copy()
    for k in range(1, n):
        in_text = (positions + k < text_ends)[:-k]
        hashes[:-k] += np.where(in_text, words.hashes[k:] * NGRAM_WEIGHTS[k], np.uint64(0))
        lengths[:-k] += np.where(in_text, words.lengths[k:], 0)
    is_complete = positions + n <= text_ends
    is_complete[words.offsets[:-1][counts > 0]] = True
    offsets = np.searchsorted(np.flatnonzero(is_complete), words.offsets)
    return HashedWords(mix_bits(hashes[is_complete]), lengths[is_complete], offsets)


def is_unspaced(block: TextBlock) -> np.ndarray:
    """Whether each text has no or hardly any spaces between words."""
    lengths = np.diff(block.offsets)
    spaces = count_per_text(is_ascii_space(block.data), block.offsets)
    characters = lengths - count_per_text(is_continuation_byte(block.data), block.offsets)
    return (spaces < MIN_SPACE_SHARE * characters) | is_unspaced_script(block, characters)


def is_unspaced_script(block: TextBlock, characters: np.ndarray) -> np.ndarray:
    """Whether each text is in Chinese, Japanese, Thai, Lao, Tibetan, Burmese or Khmer, recognized
    by the first two bytes of their characters: E3 to E9, E0 B8 to BF, E1 80 to 82, E1 9E to 9F. `characters`
    has the number of characters of each text."""
    data = block.data
    if not len(data) or data.max() < 0x80:
        return np.zeros(len(block), bool)
    next_bytes = np.append(data[1:], np.uint8(0))
    in_script = (data >= 0xE3) & (data <= 0xE9)
    in_script |= (data == 0xE0) & (next_bytes >= 0xB8)
    in_script |= (data == 0xE1) & ((next_bytes <= 0x82) | (next_bytes & 0xFE == 0x9E)) & (next_bytes >= 0x80)
    return count_per_text(in_script, block.offsets) > UNSPACED_SCRIPT_SHARE * characters


def count_per_text(mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The number of true elements in each text."""
    return np.diff(np.searchsorted(np.flatnonzero(mask), offsets))


def is_continuation_byte(data: np.ndarray) -> np.ndarray:
    """Whether a byte of UTF-8 is not the first of its character."""
    return data & 0xC0 == 0x80


def hash_spans(values: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each values[start:stop] that does not depend on its position. It is a difference of
    running sums of value * base**position, multiplied by the inverse of base**start modulo 2^64."""
    powers, inverses = base_powers(1 << max(18, len(values).bit_length()))
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values * powers[: len(values)], out=sums[1:])
    return mix_bits((sums[stops] - sums[starts]) * inverses[starts])


def mix_bits(values: np.ndarray) -> np.ndarray:
    """Hash 64-bit integers so that every bit affects all others (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@cache
def base_powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Powers 0..count of the base of `hash_spans` modulo 2^64, and of its inverse."""
    base = 0x9E3779B97F4A7C15
    inverse = pow(base, -1, 1 << 64)
    return tuple(  # type: ignore[return-value]
        np.cumprod(np.append(np.uint64(1), np.full(count, factor, np.uint64))) for factor in (base, inverse)
    )


def is_word_byte(data: np.ndarray) -> np.ndarray:
    """Whether bytes are ASCII letters, digits, underscores, or not ASCII. Comparisons are four times as fast
    as a table of 256 entries (0.6 against 2.7 ns a byte)."""
    return is_ascii_letter(data) | (data - np.uint8(ord("0")) < 10) | (data == ord("_")) | (data >= 0x80)


def is_ascii_letter(data: np.ndarray) -> np.ndarray:
    # Unsigned: bytes below "a" wrap around to large numbers.
    return (data | np.uint8(0x20)) - np.uint8(ord("a")) < 26


def is_ascii_space(data: np.ndarray) -> np.ndarray:
    """Whether bytes are spaces, or tab to carriage return."""
    return (data == ord(" ")) | (data - np.uint8(9) < 5)


def lower_ascii(data: np.ndarray) -> np.ndarray:
    return data + (data - np.uint8(ord("A")) < 26) * np.uint8(0x20)


# Factors of the words in an n-gram.
NGRAM_WEIGHTS = mix_bits(np.arange(1, 9, dtype=np.uint64) << np.uint64(32)) | np.uint64(1)
