"""Filters of documents: removes empty ones, those too short or too long and, if the recipe enables it, those
that are hardly text. The quality rules work for any language: they follow Gopher (arXiv 2112.11446, table A1
and its text) without its word list. They are made for prose: of the source files of installed packages they
remove 11 % (Python) to 16 % (C headers), most for repetition."""

import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.config.sections import NormalizeKeys
from headrace.data.clean import words

MIN_CHARACTERS = 200  # shares of shorter texts mean little; Gopher removes all texts under 50 words
MIN_READABLE = 0.65  # letters, digits and spaces; our choice: prose has 0.98, 99 % of C headers over 0.79
MAX_MARKS = 0.1  # hashtags and ellipses a word; Gopher counts all hash signs, which start comments in code
MAX_DIGITS = 0.3  # of all characters but spaces; our choice: 99 % of source files have under 0.11
MAX_RUN = 300  # of one character but spaces; our choice: 99 % of source files have under 80
WORD_LENGTH_RANGE = (
    2.5,
    15.0,
)  # characters; Gopher has 3 to 10: prose has 5 to 7, 99 % of C headers under 13.4
MAX_REPEATED_LINES = 0.3  # of the characters; Gopher's 0.2 removes 13 % of Python files, this 6 %
MAX_REPEATED_PARAGRAPHS = 0.2  # of the characters (Gopher)
MAX_REPEATED_PHRASE = {2: 0.20, 3: 0.18, 4: 0.16}  # of the characters, by number of words (Gopher)
MAX_ELLIPSES = 0.3  # of the lines (Gopher)
MAX_BULLETS = 0.9  # of the lines (Gopher)
BULLETS = "-*•‣▪●◦–"

OTHER, LETTER, DIGIT, SPACE = range(4)


@dataclass(frozen=True)
class TextMeasures:
    """Measures of each text, or of the first 256 KB of a longer one. Shares are of characters unless
    noted."""

    characters: np.ndarray
    readable: np.ndarray
    marks: np.ndarray  # for each word
    digits: np.ndarray
    run: np.ndarray  # characters
    word_length: np.ndarray  # nan for scripts without spaces
    lines: np.ndarray
    paragraphs: np.ndarray
    phrases: dict[int, np.ndarray]
    ellipses: np.ndarray  # share of lines
    bullets: np.ndarray  # share of lines


# True where the text is bad. A text counts under the first rule that matches it.
RULES: dict[str, Callable[[TextMeasures], np.ndarray]] = {
    "unreadable": lambda m: m.readable < MIN_READABLE,
    "digits": lambda m: m.digits > MAX_DIGITS,
    "run of one character": lambda m: m.run > MAX_RUN,
    "word length": lambda m: (m.word_length < WORD_LENGTH_RANGE[0]) | (m.word_length > WORD_LENGTH_RANGE[1]),
    "hashtags": lambda m: m.marks > MAX_MARKS,
    "ellipses": lambda m: m.ellipses > MAX_ELLIPSES,
    "bullets": lambda m: m.bullets > MAX_BULLETS,
    "repeated lines": lambda m: m.lines > MAX_REPEATED_LINES,
    "repeated paragraphs": lambda m: m.paragraphs > MAX_REPEATED_PARAGRAPHS,
    "repeated phrase": lambda m: np.any(
        [m.phrases[n] > limit for n, limit in MAX_REPEATED_PHRASE.items()], axis=0
    ),
}
RULES_FOR_ANY_LENGTH = {"unreadable", "digits", "run of one character"}  # the others need MIN_CHARACTERS


def select_texts(texts: pa.LargeStringArray, cfg: NormalizeKeys) -> tuple[np.ndarray, Counter[str]]:
    """Whether to keep each text, and the number of texts that each rule removed."""
    keep, dropped = np.ones(len(texts), bool), Counter[str]()

    def drop(rule: str, is_bad: np.ndarray) -> None:
        dropped[rule] += int(np.count_nonzero(is_bad & keep))
        np.logical_and(keep, ~is_bad, out=keep)

    drop("empty", is_blank(texts))
    if cfg.min_chars > 1 or cfg.max_chars is not None:
        lengths = pc.utf8_length(texts).to_numpy()
        drop("too short", lengths < cfg.min_chars)
        if cfg.max_chars is not None:
            drop("too long", lengths > cfg.max_chars)
    if cfg.quality_filter:
        for rule, is_bad in find_low_quality(texts).items():
            drop(rule, is_bad)
    return keep, +dropped


