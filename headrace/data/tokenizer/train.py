"""Training of tokenizers: byte-level BPE and unigram. Both decode any text that they encode to itself."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from headrace.data.formats.columns import to_string_array
from headrace.data.tokenizer import unicode_drift
from headrace.data.tokenizer.convert import byte_symbols
from headrace.data.tokenizer.encoders import is_library_failure, suppress_output
from headrace.data.tokenizer.tokenizer import Tokenizer, find_special_tokens
from headrace.errors import UserError

# The special tokens of tokenizers trained here, by role, in the order of their ids.
SPECIAL_TOKENS = {"pad": "<|pad|>", "bos": "<|bos|>", "eos": "<|eos|>", "mask": "<|mask|>"}

# Characters of text for each entry from which gigatoken trains. With less text many pairs are equally
# frequent: it is then slow (CPU seconds for 32,768 entries from 1, 10, 25 and 50 MB: 28, 8, 4, 4; tokenizers
# 1, 6, 14, 26), and on one corpus of 108 made-up words it merged pairs that no longer occur before others.
MIN_CHARACTERS_PER_ENTRY = 400

# Share of the texts that training may drop because the libraries classify their characters differently.
MAX_DRIFT_SHARE = 0.01

Report = Callable[[str], None]
Pair = tuple[str, str]


def print_line(line: str) -> None:
    print(line, file=sys.stderr)


def train_tokenizer(
    texts: Iterable[str], *, kind: Literal["bpe", "unigram"], vocab: int, report: Report = print_line
) -> Tokenizer:
    """Train a tokenizer of `vocab` entries, or fewer if there is little text. Holds all texts in memory;
    calls `report` with messages for the user."""
    min_vocab = len(SPECIAL_TOKENS) + 256
    if vocab < min_vocab:
        raise UserError(
            f"tokenizer.vocab: expected at least {min_vocab} (all bytes and special tokens), found {vocab}"
        )
    all_texts = list(texts)
    model = train_bpe(all_texts, vocab, report) if kind == "bpe" else train_unigram(all_texts, vocab)
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIAL_TOKENS.values()))
    # Prompts start with the same token as documents.
    bos = SPECIAL_TOKENS["bos"]
    inner.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, inner.token_to_id(bos))]
    )
    return Tokenizer(inner, find_special_tokens(inner, {}))


def train_bpe(texts: Sequence[str], vocab: int, report: Report) -> models.BPE:
    """Train BPE on GPT-2's words: the merges of Hugging Face's trainer, computed by the faster library that
    finds them."""
    if sum(map(len, texts)) < MIN_CHARACTERS_PER_ENTRY * vocab:
        return train_bpe_with_tokenizers(texts, vocab)
    is_new = unicode_drift.has_drifting(to_string_array(texts))
    if is_new.mean() > MAX_DRIFT_SHARE:
        reason = f"{is_new.sum()} of {len(texts)} texts have characters that tokenizers does not know"
        report(f"tokenizer: trained with tokenizers, which is slower: {reason}")
        return train_bpe_with_tokenizers(texts, vocab)
    if is_new.any():
        skipped = f"{is_new.sum()} of {len(texts)} texts"
        report(f"tokenizer: {skipped} with very new characters are skipped in training")
        texts = [text for text, skip in zip(texts, is_new, strict=True) if not skip]
    try:
        return train_bpe_with_gigatoken(texts, vocab)
    except BaseException as error:
        if not is_library_failure(error):
            raise
        report(f"tokenizer: trained with tokenizers, which is slower: gigatoken failed: {error}")
        return train_bpe_with_tokenizers(texts, vocab)


def train_bpe_with_tokenizers(texts: Sequence[str], vocab: int) -> models.BPE:
    trainer = trainers.BpeTrainer(vocab_size=vocab, **trainer_options())
    model = run_trainer(models.BPE(), texts, trainer)["model"]
    return models.BPE(model["vocab"], [(left, right) for left, right in model["merges"]])


def train_bpe_with_gigatoken(texts: Sequence[str], vocab: int) -> models.BPE:
    """Train BPE with gigatoken; the special tokens are part of `vocab`."""
    import gigatoken  # with awkward it takes half a second, and may not be installed

    separator = b"\xff"  # a byte that UTF-8 never contains
    with suppress_output():
        _, merges = gigatoken.train_bpe(
            separator.join(text.encode() for text in texts),
            vocab_size=vocab - len(SPECIAL_TOKENS),
            special_tokens=[],
            tie_breaking="huggingface",
            separator=separator,
        )
    symbols = byte_symbols()  # a table for str.translate: a byte is a letter of Latin-1
    spell = lambda token: token.decode("latin-1").translate(symbols)
    return make_bpe(drop_unused_merges([(spell(left), spell(right)) for left, right in merges], texts))


def drop_unused_merges(merges: list[Pair], texts: Sequence[str]) -> list[Pair]:
    """The merges up to the one after which every word is a single token. Hugging Face's trainer stops there;
    gigatoken continues with pairs that no longer occur, some of them repeatedly."""
    merges = list(dict.fromkeys(merges))
    inner = tokenizers.Tokenizer(make_bpe(merges))
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words: set[str] = set()
    for text in texts:
        new_words = {word for word, _ in pre_tokenizer.pre_tokenize_str(text)} - words
        # A word of several tokens shows that all merges are used. Most often the first text has one.
        if any(len(encoding) > 1 for encoding in inner.encode_batch_fast(list(new_words))):
            return merges
        words |= new_words
    low, high = 0, len(merges)
    while low < high:
        middle = (low + high) // 2
        inner = tokenizers.Tokenizer(make_bpe(merges[:middle]))
        if any(len(encoding) > 1 for encoding in inner.encode_batch_fast(list(words))):
            low = middle + 1
        else:
            high = middle
    return merges[:low]


def make_bpe(merges: list[Pair]) -> models.BPE:
    """A byte-level BPE model with the special tokens first, then the bytes, then the merges."""
    vocab = {
        entry: id for id, entry in enumerate([*SPECIAL_TOKENS.values(), *sorted(byte_symbols().values())])
    }
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    return models.BPE(vocab, merges)


def train_unigram(texts: Sequence[str], vocab: int) -> models.Unigram:
    """Train a unigram model on the bytes of GPT-2's words, so that no text is unknown."""
    trainer = trainers.UnigramTrainer(vocab_size=vocab, **trainer_options())
    entries = run_trainer(models.Unigram(), texts, trainer)["model"]["vocab"]
    special = [(entry, 0.0) for entry in SPECIAL_TOKENS.values()]
    return models.Unigram([*special, *sort_ties(entries[len(SPECIAL_TOKENS) :])])


