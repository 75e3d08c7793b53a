"""Which documents to leave out: empty ones, those too short or too long, and, on wish, those that look like
no text anybody wrote. The quality rules are of no language: after Gopher (arXiv 2112.11446, table A1 and
its text) without its list of words. They are made for prose: of the source files of installed packages they
leave out 11 % (Python) to 16 % (C headers), most for what they repeat."""

import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.data.clean import words

LEAST_MEASURED = 200  # characters: shares of less say little; Gopher takes nothing under 50 words
LEAST_READABLE = 0.65  # letters, digits and spaces; own choice: prose has 0.98, 99 % of C headers over 0.79
MOST_MARKS = 0.1  # hashtags and ellipses a word; Gopher counts all hash marks, as code has for comments
MOST_DIGITS = 0.3  # of what is not space; own choice: 99 % of source files have under 0.11
LONGEST_RUN = 300  # of one character but spaces; own choice: 99 % of source files stay under 80
WORD_LENGTH = (2.5, 15.0)  # characters; Gopher has 3 to 10: prose has 5 to 7, 99 % of C headers under 13.4
MOST_REPEATED_LINES = 0.3  # of the characters; Gopher's 0.2 leaves out 13 % of Python files, this 6 %
MOST_REPEATED_PARAGRAPHS = 0.2  # of the characters (Gopher)
MOST_REPEATED_PHRASE = {2: 0.20, 3: 0.18, 4: 0.16}  # of the characters, by its words (Gopher)
MOST_ELLIPSES = 0.3  # of the lines (Gopher)
MOST_BULLETS = 0.9  # of the lines (Gopher)
BULLETS = "-*•‣▪●◦–"

OTHER, LETTER, DIGIT, SPACE = range(4)


@dataclass(frozen=True)
class Measures:
    """Of each text, or the first 256 KB of a longer one. Shares are of characters unless said otherwise."""

    characters: np.ndarray
    readable: np.ndarray
    marks: np.ndarray  # a word
    digits: np.ndarray
    run: np.ndarray  # characters
    word_length: np.ndarray  # nan where a script has no spaces
    lines: np.ndarray
    paragraphs: np.ndarray
    phrases: dict[int, np.ndarray]
    ellipses: np.ndarray  # of lines
    bullets: np.ndarray  # of lines


# What each rule finds bad. A text counts under the first that finds it so.
RULES: dict[str, Callable[[Measures], np.ndarray]] = {
    "unreadable": lambda m: m.readable < LEAST_READABLE,
    "digits": lambda m: m.digits > MOST_DIGITS,
    "run of one character": lambda m: m.run > LONGEST_RUN,
    "word length": lambda m: (m.word_length < WORD_LENGTH[0]) | (m.word_length > WORD_LENGTH[1]),
    "hashtags": lambda m: m.marks > MOST_MARKS,
    "ellipses": lambda m: m.ellipses > MOST_ELLIPSES,
    "bullets": lambda m: m.bullets > MOST_BULLETS,
    "repeated lines": lambda m: m.lines > MOST_REPEATED_LINES,
    "repeated paragraphs": lambda m: m.paragraphs > MOST_REPEATED_PARAGRAPHS,
    "repeated phrase": lambda m: np.any(
        [m.phrases[n] > most for n, most in MOST_REPEATED_PHRASE.items()], axis=0
    ),
}
ANY_LENGTH = {"unreadable", "digits", "run of one character"}  # the others need LEAST_MEASURED


def judge(texts: pa.LargeStringArray, cfg: Any) -> tuple[np.ndarray, Counter[str]]:
    """Which texts to keep, and how many each rule left out. `cfg` is the recipe's normalize section."""
    keep, dropped = np.ones(len(texts), bool), Counter[str]()

    def drop(rule: str, bad: np.ndarray) -> None:
        dropped[rule] += int(np.count_nonzero(bad & keep))
        np.logical_and(keep, ~bad, out=keep)

    drop("empty", is_blank(texts))
    if cfg.shortest > 1 or cfg.longest is not None:
        lengths = pc.utf8_length(texts).to_numpy()
        drop("too short", lengths < cfg.shortest)
        if cfg.longest is not None:
            drop("too long", lengths > cfg.longest)
    if cfg.quality:
        for rule, bad in quality(texts).items():
            drop(rule, bad)
    return keep, +dropped