def is_blank(texts: pa.LargeStringArray) -> np.ndarray:
    """Whether each text is empty or consists of white space of any script."""
    blank = pc.or_(pc.utf8_is_space(texts), pc.equal(pc.binary_length(texts), 0))
    return blank.to_numpy(zero_copy_only=False)


def find_low_quality(texts: pa.LargeStringArray) -> dict[str, np.ndarray]:
    """Whether each text is rejected, by quality rule."""
    rejected = {rule: np.zeros(len(texts), bool) for rule in RULES}
    for block in words.iter_blocks(texts):
        measures = measure_block(block)
        for rule, is_bad in RULES.items():
            bad = is_bad(measures) & block.is_start
            if rule not in RULES_FOR_ANY_LENGTH:
                bad &= measures.characters >= MIN_CHARACTERS
            rejected[rule][block.text_indices[bad]] = True
    return rejected


def measure_block(block: words.TextBlock) -> TextMeasures:
    """Measure each piece of text in a block."""
    codes, offsets = decode_block(block)
    kinds = character_kinds()[codes]
    characters = np.diff(offsets)
    spaces, digits = (words.count_per_text(kinds == kind, offsets) for kind in (SPACE, DIGIT))
    solid = characters - spaces
    # Not at the start of a line, where C has its #include.
    hashtags = (codes == ord("#")) & np.append(kinds[1:] == LETTER, False)
    hashtags[1:] &= codes[:-1] != ord("\n")
    marks = words.count_per_text(hashtags | (codes == ord("…")), offsets)
    hashed = words.split_words(block)
    is_spaced = ~words.is_unspaced_script(block, characters)
    word_counts = count_words(kinds, offsets)
    lines, paragraphs, ellipses, bullets = measure_lines(codes, kinds, offsets)
    return TextMeasures(
        characters=characters,
        readable=divide(characters - words.count_per_text(kinds == OTHER, offsets), characters),
        marks=divide(marks, np.diff(hashed.offsets)),
        digits=divide(digits, solid),
        run=longest_runs(codes, kinds, offsets),
        word_length=np.where(is_spaced, divide(solid, word_counts), np.nan),
        lines=lines,
        paragraphs=paragraphs,
        phrases={n: top_ngram_share(hashed, n) for n in MAX_REPEATED_PHRASE},
        ellipses=ellipses,
        bullets=bullets,
    )


def decode_block(block: words.TextBlock) -> tuple[np.ndarray, np.ndarray]:
    """The code points of a block, and the offsets of its texts in them."""
    if not len(block.data) or block.data.max() < 0x80:
        return block.data, block.offsets
    codes = np.frombuffer(block.data.tobytes().decode("utf-8").encode("utf-32-le"), np.uint32)
    continuations = np.flatnonzero(words.is_continuation_byte(block.data))
    return codes, block.offsets - np.searchsorted(continuations, block.offsets)


