"""Where the words of many texts lie, and a hash of each: what duplicates and repetition are found by. All of
it is numpy over the bytes of many texts at once; no text becomes a Python object."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import pyarrow as pa

BLOCK = 1 << 18  # bytes of text at a time: numbers of 8 bytes each then fit a 2 MB cache
# Share of spaces below which characters stand for words: English has 0.17, Finnish 0.12, most code 0.08 up.
FEW_SPACES = 0.02
UNSPACED = 0.3  # share of characters of scripts without spaces above which characters stand for words


@dataclass(frozen=True)
class Block:
    """Texts end to end: text i is data[offsets[i] : offsets[i + 1]]. Of a text longer than a block each block
    has a piece. `texts` says which text each is, `first` whether it is the beginning of that text."""

    data: np.ndarray
    offsets: np.ndarray
    texts: np.ndarray
    first: np.ndarray

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Words:
    """Those of text i are hashes[offsets[i] : offsets[i + 1]]; `lengths` are in bytes."""

    hashes: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray


def blocks(texts: pa.LargeStringArray, size: int = BLOCK) -> Iterator[Block]:
    """The texts in blocks of `size` bytes, or 3 more. Where one is cut depends on nothing but itself."""
    assert texts.null_count == 0
    _, places, values = texts.buffers()
    places = np.frombuffer(places, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    data = np.frombuffer(values or b"", np.uint8)
    counts = np.maximum(1, -(-np.diff(places) // size))
    numbers = np.repeat(np.arange(len(texts)), counts)
    piece = np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = np.append(places[numbers] + piece * size, places[-1])
    for _ in range(3):  # a character has at most three continuation bytes
        cut = np.flatnonzero(piece)
        offsets[cut[is_continuation(data[offsets[cut]])]] -= 1
    begin = 0
    while begin < len(numbers):
        end = max(begin + 1, int(np.searchsorted(offsets, offsets[begin] + size, "right")) - 1)
        start, stop = offsets[begin], offsets[end]
        yield Block(
            data[start:stop], offsets[begin : end + 1] - start, numbers[begin:end], piece[begin:end] == 0
        )
        begin = end


def split(block: Block) -> Words:
    """Words are runs of letters and digits, of any script and regardless of ASCII case; in texts without
    spaces each character is one. A text of neither is one word."""
    data, offsets = block.data, block.offsets
    filled = offsets[:-1][np.diff(offsets) > 0]
    inside = is_word(data)
    begins = inside.copy()
    begins[1:] &= ~inside[:-1]
    begins[filled] = inside[filled]
    unspaced = lacks_spaces(block)
    if unspaced.any():
        begins |= inside & ~is_continuation(data) & np.repeat(unspaced, np.diff(offsets))
    ends = inside
    ends[:-1] &= ~inside[1:] | begins[1:]
    starts, stops = np.flatnonzero(begins), np.flatnonzero(ends) + 1
    wordless = np.flatnonzero((np.diff(np.searchsorted(starts, offsets)) == 0) & (np.diff(offsets) > 0))
    if len(wordless):
        starts = np.sort(np.append(starts, offsets[wordless]))
        stops = np.sort(np.append(stops, offsets[wordless + 1]))
    hashes = hash_spans(lower(data), starts, stops)
    return Words(hashes, stops - starts, np.searchsorted(starts, offsets))


def grams(words: Words, n: int) -> Words:
    """Every n words in a row; a text of fewer has one of what there is."""
    counts = np.diff(words.offsets)
    ends = np.repeat(words.offsets[1:], counts)
    places = np.arange(len(words.hashes))
    hashes, lengths = words.hashes * WEIGHTS[0], words.lengths.copy()
    for k in range(1, n):
        there = (places + k < ends)[:-k]
        hashes[:-k] += np.where(there, words.hashes[k:] * WEIGHTS[k], np.uint64(0))
        lengths[:-k] += np.where(there, words.lengths[k:], 0)
    whole = places + n <= ends
    whole[words.offsets[:-1][counts > 0]] = True
    offsets = np.searchsorted(np.flatnonzero(whole), words.offsets)
    return Words(mix(hashes[whole]), lengths[whole], offsets)


def lacks_spaces(block: Block) -> np.ndarray:
    """Which texts are written without spaces between words, or have hardly any."""
    lengths = np.diff(block.offsets)
    spaces = count(is_space(block.data), block.offsets)
    characters = lengths - count(is_continuation(block.data), block.offsets)
    return (spaces < FEW_SPACES * characters) | is_unspaced_script(block, characters)


def is_unspaced_script(block: Block, characters: np.ndarray) -> np.ndarray:
    """Which texts are in Chinese, Japanese, Thai, Lao, Tibetan, Burmese or Khmer, by the first two bytes of
    their characters: E3 to E9, E0 B8 to BF, E1 80 to 82 and E1 9E to 9F."""
    data = block.data
    if not len(data) or data.max() < 0x80:
        return np.zeros(len(block), bool)
    following = np.append(data[1:], np.uint8(0))
    found = (data >= 0xE3) & (data <= 0xE9)
    found |= (data == 0xE0) & (following >= 0xB8)
    found |= (data == 0xE1) & ((following <= 0x82) | (following & 0xFE == 0x9E)) & (following >= 0x80)
    return count(found, block.offsets) > UNSPACED * characters


def count(mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """How many are true in each text."""
    return np.diff(np.searchsorted(np.flatnonzero(mask), offsets))


def is_continuation(data: np.ndarray) -> np.ndarray:
    return data & 0xC0 == 0x80


def hash_spans(values: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each values[start:stop], the same wherever it stands: a difference of the running sum
    of value times base to the power of place, brought back to place 0 by the inverse base modulo 2^64."""
    powers, inverses = base_powers(1 << max(18, len(values).bit_length()))
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values * powers[: len(values)], out=sums[1:])
    return mix((sums[stops] - sums[starts]) * inverses[starts])


def mix(values: np.ndarray) -> np.ndarray:
    """Spreads every bit over all others (the finaliser of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@cache
def base_powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    base = 0x9E3779B97F4A7C15
    inverse = pow(base, -1, 1 << 64)
    return tuple(  # type: ignore[return-value]
        np.cumprod(np.append(np.uint64(1), np.full(count, number, np.uint64))) for number in (base, inverse)
    )


def is_word(data: np.ndarray) -> np.ndarray:
    """Letters, digits, the underscore and all that is not ASCII. Comparing is four times as fast as a table
    of 256 (0.6 against 2.7 ns a byte)."""
    return is_letter(data) | (data - np.uint8(ord("0")) < 10) | (data == ord("_")) | (data >= 0x80)


def is_letter(data: np.ndarray) -> np.ndarray:
    """Of ASCII; what lies below wraps round to large numbers."""
    return (data | np.uint8(0x20)) - np.uint8(ord("a")) < 26


def is_space(data: np.ndarray) -> np.ndarray:
    """Of ASCII: the space, and tab to carriage return."""
    return (data == ord(" ")) | (data - np.uint8(9) < 5)


def lower(data: np.ndarray) -> np.ndarray:
    """ASCII capitals made small."""
    return data + (data - np.uint8(ord("A")) < 26) * np.uint8(0x20)


WEIGHTS = mix(np.arange(1, 9, dtype=np.uint64) << np.uint64(32)) | np.uint64(1)  # of words in a gram
