"""Libraries that tokenise, one thread each, on the documents of JSON lines."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from serve import read_texts, serve

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def get_ready() -> Any:
    makers = {"tokenizers": with_tokenizers, "fastokens": with_fastokens, "tiktoken": with_tiktoken}
    state: dict[str, Any] = {}

    def work(options: dict[str, Any]) -> dict[str, Any]:
        """Read the `files` for a `library`, write the ids to `out`, or encode."""
        if "library" in options:
            try:
                state["encode"] = makers[options["library"]](options["tokenizer"])
            except ImportError as error:
                return {"missing": f"not installed: {error}"}
            state["texts"] = read_texts(options["files"])
        elif "out" in options:
            lengths = np.array([len(ids) for ids in state["found"]])
            values = np.fromiter(chain.from_iterable(state["found"]), np.uint32, int(lengths.sum()))
            np.savez(options["out"], lengths=lengths, values=values)
        else:
            state["found"] = state["encode"](state["texts"])
        return {}

    return work


def with_tokenizers(path: str) -> Any:
    import tokenizers

    inner = tokenizers.Tokenizer.from_file(path)
    inner.encode_special_tokens = True  # a special token written in a text is text
    return lambda texts: [
        encoding.ids for encoding in inner.encode_batch_fast(texts, add_special_tokens=False)
    ]


def with_fastokens(path: str) -> Any:
    import fastokens

    settings = json.loads(Path(path).read_bytes())
    inner = fastokens.Tokenizer.from_json_str(
        json.dumps(settings | {"added_tokens": [], "post_processor": None})
    )

    def encode(texts: list[str]) -> list[np.ndarray]:
        values, offsets = inner.encode_batch_flat(texts)
        ends = np.frombuffer(offsets, np.uint64).astype(np.int64)
        return np.split(np.frombuffer(values, np.uint32), ends[1:-1])

    return encode


def with_tiktoken(path: str) -> Any:
    import tiktoken

    settings = json.loads(Path(path).read_bytes())
    special = {token["content"] for token in settings["added_tokens"]}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    ranks = {
        bytes(byte_of[symbol] for symbol in entry): id
        for entry, id in settings["model"]["vocab"].items()
        if entry not in special
    }
    inner = tiktoken.Encoding("ours", pat_str=GPT2, mergeable_ranks=ranks, special_tokens={})
    return lambda texts: [inner.encode_ordinary(text) for text in texts]


if __name__ == "__main__":
    serve(get_ready)
