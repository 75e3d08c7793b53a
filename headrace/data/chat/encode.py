"""Encoding of conversations: token ids and a loss mask that selects the answers of the assistant.

The ids are those of the full text that the tokenizer's chat template renders, with special tokens recognized
wherever they occur, as in transformers' apply_chat_template. A token is trained on if any part of it belongs
to an answer. transformers does the same, except that it selects only the first token of a last character that
takes several tokens.

The text is split at special tokens, across which no tokens merge, and the fast encoder encodes the pieces.
Positions of tokens follow from the number of bytes that each token stands for. Where these are unknown, for a
tokenizer or for a text, the `tokenizers` library gives the positions, 30 times slower."""

import functools
import json
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal
from unicodedata import is_normalized

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import tokenizers

from headrace.data.chat.records import Message
from headrace.data.chat.template import ChatTemplate, RenderedChat, TemplateRefused
from headrace.data.chat.trace import TemplateTracer
from headrace.data.documents import JsonObject, Problems, Ragged, lengths_to_offsets
from headrace.data.tokenizer.split_special import SpecialSplitter, SplitText
from headrace.data.tokenizer.tokenizer import Tokenizer
from headrace.errors import UserError

PLAIN_TEMPLATE = Path(__file__).parent.parent / "templates" / "plain.jinja"
BATCH_CHARACTERS = 1 << 20  # encoded at a time: the intermediate arrays then stay in the cache
UNKNOWN_BYTES = 1 << 30  # for tokens of unknown length: more than any text has
UNICODE_FORMS: tuple[Literal["NFC", "NFD", "NFKC", "NFKD"], ...] = ("NFC", "NFD", "NFKC", "NFKD")
EMPTY_SPLIT = SplitText([""], [-1], [])


def encode_chats(
    tokenizer: Tokenizer,
    conversations: Sequence[str],
    *,
    problems: Problems | None = None,
    ids: Sequence[str] | None = None,
) -> Ragged:
    """Encode conversations, each a JSON list from `chat.records.to_messages`. If the template refuses one,
    reports a problem with its entry of `ids`; where problems are skipped, it becomes an empty document."""
    encoder = make_encoder(tokenizer)
    problems = Problems() if problems is None else problems
    batches: list[Ragged] = []
    texts, splits, size = [], [], 0
    for index, conversation in enumerate(conversations):
        try:
            split = encoder.split(conversation)
        except TemplateRefused as error:
            location = ids[index] if ids is not None else f"conversation {index + 1}"
            problems.report("refused by the chat template", location, str(error))
            split = EMPTY_SPLIT
        texts.append(conversation)
        splits.append(split)
        size += len(conversation)
        if size >= BATCH_CHARACTERS:
            batches.append(encoder.encode(texts, splits))
            texts, splits, size = [], [], 0
    return concat_ragged([*batches, encoder.encode(texts, splits)] if splits else batches)


def find_slow_reason(tokenizer: Tokenizer) -> str | None:
    """Why conversations cannot be encoded the fast way with this tokenizer; None if they can."""
    return make_encoder(tokenizer).token_sizes.unsupported_reason


@functools.lru_cache(maxsize=4)
def make_encoder(tokenizer: Tokenizer) -> "ChatEncoder":
    return ChatEncoder(tokenizer)


