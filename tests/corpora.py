"""Texts and a tokenizer that the tests of tokenizers share."""

import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from headrace.data.tokenizer import encoders, train as learn, tokenizer as tokenise
from headrace.data.documents import Ragged

WORDS = ["river", "mill", "wheel", "grain", "sluice", "größe", "naïve", "水車", "🌊", "if", "x", "==", "1:"]
SPECIAL = list(learn.OURS.values())


@cache
def code(count: int = 12) -> tuple[str, ...]:
    """Real text: files of Python's library, and one of many scripts."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:count]
    return (*(file.read_text(encoding="utf-8") for file in files), " ".join(WORDS * 20))


@cache
def trained(kind: Any = "bpe", vocab: int = 1000) -> tokenise.Tokenizer:
    return learn.train(code() if kind == "bpe" else code()[-3:], kind=kind, vocab=vocab)


@cache
def hostile() -> list[str]:
    return encoders.hostile(trained().inner)


def texts_of(ragged: Ragged) -> list[list[int]]:
    return [row.tolist() for row in np.split(ragged.values, ragged.offsets[1:-1])]
