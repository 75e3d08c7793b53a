"""Pause tokens (arXiv 2310.02226): steps of computing before the next token that a model is given and never
has to say. In texts they stand at random places, in conversations before each answer."""

from pathlib import Path

import numpy as np

from headrace.data.tokenizer import tokenizer as tokenise
from headrace.data.documents import Ragged
from headrace.errors import UserError

PAUSE = "<|pause|>"


def add_token(folder: Path) -> None:
    """Gives the tokenizer in a folder the token, unless it has it; the other files beside it stay as they
    are."""
    inner = tokenise.load(folder).inner
    if inner.token_to_id(PAUSE) is None:
        inner.add_special_tokens([PAUSE])
        tokenise.write(folder / "tokenizer.json", inner.to_str(pretty=True).encode())


def token_of(tokenizer: tokenise.Tokenizer, key: str) -> int:
    found = tokenizer.inner.token_to_id(PAUSE)
    if found is None:
        raise UserError(f"{key}: the tokenizer has no {PAUSE}; make the data with pack.pause above 0")
    return found


def with_pauses(documents: Ragged, token: int, many: int, random: np.random.Generator) -> Ragged:
    """Documents with so many pauses for every hundred tokens, at random places, and where only some tokens
    are to be learnt, before each stretch of them. Pauses themselves are not to be learnt."""
    size, loss = len(documents.values), documents.loss
    if loss is None:
        places = np.sort(random.integers(0, max(size, 1), round(size * many / 100)))
        loss = np.ones(size, bool)
    else:
        before = np.concatenate([[False], loss[:-1]])
        before[documents.offsets[:-1][documents.lengths > 0]] = False  # what another document ends with
        places = np.repeat(np.flatnonzero(loss & ~before), many)
    owners = np.searchsorted(documents.offsets, places, side="right") - 1
    added = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=len(documents)))])
    return Ragged(
        np.insert(documents.values, places, token), documents.offsets + added, np.insert(loss, places, False)
    )