class ChatEncoder:
    """Encodes conversations with a tokenizer that has a chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.chat_template is None:
            raise UserError(
                "this tokenizer has no chat template, which conversations need; name one with "
                f"tokenizer.chat_template, such as {PLAIN_TEMPLATE}, which works with any tokenizer"
            )
        self.tokenizer, self.token_sizes = tokenizer, TokenSizes(tokenizer.inner)
        self.splitter = SpecialSplitter(tokenizer.inner.get_added_tokens_decoder())
        variables = special_token_variables(tokenizer)
        self.template = ChatTemplate(tokenizer.chat_template, variables, self.splitter.special)
        self.tracer = TemplateTracer(tokenizer.chat_template, variables, self.splitter)

    def split(self, conversation: str) -> SplitText:
        """Render a conversation and split it at special tokens. Raises TemplateRefused."""
        messages, tools = parse_conversation(conversation)
        if tools is None and set(map(len, messages)) <= {2}:
            contents: list[Any] = [message.get("content") for message in messages]
            if set(map(type, contents)) <= {str}:
                outline = self.tracer.get_outline(tuple([message["role"] for message in messages]))
                filled = outline.fill(contents) if outline is not None else None
                if filled is not None:
                    return filled
        return self.splitter.split_rendered(self.template.render(messages, tools))

    def encode(self, conversations: list[str], splits: list[SplitText]) -> Ragged:
        """Encode conversations, given with their splits: the fast way, and where its result is not certain,
        again from the rendered text or the slow way."""
        if self.token_sizes.unsupported_reason is not None:
            return concat_ragged(
                [
                    self.encode_one_slowly(text, split)
                    for text, split in zip(conversations, splits, strict=True)
                ]
            )
        encoded, is_exact = self.encode_fast(splits)
        retried = np.flatnonzero(~is_exact).tolist()
        if not retried:
            return encoded
        # For most of these the only obstacle is that a message contains a special token.
        second, is_exact = self.encode_fast(
            [self.splitter.split_rendered(self.render(conversations[index])) for index in retried]
        )
        parts, done = [], 0
        for position, index in enumerate(retried):
            parts.append(encoded.slice(done, index))
            if is_exact[position]:
                parts.append(second.slice(position, position + 1))
            else:
                parts.append(self.encode_one_slowly(conversations[index], splits[index]))
            done = index + 1
        return concat_ragged([*parts, encoded.slice(done, len(splits))])

    def encode_fast(self, splits: list[SplitText]) -> tuple[Ragged, np.ndarray]:
        """Encode split conversations, all pieces in one batch. Also returns for each conversation whether the
        result is exact: no message contains a special token, and every piece has as many bytes as its
        tokens."""
        texts = pa.array(list(chain.from_iterable([split.texts for split in splits])), pa.large_string())
        next_ids = np.array(list(chain.from_iterable([split.next_ids for split in splits])), np.int64)
        has_next = next_ids >= 0
        encoded = self.tokenizer.encode_batch(texts)
        positions, special = encoded.offsets[1:][has_next], next_ids[has_next]
        values = np.insert(encoded.values, positions, special)
        piece_tokens = lengths_to_offsets(np.diff(encoded.offsets) + has_next)
        stops = lengths_to_offsets(
            self.token_sizes.count_bytes(values, piece_tokens[:-1][np.diff(encoded.offsets) > 0])
        )
        sizes = pc.binary_length(texts).to_numpy()
        expected = sizes + np.where(has_next, self.token_sizes.num_bytes[next_ids], 0)
        is_wrong = np.diff(stops[piece_tokens]) != expected
        is_wrong |= self.token_sizes.find_normalized(texts) | self.splitter.contain_tokens(texts)
        pieces = lengths_to_offsets(np.array([len(split.texts) for split in splits], np.int64))
        is_exact = np.diff(lengths_to_offsets(is_wrong)[pieces]) == 0
        owners, edges = locate_spans(splits, pieces, starts=stops[piece_tokens], sizes=sizes)
        bounds = piece_tokens[pieces]
        # From the first token that ends after the start of a span to the last that starts before its end.
        first = np.searchsorted(stops[1:], edges[::2], side="right")
        last = np.searchsorted(stops[:-1], edges[1::2], side="left")
        first, last = (np.clip(token, bounds[owners], bounds[owners + 1]) for token in (first, last))
        return Ragged(values, bounds, ranges_to_mask(first, last, len(values))), is_exact

    def render(self, conversation: str) -> RenderedChat:
        return self.template.render(*parse_conversation(conversation))

    def encode_one_slowly(self, conversation: str, split: SplitText) -> Ragged:
        """Encode one conversation with the positions that the `tokenizers` library gives."""
        rendered = RenderedChat("", []) if split is EMPTY_SPLIT else self.render(conversation)
        encoding = self.token_sizes.offset_tokenizer.encode(rendered.text, add_special_tokens=False)
        starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        loss_mask = np.zeros(len(starts), bool)
        for start, end in rendered.spans:
            first = np.searchsorted(stops, start, side="right")
            last = np.searchsorted(starts, end, side="left")
            loss_mask[first:last] = True
        return Ragged(np.array(encoding.ids, np.uint32), np.array([0, len(starts)]), loss_mask)


class TokenSizes:
    """The number of bytes of text that each token of a tokenizer stands for, if it does not depend on
    context. `unsupported_reason` is set if it does."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        settings = json.loads(inner.to_str())
        self.inner = inner
        self.unsupported_reason: str | None = None
        self.unicode_forms: list[Literal["NFC", "NFD", "NFKC", "NFKD"]] = []
        self.adds_prefix = False
        escapes_spaces = self._read_normalizer(settings["normalizer"])
        splits = flatten_steps(settings["pre_tokenizer"], "pretokenizers")
        is_byte_level = any(step["type"] == "ByteLevel" for step in splits)
        if any(step["type"] == "Metaspace" or step.get("add_prefix_space") for step in splits):
            self.unsupported_reason = "it adds a space before a text"
        elif not is_byte_level and not escapes_spaces:
            self.unsupported_reason = "its tokens are not bytes of the text"
        added = inner.get_added_tokens_decoder()
        if any(token.single_word or token.lstrip or token.rstrip for token in added.values()):
            self.unsupported_reason = "some of its special tokens include the white space around them"
        if (escapes_spaces or self.adds_prefix) and any(token.normalized for token in added.values()):
            self.unsupported_reason = "it searches normalized text for special tokens"
        vocab = inner.get_vocab(with_added_tokens=False)
        byte_fallback = bool(settings["model"].get("byte_fallback"))
        vocab_size = 1 + max(inner.get_vocab(with_added_tokens=True).values())
        self.num_bytes = np.full(vocab_size, UNKNOWN_BYTES, np.int32)
        self.num_bytes[list(vocab.values())] = [
            len(token) if is_byte_level else count_token_bytes(token, byte_fallback) for token in vocab
        ]
        unknown = vocab.get(settings["model"].get("unk_token"))
        if unknown is not None:
            self.num_bytes[unknown] = UNKNOWN_BYTES
        self.num_bytes[list(added)] = [len(token.content.encode()) for token in added.values()]

    def _read_normalizer(self, normalizer: JsonObject | None) -> bool:
        """Set attributes from the normalizer in a tokenizer.json. Returns whether it replaces spaces by
        U+2581."""
        escapes_spaces = False
        for step in flatten_steps(normalizer, "normalizers"):
            if step["type"] in UNICODE_FORMS:
                self.unicode_forms.append(step["type"])
            elif step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == "▁":
                escapes_spaces = True
            elif step["type"] == "Prepend" and step["prepend"] == "▁":
                self.adds_prefix = True
            else:
                self.unsupported_reason = f"its normalizer {step['type']} changes the text"
        return escapes_spaces

    def find_normalized(self, texts: pa.LargeStringArray) -> np.ndarray:
        """Whether the tokenizer changes each text by normalization before it encodes it."""
        is_changed = np.zeros(len(texts), bool)
        if self.unicode_forms:
            non_ascii = np.flatnonzero(~pc.string_is_ascii(texts).to_numpy(zero_copy_only=False))
            for index in non_ascii:
                text = texts[int(index)].as_py()
                is_changed[index] = not all(is_normalized(form, text) for form in self.unicode_forms)
        return is_changed

    def count_bytes(self, values: np.ndarray, text_starts: np.ndarray) -> np.ndarray:
        """The number of bytes of each token in `values`. The first token of a text, at `text_starts`, may
        have an added space that the text does not have."""
        sizes = self.num_bytes[values]
        if self.adds_prefix:
            sizes[text_starts] -= 1
        return sizes

    @functools.cached_property
    def offset_tokenizer(self) -> tokenizers.Tokenizer:
        """A copy of the tokenizer that recognizes special tokens and whose offsets include white space."""
        copy = tokenizers.Tokenizer.from_str(self.inner.to_str())
        copy.post_processor = None
        return copy


