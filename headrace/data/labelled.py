"""Texts with a label and words with tags: records in the shapes that people publish them in, and their tokens
with a label at the first token of a text or of a word. Two texts are joined by the token that ends a text,
as BERT's are by [SEP]; what a row is too short for is cut at the end, the longer text first."""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import orjson

from headrace.data.annotations import LABEL, TAGS, Notes
from headrace.data.documents import Ragged, offsets_of
from headrace.data.tokenizer.tokenizer import Tokenizer

TEXTS = ("text", "sentence", "content")
TWO_TEXTS = (
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
)
WORDS = ("tokens", "words")
TAG_NAMES = ("tags", "ner_tags", "pos_tags")
NONE = (-1, -100)  # what sets have where nobody says the label


def detect(columns: Iterable[str]) -> tuple[str, ...] | None:
    """The columns of a record that has a label or tags, that of the label first; None if it has not."""
    names = set(columns)
    tags, words = _first(TAG_NAMES, names), _first(WORDS, names)
    if tags and words:
        return tags, words
    if LABEL not in names:
        return None
    two = next((pair for pair in TWO_TEXTS if names.issuperset(pair)), None)
    one = _first(TEXTS, names)
    return (LABEL, *two) if two else (LABEL, one) if one else None


def is_labelled(record: Mapping[str, Any]) -> bool:
    """Whether a record has what its columns promise: a number such as 0.7 is a score and no label."""
    found = detect(name for name, value in record.items() if value is not None or name == LABEL)
    return found is not None and (found[0] != LABEL or isinstance(record[LABEL], str | int | None))


def parts(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A record as the parts of a document; ValueError says what is wrong with it."""
    found = detect(name for name, value in record.items() if value is not None or name == LABEL)
    assert found is not None
    if found[0] != LABEL:
        return _tagged(record, *found)
    name = _name(record[LABEL], "`label`")
    texts = [{"role": "text", "content": _text(record[column], column)} for column in found[1:]]
    return [{"role": LABEL, "label": name}, *texts]


def _tagged(record: Mapping[str, Any], tags: str, words: str) -> list[dict[str, Any]]:
    said, told = record[words], record[tags]
    if not isinstance(said, list) or not all(isinstance(word, str) for word in said):
        raise ValueError(f"`{words}` is not a list of words")
    if not isinstance(told, list) or len(told) != len(said):
        count = f"{len(told)}" if isinstance(told, list) else "no list"
        raise ValueError(f"`{tags}` has {count} for {len(said)} words, expected one each")
    names = [_name(tag, f"`{tags}` of word {number}") for number, tag in enumerate(told, 1)]
    return [{"role": TAGS, "tags": names}, {"role": "words", "content": said}]


def _name(value: Any, what: str) -> str | None:
    if value is None or value == "" or (type(value) is int and value in NONE):
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int):
        return str(value)
    raise ValueError(f"{what} is {type(value).__name__}, expected a name or a whole number")


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"`{column}` is not text")
    return value


def encode_labelled(tokenizer: Tokenizer, documents: list[str], length: int, notes: Notes) -> Ragged:
    """Documents as `parts` gives them, as JSON, each with the tokens that begin and end a text."""
    read = [orjson.loads(document) for document in documents]
    texts = tokenizer.encode_batch([part["content"] for parts in read for part in parts[1:]])
    pieces = np.split(texts.values, texts.offsets[1:-1])
    found, labels, done = [], [], 0
    for label, *rest in read:
        ids = _joined(tokenizer, pieces[done : done + len(rest)], length, notes)
        done += len(rest)
        marks = np.zeros(len(ids), np.uint16)
        marks[:1] = notes.number(label["label"])
        found.append(ids)
        labels.append(marks)
    return _ragged(found, labels)


def encode_tagged(tokenizer: Tokenizer, documents: list[str], length: int, notes: Notes) -> Ragged:
    """Words are encoded together, a space between them; a tag is at the first token of its word. A word
    without a token of its own has no tag."""
    found, labels = [], []
    for document in documents:
        tags, words = orjson.loads(document)
        encoding = tokenizer.plain.encode(" ".join(words["content"]), add_special_tokens=False)
        begins = [0, *accumulate(1 + len(word) for word in words["content"])]
        stops = np.array([stop for _, stop in encoding.offsets], np.int64)
        marks = np.zeros(len(encoding.ids), np.uint16)
        taken = -1
        for word, tag, begin in zip(words["content"], tags["tags"], begins, strict=False):
            place = int(np.searchsorted(stops, begin, side="right"))
            if taken < place < len(marks) and encoding.offsets[place][0] < begin + len(word):
                marks[place], taken = notes.number(tag), place
        (ids, kept), special = _cut(tokenizer, [np.array(encoding.ids)], length, notes), tokenizer.special
        before, after = ([0] * (token is not None) for token in (special.bos, special.eos))
        found.append(_enclosed(tokenizer, ids))
        labels.append(np.concatenate([before, marks[: kept[0]], after]).astype(np.uint16))
    return _ragged(found, labels)


def _joined(tokenizer: Tokenizer, texts: list[np.ndarray], length: int, notes: Notes) -> np.ndarray:
    ids, _ = _cut(tokenizer, texts, length, notes)
    return _enclosed(tokenizer, ids)


def _cut(
    tokenizer: Tokenizer, texts: list[np.ndarray], length: int, notes: Notes
) -> tuple[list[np.ndarray], list[int]]:
    """One or two texts as far as a row has room for them and for the tokens around them, and how far."""
    special = tokenizer.special
    room = length - (special.bos is not None) - (special.eos is not None) - (len(texts) - 1)
    sizes = [len(text) for text in texts]
    if sum(sizes) > room:
        notes.counts["cut"] += 1
        sizes = [room] if len(sizes) == 1 else _shared(sizes[0], sizes[1], room)
    return [text[:size] for text, size in zip(texts, sizes, strict=True)], sizes


def _shared(first: int, second: int, room: int) -> list[int]:
    """The longer loses tokens until both are alike, then both do; an odd one is the longer's."""
    shorter = min(first, second, room // 2)
    return [room - shorter, shorter] if first > second else [shorter, room - shorter]


def _enclosed(tokenizer: Tokenizer, texts: list[np.ndarray]) -> np.ndarray:
    special = tokenizer.special
    between = special.eos if special.eos is not None else special.bos
    parts: list[Any] = [] if special.bos is None else [[special.bos]]
    for number, text in enumerate(texts):
        parts += [[between], text] if number else [text]
    parts += [] if special.eos is None else [[special.eos]]
    return np.concatenate(parts).astype(np.uint32)


def _ragged(found: list[np.ndarray], labels: list[np.ndarray]) -> Ragged:
    offsets = offsets_of(np.array([len(ids) for ids in found], np.int64))
    nothing = [np.zeros(0, np.uint32)]
    return Ragged(
        np.concatenate([*found, *nothing]),
        offsets,
        labels=np.concatenate([*labels, *nothing]).astype(np.uint16),
    )


def _first(names: Iterable[str], among: set[str]) -> str | None:
    return next((name for name in names if name in among), None)
