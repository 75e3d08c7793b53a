"""Pause tokens (arXiv 2310.02226): extra steps of computation before the next token. The model reads them and
is never trained to predict them. In texts they are at random positions, in conversations before each
answer."""

from pathlib import Path

import numpy as np

from headrace.data.documents import Ragged
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.errors import UserError

PAUSE_TOKEN = "<|pause|>"


def add_pause_token(folder: Path) -> None:
    """Add the pause token to the tokenizer.json in a folder, unless it has it. Other files stay as they
    are."""
    inner = tokenizer_io.load(folder).inner
    if inner.token_to_id(PAUSE_TOKEN) is None:
        inner.add_special_tokens([PAUSE_TOKEN])
        tokenizer_io.write_atomic(folder / "tokenizer.json", inner.to_str(pretty=True).encode())


def find_pause_id(tokenizer: tokenizer_io.Tokenizer, key: str) -> int:
    """The id of the pause token. Raises UserError, with the recipe key that needs it, if it is missing."""
    id = tokenizer.inner.token_to_id(PAUSE_TOKEN)
    if id is None:
        hint = "make the data with pack.pause_tokens above 0"
        raise UserError(f"{key}: the tokenizer has no {PAUSE_TOKEN}; {hint}")
    return id


def insert_pauses(documents: Ragged, pause_id: int, count: int, rng: np.random.Generator) -> Ragged:
    """Insert pause tokens into documents. Without a loss mask: `count` for every 100 tokens, at random
    positions. With one: `count` before each run of trained tokens. Pauses themselves are masked out."""
    size, loss_mask = len(documents.values), documents.loss_mask
    if loss_mask is None:
        positions = np.sort(rng.integers(0, max(size, 1), round(size * count / 100)))
        loss_mask = np.ones(size, bool)
    else:
        mask_before = np.concatenate([[False], loss_mask[:-1]])
        mask_before[documents.offsets[:-1][documents.lengths > 0]] = (
            False  # the token before is another document's
        )
        positions = np.repeat(np.flatnonzero(loss_mask & ~mask_before), count)
    owners = np.searchsorted(documents.offsets, positions, side="right") - 1
    added = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=len(documents)))])
    return Ragged(
        np.insert(documents.values, positions, pause_id),
        documents.offsets + added,
        np.insert(loss_mask, positions, False),
    )
