"""Conversion of tiktoken rank files and sentencepiece models to tokenizers of Hugging Face's library, with
the same ids. Neither of the original libraries is needed."""

import base64
import binascii
import itertools
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from headrace.errors import UserError

SUFFIXES = (".tiktoken", ".model")

# The patterns with which tiktoken's encodings split text into words, and the ids of their special tokens: a
# rank file contains neither. None is GPT-2's pattern, which tokenizers calls ByteLevel.
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+\z"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FIM_TOKENS = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}
ENCODINGS: dict[str, tuple[str | None, dict[str, int]]] = {
    "r50k_base": (None, {"<|endoftext|>": 50256}),
    "p50k_base": (None, {"<|endoftext|>": 50256}),
    "cl100k_base": (CL100K, {"<|endoftext|>": 100257, **FIM_TOKENS, "<|endofprompt|>": 100276}),
    "o200k_base": (O200K, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}

# Numbers of the fields in sentencepiece_model.proto, and of the kinds of pieces and models.
PIECES, TRAINER, NORMALIZER = 1, 2, 3
PIECE, SCORE, KIND = 1, 2, 3
MODEL_TYPE, WHITESPACE_AS_SUFFIX = 3, 24
ROLES = {"bos": 41, "eos": 42, "pad": 43}
CHARSMAP, DUMMY_PREFIX, REMOVE_EXTRA_WHITESPACES, ESCAPE_WHITESPACES = 2, 3, 4, 5
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2


def read_foreign(file: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer in a file of another library, and the names of its special tokens by role, as far as the
    file gives them. Raises UserError."""
    return read_tiktoken(file) if file.suffix == ".tiktoken" else read_sentencepiece(file)


def read_tiktoken(file: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer in a rank file, which must have the name of a known encoding, and the names of its
    special tokens by role."""
    if file.stem not in ENCODINGS:
        raise UserError(
            f"tokenizer.path: {file} does not define how to split text into words, nor the special tokens; "
            f"these are known only for files named {', '.join(ENCODINGS)}; use a tokenizer.json"
        )
    pattern, special = ENCODINGS[file.stem]
    ranks = read_ranks(file)
    symbols = byte_symbols()
    spelling = {token: "".join(symbols[byte] for byte in token) for token in ranks}
    merges = [(spelling[left], spelling[right]) for left, right in ranks_to_merges(ranks)]
    # Special tokens are entries of the model: only then do they keep ids within or beyond gaps.
    vocab = {spelling[token]: rank for token, rank in ranks.items()} | special
    # As in tiktoken, a word that is an entry is not built from its parts.
    inner = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    if pattern is None:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(special))
    return inner, {"eos": "<|endoftext|>"}


def read_ranks(file: Path) -> dict[bytes, int]:
    """The tokens in a rank file and their ranks. Raises UserError."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(
                f"tokenizer.path: {file}:{number}: expected a token in base64 and its rank"
            ) from None
    if not ranks or any(bytes([byte]) not in ranks for byte in range(256)):
        raise UserError(
            f"tokenizer.path: {file} lacks some of the 256 bytes: it is cut short, or not a rank file"
        )
    return ranks


def ranks_to_merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The pair that makes each token, by rank: the two parts that remain when its bytes are merged by all
    lower ranks. No other pair can make the token, so these merges give the same ids as the ranks."""
    for token, rank in sorted(ranks.items(), key=lambda entry: entry[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [ranks.get(left + right, rank) for left, right in itertools.pairwise(parts)]
            lowest = min(pairs)
            if lowest >= rank:
                break
            i = pairs.index(lowest)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def byte_symbols() -> dict[int, str]:
    """The character that represents each byte in byte-level vocabularies: itself if it is printable,
    otherwise one from U+0100 on, in order."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    unprintable = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable}
    return symbols | {byte: chr(256 + i) for i, byte in enumerate(unprintable)}


@dataclass(frozen=True)
class SentencePieceModel:
    """The content of a sentencepiece model: (text, score, kind) of each piece, and its settings by field
    number."""

    pieces: list[tuple[str, float, int]]
    trainer: dict[int, Any]
    normalizer: dict[int, Any]

    def pieces_of(self, *kinds: int) -> list[tuple[int, str, float]]:
        """(id, text, score) of the pieces of some kinds."""
        return [(id, piece, score) for id, (piece, score, kind) in enumerate(self.pieces) if kind in kinds]


def read_sentencepiece(file: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer in a sentencepiece model, and the names of its special tokens by role. Raises
    UserError."""
    try:
        model = parse_sentencepiece(file.read_bytes())
        kind = model.trainer.get(MODEL_TYPE, UNIGRAM)
    except (ValueError, IndexError, struct.error, AttributeError, TypeError):
        raise UserError(f"tokenizer.path: {file} is not a sentencepiece model") from None
    check_convertible(file, model, kind)
    special = [
        {"id": id, "content": piece, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for id, piece, _ in model.pieces_of(UNKNOWN, CONTROL)
    ]
    control = {id: piece for id, piece, _ in model.pieces_of(CONTROL)}
    defaults = {"bos": 1, "eos": 2, "pad": -1}
    names = {role: control.get(model.trainer.get(ROLES[role], defaults[role])) for role in ROLES}
    splits = make_pre_tokenizers(model, kind)
    settings = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": {"type": "Sequence", "normalizers": make_normalizers(model)},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits} if splits else None,
        "post_processor": make_post_processor(names["bos"], model),
        "decoder": {"type": "Sequence", "decoders": list(make_decoders(model))},
        "model": make_unigram(model) if kind == UNIGRAM else make_bpe(model),
    }
    inner = tokenizers.Tokenizer.from_str(json.dumps(settings))
    return inner, {role: name for role, name in names.items() if name is not None}


def check_convertible(file: Path, model: SentencePieceModel, kind: int) -> None:
    """Raise UserError if a model has a feature that cannot be converted."""
    unsupported = {
        "a model type other than unigram and BPE": kind not in (UNIGRAM, BPE),
        "whitespace at the end of words": model.trainer.get(WHITESPACE_AS_SUFFIX, 0),
        "whitespace that is not escaped": not model.normalizer.get(ESCAPE_WHITESPACES, 1),
        "unused pieces": model.pieces_of(UNUSED),
    }
    for feature, is_present in unsupported.items():
        if is_present:
            raise UserError(
                f"tokenizer.path: {file} has {feature}, which cannot be converted; use a tokenizer.json"
            )


def make_normalizers(model: SentencePieceModel) -> list[dict[str, Any]]:
    """The normalizers of a tokenizer.json that correspond to a model's settings."""
    normalizers: list[dict[str, Any]] = []
    charsmap = model.normalizer.get(CHARSMAP, b"")
    if charsmap:
        encoded = base64.b64encode(charsmap).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": encoded})
    if model.normalizer.get(REMOVE_EXTRA_WHITESPACES, 1):
        # Only spaces, as in sentencepiece: newlines are kept unless the map above made them spaces.
        normalizers.append({"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""})
        normalizers.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if model.normalizer.get(DUMMY_PREFIX, 1):
        normalizers.append({"type": "Prepend", "prepend": "▁"})
    return [*normalizers, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]


def make_pre_tokenizers(model: SentencePieceModel, kind: int) -> list[dict[str, Any]]:
    """The pre-tokenizers of a tokenizer.json. Sentencepiece has none, so they split only where it does not
    change the ids."""

    def split(pattern: dict[str, str], behavior: str) -> dict[str, Any]:
        return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False}

    steps = []
    user_defined = [piece for _, piece, _ in model.pieces_of(USER_DEFINED)]
    has_spanning = any("▁" in piece[1:] for _, piece, _ in model.pieces_of(NORMAL, USER_DEFINED))
    if kind == UNIGRAM and not has_spanning:
        steps.append(split({"String": "▁"}, "MergedWithNext"))  # into words: no piece spans two
    if kind == BPE and user_defined:
        # User-defined pieces are matched before any merge, the longest first.
        literal = "|".join(escape_regex(piece) for piece in sorted(user_defined, key=len, reverse=True))
        steps.append(split({"Regex": literal}, "Isolated"))
    # The name of a byte, written in a text, is text: split before its ">", which few pieces span.
    if model.pieces_of(BYTE) and kind == UNIGRAM:
        steps.append(split({"Regex": "(?<=<0x[0-9A-F]{2})>"}, "MergedWithNext"))
    elif model.pieces_of(BYTE) and user_defined:
        steps.append(split({"Regex": r"(?<=\A<0x[0-9A-F]{2})>(?=\z)"}, "MergedWithNext"))
    return steps


def escape_regex(text: str) -> str:
    """A pattern for Oniguruma that matches a text literally."""
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{{{ord(c):x}}}" for c in text)


def make_unigram(model: SentencePieceModel) -> dict[str, Any]:
    """The unigram model of a tokenizer.json."""
    best = max((score for _, _, score in model.pieces_of(NORMAL)), default=0.0)
    scores = {piece: len(piece.encode()) * best - 0.1 for _, piece, _ in model.pieces_of(USER_DEFINED)}
    vocab = [[piece, scores.get(piece, score)] for piece, score, _ in model.pieces]
    unknown = next(id for id, _, _ in model.pieces_of(UNKNOWN))
    byte_fallback = bool(model.pieces_of(BYTE))
    return {"type": "Unigram", "unk_id": unknown, "vocab": vocab, "byte_fallback": byte_fallback}


def make_bpe(model: SentencePieceModel) -> dict[str, Any]:
    """The BPE model of a tokenizer.json. Sentencepiece merges the neighbors whose union scores best, so every
    division of a piece into two pieces is a merge."""
    usable = {piece: (id, score) for id, piece, score in model.pieces_of(NORMAL)}
    merges = [
        (-score, id, i, [piece[:i], piece[i:]])
        for piece, (id, score) in usable.items()
        for i in range(1, len(piece))
        if piece[:i] in usable and piece[i:] in usable
    ]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": next(piece for _, piece, _ in model.pieces_of(UNKNOWN)),
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": bool(model.pieces_of(BYTE)),
        "ignore_merges": bool(model.pieces_of(USER_DEFINED)),
        "vocab": {piece: id for id, (piece, _, _) in enumerate(model.pieces)},
        "merges": [pair for *_, pair in sorted(merges, key=lambda merge: merge[:3])],
    }


def make_post_processor(bos: str | None, model: SentencePieceModel) -> dict[str, Any] | None:
    """The post-processor of a tokenizer.json: prompts start with `bos`, as documents do. None without it."""
    if bos is None:
        return None
    first, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    ids = [id for id, piece, _ in model.pieces_of(CONTROL) if piece == bos]
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, second],
        "special_tokens": {bos: {"id": bos, "ids": ids, "tokens": [bos]}},
    }


def make_decoders(model: SentencePieceModel) -> Iterator[dict[str, Any]]:
    """The decoders of a tokenizer.json."""
    yield {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    yield {"type": "ByteFallback"}
    yield {"type": "Fuse"}
    if model.normalizer.get(DUMMY_PREFIX, 1):
        yield {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def parse_sentencepiece(data: bytes) -> SentencePieceModel:
    """Parse the protocol buffer of a sentencepiece model. Raises ValueError, among others, for other data."""
    pieces, settings = [], {TRAINER: b"", NORMALIZER: b""}
    for number, value in iter_fields(data):
        if number == PIECES:
            piece = dict(iter_fields(value))
            (score,) = struct.unpack("<f", piece.get(SCORE, bytes(4)))
            pieces.append((piece[PIECE].decode("utf-8"), score, piece.get(KIND, NORMAL)))
        elif number in settings:
            settings[number] = value
    trainer, normalizer = dict(iter_fields(settings[TRAINER])), dict(iter_fields(settings[NORMALIZER]))
    model = SentencePieceModel(pieces, trainer, normalizer)
    if not model.pieces_of(NORMAL) or not model.pieces_of(UNKNOWN):
        raise ValueError("no pieces")
    return model


def iter_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of the fields of a protocol buffer; values are integers or bytes."""
    position = 0
    while position < len(data):
        key, position = read_varint(data, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, position = read_varint(data, position)
            yield number, value
            continue
        if wire_type == 2:
            size, position = read_varint(data, position)
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type}")
        if position + size > len(data):
            raise ValueError("cut short")
        yield number, data[position : position + size]
        position += size


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """The variable-length integer at a position, and the position after it."""
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
