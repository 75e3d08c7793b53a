"""Buffer that collects the tokens of many documents before they are packed."""

import numpy as np

from headrace.data.documents import Ragged
from headrace.data.shards import DTYPE_LIMITS

COPY_EACH_FROM = 200  # mean tokens per document from which copying each is faster than all by a mask


class TokenBuffer:
    """Token ids of documents, one after the other, in the type in which shards store them.

    Memory is reserved for `capacity` tokens; the system provides it only as it is used."""

    def __init__(self, dtype: str, capacity: int) -> None:
        self.values = np.empty(capacity, dtype)
        self.clear()

    def clear(self) -> None:
        """Remove all documents. The memory is used again."""
        self.used = 0  # tokens
        self.loss_masks: list[np.ndarray] = []
        self.has_loss_mask = False  # some tokens are not to be trained on
        self.labels: list[np.ndarray] = []
        self.seconds: list[np.ndarray] = []
        self.lengths = [np.zeros(1, np.int64)]

    def add(self, ragged: Ragged, bos: int | None = None, eos: int | None = None) -> None:
        """Append documents, each between the tokens `bos` and `eos` (None: without)."""
        extra = (bos is not None) + (eos is not None)
        offsets = ragged.offsets + extra * np.arange(len(ragged.offsets))
        begin, end = self.used, self.used + int(offsets[-1])
        if end > len(self.values):
            self.values = np.concatenate([self.values[:begin], np.empty(end, self.values.dtype)])
        assert not len(ragged.values) or int(ragged.values.max()) < DTYPE_LIMITS[str(self.values.dtype)]
        values, is_text = self.values[begin:end], np.ones(end - begin, bool)
        for token, positions in ((bos, offsets[:-1]), (eos, offsets[1:] - 1)):
            if token is not None:
                values[positions] = token
                is_text[positions] = False
        if len(ragged.values) < COPY_EACH_FROM * len(ragged):
            values[is_text] = ragged.values
        else:
            text_starts = (offsets[:-1] + (bos is not None)).tolist()
            bounds = ragged.offsets.tolist()
            for start, first, last in zip(text_starts, bounds[:-1], bounds[1:], strict=True):
                values[start : start + last - first] = ragged.values[first:last]
        if ragged.loss_mask is None:
            self.loss_masks.append(np.broadcast_to(True, end - begin))
        else:
            self.loss_masks.append(expand_loss_mask(ragged.loss_mask, is_text))
            self.has_loss_mask = True
        self.lengths.append(np.diff(offsets))
        self._add_labels(ragged, is_text)
        self.used = end

    def _add_labels(self, ragged: Ragged, is_text: np.ndarray) -> None:
        """Append labels and positions of second texts. Earlier documents without labels get zeros."""
        if ragged.labels is not None or self.labels:
            labels = np.zeros(len(is_text), np.uint16)
            labels[is_text] = 0 if ragged.labels is None else ragged.labels
            self.labels += [labels] if self.labels else [np.zeros(self.used, np.uint16), labels]
        if ragged.second_starts is not None:  # a dataset of pairs has no other documents
            self.seconds.append(ragged.second_starts)

    def to_ragged(self) -> Ragged:
        """The documents that were added. Their token ids are a view of this buffer until it is cleared."""
        loss_mask = np.concatenate(self.loss_masks) if self.has_loss_mask else None
        labels = np.concatenate(self.labels) if self.labels else None
        seconds = np.concatenate(self.seconds) if self.seconds else None
        offsets = np.cumsum(np.concatenate(self.lengths))
        return Ragged(self.values[: self.used], offsets, loss_mask, labels, seconds)


def expand_loss_mask(loss_mask: np.ndarray, is_text: np.ndarray) -> np.ndarray:
    """Extend a mask over the tokens of texts to all tokens. Those around a text are trained on."""
    expanded = np.ones(len(is_text), bool)
    expanded[is_text] = loss_mask
    return expanded
