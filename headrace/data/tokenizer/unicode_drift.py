"""Characters that libraries of tokenizers take for different things, since their tables of Unicode differ in
age, and the stretches of text around them that must be left to the library that is the measure."""

import re
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Regex, pre_tokenizers

POINTS = 0x40000  # beyond, no letters
CUT = re.compile(rb"[a-z](?= [a-z]|[0-9\n])")  # behind this letter, wherever words are cut


@cache
def characters() -> np.ndarray:
    """By code point: those that the table of tokenizers lacks, measured in 0.2 s, and two that moved between
    versions, U+0295, a letter that became lower-case, and U+180E, once a space. gigatoken 0.10 knows 4,657
    letters and digits that tokenizers 0.23 does not. Noncharacters are in no table, and never will be."""
    points = np.arange(POINTS, dtype="<u4")
    text = points[(points < 0xD800) | (points >= 0xE000)].tobytes().decode("utf-32-le")
    unknown = pre_tokenizers.Split(Regex(r"\P{Cn}+"), "removed").pre_tokenize_str(text)
    points = np.frombuffer("".join(run for run, _ in unknown).encode("utf-32-le"), "<u4")
    table = np.zeros(POINTS, bool)
    table[points[(points & 0xFFFE != 0xFFFE) & ((points < 0xFDD0) | (points > 0xFDEF))]] = True
    table[[0x295, 0x180E]] = True
    return table


@cache
def beginnings() -> np.ndarray:
    """By the first two bytes of a character in UTF-8, of which the first is the high one: may it be one?"""
    points = np.flatnonzero(characters())
    table = np.zeros(1 << 16, bool)
    for first, last, mark, shift in (
        (0x80, 0x7FF, 0xC0, 6),
        (0x800, 0xFFFF, 0xE0, 12),
        (0x10000, POINTS, 0xF0, 18),
    ):
        some = points[(points >= first) & (points <= last)]
        table[(mark | some >> shift) << 8 | 0x80 | some >> shift - 6 & 0x3F] = True
    return table


def find(texts: pa.LargeStringArray) -> np.ndarray:
    """Where such characters are: bytes from the beginning of the first text. Takes 0.2 ms a megabyte of code
    or English, where a regular expression takes 2."""
    _, data = memory(texts)
    places = np.flatnonzero(data >= 0xC2)  # where characters of several bytes begin
    places = places[beginnings()[data[places].astype(np.uint16) << 8 | data[places + 1]]]
    return places[characters()[decode(data, places)]] if len(places) else places


def decode(data: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The characters of several bytes that begin at these places, as code points below POINTS."""
    first = data[places].astype(np.int64)
    size = 2 + (first >= 0xE0) + (first >= 0xF0)
    points = first & 0x7F >> size
    for more in (1, 2, 3):
        byte = data[np.minimum(places + more, len(data) - 1)] & 0x3F
        points = np.where(size > more, points << 6 | byte, points)
    return points


def are_in(texts: pa.LargeStringArray) -> np.ndarray:
    """Which of the texts have such characters."""
    offsets, _ = memory(texts)
    found = np.zeros(len(texts), bool)
    found[np.searchsorted(offsets, find(texts), "right") - 1] = True
    return found


def stretches(texts: pa.LargeStringArray, places: np.ndarray, *, cut: bool) -> tuple[np.ndarray, np.ndarray]:
    """Where the stretches around some places begin and end, in order: from the nearest cut before to the
    nearest after, within a text, or whole texts. All are bytes from the beginning of the first text."""
    offsets, bytes_of_all = memory(texts)
    data: Any = bytes_of_all.data
    begins: list[int] = []
    ends: list[int] = [0]
    numbers = np.searchsorted(offsets, places, "right") - 1
    for place, start, stop in zip(
        places.tolist(), offsets[numbers].tolist(), offsets[numbers + 1].tolist(), strict=True
    ):
        if place < ends[-1]:
            continue
        begin, end = max(start, ends[-1]), stop
        if cut:
            before = [match.end() for match in CUT.finditer(data, begin, place)]
            after = CUT.search(data, place, stop)
            begin, end = before[-1] if before else begin, after.end() if after else stop
        begins.append(begin)
        ends.append(end)
    return np.array(begins, np.int64), np.array(ends[1:], np.int64)


def divide(texts: pa.LargeStringArray, cuts: np.ndarray) -> tuple[pa.LargeStringArray, np.ndarray]:
    """The texts cut at these places, in the same memory, and the number of the first piece of each text, with
    that of the end."""
    offsets, _ = memory(texts)
    cuts = np.setdiff1d(cuts, offsets)
    base = 0 if texts.buffers()[1] is None else int(np.frombuffer(texts.buffers()[1], np.int64)[texts.offset])
    all_offsets = np.sort(np.concatenate([offsets, cuts])) + base
    buffers = [None, pa.py_buffer(all_offsets), texts.buffers()[2]]
    pieces = pa.Array.from_buffers(pa.large_string(), len(all_offsets) - 1, buffers)
    return pieces, np.arange(len(offsets)) + np.searchsorted(cuts, offsets)


def memory(texts: pa.LargeStringArray) -> tuple[np.ndarray, np.ndarray]:
    """Where texts begin and end, from the beginning of the first, and the bytes of all."""
    _, places, data = texts.buffers()
    if places is None or data is None or not len(texts):
        return np.zeros(len(texts) + 1, np.int64), np.zeros(0, np.uint8)
    offsets = np.frombuffer(places, np.int64, len(texts) + 1, 8 * texts.offset)
    begin, end = offsets[[0, -1]].tolist()
    return offsets - begin, np.frombuffer(data, np.uint8, end - begin, begin)
