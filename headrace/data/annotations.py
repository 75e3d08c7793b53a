"""Documents with annotations: a labeled text, tagged words, or a prompt with a preferred and a rejected
answer.

They are stored like messages, as a JSON list; the role of its first part gives the kind of the document.
Packing never splits them."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa

from headrace.data.documents import JsonObject
from headrace.errors import UserError

LABEL, TAGS, PAIR = "label", "tags", "prompt"  # roles of first parts; no conversation starts with one of them
KIND_NAMES = {
    LABEL: "texts with a label",
    TAGS: "words with tags",
    PAIR: "pairs of answers",
    "chat": "conversations",
}
KIND_PREFIXES = {kind: f'[{{"role":"{kind}",' for kind in (LABEL, TAGS, PAIR)}
MAX_LABELS_SHOWN = 12  # in a message
MAX_LABELS = (1 << 16) - 1  # labels are stored as uint16, and 0 means no label


@dataclass
class AnnotationStats:
    """Annotations that one worker has seen: label names, numbered in the order of their first use, kinds of
    documents, and how many documents were cut or skipped because they did not fit in a row."""

    names: dict[str, int] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def is_indivisible(self) -> bool:
        """Whether packing must not split the documents."""
        return bool(self.kinds & KIND_PREFIXES.keys())

    def get_label_number(self, name: str | None) -> int:
        """The number that stands for a label in the label column; 0 for None. A new name gets the next
        number."""
        if name is None:
            return 0
        if name not in self.names:
            if len(self.names) == MAX_LABELS:
                raise UserError(
                    f"sources: more than {MAX_LABELS:,} different labels, the last is {name!r}; if the "
                    "column `label` does not hold labels, choose the column of the text: text_column: text"
                )
            self.names[name] = len(self.names)
        return 1 + self.names[name]

    def to_json(self) -> JsonObject:
        return {"labels": list(self.names), "kinds": sorted(self.kinds), "counts": dict(self.counts)}


def detect_kinds(table: pa.Table) -> np.ndarray:
    """The kind of each document of a table: "text", "chat", or one of LABEL, TAGS, PAIR."""
    documents = table["messages"].to_pylist()
    kinds = ["text" if document is None else detect_kind(document) for document in documents]
    return np.array(kinds, dtype=object)


def detect_kind(messages: str) -> str:
    """The kind of a document stored as a JSON list: "chat", or one of LABEL, TAGS, PAIR."""
    return next((kind for kind, prefix in KIND_PREFIXES.items() if messages.startswith(prefix)), "chat")


def collect_kinds(summaries: Sequence[JsonObject]) -> set[str]:
    """The kinds of documents in the summaries of several workers (`AnnotationStats.to_json`)."""
    return {kind for summary in summaries for kind in summary["kinds"]}


def describe_annotations(summaries: Sequence[JsonObject], row_length: int) -> Iterator[str]:
    """Lines for the user about all annotations: the labels, and what did not fit in a row of `row_length`
    tokens.

    Raises UserError if the workers found documents for different tasks."""
    kinds = collect_kinds(summaries)
    check_one_task(kinds)
    names = sort_labels(name for summary in summaries for name in summary["labels"])
    cut, skipped = (
        sum(summary["counts"].get(key, 0) for summary in summaries) for key in ("cut", "too long")
    )
    if names:
        extra = f" and {len(names) - MAX_LABELS_SHOWN} more" if len(names) > MAX_LABELS_SHOWN else ""
        labeled = "words" if find_labeled_unit(kinds) == "tokens" else "texts"
        yield f"{labeled} have {len(names):,} labels: {', '.join(names[:MAX_LABELS_SHOWN])}{extra}"
    if cut:
        yield f"{cut:,} labeled texts are cut at the end, to rows of {row_length} tokens"
    if skipped:
        yield (
            f"{skipped:,} pairs of answers are skipped: both answers do not fit in a row of {row_length} "
            "tokens; raise pack.sequence_length to keep them"
        )


def sort_labels(names: Iterable[str]) -> tuple[str, ...]:
    """Distinct labels in the order in which they are numbered: integers by value, other names by spelling."""
    distinct = set(names)
    if all(re.fullmatch(r"-?\d{1,18}", name) for name in distinct):
        return tuple(sorted(distinct, key=lambda name: (int(name), name)))
    return tuple(sorted(distinct))


def check_one_task(kinds: set[str]) -> None:
    """Raise UserError if these kinds of documents serve different tasks: a dataset serves one."""
    annotated = kinds & KIND_PREFIXES.keys()
    is_mixed = len(annotated) > 1 or (PAIR in annotated and len(kinds) > 1)
    if is_mixed:
        names = " and ".join(KIND_NAMES.get(kind, "plain texts") for kind in sorted(kinds))
        hint = "; a record with `chosen` but no `rejected` is a conversation" if PAIR in annotated else ""
        raise UserError(
            f"sources: found {names} in one dataset, expected one kind; make a dataset of each{hint}"
        )


def find_labeled_unit(kinds: Iterable[str]) -> Literal["", "text", "tokens"]:
    """The unit that the labels of these kinds of documents belong to; "" if they have no labels."""
    distinct = set(kinds)
    return "text" if LABEL in distinct else "tokens" if TAGS in distinct else ""
