"""Text to token ids and back, with one's own tokenizer or another's. What is saved is a folder that
transformers.AutoTokenizer loads; learn.py trains tokenizers, convert.py reads those of other libraries."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import tokenizers

from headrace.data.tokenizer import convert, encoders
from headrace.data.documents import Ragged
from headrace.data.shards import Special, atomic, write_json
from headrace.errors import UserError

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

# What tokenizers call their special tokens, for a tokenizer.json that comes without its configuration.
COMMON = {
    "pad": ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>"),
    "bos": ("<|bos|>", "<s>", "<bos>", "[CLS]", "<|begin_of_text|>", "<|startoftext|>"),
    "eos": ("<|eos|>", "</s>", "<eos>", "[SEP]", "<|end_of_text|>", "<|endoftext|>"),
    "mask": ("<|mask|>", "<mask>", "[MASK]"),
}


@dataclass(frozen=True)
class Choice:
    """The library that encodes, and why it does rather than another."""

    name: str
    why: str


class Tokenizer:
    """Encodes what stands in a text as text: a document that mentions <|eos|> does not end there."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        special: Special,
        *,
        template: str | None = None,
        encoder: str = "auto",
    ) -> None:
        assert encoder in ("auto", *encoders.NAMES), encoder
        # Settings in the file that suit short inputs would silently cut documents.
        inner.no_truncation()
        inner.no_padding()
        self.inner = inner
        self.special = special
        self.template = template  # of conversations, in jinja
        self.encoder = encoder
        # Ids may have gaps, so the largest counts.
        self.vocab = 1 + max(inner.get_vocab(with_added_tokens=True).values())
        self.plain = encoders.without_special(inner)

    def encode(self, text: str) -> list[int]:
        """The ids of a text alone, without <|bos|> and <|eos|>."""
        return self.plain.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode([int(token) for token in ids], skip_special_tokens=True)

    def encode_batch(self, texts: encoders.Texts) -> Ragged:
        """The ids of many texts, each alone. Arrow arrays of large strings are read where they lie."""
        assert not isinstance(texts, pa.Array) or (
            pa.types.is_large_string(texts.type) and not texts.null_count
        )
        return self.encode_with(texts)

    @cached_property
    def encode_with(self) -> encoders.Encode:
        name = choose(self, []).name if self.encoder == "auto" else self.encoder
        return encoders.make(name, self.plain)


def load(path: str | Path, encoder: str = "auto") -> Tokenizer:
    """A tokenizer from its file, or from the folder that holds one. `encoder` is the library for batches, as
    `choose` found it; `auto` finds it when the first batch comes."""
    file = tokenizer_file(path)
    if file.suffix in convert.SUFFIXES:
        inner, names = convert.read(file)
    else:
        try:
            inner, names = tokenizers.Tokenizer.from_file(str(file)), {}
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"tokenizer.path: {file} is not a tokenizer: {error}") from None
    special = find_special(inner, names | named_special(file.parent), file)
    return Tokenizer(inner, special, template=find_template(file.parent), encoder=encoder)