def sort_ties(entries: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Make unigram entries reproducible: rounds the scores and sorts entries with equal scores by spelling.
    The trainer works in an order that changes between runs, which changes the last digits of scores (about
    1e-14) and the steps of 1e-4 between the scores of bytes that it never saw."""
    ranked = sorted(
        ((round(score, 4), entry) for entry, score in entries), key=lambda pair: (-pair[0], pair[1])
    )
    last = max((i for i, (_, entry) in enumerate(ranked) if len(entry) > 1), default=-1)
    learned, unseen_bytes = ranked[: last + 1], sorted(entry for _, entry in ranked[last + 1 :])
    lowest = learned[-1][0] if learned else 0.0
    unseen = [(entry, lowest - 1e-4 * (i + 1)) for i, entry in enumerate(unseen_bytes)]
    return [*((entry, score) for score, entry in learned), *unseen]


def run_trainer(model: models.Model, texts: Sequence[str], trainer: trainers.Trainer) -> dict[str, Any]:
    """Train with Hugging Face's library on GPT-2's words. Returns the content of a tokenizer.json."""
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.train_from_iterator(texts, trainer)
    return json.loads(inner.to_str())


def trainer_options() -> dict[str, Any]:
    """Options that the trainers of BPE and unigram tokenizers have in common."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return {
        "special_tokens": list(SPECIAL_TOKENS.values()),
        "initial_alphabet": alphabet,
        "show_progress": False,
    }
