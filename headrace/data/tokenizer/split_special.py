"""Texts cut at a tokenizer's own tokens (special ones, and others that were added to it), which nothing is
merged across: what lies between can be encoded on its own, and the ids of all are those of the whole."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.data.chat.template import Rendered


class Edge(NamedTuple):
    """A place in a cut text: so many bytes after the begin of a piece of text, which may be in the token that
    follows it, or before its end."""

    piece: int
    bytes: int
    from_end: bool = False


@dataclass(frozen=True)
class Cut:
    """Pieces of text, the id of the token that follows each (-1 after the last), and where the assistant
    begins and ends to speak, in turn."""

    texts: list[str]
    follow: list[int]
    edges: list[Edge]


class Cutter:
    def __init__(self, added: dict[int, Any]) -> None:
        """`added` are the tokens that a tokenizer of the `tokenizers` library has added, by id."""
        self.numbers = {token.content: id for id, token in added.items() if token.content}
        self.patterns = [
            one_of([token.content for token in added.values() if token.normalized == normalised])
            for normalised in (False, True)
        ]
        self.any, self.special = (
            one_of(texts) or re.compile("(?!)")
            for texts in (list(self.numbers), [token.content for token in added.values() if token.special])
        )
        self.apart = are_apart(list(self.numbers))

    def split(self, text: str) -> list[str]:
        """Text and tokens in turn, beginning and ending with text, as `tokenizers` finds them: leftmost, then
        longest; those that are looked for in normalised text after the others."""
        first, second = self.patterns
        pieces = [text] if first is None else first.split(text)
        if second is None:
            return pieces
        found = [second.split(piece) if place % 2 == 0 else [piece] for place, piece in enumerate(pieces)]
        return [piece for some in found for piece in some]

    def cut(self, rendered: Rendered) -> Cut:
        pieces = self.split(rendered.text)
        texts, follow = pieces[::2], [self.numbers[piece] for piece in pieces[1::2]] + [-1]
        edges = [edge for span in rendered.spans for edge in span]
        return Cut(
            texts, follow, [Edge(piece, len(part.encode())) for piece, part in find_places(pieces, edges)]
        )

    def find(self, texts: pa.LargeStringArray) -> np.ndarray:
        """Which texts have tokens in them."""
        if not self.numbers:
            return np.zeros(len(texts), bool)
        # 470 MB/s however many tokens there are; Python's own would do 120
        return pc.match_substring_regex(texts, self.any.pattern).to_numpy(zero_copy_only=False)


def are_apart(tokens: list[str]) -> bool:
    """Whether none stands in another or can overlap another. Then a token is one whatever comes before and
    after it."""
    begins = {token[:size] for token in tokens for size in range(1, len(token))}
    overlap = any(token[size:] in begins for token in tokens for size in range(1, len(token)))
    return not overlap and not any(one in other and one != other for one in tokens for other in tokens)


def find_places(pieces: list[str], edges: list[int]) -> list[tuple[int, str]]:
    """For places in the text, in order: which piece of text each is in, or in the token after it, and what
    comes before it there."""
    found, number, start = [], 0, 0
    for edge in edges:
        while number < len(pieces) - 1 and start + len(pieces[number]) + len(pieces[number + 1]) <= edge:
            start += len(pieces[number]) + len(pieces[number + 1])
            number += 2
        found.append((number // 2, "".join(pieces[number : number + 2])[: edge - start]))
    return found


def one_of(texts: Sequence[str]) -> re.Pattern[str] | None:
    """Finds the longest of these texts that stands at a place."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
