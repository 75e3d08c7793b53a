"""Map the rows of one vocabulary to those of another, for embeddings and heads."""

import numpy as np

from headrace.data.memory_map import open_folder
from headrace.errors import UserError


def vocab_row_map(
    source_path: str, data_path: str, source_size: int, size: int
) -> tuple[np.ndarray | None, str]:
    """Find for each token of the new vocabulary its row in the source's, -1 for new tokens.

    Returns None if all rows keep their place, and a summary for the log. The folders have the tokenizers; if
    one of them has none, tokens are identified by their numbers."""
    source_ids, ids = read_vocab(source_path), read_vocab(data_path)
    if source_ids is None or ids is None or source_ids == ids:
        if source_size == size:
            return None, ""
        rows = np.where(np.arange(size) < source_size, np.arange(size), -1)
        method = "by their numbers"
    else:
        rows, method = np.full(size, -1), "by their text"
        for token, row in ids.items():
            if row < size and source_ids.get(token, source_size) < source_size:
                rows[row] = source_ids[token]
    num_mapped = int((rows >= 0).sum())
    new = f", {size - num_mapped:,} new ones as the mean of the old" if num_mapped < size else ""
    return rows, f"{num_mapped:,} tokens {method}{new}"


def read_vocab(folder: str) -> dict[str, int] | None:
    """Read the ids of all tokens from the tokenizer.json in a folder. None if there is no such file."""
    import tokenizers

    try:
        text = open_folder(folder).read("tokenizer.json")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return tokenizers.Tokenizer.from_str(bytes(text).decode()).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises a plain Exception
        raise UserError(f"{folder}/tokenizer.json: not a tokenizer: {error}") from None
