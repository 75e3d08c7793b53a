"""Conversations to token ids, and which of them a model is to learn: those of what the assistant says.

Ids are those of the whole text that the tokenizer's chat template gives, special tokens in it recognised
wherever they stand, as with transformers' apply_chat_template. A token is learnt if any of it is in what the
assistant says. transformers does the same except that, of a last character that takes several tokens, it
takes the first.

The text is cut at special tokens, which nothing is merged across, and the fast encoder encodes what lies
between. Where each token stands follows from how many bytes it is for. Where that is not known, for a
tokenizer or a text, the `tokenizers` library says it, thirty times slower."""

import functools
import json
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from unicodedata import is_normalized

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import tokenizers

from headrace.data.tokenizer.split_special import Cut, Cutter
from headrace.data.documents import Problems, Ragged, offsets_of
from headrace.data.chat.template import Refused, Rendered, Template
from headrace.data.tokenizer.tokenizer import Tokenizer
from headrace.data.chat.trace import Tracer
from headrace.errors import UserError

PLAIN = Path(__file__).parent.parent / "templates" / "plain.jinja"
BATCH = 1 << 20  # characters encoded at a time: what is made of them stays in the cache
UNKNOWN = 1 << 30  # bytes, for tokens whose length is not known: no text has as many
FORMS = ("NFC", "NFD", "NFKC", "NFKD")
NOTHING = Cut([""], [-1], [])


def encode_chats(
    tokenizer: Tokenizer,
    conversations: Sequence[str],
    *,
    problems: Problems | None = None,
    ids: Sequence[str] | None = None,
) -> Ragged:
    """The tokens of conversations, which are JSON as `shapes.messages` gives them. One that the template
    refuses is a problem of the document that `ids` names; where those are skipped, it has no tokens."""
    encoder = make_encoder(tokenizer)
    problems = Problems() if problems is None else problems
    done: list[Ragged] = []
    texts, cuts, size = [], [], 0
    for number, conversation in enumerate(conversations):
        try:
            cut = encoder.cut(conversation)
        except Refused as error:
            where = ids[number] if ids is not None else f"conversation {number + 1}"
            problems.bad("refused by the chat template", where, str(error))
            cut = NOTHING
        texts.append(conversation)
        cuts.append(cut)
        size += len(conversation)
        if size >= BATCH:
            done.append(encoder.encode(texts, cuts))
            texts, cuts, size = [], [], 0
    return join([*done, encoder.encode(texts, cuts)] if cuts else done)


def why_slow(tokenizer: Tokenizer) -> str | None:
    """Why conversations cannot be encoded the fast way with this tokenizer; None if they can."""
    return make_encoder(tokenizer).measure.trouble


@functools.lru_cache(maxsize=4)
def make_encoder(tokenizer: Tokenizer) -> "Encoder":
    return Encoder(tokenizer)


class Encoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.template is None:
            raise UserError(
                "this tokenizer has no chat template, which conversations need; name one with "
                f"tokenizer.template, or take {PLAIN}, which suits any tokenizer"
            )
        self.tokenizer, self.measure = tokenizer, Measure(tokenizer.inner)
        self.cutter = Cutter(tokenizer.inner.get_added_tokens_decoder())
        variables = name_special(tokenizer)
        self.template = Template(tokenizer.template, variables, self.cutter.special)
        self.tracer = Tracer(tokenizer.template, variables, self.cutter)

    def cut(self, conversation: str) -> Cut:
        """A conversation's text, in pieces."""
        messages, tools = parse(conversation)
        if tools is None and set(map(len, messages)) <= {2}:
            contents: list[Any] = [message.get("content") for message in messages]
            if set(map(type, contents)) <= {str}:
                outline = self.tracer.outline(tuple([message["role"] for message in messages]))
                filled = outline.fill(contents) if outline is not None else None
                if filled is not None:
                    return filled
        return self.cutter.cut(self.template.render(messages, tools))

    def encode(self, conversations: list[str], cuts: list[Cut]) -> Ragged:
        if self.measure.trouble is not None:
            return join(
                [self.encode_slowly(text, cut) for text, cut in zip(conversations, cuts, strict=True)]
            )
        encoded, right = self.encode_fast(cuts)
        again = np.flatnonzero(~right).tolist()
        if not again:
            return encoded
        # Nothing else is amiss with most of these than that somebody says a special token.
        second, right = self.encode_fast(
            [self.cutter.cut(self.render(conversations[number])) for number in again]
        )
        parts, done = [], 0
        for place, number in enumerate(again):
            parts.append(encoded.take(done, number))
            if right[place]:
                parts.append(second.take(place, place + 1))
            else:
                parts.append(self.encode_slowly(conversations[number], cuts[number]))
            done = number + 1
        return join([*parts, encoded.take(done, len(cuts))])

    def encode_fast(self, cuts: list[Cut]) -> tuple[Ragged, np.ndarray]:
        """The tokens, and of which conversations they are right: nobody says a special token, and every piece
        has as many bytes as its tokens. All pieces at once, each a text and the token that follows it."""
        texts = pa.array(list(chain.from_iterable([cut.texts for cut in cuts])), pa.large_string())
        follow = np.array(list(chain.from_iterable([cut.follow for cut in cuts])), np.int64)
        there = follow >= 0
        encoded = self.tokenizer.encode_batch(texts)
        places, special = encoded.offsets[1:][there], follow[there]
        values = np.insert(encoded.values, places, special)
        tokens = offsets_of(np.diff(encoded.offsets) + there)  # of pieces
        stops = offsets_of(self.measure.count(values, tokens[:-1][np.diff(encoded.offsets) > 0]))
        sizes = pc.binary_length(texts).to_numpy()
        wrong = np.diff(stops[tokens]) != sizes + np.where(there, self.measure.bytes[follow], 0)
        wrong |= self.measure.changes(texts) | self.cutter.find(texts)
        pieces = offsets_of(np.array([len(cut.texts) for cut in cuts], np.int64))
        right = np.diff(offsets_of(wrong)[pieces]) == 0
        owners, edges = locate(cuts, pieces, starts=stops[tokens], sizes=sizes)
        bounds = tokens[pieces]
        # Learnt is from the first token that ends after a span's start to the last that starts before its end
        first = np.searchsorted(stops[1:], edges[::2], side="right")
        last = np.searchsorted(stops[:-1], edges[1::2], side="left")
        first, last = (np.clip(place, bounds[owners], bounds[owners + 1]) for place in (first, last))
        return Ragged(values, bounds, mark(first, last, len(values))), right

    def render(self, conversation: str) -> Rendered:
        return self.template.render(*parse(conversation))

    def encode_slowly(self, conversation: str, cut: Cut) -> Ragged:
        rendered = Rendered("", []) if cut is NOTHING else self.render(conversation)
        encoding = self.measure.reference.encode(rendered.text, add_special_tokens=False)
        starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        loss = np.zeros(len(starts), bool)
        for begin, end in rendered.spans:
            loss[np.searchsorted(stops, begin, side="right") : np.searchsorted(starts, end, side="left")] = (
                True
            )
        return Ragged(np.array(encoding.ids, np.uint32), np.array([0, len(starts)]), loss)


class Measure:
    """How many bytes of text each token is for, if that is the same wherever it stands."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        settings = json.loads(inner.to_str())
        self.trouble, self.forms, self.prefixed = None, [], False
        spaced = False  # whether spaces are written as U+2581
        for step in flatten(settings["normalizer"], "normalizers"):
            if step["type"] in FORMS:
                self.forms.append(step["type"])
            elif step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == "▁":
                spaced = True
            elif step["type"] == "Prepend" and step["prepend"] == "▁":
                self.prefixed = True
            else:
                self.trouble = f"its normalizer {step['type']} changes the text"
        splits = flatten(settings["pre_tokenizer"], "pretokenizers")
        bytewise = any(step["type"] == "ByteLevel" for step in splits)
        if any(step["type"] == "Metaspace" or step.get("add_prefix_space") for step in splits):
            self.trouble = "it puts a space before a text"
        elif not bytewise and not spaced:
            self.trouble = "its tokens are not bytes of the text"
        added = inner.get_added_tokens_decoder()
        if any(token.single_word or token.lstrip or token.rstrip for token in added.values()):
            self.trouble = "some of its special tokens take blank space with them"
        if (spaced or self.prefixed) and any(token.normalized for token in added.values()):
            self.trouble = "it looks for special tokens in changed text"
        vocabulary = inner.get_vocab(with_added_tokens=False)
        fallback = bool(settings["model"].get("byte_fallback"))
        self.bytes = np.full(1 + max(inner.get_vocab(with_added_tokens=True).values()), UNKNOWN, np.int32)
        self.bytes[list(vocabulary.values())] = [
            len(token) if bytewise else count_bytes(token, fallback) for token in vocabulary
        ]
        unknown = vocabulary.get(settings["model"].get("unk_token"))
        if unknown is not None:
            self.bytes[unknown] = UNKNOWN
        self.bytes[list(added)] = [len(token.content.encode()) for token in added.values()]
        self.inner = inner

    def changes(self, texts: pa.LargeStringArray) -> np.ndarray:
        """Which texts the tokenizer changes before it encodes them."""
        changed = np.zeros(len(texts), bool)
        if self.forms:
            beyond = np.flatnonzero(~pc.string_is_ascii(texts).to_numpy(zero_copy_only=False))
            for number in beyond:
                text = texts[int(number)].as_py()
                changed[number] = not all(is_normalized(form, text) for form in self.forms)
        return changed

    def count(self, values: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """The bytes of tokens. Those at `starts` begin a text, and may have a space more than it."""
        lengths = self.bytes[values]
        if self.prefixed:
            lengths[starts] -= 1
        return lengths

    @functools.cached_property
    def reference(self) -> tokenizers.Tokenizer:
        """Finds special tokens in a text, and leaves the blank space in what it says of a token's place."""
        copy = tokenizers.Tokenizer.from_str(self.inner.to_str())
        copy.post_processor = None
        return copy


