"""Texts with a label and words with tags: reads the record layouts in which they are published, and encodes
them with the label at the first token of the text or word.

Two texts are joined by the token that ends a text, as BERT joins them with [SEP]. Documents that are too long
for a row are cut at the end, the longer text first."""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import orjson

from headrace.data.annotations import LABEL, TAGS, AnnotationStats
from headrace.data.documents import JsonObject, Ragged, lengths_to_offsets
from headrace.data.tokenizer.tokenizer import Tokenizer

TEXT_COLUMNS = ("text", "sentence", "content")
TEXT_PAIR_COLUMNS = (
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
)
WORD_COLUMNS = ("tokens", "words")
TAG_COLUMNS = ("tags", "ner_tags", "pos_tags")
MISSING_LABELS = (-1, -100)  # what datasets store where the label is unknown


def find_label_columns(columns: Iterable[str]) -> tuple[str, ...] | None:
    """The columns of a labeled or tagged record: the label or the tags first, then the texts or the words.
    None if the record has neither labels nor tags."""
    names = set(columns)
    tags, words = _find_first(TAG_COLUMNS, names), _find_first(WORD_COLUMNS, names)
    if tags and words:
        return tags, words
    if LABEL not in names:
        return None
    pair = next((pair for pair in TEXT_PAIR_COLUMNS if names.issuperset(pair)), None)
    text = _find_first(TEXT_COLUMNS, names)
    return (LABEL, *pair) if pair else (LABEL, text) if text else None


def has_label(record: Mapping[str, object]) -> bool:
    """Whether a record is labeled or tagged, by its columns and values: a number such as 0.7 is not a
    label."""
    columns = _columns_with_values(record)
    return columns is not None and (columns[0] != LABEL or isinstance(record[LABEL], str | int | None))


def to_document_parts(record: Mapping[str, object]) -> list[JsonObject]:
    """Convert a labeled or tagged record to the parts of a document. Raises ValueError that describes what is
    wrong with the record."""
    columns = _columns_with_values(record)
    assert columns is not None
    if columns[0] != LABEL:
        return _tags_to_parts(record, *columns)
    name = _to_label_name(record[LABEL], "`label`")
    texts = [{"role": "text", "content": _require_text(record[column], column)} for column in columns[1:]]
    return [{"role": LABEL, "label": name}, *texts]


def encode_labeled_texts(
    tokenizer: Tokenizer, documents: list[str], max_length: int, stats: AnnotationStats
) -> Ragged:
    """Encode JSON documents from `to_document_parts`, with the tokens that begin and end a text; the label is
    at the first token. Adds labels and counts to `stats`."""
    parsed = [orjson.loads(document) for document in documents]
    texts = tokenizer.encode_batch([part["content"] for parts in parsed for part in parts[1:]])
    text_ids = np.split(texts.values, texts.offsets[1:-1])
    encoded, labels, num_used = [], [], 0
    for label, *parts in parsed:
        pieces, _ = _truncate(tokenizer, text_ids[num_used : num_used + len(parts)], max_length, stats)
        ids = _add_special_tokens(tokenizer, pieces)
        num_used += len(parts)
        numbers = np.zeros(len(ids), np.uint16)
        numbers[:1] = stats.get_label_number(label["label"])
        encoded.append(ids)
        labels.append(numbers)
    return _to_ragged(encoded, labels)


