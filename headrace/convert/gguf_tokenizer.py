"""A tokenizer in GGUF: byte-level BPE as llama.cpp's `gpt2`, sentencepiece's BPE as its `llama`. Others are
refused, since llama.cpp would cut texts in another way than the model has learnt."""

import json
import re
from typing import Any

from headrace.checkpoint.open_run import LoadedRun
from headrace.data.tokenizer.convert import CL100K
from headrace.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # kinds of tokens, as in llama.h

LLAMA3 = CL100K.replace(r"|\s+\z", "")  # which comes to the same: what is left of a text at its end
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

# How llama.cpp calls the ways to cut text into words; the second says that a word which is an entry is taken
# whole (ignore_merges).
CUTS = {
    (None, False): "gpt-2",
    (LLAMA3, True): "llama-bpe",
    (LLAMA3, False): "dbrx",
    (QWEN2, False): "qwen2",
}
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def add_tokens(writer: Any, run: LoadedRun) -> None:
    tokenizer = run.tokenizer
    assert tokenizer is not None
    settings = json.loads(tokenizer.inner.to_str())
    model = settings["model"]
    if model["type"] != "BPE":
        raise UserError(
            f"tokenizer: found {model['type']}, and .gguf files are written with BPE; export a folder instead"
        )
    entries: dict[str, int] = tokenizer.inner.get_vocab(with_added_tokens=True)
    names = [f"[UNUSED{id}]" for id in range(run.recipe.model.vocab)]
    kinds = [UNUSED] * len(names)
    for entry, id in entries.items():
        names[id], kinds[id] = entry, NORMAL
    for added in settings["added_tokens"]:
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    if is_sentencepiece(settings):
        add_sentencepiece(writer, settings, names, kinds, merges)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pretokenizer_name(settings))
        writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    for role, id in vars(tokenizer.special).items():
        if id is not None:
            getattr(writer, f"add_{role}_token_id")(id)
    begins = tokenizer.inner.encode("a").ids[:1] == [tokenizer.special.bos]
    writer.add_add_bos_token(begins)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(without_marks(tokenizer.chat_template))


def without_marks(template: str) -> str:
    """A template without {% generation %}, which is for training and unknown to llama.cpp. An `if` that is
    always true takes its place, since such a tag also takes away the blank space around it."""

    def plain(found: re.Match[str]) -> str:
        return f"{{%{found[1]} {'endif' if found[2] else 'if true'} {found[3]}%}}"

    return re.sub(r"\{%(-?)\s*(end)?generation\s*(-?)%\}", plain, template)


def pretokenizer_name(settings: dict[str, Any]) -> str:
    """What llama.cpp calls the way a byte-level tokenizer cuts text into words."""
    normalizer, cutter = settings["normalizer"], settings["pre_tokenizer"] or {}
    parts = cutter["pretokenizers"] if cutter.get("type") == "Sequence" else [cutter]
    pattern = None
    if len(parts) == 2 and parts[0].get("type") == "Split":
        pattern, parts = parts[0]["pattern"].get("Regex"), parts[1:]
    is_plain = len(parts) == 1 and parts[0].get("type") == "ByteLevel" and not parts[0]["add_prefix_space"]
    # llama.cpp composes no letters with their accents (NFC): most texts have them composed already.
    known = normalizer is None or normalizer["type"] == "NFC"
    pattern = LLAMA3 if pattern == CL100K else None if pattern == GPT2 else pattern
    way = CUTS.get((pattern, bool(settings["model"].get("ignore_merges"))))
    if not (is_plain and known and way and parts[0]["use_regex"] == (pattern is None)):
        raise UserError(
            "tokenizer: it cuts text into words in a way that llama.cpp has no name for; expected that of "
            f"{', '.join(CUTS.values())}; export a folder instead"
        )
    return way


def is_sentencepiece(settings: dict[str, Any]) -> bool:
    return bool(settings["model"].get("byte_fallback"))


def add_sentencepiece(
    writer: Any, settings: dict[str, Any], names: list[str], kinds: list[int], merges: list[tuple[str, ...]]
) -> None:
    """Pieces with scores: llama.cpp merges the pair whose piece has the highest, so the earliest merge's."""
    scores = [0.0] * len(names)
    numbers = {entry: id for id, entry in enumerate(names)}
    for rank, pair in reversed(list(enumerate(merges))):
        scores[numbers["".join(pair)]] = -float(rank + 1)
    for id, entry in enumerate(names):
        if re.fullmatch(r"<0x[0-9A-F]{2}>", entry):
            kinds[id] = BYTE
        elif entry == settings["model"].get("unk_token"):
            kinds[id] = UNKNOWN
            writer.add_unk_token_id(id)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores(scores)
    writer.add_add_space_prefix(begins_with_space(settings))


def begins_with_space(settings: dict[str, Any]) -> bool:
    """Whether a text is read as if a space stood before it. Spaces are ▁ within such a tokenizer."""
    normalizer, cutter = settings["normalizer"] or {}, settings["pre_tokenizer"] or {}
    steps = normalizer["normalizers"] if normalizer.get("type") == "Sequence" else [normalizer]
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if steps == [{"type": "Prepend", "prepend": "▁"}, replaces] and not cutter:
        return True
    if steps == [replaces] and (not cutter or cutter.get("type") == "Split"):
        return False
    if cutter.get("type") == "Metaspace" and steps == [{}] and not cutter.get("split"):
        return cutter["prepend_scheme"] != "never"
    raise UserError(
        "tokenizer: it changes texts in a way that llama.cpp does not know before it cuts them; expected "
        "spaces to become ▁ and no more; export a folder instead"
    )