def parse(conversation: str) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """The messages, and the tools that stand before them."""
    try:
        messages = orjson.loads(conversation)
    except orjson.JSONDecodeError as error:
        raise Refused(f"it is not JSON: {error}") from None
    if not isinstance(messages, list) or not set(map(type, messages)) <= {dict}:
        raise Refused("it is not a list of messages")
    if not set(map(type, [message.get("role") for message in messages])) <= {str}:
        raise Refused("a message has no role")
    if messages and messages[0]["role"] == "tools":
        return messages[1:], messages[0]["tools"]
    return messages, None


def name_special(tokenizer: Tokenizer) -> dict[str, str]:
    """bos_token, eos_token... as templates know them; those that the tokenizer lacks are undefined."""
    ids = {role: id for role, id in vars(tokenizer.special).items() if id is not None}
    return {f"{role}_token": str(tokenizer.inner.id_to_token(id)) for role, id in ids.items()}


def locate(
    cuts: list[Cut], pieces: np.ndarray, *, starts: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Where the assistant begins and ends to speak, in turn, in bytes of all texts together, and in whose
    conversation. `pieces` begin conversations, `starts` are where pieces begin and `sizes` those of their
    text."""
    counts = [len(cut.edges) for cut in cuts]
    flat = chain.from_iterable(chain.from_iterable([cut.edges for cut in cuts]))
    piece, offset, from_end = np.array(list(flat), np.int64).reshape(-1, 3).T
    owners = np.repeat(np.arange(len(cuts)), counts)
    piece = piece + pieces[owners]
    return owners[::2], starts[piece] + np.where(from_end, sizes[piece] - offset, offset)


def mark(first: np.ndarray, last: np.ndarray, size: int) -> np.ndarray:
    """True from each first up to its last; a token may be the last of one range and the first of the next."""
    edges = np.zeros(2 * len(first) + 2, np.int64)
    edges[1:-1:2], edges[2:-1:2], edges[-1] = first, last, size
    np.maximum.accumulate(edges, out=edges)
    return np.repeat(np.arange(len(edges) - 1) % 2 == 1, np.diff(edges))


def join(parts: list[Ragged]) -> Ragged:
    if not parts:
        return Ragged(np.zeros(0, np.uint32), np.zeros(1, np.int64), np.zeros(0, bool))
    if len(parts) == 1:
        return parts[0]
    lengths = np.concatenate([part.lengths for part in parts])
    values, loss = (
        np.concatenate(arrays) for arrays in zip(*((part.values, part.loss) for part in parts), strict=True)
    )
    return Ragged(values, offsets_of(lengths), loss)


def count_bytes(token: str, fallback: bool) -> int:
    if fallback and re.fullmatch("<0x[0-9A-F]{2}>", token):
        return 1
    return len(token.replace("▁", " ").encode())


def flatten(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, which may be one, none or a sequence of sequences."""
    if step is None:
        return []
    return (
        [inner for part in step[name] for inner in flatten(part, name)]
        if step["type"] == "Sequence"
        else [step]
    )