def parse_conversation(conversation: str) -> tuple[list[Message], list[object] | None]:
    """Parse the JSON of a conversation into its messages and its tools, if it has any. Raises
    TemplateRefused."""
    try:
        messages = orjson.loads(conversation)
    except orjson.JSONDecodeError as error:
        raise TemplateRefused(f"it is not JSON: {error}") from None
    if not isinstance(messages, list) or not set(map(type, messages)) <= {dict}:
        raise TemplateRefused("it is not a list of messages")
    if not set(map(type, [message.get("role") for message in messages])) <= {str}:
        raise TemplateRefused("a message has no role")
    if messages and messages[0]["role"] == "tools":
        return messages[1:], messages[0]["tools"]
    return messages, None


def special_token_variables(tokenizer: Tokenizer) -> dict[str, str]:
    """The variables bos_token, eos_token... of chat templates; those that the tokenizer lacks are
    undefined."""
    ids = {role: id for role, id in vars(tokenizer.special).items() if id is not None}
    return {f"{role}_token": str(tokenizer.inner.id_to_token(id)) for role, id in ids.items()}


def locate_spans(
    splits: list[SplitText], pieces: np.ndarray, *, starts: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The conversation of each answer, and the alternating starts and ends of all answers, in bytes of the
    concatenated texts. `pieces` has the first piece of each conversation, `starts` the first byte of each
    piece, `sizes` the bytes of its text."""
    counts = [len(split.edges) for split in splits]
    flat = chain.from_iterable(chain.from_iterable([split.edges for split in splits]))
    piece, offset, is_from_end = np.array(list(flat), np.int64).reshape(-1, 3).T
    owners = np.repeat(np.arange(len(splits)), counts)
    piece = piece + pieces[owners]
    return owners[::2], starts[piece] + np.where(is_from_end, sizes[piece] - offset, offset)


def ranges_to_mask(first: np.ndarray, last: np.ndarray, size: int) -> np.ndarray:
    """[size] bool: True from each `first` up to its `last`. A token may be the last of one range and the
    first of the next."""
    edges = np.zeros(2 * len(first) + 2, np.int64)
    edges[1:-1:2], edges[2:-1:2], edges[-1] = first, last, size
    np.maximum.accumulate(edges, out=edges)
    return np.repeat(np.arange(len(edges) - 1) % 2 == 1, np.diff(edges))


def concat_ragged(parts: list[Ragged]) -> Ragged:
    """Concatenate documents that have loss masks."""
    if not parts:
        return Ragged(np.zeros(0, np.uint32), np.zeros(1, np.int64), np.zeros(0, bool))
    if len(parts) == 1:
        return parts[0]
    lengths = np.concatenate([part.lengths for part in parts])
    values, loss_mask = (
        np.concatenate(arrays)
        for arrays in zip(*((part.values, part.loss_mask) for part in parts), strict=True)
    )
    return Ragged(values, lengths_to_offsets(lengths), loss_mask)


def count_token_bytes(token: str, byte_fallback: bool) -> int:
    """The bytes of text that a sentencepiece token stands for."""
    if byte_fallback and re.fullmatch("<0x[0-9A-F]{2}>", token):
        return 1
    return len(token.replace("▁", " ").encode())


def flatten_steps(step: JsonObject | None, name: str) -> list[JsonObject]:
    """The steps of a normalizer or pre-tokenizer: of none, one, or nested sequences stored under `name`."""
    if step is None:
        return []
    return (
        [inner for part in step[name] for inner in flatten_steps(part, name)]
        if step["type"] == "Sequence"
        else [step]
    )