def encode_tagged_words(
    tokenizer: Tokenizer, documents: list[str], max_length: int, stats: AnnotationStats
) -> Ragged:
    """Encode JSON documents of tagged words from `to_document_parts`. Words are joined by spaces and encoded
    together; a tag is at the first token of its word. A word that shares its token with the word before it
    loses its tag. Adds labels and counts to `stats`."""
    encoded, labels = [], []
    for document in documents:
        tags, words = orjson.loads(document)
        encoding = tokenizer.text_tokenizer.encode(" ".join(words["content"]), add_special_tokens=False)
        word_starts = [0, *accumulate(1 + len(word) for word in words["content"])]
        stops = np.array([stop for _, stop in encoding.offsets], np.int64)
        numbers = np.zeros(len(encoding.ids), np.uint16)
        last_tagged = -1
        for word, tag, start in zip(words["content"], tags["tags"], word_starts, strict=False):
            token = int(np.searchsorted(stops, start, side="right"))
            if last_tagged < token < len(numbers) and encoding.offsets[token][0] < start + len(word):
                numbers[token], last_tagged = stats.get_label_number(tag), token
        (ids, lengths), special = (
            _truncate(tokenizer, [np.array(encoding.ids)], max_length, stats),
            tokenizer.special,
        )
        prefix, suffix = ([0] * (token is not None) for token in (special.bos, special.eos))
        encoded.append(_add_special_tokens(tokenizer, ids))
        labels.append(np.concatenate([prefix, numbers[: lengths[0]], suffix]).astype(np.uint16))
    return _to_ragged(encoded, labels)


def _columns_with_values(record: Mapping[str, object]) -> tuple[str, ...] | None:
    return find_label_columns(name for name, value in record.items() if value is not None or name == LABEL)


def _tags_to_parts(record: Mapping[str, object], tag_column: str, word_column: str) -> list[JsonObject]:
    words, tags = record[word_column], record[tag_column]
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"`{word_column}` is not a list of words")
    if not isinstance(tags, list) or len(tags) != len(words):
        count = f"{len(tags)}" if isinstance(tags, list) else "no list"
        raise ValueError(f"`{tag_column}` has {count} for {len(words)} words, expected one tag for each word")
    names = [_to_label_name(tag, f"`{tag_column}` of word {number}") for number, tag in enumerate(tags, 1)]
    return [{"role": TAGS, "tags": names}, {"role": "words", "content": words}]


def _to_label_name(value: object, location: str) -> str | None:
    if value is None or value == "" or (type(value) is int and value in MISSING_LABELS):
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int):
        return str(value)
    raise ValueError(f"{location} is {type(value).__name__}, expected a name or an integer")


def _require_text(value: object, column: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"`{column}` is not text")
    return value


def _truncate(
    tokenizer: Tokenizer, texts: list[np.ndarray], max_length: int, stats: AnnotationStats
) -> tuple[list[np.ndarray], list[int]]:
    """Cut one or two texts so that they fit in `max_length` with their special tokens. Returns the texts and
    their lengths."""
    special = tokenizer.special
    room = max_length - (special.bos is not None) - (special.eos is not None) - (len(texts) - 1)
    lengths = [len(text) for text in texts]
    if sum(lengths) > room:
        stats.counts["cut"] += 1
        lengths = [room] if len(lengths) == 1 else _share_room(lengths[0], lengths[1], room)
    return [text[:length] for text, length in zip(texts, lengths, strict=True)], lengths


def _share_room(first: int, second: int, room: int) -> list[int]:
    """Lengths of two texts cut to `room` tokens: the longer is cut until both are equally long, then both
    are. An odd token belongs to the longer one."""
    shorter = min(first, second, room // 2)
    return [room - shorter, shorter] if first > second else [shorter, room - shorter]


def _add_special_tokens(tokenizer: Tokenizer, texts: list[np.ndarray]) -> np.ndarray:
    special = tokenizer.special
    separator = special.eos if special.eos is not None else special.bos
    parts: list[Any] = [] if special.bos is None else [[special.bos]]
    for index, text in enumerate(texts):
        parts += [[separator], text] if index else [text]
    parts += [] if special.eos is None else [[special.eos]]
    return np.concatenate(parts).astype(np.uint32)


def _to_ragged(documents: list[np.ndarray], labels: list[np.ndarray]) -> Ragged:
    offsets = lengths_to_offsets(np.array([len(ids) for ids in documents], np.int64))
    empty = [np.zeros(0, np.uint32)]
    return Ragged(
        np.concatenate([*documents, *empty]),
        offsets,
        labels=np.concatenate([*labels, *empty]).astype(np.uint16),
    )


def _find_first(names: Iterable[str], available: set[str]) -> str | None:
    return next((name for name in names if name in available), None)
