"""Splitting of texts at a tokenizer's added tokens (special and others), across which no tokens merge: the
pieces can be encoded separately, and their ids together are those of the full text."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tokenizers

from headrace.data.chat.template import RenderedChat


class TextPosition(NamedTuple):
    """A position in a split text: `bytes` after the start of a piece, or before its end. It may be within
    the token that follows the piece."""

    piece: int
    bytes: int
    is_from_end: bool = False


@dataclass(frozen=True)
class SplitText:
    """A text split at added tokens: the pieces between them, the id of the token after each piece (-1 after
    the last), and the alternating starts and ends of the assistant's answers."""

    texts: list[str]
    next_ids: list[int]
    edges: list[TextPosition]


class SpecialSplitter:
    def __init__(self, added: Mapping[int, tokenizers.AddedToken]) -> None:
        """`added` are the added tokens by id, from `tokenizers.Tokenizer.get_added_tokens_decoder`."""
        self.token_ids = {token.content: id for id, token in added.items() if token.content}
        # Tokens searched in the text as it is, and those searched in normalized text.
        self.patterns = [
            compile_alternatives(
                [token.content for token in added.values() if token.normalized == is_normalized]
            )
            for is_normalized in (False, True)
        ]
        self.any_token, self.special = (
            compile_alternatives(texts) or re.compile("(?!)")
            for texts in (
                list(self.token_ids),
                [token.content for token in added.values() if token.special],
            )
        )
        self.is_unambiguous = are_unambiguous(list(self.token_ids))

    def split(self, text: str) -> list[str]:
        """Text and tokens alternately; the first and last are text. Matches like `tokenizers`: the leftmost
        token, then the longest, and tokens searched in normalized text after the others."""
        first, second = self.patterns
        pieces = [text] if first is None else first.split(text)
        if second is None:
            return pieces
        nested = [second.split(piece) if index % 2 == 0 else [piece] for index, piece in enumerate(pieces)]
        return [piece for part in nested for piece in part]

    def split_rendered(self, rendered: RenderedChat) -> SplitText:
        """Split a rendered conversation, with the answers in it."""
        pieces = self.split(rendered.text)
        texts, next_ids = pieces[::2], [self.token_ids[piece] for piece in pieces[1::2]] + [-1]
        edges = [edge for span in rendered.spans for edge in span]
        positions = [TextPosition(piece, len(part.encode())) for piece, part in locate_edges(pieces, edges)]
        return SplitText(texts, next_ids, positions)

    def contain_tokens(self, texts: pa.LargeStringArray) -> np.ndarray:
        """Whether each text contains an added token."""
        if not self.token_ids:
            return np.zeros(len(texts), bool)
        # 470 MB/s for any number of tokens; Python's re reaches 120
        return pc.match_substring_regex(texts, self.any_token.pattern).to_numpy(zero_copy_only=False)


def are_unambiguous(tokens: list[str]) -> bool:
    """Whether no token contains or can overlap another. A token is then recognized in any context."""
    prefixes = {token[:size] for token in tokens for size in range(1, len(token))}
    can_overlap = any(token[size:] in prefixes for token in tokens for size in range(1, len(token)))
    return not can_overlap and not any(a in b and a != b for a in tokens for b in tokens)


def locate_edges(pieces: list[str], edges: list[int]) -> list[tuple[int, str]]:
    """Locate sorted positions in the text of `pieces` (text and tokens alternately). Returns for each the
    index of the piece of text that contains it, or whose next token does, and the text from the start of that
    piece up to the position."""
    located, number, start = [], 0, 0
    for edge in edges:
        while number < len(pieces) - 1 and start + len(pieces[number]) + len(pieces[number + 1]) <= edge:
            start += len(pieces[number]) + len(pieces[number + 1])
            number += 2
        located.append((number // 2, "".join(pieces[number : number + 2])[: edge - start]))
    return located


def compile_alternatives(texts: Sequence[str]) -> re.Pattern[str] | None:
    """A pattern that matches the longest of these texts at a position; None if there are no texts."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
