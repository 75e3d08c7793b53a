"""Text to token ids. Trains a byte-level BPE tokenizer or takes one from a tokenizer.json, both with the
`tokenizers` library, and leaves a folder that transformers.AutoTokenizer can load."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from millrace.errors import UserError

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

# The special tokens of our own tokenizers, in the order of their ids.
OURS = {"pad": "<|pad|>", "bos": "<|bos|>", "eos": "<|eos|>", "mask": "<|mask|>"}

# What tokenizers call them, for a tokenizer.json that comes without its configuration.
COMMON = {
    "pad": ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>"),
    "bos": ("<|bos|>", "<s>", "<bos>", "[CLS]", "<|begin_of_text|>", "<|startoftext|>"),
    "eos": ("<|eos|>", "</s>", "<eos>", "[SEP]", "<|end_of_text|>", "<|endoftext|>"),
    "mask": ("<|mask|>", "<mask>", "[MASK]"),
}


@dataclass(frozen=True)
class Document:
    id: str
    text: str


@dataclass(frozen=True)
class Encoded:
    """A document's tokens, with its <|bos|> and <|eos|>, and how many bytes of text they stand for."""

    id: str
    tokens: np.ndarray
    bytes: int


@dataclass(frozen=True)
class Special:
    """Ids of the special tokens a tokenizer has; None for those it lacks."""

    bos: int | None
    eos: int | None
    pad: int | None
    mask: int | None


class Tokenizer:
    """Encodes what stands in a text as text: a document that mentions <|eos|> does not end there."""

    def __init__(self, inner: tokenizers.Tokenizer, special: Special) -> None:
        # Settings in the file that suit short inputs would silently cut documents.
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True
        self.inner = inner
        self.special = special
        # Ids may have gaps, so the largest counts.
        self.vocab = 1 + max(inner.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        """The ids of a text alone, without <|bos|> and <|eos|>."""
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode([int(token) for token in ids], skip_special_tokens=True)

    def encode_documents(self, documents: Iterable[Document], dtype: str) -> Iterator[Encoded]:
        first = [self.special.bos] if self.special.bos is not None else []
        last = [self.special.eos] if self.special.eos is not None else []
        for batch in batches(documents):
            texts = [document.text for document in batch]
            encodings = self.inner.encode_batch_fast(texts, add_special_tokens=False)
            for document, encoding in zip(batch, encodings, strict=True):
                tokens = np.array([*first, *encoding.ids, *last], dtype)
                yield Encoded(document.id, tokens, len(document.text.encode("utf-8")))


def train(texts: Iterator[str], vocab: int) -> Tokenizer:
    """Byte-level BPE (GPT-2's splitting into words) of `vocab` entries, or fewer where the text is small."""
    smallest = len(OURS) + 256
    if vocab < smallest:
        raise UserError(f"tokenizer.vocab: at least {smallest} (all bytes and special tokens), not {vocab}")
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(OURS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    # A prompt begins as the documents did.
    bos = OURS["bos"]
    inner.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, inner.token_to_id(bos))]
    )
    return Tokenizer(inner, find_special(inner, {}))


def load(path: str | Path) -> Tokenizer:
    """A tokenizer from its tokenizer.json, or from the folder that holds one."""
    file = tokenizer_file(path)
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"tokenizer.path: {file} is not a tokenizer: {error}") from None
    return Tokenizer(inner, find_special(inner, named_special(file.parent)))


def save(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.inner.save(str(folder / "tokenizer.json"))
    save_configuration(tokenizer, folder)


def copy(path: str | Path, folder: Path) -> None:
    """Copies a tokenizer byte for byte, with the configuration that transformers needs, or writes one."""
    file = tokenizer_file(path)
    for name in FILES:
        source = file if name == "tokenizer.json" else file.parent / name
        if source.is_file():
            shutil.copyfile(source, folder / name)
    if not (folder / "tokenizer_config.json").is_file():
        save_configuration(load(folder), folder)


def sha256(path: str | Path) -> str:
    return hashlib.sha256(tokenizer_file(path).read_bytes()).hexdigest()


def tokenizer_file(path: str | Path) -> Path:
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
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
    """The special tokens by role, as the files beside a tokenizer.json name them."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            continue
        settings = json.loads((folder / name).read_text(encoding="utf-8"))
        # BERT has no bos and eos, and begins and ends a text with these.
        for key in ("cls_token", "sep_token", "bos_token", "eos_token", "pad_token", "mask_token"):
            value = settings.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if value:
                role = key.removesuffix("_token")
                found[{"cls": "bos", "sep": "eos"}.get(role, role)] = value
    return found


def find_special(inner: tokenizers.Tokenizer, names: dict[str, str]) -> Special:
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
        raise UserError("tokenizer.path: it has no token that begins or ends a text, to tell documents apart")
    return Special(**ids)


def batches(documents: Iterable[Document], characters: int = 4_000_000) -> Iterator[list[Document]]:
    """Enough text at a time to keep all cores busy, and no more in memory."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