def is_blank(texts: pa.LargeStringArray) -> np.ndarray:
    """Nothing, or nothing but white space of any script."""
    blank = pc.or_(pc.utf8_is_space(texts), pc.equal(pc.binary_length(texts), 0))
    return blank.to_numpy(zero_copy_only=False)


def quality(texts: pa.LargeStringArray) -> dict[str, np.ndarray]:
    """By rule, which texts it finds bad."""
    found = {rule: np.zeros(len(texts), bool) for rule in RULES}
    for block in words.blocks(texts):
        measures = measure(block)
        for rule, is_bad in RULES.items():
            bad = is_bad(measures) & block.first
            if rule not in ANY_LENGTH:
                bad &= measures.characters >= LEAST_MEASURED
            found[rule][block.texts[bad]] = True
    return found


def measure(block: words.Block) -> Measures:
    codes, offsets = decode(block)
    kinds = kinds_of_characters()[codes]
    characters = np.diff(offsets)
    spaces, digits = (words.count(kinds == kind, offsets) for kind in (SPACE, DIGIT))
    solid = characters - spaces
    # Not at the beginning of a line, where C has its #include.
    hashtags = (codes == ord("#")) & np.append(kinds[1:] == LETTER, False)
    hashtags[1:] &= codes[:-1] != ord("\n")
    marks = words.count(hashtags | (codes == ord("…")), offsets)
    found = words.split(block)
    spaced = ~words.is_unspaced_script(block, characters)
    counts = count_words(kinds, offsets)
    lines, paragraphs, ellipses, bullets = measure_lines(codes, kinds, offsets)
    return Measures(
        characters=characters,
        readable=share(characters - words.count(kinds == OTHER, offsets), characters),
        marks=share(marks, np.diff(found.offsets)),
        digits=share(digits, solid),
        run=longest_run(codes, kinds, offsets),
        word_length=np.where(spaced, share(solid, counts), np.nan),
        lines=lines,
        paragraphs=paragraphs,
        phrases={n: most_frequent(found, n) for n in MOST_REPEATED_PHRASE},
        ellipses=ellipses,
        bullets=bullets,
    )


def decode(block: words.Block) -> tuple[np.ndarray, np.ndarray]:
    """The block's code points, and where each text begins among them."""
    if not len(block.data) or block.data.max() < 0x80:
        return block.data, block.offsets
    codes = np.frombuffer(block.data.tobytes().decode("utf-8").encode("utf-32-le"), np.uint32)
    continued = np.flatnonzero(words.is_continuation(block.data))
    return codes, block.offsets - np.searchsorted(continued, block.offsets)


