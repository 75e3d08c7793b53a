"""Pairs of answers to one prompt, the preferred one first: both rendered by the tokenizer's chat template,
side by side as one document of two texts. What is to be learnt is the answers, and nothing of what both
share."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from headrace.data.chat import encode as chat
from headrace.data.annotations import Notes
from headrace.data.documents import Problems, Ragged, offsets_of
from headrace.data.tokenizer.tokenizer import Tokenizer


def encode_pairs(
    tokenizer: Tokenizer,
    documents: Sequence[str],
    length: int,
    *,
    notes: Notes,
    problems: Problems | None = None,
    ids: Sequence[str] | None = None,
) -> Ragged:
    """Documents as `shapes.pair` gives them, as JSON. One that a row has no room for, or that the template
    refuses, has no tokens."""
    conversations, answers, names = [], [], []
    for number, document in enumerate(documents):
        prompt, *both = (part["messages"] for part in orjson.loads(document))
        for answer in both:
            conversations.append(orjson.dumps([*prompt, *answer]).decode())
            answers.append(sum(message["role"] == "assistant" for message in answer))
            names.append(ids[number] if ids is not None else f"pair {number + 1}")
    encoded = chat.encode_chats(tokenizer, conversations, problems=problems, ids=names)
    assert encoded.loss is not None
    only_answers(encoded, answers)
    lengths = encoded.lengths.reshape(-1, 2)
    refused = (lengths == 0).any(axis=1)
    too_long = lengths.sum(axis=1) > length
    notes.counts["too long"] += int(np.count_nonzero(too_long & ~refused))
    kept = ~(refused | too_long)
    taken = np.repeat(kept, 2).repeat(encoded.lengths)
    return Ragged(
        encoded.values[taken],
        offsets_of(np.where(kept, lengths.sum(axis=1), 0)),
        encoded.loss[taken],
        seconds=np.where(kept, lengths[:, 0], 0),
    )


def only_answers(encoded: Ragged, answers: Sequence[int]) -> None:
    """Takes the marks off all that the assistant says but its last `answers` turns: in place."""
    loss: Any = encoded.loss
    for begin, end, turns in zip(encoded.offsets[:-1], encoded.offsets[1:], answers, strict=True):
        here = loss[begin:end]
        starts = np.flatnonzero(here & ~np.concatenate([[False], here[:-1]]))
        if len(starts) > turns:
            here[: starts[len(starts) - turns]] = False
