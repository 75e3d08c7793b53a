"""Tokenizers: text to token ids and back. A saved tokenizer is a folder that transformers.AutoTokenizer
loads. `train` trains tokenizers, `convert` reads those of other libraries."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import tokenizers

from headrace.data.documents import Ragged
from headrace.data.shards import SpecialTokenIds, open_atomic, write_json
from headrace.data.tokenizer import convert, encoders
from headrace.errors import UserError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)

# Usual names of special tokens, for a tokenizer.json without its configuration.
COMMON_SPECIAL_TOKENS = {
    "pad": ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>"),
    "bos": ("<|bos|>", "<s>", "<bos>", "[CLS]", "<|begin_of_text|>", "<|startoftext|>"),
    "eos": ("<|eos|>", "</s>", "<eos>", "[SEP]", "<|end_of_text|>", "<|endoftext|>"),
    "mask": ("<|mask|>", "<mask>", "[MASK]"),
}


@dataclass(frozen=True)
class EncoderChoice:
    """The library that encodes batches, and the reason for the choice."""

    name: str
    reason: str


class Tokenizer:
    """Encodes the content of a text as text: a document that mentions <|eos|> does not end there."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        special: SpecialTokenIds,
        *,
        chat_template: str | None = None,
        encoder_name: str = "auto",
    ) -> None:
        """`chat_template` is in Jinja; `encoder_name` is the library for batches, or "auto"."""
        assert encoder_name in ("auto", *encoders.ENCODER_NAMES), encoder_name
        # Settings in the file that are meant for short inputs would truncate documents.
        inner.no_truncation()
        inner.no_padding()
        self.inner = inner
        self.special = special
        self.chat_template = chat_template
        self.encoder_name = encoder_name
        # The largest id counts: there may be gaps.
        self.vocab_size = 1 + max(inner.get_vocab(with_added_tokens=True).values())
        self.text_tokenizer = encoders.treat_special_as_text(inner)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without <|bos|> and <|eos|>."""
        return self.text_tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return self.inner.decode([int(token) for token in ids], skip_special_tokens=True)

    def encode_batch(self, texts: encoders.Texts) -> Ragged:
        """The ids of many texts, without <|bos|> and <|eos|>. Arrow arrays of large strings are not
        copied."""
        assert not isinstance(texts, pa.Array) or (
            pa.types.is_large_string(texts.type) and not texts.null_count
        )
        return self.encode_texts(texts)

    @cached_property
    def encode_texts(self) -> encoders.EncodeBatch:
        name = choose_encoder(self, []).name if self.encoder_name == "auto" else self.encoder_name
        return encoders.make_encoder(name, self.text_tokenizer)


def load(path: str | Path, encoder_name: str = "auto") -> Tokenizer:
    """Load a tokenizer from its file, or from the folder that holds it. `encoder_name` is the library for
    batches, from `choose_encoder`; "auto" chooses one when the first batch is encoded. Raises UserError."""
    file = find_tokenizer_file(path)
    if file.suffix in convert.SUFFIXES:
        inner, names = convert.read_foreign(file)
    else:
        try:
            inner, names = tokenizers.Tokenizer.from_file(str(file)), {}
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"tokenizer.path: {file} is not a tokenizer: {error}") from None
    special = find_special_tokens(inner, names | read_special_names(file.parent), file)
    chat_template = read_chat_template(file.parent)
    return Tokenizer(inner, special, chat_template=chat_template, encoder_name=encoder_name)


def choose_encoder(tokenizer: Tokenizer, sample: Sequence[str]) -> EncoderChoice:
    """Choose the fastest library that gives the ids of Hugging Face's on adversarial texts and on a
    sample."""
    texts = [*encoders.adversarial_texts(tokenizer.inner), *sample]
    probe = encoders.make_boundary_probe(tokenizer.text_tokenizer)
    reasons: list[str] = []
    for name in encoders.ENCODER_NAMES[:-1]:
        mismatch = encoders.find_mismatch(name, tokenizer.text_tokenizer, texts)
        if mismatch is None and probe is not None:
            mismatch = encoders.find_mismatch(name, probe, encoders.boundary_texts())
        if mismatch is None:
            reasons.append(f"{name} gives the ids of tokenizers on {len(texts)} texts")
            return EncoderChoice(name, "; ".join(reasons))
        reasons.append(f"{name} is not usable: {mismatch}")
    return EncoderChoice("tokenizers", "; ".join(reasons))


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer and the configuration that transformers needs; tokenizer.json last."""
    save_config(tokenizer, folder)
    if tokenizer.chat_template is not None:
        write_chat_template(folder, tokenizer.chat_template)
    write_atomic(folder / "tokenizer.json", tokenizer.inner.to_str(pretty=True).encode())