def count_words(kinds: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Runs of what is not space."""
    solid = kinds != SPACE
    begins = solid.copy()
    begins[1:] &= ~solid[:-1]
    filled = offsets[:-1][np.diff(offsets) > 0]
    begins[filled] = solid[filled]
    return words.count(begins, offsets)


def longest_run(codes: np.ndarray, kinds: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """How often one character, not a space, comes in a row at most."""
    filled = np.flatnonzero(np.diff(offsets))
    longest = np.zeros(len(offsets) - 1, np.int64)
    if len(filled):
        changes = np.append(True, codes[1:] != codes[:-1])
        changes[offsets[filled]] = True
        starts = np.flatnonzero(changes)
        lengths = np.diff(np.append(starts, len(codes))) * (kinds[starts] != SPACE)
        longest[filled] = np.maximum.reduceat(lengths, np.searchsorted(starts, offsets[filled]))
    return longest


def measure_lines(
    codes: np.ndarray, kinds: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The shares of characters in repeated lines and in repeated paragraphs, and of lines that end in an
    ellipsis and that begin with a bullet. Lines are taken without the spaces around them; blank ones part
    paragraphs."""
    texts = len(offsets) - 1
    solid = np.flatnonzero(kinds != SPACE)
    edges = np.sort(np.append(np.flatnonzero(codes == ord("\n")), offsets))
    at = np.searchsorted(solid, edges)
    full = at[1:] > at[:-1]
    starts, stops = solid[at[:-1][full]], solid[at[1:][full] - 1] + 1
    line_text = np.searchsorted(offsets, starts, "right") - 1
    # A paragraph begins where the line before was blank or of another text.
    numbers = np.flatnonzero(full)
    begins = np.append(True, (np.diff(numbers) > 1) | (np.diff(line_text) > 0))[: len(numbers)]
    paragraph_starts = np.flatnonzero(begins)
    paragraph_stops = np.append(paragraph_starts[1:], len(numbers)).astype(np.int64)[: len(paragraph_starts)]
    hashes, lengths = words.hash_spans(codes, starts, stops), stops - starts
    paragraph_hashes = words.hash_spans(hashes, paragraph_starts, paragraph_stops)
    sums = np.append(0, np.cumsum(lengths))
    paragraph_lengths = sums[paragraph_stops] - sums[paragraph_starts]
    ellipsis = (codes[stops - 1] == ord(".")) & (lengths >= 3)
    for back in (2, 3):
        ellipsis &= codes[np.maximum(stops - back, 0)] == ord(".")
    ellipsis |= codes[stops - 1] == ord("…")
    bullet = np.isin(codes[starts], [ord(bullet) for bullet in BULLETS])
    total = np.bincount(line_text, minlength=texts)
    return (
        repeated(hashes, lengths, line_text, texts),
        repeated(paragraph_hashes, paragraph_lengths, line_text[paragraph_starts], texts),
        share(np.bincount(line_text[ellipsis], minlength=texts), total),
        share(np.bincount(line_text[bullet], minlength=texts), total),
    )


def repeated(hashes: np.ndarray, lengths: np.ndarray, owners: np.ndarray, texts: int) -> np.ndarray:
    """The share, by length, of what came before in the same text."""
    keys = words.mix(hashes + owners.astype(np.uint64))
    order = np.argsort(keys, kind="stable")
    again = order[1:][keys[order[1:]] == keys[order[:-1]]]
    repeats = np.bincount(owners[again], weights=lengths[again], minlength=texts)
    return share(repeats, np.bincount(owners, weights=lengths, minlength=texts))


def most_frequent(found: words.Words, n: int) -> np.ndarray:
    """The share of a text that the n words make up which come most often in a row, more than once."""
    texts = len(found.offsets) - 1
    grams = words.grams(found, n)
    owners = np.repeat(np.arange(texts), np.diff(grams.offsets))
    keys = words.mix(grams.hashes + owners.astype(np.uint64))
    order = np.argsort(keys)
    starts = np.flatnonzero(np.append(True, keys[order[1:]] != keys[order[:-1]])[: len(order)])
    counts = np.diff(np.append(starts, len(order)))
    several = counts > 1
    most = np.zeros(texts, np.int64)
    gram = order[starts[several]]
    np.maximum.at(most, owners[gram], counts[several] * grams.lengths[gram])
    sums = np.append(0, np.cumsum(found.lengths))
    return share(most, np.diff(sums[found.offsets]))


def share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return part / np.maximum(whole, 1)


@cache
def kinds_of_characters() -> np.ndarray:
    """By code point. Marks belong to the letters they stand on."""
    kinds = {"L": LETTER, "M": LETTER, "N": DIGIT, "Z": SPACE}
    table = np.array(
        [kinds.get(unicodedata.category(chr(code))[0], OTHER) for code in range(0x110000)], np.uint8
    )
    table[[9, 10, 11, 12, 13, 0x85]] = SPACE
    return table
