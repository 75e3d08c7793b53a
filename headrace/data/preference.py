"""Preference pairs: the tokenizer's chat template renders the prompt with each of two answers, and both texts
form one document, the preferred answer first. Only the answers are trained on, not the shared prompt."""

from collections.abc import Sequence

import numpy as np
import orjson

from headrace.data.annotations import AnnotationStats
from headrace.data.chat import encode
from headrace.data.documents import Problems, Ragged, lengths_to_offsets
from headrace.data.tokenizer.tokenizer import Tokenizer


def encode_pairs(
    tokenizer: Tokenizer,
    documents: Sequence[str],
    max_length: int,
    *,
    stats: AnnotationStats,
    problems: Problems | None = None,
    ids: Sequence[str] | None = None,
) -> Ragged:
    """Encode JSON documents from `chat.records.to_preference_parts`. A pair that is longer than `max_length`,
    or that the chat template refuses, becomes an empty document."""
    conversations, answer_turns, names = [], [], []
    for index, document in enumerate(documents):
        prompt, *answers = (part["messages"] for part in orjson.loads(document))
        for answer in answers:
            conversations.append(orjson.dumps([*prompt, *answer]).decode())
            answer_turns.append(sum(message["role"] == "assistant" for message in answer))
            names.append(ids[index] if ids is not None else f"pair {index + 1}")
    encoded = encode.encode_chats(tokenizer, conversations, problems=problems, ids=names)
    loss_mask = mask_all_but_answers(encoded, answer_turns)
    lengths = encoded.lengths.reshape(-1, 2)
    is_refused = (lengths == 0).any(axis=1)
    is_too_long = lengths.sum(axis=1) > max_length
    stats.counts["too long"] += int(np.count_nonzero(is_too_long & ~is_refused))
    keep = ~(is_refused | is_too_long)
    keep_token = np.repeat(keep, 2).repeat(encoded.lengths)
    return Ragged(
        encoded.values[keep_token],
        lengths_to_offsets(np.where(keep, lengths.sum(axis=1), 0)),
        loss_mask[keep_token],
        second_starts=np.where(keep, lengths[:, 0], 0),
    )


def mask_all_but_answers(conversations: Ragged, answer_turns: Sequence[int]) -> np.ndarray:
    """The loss mask of conversations, restricted to the last `answer_turns[i]` turns of the assistant in
    each. Changes `conversations.loss_mask` in place."""
    loss_mask = conversations.loss_mask
    assert loss_mask is not None
    offsets = conversations.offsets
    for start, stop, turns in zip(offsets[:-1], offsets[1:], answer_turns, strict=True):
        mask = loss_mask[start:stop]
        turn_starts = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
        if len(turn_starts) > turns:
            mask[: turn_starts[len(turn_starts) - turns]] = False
    return loss_mask
