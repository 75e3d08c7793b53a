"""Tokenizers of other libraries as those of Hugging Face: tiktoken's rank files and sentencepiece's models.
Neither library is needed. The ids stay the same."""

import base64
import binascii
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

# How the known encodings of tiktoken cut text into words, and which ids their special tokens have: a rank
# file says neither. None is GPT-2's way, which tokenizers calls ByteLevel.
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+\z"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
HOLES = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}
ENCODINGS: dict[str, tuple[str | None, dict[str, int]]] = {
    "r50k_base": (None, {"<|endoftext|>": 50256}),
    "p50k_base": (None, {"<|endoftext|>": 50256}),
    "cl100k_base": (CL100K, {"<|endoftext|>": 100257, **HOLES, "<|endofprompt|>": 100276}),
    "o200k_base": (O200K, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}

# Numbers of the fields in sentencepiece_model.proto, and of the kinds of pieces and models.
PIECES, TRAINER, NORMALIZER = 1, 2, 3
PIECE, SCORE, KIND = 1, 2, 3
MODEL_TYPE, WHITESPACE_AS_SUFFIX, BYTE_FALLBACK = 3, 24, 35
UNK, ROLES = 40, {"bos": 41, "eos": 42, "pad": 43}
CHARSMAP, DUMMY_PREFIX, REMOVE_EXTRA_WHITESPACES, ESCAPE_WHITESPACES = 2, 3, 4, 5
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2


def read(file: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer in a file, and what it calls its special tokens, by role, where it says so."""
    return read_tiktoken(file) if file.suffix == ".tiktoken" else read_sentencepiece(file)


def read_tiktoken(file: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    if file.stem not in ENCODINGS:
        raise UserError(
            f"tokenizer.path: {file} says neither how it cuts text into words nor which tokens are special; "
            f"that is known only for files named {', '.join(ENCODINGS)}; give a tokenizer.json"
        )
    pattern, special = ENCODINGS[file.stem]
    ranks = read_ranks(file)
    symbols = byte_symbols()
    spelling = {token: "".join(symbols[byte] for byte in token) for token in ranks}
    merges = [(spelling[left], spelling[right]) for left, right in merges_of(ranks)]
    # The special ones are entries of the model: only so do they keep ids among or beyond gaps.
    vocab = {spelling[token]: rank for token, rank in ranks.items()} | special
    # A word that is an entry is not put together from its parts, as in tiktoken.
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
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(
                f"tokenizer.path: {file}:{number} is not a token in base64 and its rank"
            ) from None
    if not ranks or any(bytes([byte]) not in ranks for byte in range(256)):
        raise UserError(
            f"tokenizer.path: {file} lacks some of the 256 bytes: it is cut short, or no rank file"
        )
    return ranks


def merges_of(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The pair each token is made of, by rank: the two that are left when its bytes are merged by the ranks
    below its own. No other neighbours can come to make that token, so these give the ids of all ranks."""
    for token, rank in sorted(ranks.items(), key=lambda entry: entry[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [ranks.get(left + right, rank) for left, right in zip(parts, parts[1:], strict=False)]
            lowest = min(pairs)
            if lowest >= rank:
                break
            i = pairs.index(lowest)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def byte_symbols() -> dict[int, str]:
    """The character that stands for each byte in byte-level vocabularies: itself where it can be seen, else
    one of those from U+0100 on, in order."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + i) for i, byte in enumerate(unseen)}


@dataclass(frozen=True)
class Model:
    """What a sentencepiece model holds: pieces with their scores and kinds, and its settings by field."""

    pieces: list[tuple[str, float, int]]
    trainer: dict[int, Any]
    normalizer: dict[int, Any]

    def of(self, *kinds: int) -> list[tuple[int, str, float]]:
        """Pieces of some kinds, with ids and scores."""
        return [(id, piece, score) for id, (piece, score, kind) in enumerate(self.pieces) if kind in kinds]


def read_sentencepiece(file: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    try:
        model = parse(file.read_bytes())
        kind = model.trainer.get(MODEL_TYPE, UNIGRAM)
    except (ValueError, IndexError, struct.error, AttributeError, TypeError):
        raise UserError(f"tokenizer.path: {file} is not a sentencepiece model") from None
    unsupported = {
        "a model type other than unigram and BPE": kind not in (UNIGRAM, BPE),
        "whitespace at the end of words": model.trainer.get(WHITESPACE_AS_SUFFIX, 0),
        "whitespace that is not escaped": not model.normalizer.get(ESCAPE_WHITESPACES, 1),
        "unused pieces": model.of(UNUSED),
    }
    for what, present in unsupported.items():
        if present:
            raise UserError(
                f"tokenizer.path: {file} has {what}, which cannot be converted; give a tokenizer.json"
            )

    special = [
        {"id": id, "content": piece, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for id, piece, _ in model.of(UNKNOWN, CONTROL)
    ]
    control = {id: piece for id, piece, _ in model.of(CONTROL)}
    defaults = {"bos": 1, "eos": 2, "pad": -1}
    names = {role: control.get(model.trainer.get(ROLES[role], defaults[role])) for role in ROLES}
    settings = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": {"type": "Sequence", "normalizers": normalizers(model)},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits(model, kind)}
        if splits(model, kind)
        else None,
        "post_processor": beginning(names["bos"], model),
        "decoder": {"type": "Sequence", "decoders": list(decoding(model))},
        "model": unigram(model) if kind == UNIGRAM else byte_pairs(model),
    }
    inner = tokenizers.Tokenizer.from_str(json.dumps(settings))
    return inner, {role: name for role, name in names.items() if name is not None}


def normalizers(model: Model) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    charsmap = model.normalizer.get(CHARSMAP, b"")
    if charsmap:
        found.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()})
    if model.normalizer.get(REMOVE_EXTRA_WHITESPACES, 1):
        # Spaces only, as sentencepiece has it: line ends stay unless the map above made them spaces.
        found.append({"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""})
        found.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if model.normalizer.get(DUMMY_PREFIX, 1):
        found.append({"type": "Prepend", "prepend": "▁"})
    return [*found, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]


def splits(model: Model, kind: int) -> list[dict[str, Any]]:
    """How text is cut before the model sees it. Sentencepiece does not, so only where it changes nothing."""

    def split(pattern: dict[str, str], behavior: str) -> dict[str, Any]:
        return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False}

    found = []
    own = [piece for _, piece, _ in model.of(USER_DEFINED)]
    if kind == UNIGRAM and not any("▁" in piece[1:] for _, piece, _ in model.of(NORMAL, USER_DEFINED)):
        found.append(split({"String": "▁"}, "MergedWithNext"))  # words alone: no piece spans two
    if kind == BPE and own:
        # Pieces of the user's are taken before anything is merged, the longest first.
        literal = "|".join(escaped(piece) for piece in sorted(own, key=len, reverse=True))
        found.append(split({"Regex": literal}, "Isolated"))
    # The name of a byte, written in a text, is text: cut before its ">", which few pieces span.
    if model.of(BYTE) and kind == UNIGRAM:
        found.append(split({"Regex": "(?<=<0x[0-9A-F]{2})>"}, "MergedWithNext"))
    elif model.of(BYTE) and own:
        found.append(split({"Regex": r"(?<=\A<0x[0-9A-F]{2})>(?=\z)"}, "MergedWithNext"))
    return found


def escaped(piece: str) -> str:
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{{{ord(c):x}}}" for c in piece)


def unigram(model: Model) -> dict[str, Any]:
    best = max((score for _, _, score in model.of(NORMAL)), default=0.0)
    scores = {piece: len(piece.encode()) * best - 0.1 for _, piece, _ in model.of(USER_DEFINED)}
    vocab = [[piece, scores.get(piece, score)] for piece, score, _ in model.pieces]
    unknown = next(id for id, _, _ in model.of(UNKNOWN))
    return {"type": "Unigram", "unk_id": unknown, "vocab": vocab, "byte_fallback": bool(model.of(BYTE))}


def byte_pairs(model: Model) -> dict[str, Any]:
    """Sentencepiece merges the neighbours whose union scores best, however it is divided."""
    usable = {piece: (id, score) for id, piece, score in model.of(NORMAL)}
    merges = []
    for piece, (id, score) in usable.items():
        for i in range(1, len(piece)):
            if piece[:i] in usable and piece[i:] in usable:
                merges.append((-score, id, i, [piece[:i], piece[i:]]))
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": next(piece for _, piece, _ in model.of(UNKNOWN)),
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": bool(model.of(BYTE)),
        "ignore_merges": bool(model.of(USER_DEFINED)),
        "vocab": {piece: id for id, (piece, _, _) in enumerate(model.pieces)},
        "merges": [pair for *_, pair in sorted(merges, key=lambda merge: merge[:3])],
    }


def beginning(bos: str | None, model: Model) -> dict[str, Any] | None:
    """A prompt begins as the documents did."""
    if bos is None:
        return None
    first, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    ids = [id for id, piece, _ in model.of(CONTROL) if piece == bos]
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, second],
        "special_tokens": {bos: {"id": bos, "ids": ids, "tokens": [bos]}},
    }


def decoding(model: Model) -> Iterator[dict[str, Any]]:
    yield {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    yield {"type": "ByteFallback"}
    yield {"type": "Fuse"}
    if model.normalizer.get(DUMMY_PREFIX, 1):
        yield {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def parse(data: bytes) -> Model:
    pieces, settings = [], {TRAINER: b"", NORMALIZER: b""}
    for number, value in fields(data):
        if number == PIECES:
            piece = dict(fields(value))
            (score,) = struct.unpack("<f", piece.get(SCORE, bytes(4)))
            pieces.append((piece[PIECE].decode("utf-8"), score, piece.get(KIND, NORMAL)))
        elif number in settings:
            settings[number] = value
    model = Model(pieces, dict(fields(settings[TRAINER])), dict(fields(settings[NORMALIZER])))
    if not model.of(NORMAL) or not model.of(UNKNOWN):
        raise ValueError("no pieces")
    return model


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer: whole numbers, or bytes."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = varint(data, at)
            yield number, value
            continue
        if wire == 2:
            size, at = varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + size > len(data):
            raise ValueError("cut short")
        yield number, data[at : at + size]
        at += size


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