def choose(tokenizer: Tokenizer, sample: Sequence[str]) -> Choice:
    """The fastest library that gives the ids of Hugging Face's on hostile texts and on the sample."""
    texts = [*encoders.hostile(tokenizer.inner), *sample]
    cutting = encoders.splitting(tokenizer.plain)
    reasons: list[str] = []
    for name in encoders.NAMES[:-1]:
        reason = encoders.difference(name, tokenizer.plain, texts)
        if reason is None and cutting is not None:
            reason = encoders.difference(name, cutting, encoders.cuts())
        if reason is None:
            return Choice(
                name, "; ".join([*reasons, f"{name} gives the ids of tokenizers on {len(texts)} texts"])
            )
        reasons.append(f"{name} does not do: {reason}")
    return Choice("tokenizers", "; ".join(reasons))


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes a tokenizer and what transformers needs to know of it; tokenizer.json comes last."""
    save_configuration(tokenizer, folder)
    if tokenizer.template is not None:
        write_template(folder, tokenizer.template)
    write(folder / "tokenizer.json", tokenizer.inner.to_str(pretty=True).encode())


def copy(path: str | Path, folder: Path) -> None:
    """Copies a tokenizer.json byte for byte, with the configuration that transformers needs, or writes one.
    A tokenizer of another library is converted."""
    file, tokenizer = tokenizer_file(path), load(path)
    if file.suffix in convert.SUFFIXES:
        return save(tokenizer, folder)
    for name in FILES[1:]:
        if (file.parent / name).is_file():
            write(folder / name, (file.parent / name).read_bytes())
    if not (folder / "tokenizer_config.json").is_file():
        save_configuration(tokenizer, folder)
    write(folder / "tokenizer.json", file.read_bytes())


def write_template(folder: Path, text: str) -> None:
    """Gives the tokenizer in a folder a template for conversations, which goes before one in its settings."""
    write(folder / "chat_template.jinja", text.encode())


def sha256(path: str | Path) -> str:
    return hashlib.sha256(tokenizer_file(path).read_bytes()).hexdigest()


def tokenizer_file(path: str | Path) -> Path:
    file = Path(path)
    if file.is_dir():
        others = sorted(found for suffix in convert.SUFFIXES for found in file.glob(f"*{suffix}"))
        file = file / "tokenizer.json"
        if not file.is_file() and len(others) == 1:
            return others[0]
    if not file.is_file():
        raise UserError(f"tokenizer.path: no such file: {file}")
    return file


def save_configuration(tokenizer: Tokenizer, folder: Path) -> None:
    ids = {role: id for role, id in vars(tokenizer.special).items() if id is not None}
    names = {f"{role}_token": tokenizer.inner.id_to_token(id) for role, id in ids.items()}
    # No cleaning up: it would drop spaces before punctuation when decoding.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", settings | names)
    write_json(folder / "special_tokens_map.json", names)


def named_special(folder: Path) -> dict[str, str]:
    """The special tokens by role, as the files beside a tokenizer name them."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        settings = read_settings(folder / name)
        # BERT has no bos and eos, and begins and ends a text with these.
        for key in ("cls_token", "sep_token", "bos_token", "eos_token", "pad_token", "mask_token"):
            value = settings.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if not isinstance(value, str | None):
                raise UserError(f"tokenizer.path: {folder / name}: {key} must be a text, not {value!r}")
            if value:
                role = key.removesuffix("_token")
                found[{"cls": "bos", "sep": "eos"}.get(role, role)] = value
    return found


def find_template(folder: Path) -> str | None:
    """How the tokenizer in a folder writes conversations, in jinja."""
    file, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    try:
        if file.is_file():
            return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"tokenizer.path: {file} is not UTF-8 text") from None
    found = read_settings(settings).get("chat_template")
    try:
        if isinstance(found, list):  # several, by name
            found = {entry["name"]: entry["template"] for entry in found}.get("default")
    except (TypeError, KeyError):
        raise UserError(f"tokenizer.path: {settings}: chat_template must list names and templates") from None
    if not isinstance(found, str | None):
        raise UserError(f"tokenizer.path: {settings}: chat_template must be a text or a list")
    return found


def find_special(inner: tokenizers.Tokenizer, names: dict[str, str], file: Path | None = None) -> Special:
    """Looks the named tokens up. For a role without a name the common ones are tried, among the added tokens
    only: an ordinary entry may be spelt like one of them."""
    added = {token.content: id for id, token in inner.get_added_tokens_decoder().items()}
    ids: dict[str, int | None] = {}
    for role, common in COMMON.items():
        named = inner.token_to_id(names[role]) if role in names else None
        known = [added[name] for name in common if name in added]
        ids[role] = named if named is not None else next(iter(known), None)
    if ids["bos"] == ids["eos"]:
        ids["bos"] = None  # GPT-2 has one token for both; it stands at the end of each document
    if ids["bos"] is None and ids["eos"] is None:
        raise UserError(
            f"tokenizer.path: {file} has no token that begins or ends a text, to tell documents apart; name "
            "its eos_token in a tokenizer_config.json beside it"
        )
    return Special(**ids)


def read_settings(file: Path) -> dict[str, Any]:
    """A JSON file beside a tokenizer; nothing where there is none."""
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_bytes())
    except ValueError as error:
        raise UserError(f"tokenizer.path: {file} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise UserError(f"tokenizer.path: {file} must hold an object, not {type(settings).__name__}")
    return settings


def write(file: Path, content: bytes) -> None:
    with atomic(file) as opened:
        opened.write(content)
