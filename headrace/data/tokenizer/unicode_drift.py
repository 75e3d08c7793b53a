"""Characters that tokenizer libraries classify differently because their Unicode tables differ in age, and
the spans of text around them that must be encoded with the reference library."""

import re
from functools import cache

import numpy as np
import pyarrow as pa
from tokenizers import Regex, pre_tokenizers

MAX_CODE_POINT = 0x40000  # no letters beyond
WORD_BOUNDARY = re.compile(rb"[a-z](?= [a-z]|[0-9\n])")  # after this letter every library splits words


@cache
def drifting_characters() -> np.ndarray:
    """Whether each code point is classified differently: those that the table of tokenizers lacks (found in
    0.2 s), and two that changed between versions, U+0295, a letter that became lower-case, and U+180E,
    formerly a space. gigatoken 0.10 knows 4,657 letters and digits that tokenizers 0.23 does not.
    Noncharacters are in no table and never will be."""
    points = np.arange(MAX_CODE_POINT, dtype="<u4")
    text = points[(points < 0xD800) | (points >= 0xE000)].tobytes().decode("utf-32-le")
    unassigned = pre_tokenizers.Split(Regex(r"\P{Cn}+"), "removed").pre_tokenize_str(text)
    points = np.frombuffer("".join(run for run, _ in unassigned).encode("utf-32-le"), "<u4")
    table = np.zeros(MAX_CODE_POINT, bool)
    table[points[(points & 0xFFFE != 0xFFFE) & ((points < 0xFDD0) | (points > 0xFDEF))]] = True
    table[[0x295, 0x180E]] = True
    return table


@cache
def unstable_prefixes() -> np.ndarray:
    """Whether a character may be a drifting one, by its first two bytes in UTF-8 as a 16-bit number, the
    first byte being the high one."""
    points = np.flatnonzero(drifting_characters())
    table = np.zeros(1 << 16, bool)
    for first, last, lead, shift in (
        (0x80, 0x7FF, 0xC0, 6),
        (0x800, 0xFFFF, 0xE0, 12),
        (0x10000, MAX_CODE_POINT, 0xF0, 18),
    ):
        in_range = points[(points >= first) & (points <= last)]
        table[(lead | in_range >> shift) << 8 | 0x80 | in_range >> shift - 6 & 0x3F] = True
    return table


def find_drifting(texts: pa.LargeStringArray) -> np.ndarray:
    """Positions of drifting characters, in bytes from the start of the first text. Takes 0.2 ms a megabyte of
    code or English, where a regular expression takes 2."""
    _, data = offsets_and_bytes(texts)
    positions = np.flatnonzero(data >= 0xC2)  # the first bytes of characters of several bytes
    prefixes = data[positions].astype(np.uint16) << 8 | data[positions + 1]
    positions = positions[unstable_prefixes()[prefixes]]
    return (
        positions[drifting_characters()[decode_multibyte(data, positions)]] if len(positions) else positions
    )


def decode_multibyte(data: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The code points of the characters of several bytes that start at these positions."""
    first = data[positions].astype(np.int64)
    size = 2 + (first >= 0xE0) + (first >= 0xF0)
    points = first & 0x7F >> size
    for offset in (1, 2, 3):
        byte = data[np.minimum(positions + offset, len(data) - 1)] & 0x3F
        points = np.where(size > offset, points << 6 | byte, points)
    return points


def has_drifting(texts: pa.LargeStringArray) -> np.ndarray:
    """Whether each text contains drifting characters."""
    offsets, _ = offsets_and_bytes(texts)
    has_any = np.zeros(len(texts), bool)
    has_any[np.searchsorted(offsets, find_drifting(texts), "right") - 1] = True
    return has_any


def find_spans(
    texts: pa.LargeStringArray, positions: np.ndarray, *, at_boundaries: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The sorted, disjoint (starts, ends) of spans that contain these positions: with `at_boundaries`, from
    the nearest WORD_BOUNDARY before to the nearest after, within a text; otherwise whole texts. All are in
    bytes from the start of the first text."""
    offsets, array = offsets_and_bytes(texts)
    data = array.data
    starts: list[int] = []
    ends: list[int] = [0]
    indices = np.searchsorted(offsets, positions, "right") - 1
    for position, text_start, text_end in zip(
        positions.tolist(), offsets[indices].tolist(), offsets[indices + 1].tolist(), strict=True
    ):
        if position < ends[-1]:
            continue
        start, end = max(text_start, ends[-1]), text_end
        if at_boundaries:
            before = [match.end() for match in WORD_BOUNDARY.finditer(data, start, position)]
            after = WORD_BOUNDARY.search(data, position, text_end)
            start, end = before[-1] if before else start, after.end() if after else text_end
        starts.append(start)
        ends.append(end)
    return np.array(starts, np.int64), np.array(ends[1:], np.int64)


def split_at(texts: pa.LargeStringArray, positions: np.ndarray) -> tuple[pa.LargeStringArray, np.ndarray]:
    """Split texts at these positions, without a copy. Returns the pieces and the index of the first piece of
    each text, followed by the number of pieces."""
    offsets, _ = offsets_and_bytes(texts)
    positions = np.setdiff1d(positions, offsets)
    _, buffer, data = texts.buffers()
    base = 0 if buffer is None else int(np.frombuffer(buffer, np.int64)[texts.offset])
    all_offsets = np.sort(np.concatenate([offsets, positions])) + base
    buffers = [None, pa.py_buffer(all_offsets), data]
    pieces = pa.Array.from_buffers(pa.large_string(), len(all_offsets) - 1, buffers)
    return pieces, np.arange(len(offsets)) + np.searchsorted(positions, offsets)


def offsets_and_bytes(texts: pa.LargeStringArray) -> tuple[np.ndarray, np.ndarray]:
    """The offsets of the texts, counted from the start of the first, and the bytes of all, without a copy."""
    _, buffer, data = texts.buffers()
    if buffer is None or data is None or not len(texts):
        return np.zeros(len(texts) + 1, np.int64), np.zeros(0, np.uint8)
    offsets = np.frombuffer(buffer, np.int64, len(texts) + 1, 8 * texts.offset)
    start, end = offsets[[0, -1]].tolist()
    return offsets - start, np.frombuffer(data, np.uint8, end - start, start)
