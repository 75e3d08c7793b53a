"""Texts and a tokenizer that the tests of tokenizers share."""

import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from headrace.data.documents import Ragged
from headrace.data.tokenizer import encoders
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.data.tokenizer import train as tokenizer_train

WORDS = ["river", "mill", "wheel", "grain", "sluice", "größe", "naïve", "水車", "🌊", "if", "x", "==", "1:"]
SPECIAL = list(tokenizer_train.SPECIAL_TOKENS.values())


@cache
def code(count: int = 12) -> tuple[str, ...]:
    """Real text: files of Python's library, and one of many scripts."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:count]
    return (*(file.read_text(encoding="utf-8") for file in files), " ".join(WORDS * 20))


@cache
def trained(kind: Any = "bpe", vocab: int = 1000) -> tokenizer_io.Tokenizer:
    return tokenizer_train.train_tokenizer(code() if kind == "bpe" else code()[-3:], kind=kind, vocab=vocab)


@cache
def hostile() -> list[str]:
    return encoders.adversarial_texts(trained().inner)


def texts_of(ragged: Ragged) -> list[list[int]]:
    return [row.tolist() for row in np.split(ragged.values, ragged.offsets[1:-1])]