def copy(path: str | Path, folder: Path) -> None:
    """Copy a tokenizer to a folder: tokenizer.json byte for byte, with its configuration, which is written if
    it is missing. Tokenizers of other libraries are converted."""
    file, tokenizer = find_tokenizer_file(path), load(path)
    if file.suffix in convert.SUFFIXES:
        save(tokenizer, folder)
        return
    for name in TOKENIZER_FILES[1:]:
        if (file.parent / name).is_file():
            write_atomic(folder / name, (file.parent / name).read_bytes())
    if not (folder / "tokenizer_config.json").is_file():
        save_config(tokenizer, folder)
    write_atomic(folder / "tokenizer.json", file.read_bytes())


def write_chat_template(folder: Path, text: str) -> None:
    """Give the tokenizer in a folder a chat template, which overrides one in its configuration."""
    write_atomic(folder / "chat_template.jinja", text.encode())


def file_sha256(path: str | Path) -> str:
    """The SHA-256 of a tokenizer's file, in hex."""
    return hashlib.sha256(find_tokenizer_file(path).read_bytes()).hexdigest()


def find_tokenizer_file(path: str | Path) -> Path:
    """The file of the tokenizer at a path: the file itself, or in a folder tokenizer.json or the only file of
    another library. Raises UserError if there is no such file."""
    file = Path(path)
    if file.is_dir():
        foreign = sorted(match for suffix in convert.SUFFIXES for match in file.glob(f"*{suffix}"))
        file = file / "tokenizer.json"
        if not file.is_file() and len(foreign) == 1:
            return foreign[0]
    if not file.is_file():
        raise UserError(f"tokenizer.path: no such file: {file}")
    return file


def save_config(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the configuration files that transformers needs."""
    ids = {role: id for role, id in vars(tokenizer.special).items() if id is not None}
    names = {f"{role}_token": tokenizer.inner.id_to_token(id) for role, id in ids.items()}
    # The clean-up would remove spaces before punctuation when decoding.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", settings | names)
    write_json(folder / "special_tokens_map.json", names)


def read_special_names(folder: Path) -> dict[str, str]:
    """The names of the special tokens by role, from the configuration files in a folder. Raises UserError."""
    names: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        settings = read_json_object(folder / name)
        # BERT has no bos and eos: cls starts a text, and sep ends it.
        for key in ("cls_token", "sep_token", "bos_token", "eos_token", "pad_token", "mask_token"):
            value = settings.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if not isinstance(value, str | None):
                raise UserError(f"tokenizer.path: {folder / name}: {key}: expected a string, found {value!r}")
            if value:
                role = key.removesuffix("_token")
                names[{"cls": "bos", "sep": "eos"}.get(role, role)] = value
    return names


def read_chat_template(folder: Path) -> str | None:
    """The chat template, in Jinja, of the tokenizer in a folder; None if it has none. Raises UserError."""
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    try:
        if file.is_file():
            return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"tokenizer.path: {file} is not UTF-8 text") from None
    value = read_json_object(config).get("chat_template")
    try:
        if isinstance(value, list):  # several, by name
            value = {entry["name"]: entry["template"] for entry in value}.get("default")
    except (TypeError, KeyError):
        raise UserError(f"tokenizer.path: {config}: chat_template must list names and templates") from None
    if not isinstance(value, str | None):
        raise UserError(f"tokenizer.path: {config}: chat_template must be a string or a list")
    return value


def find_special_tokens(
    inner: tokenizers.Tokenizer, names: dict[str, str], file: Path | None = None
) -> SpecialTokenIds:
    """The ids of the special tokens with these names. For a role without a name, searches the usual names
    among the added tokens; ordinary entries may be spelled like one. `file` is for the message of the
    UserError that is raised if no token starts or ends a text."""
    added = {token.content: id for id, token in inner.get_added_tokens_decoder().items()}
    ids: dict[str, int | None] = {}
    for role, usual_names in COMMON_SPECIAL_TOKENS.items():
        named = inner.token_to_id(names[role]) if role in names else None
        usual = [added[name] for name in usual_names if name in added]
        ids[role] = named if named is not None else next(iter(usual), None)
    if ids["bos"] == ids["eos"]:
        ids["bos"] = None  # GPT-2 has one token for both; it goes at the end of each document
    if ids["bos"] is None and ids["eos"] is None:
        raise UserError(
            f"tokenizer.path: {file} has no token that starts or ends a text, which separates documents; set "
            "eos_token in a tokenizer_config.json next to it"
        )
    return SpecialTokenIds(**ids)


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a tokenizer; empty if the file does not exist. Raises UserError."""
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_bytes())
    except ValueError as error:
        raise UserError(f"tokenizer.path: {file} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise UserError(f"tokenizer.path: {file}: expected an object, found {type(settings).__name__}")
    return settings


def write_atomic(file: Path, content: bytes) -> None:
    """Write a file so that it never exists with only a part of its content."""
    with open_atomic(file) as opened:
        opened.write(content)
