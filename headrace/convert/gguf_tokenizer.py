"""Tokenizers in GGUF files: byte-level BPE as llama.cpp's `gpt2`, BPE of sentencepiece as its `llama`.

Others are refused: llama.cpp would split texts differently than they were split in training."""

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any

from headrace.data.tokenizer.convert import CL100K
from headrace.data.tokenizer.tokenizer import Tokenizer
from headrace.errors import UserError

if TYPE_CHECKING:
    from gguf import GGUFWriter

TokenizerJSON = dict[str, Any]  # the content of a tokenizer.json

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of tokens, as in llama.h

# Patterns that split a text into words. Without the last alternative of CL100K, the pattern splits alike: it
# only matches whitespace at the end of a text, which others match, too.
LLAMA3 = CL100K.replace(r"|\s+\z", "")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

EQUAL_PATTERNS: dict[str | None, str | None] = {CL100K: LLAMA3, GPT2: None}

# llama.cpp's names of pre-tokenizers, by pattern (None: the default of ByteLevel, which is GPT2) and
# `ignore_merges`: whether a word that is an entry of the vocabulary becomes one token without merging.
PRETOKENIZERS = {
    (None, False): "gpt-2",
    (LLAMA3, True): "llama-bpe",
    (LLAMA3, False): "dbrx",
    (QWEN2, False): "qwen2",
}


def add_tokenizer(writer: "GGUFWriter", tokenizer: Tokenizer, vocab_size: int) -> None:
    """Add a tokenizer and its chat template to a file's metadata.

    `vocab_size` is the size of the model's vocabulary: ids that the tokenizer does not use get names, too."""
    settings = json.loads(tokenizer.inner.to_str())
    model = settings["model"]
    if model["type"] != "BPE":
        raise UserError(
            f"tokenizer: found {model['type']}, and .gguf files are written with BPE; export a folder instead"
        )
    names = [f"[UNUSED{token}]" for token in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for name, token in tokenizer.inner.get_vocab(with_added_tokens=True).items():
        names[token], types[token] = name, NORMAL
    for added in settings["added_tokens"]:
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    if is_sentencepiece(settings):
        add_sentencepiece_model(writer, settings, names, types, merges)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pretokenizer_name(settings))
        writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_token_list(names)
    writer.add_token_types(types)
    for role, token in dataclasses.asdict(tokenizer.special).items():
        if token is not None:
            getattr(writer, f"add_{role}_token_id")(token)
    writer.add_add_bos_token(tokenizer.inner.encode("a").ids[:1] == [tokenizer.special.bos])
    if tokenizer.chat_template is not None:
        writer.add_chat_template(replace_generation_tags(tokenizer.chat_template))


def replace_generation_tags(template: str) -> str:
    """Replace the tags {% generation %} of a chat template, which llama.cpp does not know, by {% if true %}.

    They mark what is trained. They are not removed, since a tag also strips the whitespace around it."""

    def to_if(tag: re.Match[str]) -> str:
        return f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}"

    return re.sub(r"\{%(-?)\s*(end)?generation\s*(-?)%\}", to_if, template)


def pretokenizer_name(settings: TokenizerJSON) -> str:
    """Find llama.cpp's name for the way a byte-level tokenizer splits text into words.

    Raises UserError if it has none."""
    normalizer, pretokenizer = settings["normalizer"], settings["pre_tokenizer"] or {}
    steps = pretokenizer["pretokenizers"] if pretokenizer.get("type") == "Sequence" else [pretokenizer]
    pattern = None
    if len(steps) == 2 and steps[0].get("type") == "Split":
        pattern, steps = steps[0]["pattern"].get("Regex"), steps[1:]
    is_byte_level = len(steps) == 1 and steps[0].get("type") == "ByteLevel"
    # llama.cpp does not compose letters with their accents (NFC): in most texts they are composed already.
    has_known_normalizer = normalizer is None or normalizer["type"] == "NFC"
    pattern = EQUAL_PATTERNS.get(pattern, pattern)
    name = PRETOKENIZERS.get((pattern, bool(settings["model"].get("ignore_merges"))))
    if (
        name is None
        or not (is_byte_level and has_known_normalizer)
        or steps[0]["add_prefix_space"]
        or steps[0]["use_regex"] != (pattern is None)
    ):
        raise UserError(
            "tokenizer: it splits text into words in a way that llama.cpp has no name for; expected that of "
            f"{', '.join(PRETOKENIZERS.values())}; export a folder instead"
        )
    return name


def is_sentencepiece(settings: TokenizerJSON) -> bool:
    """Whether a tokenizer is a BPE model of sentencepiece, which encodes unknown characters as bytes."""
    return bool(settings["model"].get("byte_fallback"))


def add_sentencepiece_model(
    writer: "GGUFWriter",
    settings: TokenizerJSON,
    names: list[str],
    types: list[int],
    merges: list[tuple[str, ...]],
) -> None:
    """Add a BPE model as scored pieces: llama.cpp first merges the pair whose piece has the highest score.

    Sets the types of the unknown token and of bytes in `types`."""
    scores = [0.0] * len(names)
    ids = {name: token for token, name in enumerate(names)}
    for rank, pair in reversed(list(enumerate(merges))):  # of several merges to one piece, the first counts
        scores[ids["".join(pair)]] = -float(rank + 1)
    for token, name in enumerate(names):
        if re.fullmatch(r"<0x[0-9A-F]{2}>", name):
            types[token] = BYTE
        elif name == settings["model"].get("unk_token"):
            types[token] = UNKNOWN
            writer.add_unk_token_id(token)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores(scores)
    writer.add_add_space_prefix(adds_leading_space(settings))


def adds_leading_space(settings: TokenizerJSON) -> bool:
    """Whether a tokenizer of sentencepiece adds a space before a text.

    Raises UserError if it changes texts otherwise than llama.cpp can. Such tokenizers write a space as ▁."""
    normalizer, pretokenizer = settings["normalizer"] or {}, settings["pre_tokenizer"] or {}
    steps = normalizer["normalizers"] if normalizer.get("type") == "Sequence" else [normalizer]
    replaces_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if steps == [{"type": "Prepend", "prepend": "▁"}, replaces_spaces] and not pretokenizer:
        return True
    if steps == [replaces_spaces] and (not pretokenizer or pretokenizer.get("type") == "Split"):
        return False
    if pretokenizer.get("type") == "Metaspace" and steps == [{}] and not pretokenizer.get("split"):
        return bool(pretokenizer["prepend_scheme"] != "never")
    raise UserError(
        "tokenizer: it changes texts in a way that llama.cpp does not support before splitting them; "
        "expected spaces to become ▁, and nothing else; export a folder instead"
    )