def count_words(kinds: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The number of words of each text: runs of characters that are not spaces."""
    solid = kinds != SPACE
    starts = solid.copy()
    starts[1:] &= ~solid[:-1]
    non_empty = offsets[:-1][np.diff(offsets) > 0]
    starts[non_empty] = solid[non_empty]
    return words.count_per_text(starts, offsets)


def longest_runs(codes: np.ndarray, kinds: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The length of each text's longest run of one character that is not a space."""
    non_empty = np.flatnonzero(np.diff(offsets))
    longest = np.zeros(len(offsets) - 1, np.int64)
    if len(non_empty):
        changes = np.append(True, codes[1:] != codes[:-1])
        changes[offsets[non_empty]] = True
        starts = np.flatnonzero(changes)
        lengths = np.diff(np.append(starts, len(codes))) * (kinds[starts] != SPACE)
        longest[non_empty] = np.maximum.reduceat(lengths, np.searchsorted(starts, offsets[non_empty]))
    return longest


def measure_lines(
    codes: np.ndarray, kinds: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Shares, for each text, of characters in repeated lines and in repeated paragraphs, and the shares of
    lines that end with an ellipsis and that start with a bullet. Lines are stripped of spaces; blank lines
    separate paragraphs."""
    num_texts = len(offsets) - 1
    solid = np.flatnonzero(kinds != SPACE)
    edges = np.sort(np.append(np.flatnonzero(codes == ord("\n")), offsets))
    at = np.searchsorted(solid, edges)
    is_filled = at[1:] > at[:-1]
    starts, stops = solid[at[:-1][is_filled]], solid[at[1:][is_filled] - 1] + 1
    line_text = np.searchsorted(offsets, starts, "right") - 1
    # A paragraph starts where the line before is blank or belongs to another text.
    line_numbers = np.flatnonzero(is_filled)
    is_first = np.append(True, (np.diff(line_numbers) > 1) | (np.diff(line_text) > 0))[: len(line_numbers)]
    paragraph_starts = np.flatnonzero(is_first)
    paragraph_stops = np.append(paragraph_starts[1:], len(line_numbers)).astype(np.int64)
    paragraph_stops = paragraph_stops[: len(paragraph_starts)]
    hashes, lengths = words.hash_spans(codes, starts, stops), stops - starts
    paragraph_hashes = words.hash_spans(hashes, paragraph_starts, paragraph_stops)
    sums = np.append(0, np.cumsum(lengths))
    paragraph_lengths = sums[paragraph_stops] - sums[paragraph_starts]
    ellipsis = (codes[stops - 1] == ord(".")) & (lengths >= 3)
    for back in (2, 3):
        ellipsis &= codes[np.maximum(stops - back, 0)] == ord(".")
    ellipsis |= codes[stops - 1] == ord("…")
    bullet = np.isin(codes[starts], [ord(bullet) for bullet in BULLETS])
    line_counts = np.bincount(line_text, minlength=num_texts)
    return (
        repeated_share(hashes, lengths, line_text, num_texts),
        repeated_share(paragraph_hashes, paragraph_lengths, line_text[paragraph_starts], num_texts),
        divide(np.bincount(line_text[ellipsis], minlength=num_texts), line_counts),
        divide(np.bincount(line_text[bullet], minlength=num_texts), line_counts),
    )


def repeated_share(hashes: np.ndarray, lengths: np.ndarray, owners: np.ndarray, num_texts: int) -> np.ndarray:
    """The share of each text, by length, of items that repeat an earlier item of the same text.
    `owners` has the index of the text of each item."""
    keys = words.mix_bits(hashes + owners.astype(np.uint64))
    order = np.argsort(keys, kind="stable")
    repeats = order[1:][keys[order[1:]] == keys[order[:-1]]]
    repeated = np.bincount(owners[repeats], weights=lengths[repeats], minlength=num_texts)
    return divide(repeated, np.bincount(owners, weights=lengths, minlength=num_texts))


def top_ngram_share(hashed: words.HashedWords, n: int) -> np.ndarray:
    """The share of each text, in bytes of words, that its most frequent repeated n-gram takes up."""
    num_texts = len(hashed.offsets) - 1
    ngrams = words.make_ngrams(hashed, n)
    owners = np.repeat(np.arange(num_texts), np.diff(ngrams.offsets))
    keys = words.mix_bits(ngrams.hashes + owners.astype(np.uint64))
    order = np.argsort(keys)
    starts = np.flatnonzero(np.append(True, keys[order[1:]] != keys[order[:-1]])[: len(order)])
    counts = np.diff(np.append(starts, len(order)))
    is_repeated = counts > 1
    largest = np.zeros(num_texts, np.int64)
    ngram = order[starts[is_repeated]]
    np.maximum.at(largest, owners[ngram], counts[is_repeated] * ngrams.lengths[ngram])
    sums = np.append(0, np.cumsum(hashed.lengths))
    return divide(largest, np.diff(sums[hashed.offsets]))


def divide(part: np.ndarray, total: np.ndarray) -> np.ndarray:
    """part / total; 0 of nothing is 0."""
    return part / np.maximum(total, 1)


@cache
def character_kinds() -> np.ndarray:
    """LETTER, DIGIT, SPACE or OTHER for each code point. Combining marks count as letters."""
    kinds = {"L": LETTER, "M": LETTER, "N": DIGIT, "Z": SPACE}
    table = np.array(
        [kinds.get(unicodedata.category(chr(code))[0], OTHER) for code in range(0x110000)], np.uint8
    )
    table[[9, 10, 11, 12, 13, 0x85]] = SPACE
    return table
