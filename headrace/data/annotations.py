"""Documents that say more than their text: a text or its words with labels, or two answers of which one was
preferred. They travel as messages do, as JSON whose first part tells what follows, and are packed whole."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from headrace.errors import UserError

LABEL, TAGS, PAIR = "label", "tags", "prompt"  # roles of first parts; no conversation begins with one
WHAT = {
    LABEL: "texts with a label",
    TAGS: "words with tags",
    PAIR: "pairs of answers",
    "chat": "conversations",
}
OPENINGS = {kind: f'[{{"role":"{kind}",' for kind in (LABEL, TAGS, PAIR)}
NAMED = 12  # labels at most in a line
MOST = (1 << 16) - 1  # labels: one number is for none


@dataclass
class Notes:
    """What one worker met: labels by their names, numbered as they came, the kinds of documents, and how many
    were cut at the end, or left out, because a row is too short for them."""

    names: dict[str, int] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def whole(self) -> bool:
        """Whether documents must not be divided."""
        return bool(self.kinds & OPENINGS.keys())

    def number(self, name: str | None) -> int:
        """As the column of labels has it: 0 is none, the first is 1."""
        if name is None:
            return 0
        if name not in self.names:
            if len(self.names) == MOST:
                raise UserError(
                    f"sources: more than {MOST:,} different labels, the last {name!r}; if the column named "
                    "label holds none, name the one with the text: column: text"
                )
            self.names[name] = len(self.names)
        return 1 + self.names[name]

    def summary(self) -> dict[str, Any]:
        return {"labels": list(self.names), "kinds": sorted(self.kinds), "counts": dict(self.counts)}


def kinds_of(table: pa.Table) -> np.ndarray:
    """Of each document: text, chat, or one of WHAT."""
    found = ["text" if said is None else kind_of(said) for said in table["messages"].to_pylist()]
    return np.array(found, dtype=object)


def kind_of(document: str) -> str:
    return next((kind for kind, opening in OPENINGS.items() if document.startswith(opening)), "chat")


def kinds(notes: Sequence[dict[str, Any]]) -> set[str]:
    return {kind for one in notes for kind in one["kinds"]}


def told(notes: Sequence[dict[str, Any]], length: int) -> Iterator[str]:
    """What is said of all documents together: their labels, and what a row is too short for."""
    check(kinds(notes))
    names = ordered(name for one in notes for name in one["labels"])
    cut, left_out = (sum(one["counts"].get(key, 0) for one in notes) for key in ("cut", "too long"))
    if names:
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        what = "words" if labelled(kinds(notes)) == "tokens" else "texts"
        yield f"{what} have {len(names):,} labels: {', '.join(names[:NAMED])}{more}"
    if cut:
        yield f"{cut:,} labelled texts are cut at the end, to rows of {length} tokens"
    if left_out:
        yield (
            f"{left_out:,} pairs of answers are left out, longer together than a row of {length} tokens; "
            "raise pack.sequence_length to keep them"
        )


def ordered(names: Iterable[str]) -> tuple[str, ...]:
    """All labels in the order in which they are numbered: whole numbers by their value, others by name."""
    found = set(names)
    if all(re.fullmatch(r"-?\d{1,18}", name) for name in found):
        return tuple(sorted(found, key=lambda name: (int(name), name)))
    return tuple(sorted(found))


def check(kinds: set[str]) -> None:
    """A set holds documents for one task: UserError where it would hold several."""
    marked = kinds & OPENINGS.keys()
    mixed = len(marked) > 1 or (PAIR in marked and len(kinds) > 1)
    if mixed:
        found = " and ".join(WHAT.get(kind, "plain texts") for kind in sorted(kinds))
        hint = "; a record with `chosen` and no `rejected` is a conversation" if PAIR in marked else ""
        raise UserError(f"sources: found {found} in one set, expected one kind; make a set of each{hint}")


def labelled(kinds: Iterable[str]) -> Literal["", "text", "tokens"]:
    """What of a set has labels: text, tokens, or nothing."""
    found = set(kinds)
    return "text" if LABEL in found else "tokens" if TAGS in found else ""
