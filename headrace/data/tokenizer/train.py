"""Training of tokenizers on text: byte-level BPE and unigram, both of which give back any text they took."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from headrace.data.tokenizer import unicode_drift as unsettled
from headrace.data.tokenizer.convert import byte_symbols
from headrace.data.tokenizer.encoders import is_failure, silenced
from headrace.data.formats.columns import strings
from headrace.data.tokenizer.tokenizer import Tokenizer, find_special
from headrace.errors import UserError

# The special tokens of our own tokenizers, in the order of their ids.
OURS = {"pad": "<|pad|>", "bos": "<|bos|>", "eos": "<|eos|>", "mask": "<|mask|>"}

# Characters of text an entry from which gigatoken trains. With less, many pairs come equally often: there it
# is slow (CPU seconds for 32,768 entries from 1, 10, 25 and 50 MB: 28, 8, 4, 4; tokenizers 1, 6, 14, 26), and
# on one corpus of 108 made-up words it took pairs that occur no more before others.
PLENTY = 400

# Share of the texts, with characters that the libraries take for different things, that training may lack.
RARE = 0.01

Report = Callable[[str], None]
Pair = tuple[str, str]


def to_terminal(line: str) -> None:
    print(line, file=sys.stderr)


def train(
    texts: Iterable[str], *, kind: Literal["bpe", "unigram"], vocab: int, report: Report = to_terminal
) -> Tokenizer:
    """A tokenizer of `vocab` entries, or fewer where the text is small. All texts are held in memory."""
    smallest = len(OURS) + 256
    if vocab < smallest:
        raise UserError(f"tokenizer.vocab: at least {smallest} (all bytes and special tokens), not {vocab}")
    held = list(texts)
    inner = tokenizers.Tokenizer(byte_pairs(held, vocab, report) if kind == "bpe" else unigram(held, vocab))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(OURS.values()))
    # A prompt begins as the documents did.
    bos = OURS["bos"]
    inner.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, inner.token_to_id(bos))]
    )
    return Tokenizer(inner, find_special(inner, {}))


def byte_pairs(texts: Sequence[str], vocab: int, report: Report) -> models.BPE:
    """BPE over GPT-2's words, with the merges that Hugging Face's trainer finds, by the faster of the two."""
    if sum(map(len, texts)) < PLENTY * vocab:
        return byte_pairs_by_tokenizers(texts, vocab)
    new = unsettled.are_in(strings(texts))
    if new.mean() > RARE:
        why = f"{new.sum()} of {len(texts)} texts have characters new to it"
        report(f"tokenizer: trained by tokenizers, which is slower, since {why}")
        return byte_pairs_by_tokenizers(texts, vocab)
    if new.any():
        report(f"tokenizer: trained without {new.sum()} of {len(texts)} texts that have very new characters")
        texts = [text for text, is_new in zip(texts, new, strict=True) if not is_new]
    try:
        return byte_pairs_by_gigatoken(texts, vocab)
    except BaseException as error:
        if not is_failure(error):
            raise
        report(f"tokenizer: trained by tokenizers, which is slower, since gigatoken cannot: {error}")
        return byte_pairs_by_tokenizers(texts, vocab)


def byte_pairs_by_tokenizers(texts: Sequence[str], vocab: int) -> models.BPE:
    trainer = trainers.BpeTrainer(vocab_size=vocab, **common_settings())
    model = trained(models.BPE(), texts, trainer)["model"]
    return models.BPE(model["vocab"], [(left, right) for left, right in model["merges"]])


def byte_pairs_by_gigatoken(texts: Sequence[str], vocab: int) -> models.BPE:
    import gigatoken  # here: with awkward it takes half a second, and may be missing

    separator = b"\xff"  # no UTF-8 text has this byte
    with silenced():
        _, merges = gigatoken.train_bpe(
            separator.join(text.encode() for text in texts),
            vocab_size=vocab - len(OURS),
            special_tokens=[],
            tie_breaking="huggingface",
            separator=separator,
        )
    symbols = byte_symbols()  # of which str.translate makes a table: a byte is a letter of Latin-1
    spell = lambda token: token.decode("latin-1").translate(symbols)
    return byte_pair_model(used([(spell(left), spell(right)) for left, right in merges], texts))


def used(merges: list[Pair], texts: Sequence[str]) -> list[Pair]:
    """The merges up to the one that makes the last word whole. Hugging Face's trainer ends there; gigatoken
    goes on with pairs that occur no more, some of them twice."""
    merges = list(dict.fromkeys(merges))
    inner = tokenizers.Tokenizer(byte_pair_model(merges))
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words: set[str] = set()
    for text in texts:
        found = {word for word, _ in split.pre_tokenize_str(text)} - words
        # The first word in parts tells that the text was not used up, in most cases one of the first text's.
        if any(len(encoding) > 1 for encoding in inner.encode_batch_fast(list(found))):
            return merges
        words |= found
    low, high = 0, len(merges)
    while low < high:
        middle = (low + high) // 2
        inner = tokenizers.Tokenizer(byte_pair_model(merges[:middle]))
        if any(len(encoding) > 1 for encoding in inner.encode_batch_fast(list(words))):
            low = middle + 1
        else:
            high = middle
    return merges[:low]


def byte_pair_model(merges: list[Pair]) -> models.BPE:
    vocab = {entry: id for id, entry in enumerate([*OURS.values(), *sorted(byte_symbols().values())])}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    return models.BPE(vocab, merges)


def unigram(texts: Sequence[str], vocab: int) -> models.Unigram:
    """Unigram over the bytes of GPT-2's words, so that nothing is unknown."""
    trainer = trainers.UnigramTrainer(vocab_size=vocab, **common_settings())
    found = trained(models.Unigram(), texts, trainer)["model"]["vocab"]
    return models.Unigram([*((entry, 0.0) for entry in OURS.values()), *steady(found[len(OURS) :])])


def steady(entries: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """The same for the same text. The trainer works in an order that changes from run to run: the last digits
    of scores change with it, about 1e-14, and so do the steps of 1e-4 it gives to bytes that it never saw."""
    ranked = sorted(
        ((round(score, 4), entry) for entry, score in entries), key=lambda pair: (-pair[0], pair[1])
    )
    last = max((i for i, (_, entry) in enumerate(ranked) if len(entry) > 1), default=-1)
    learnt, bytes_left = ranked[: last + 1], sorted(entry for _, entry in ranked[last + 1 :])
    lowest = learnt[-1][0] if learnt else 0.0
    unseen = [(entry, lowest - 1e-4 * (i + 1)) for i, entry in enumerate(bytes_left)]
    return [*((entry, score) for score, entry in learnt), *unseen]


def trained(model: Any, texts: Sequence[str], trainer: Any) -> dict[str, Any]:
    """What Hugging Face's trainer makes of the texts, as in a tokenizer.json."""
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.train_from_iterator(texts, trainer)
    return json.loads(inner.to_str())


def common_settings() -> dict[str, Any]:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return {"special_tokens": list(OURS.values()), "initial_alphabet": alphabet, "show_progress": False}
