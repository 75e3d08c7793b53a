"""Megatron's way of preprocessing: a pool of processes that parse and tokenise lines, one process that writes
what comes back."""

import json
import multiprocessing
from collections.abc import Iterator
from typing import Any

import numpy as np
from serve import serve

state: dict[str, Any] = {}


def get_ready() -> Any:
    import tokenizers  # noqa: F401

    def work(options: dict[str, Any]) -> dict[str, Any]:
        ends, end = [], 0
        pool = multiprocessing.Pool(2, start_worker, (options["tokenizer"], options["eos"]))
        with pool, open(f"{options['out']}.bin", "wb") as out:
            for ids in pool.imap(encode, read_lines(options["files"]), 32):
                out.write(np.array(ids, np.uint16).tobytes())
                end += len(ids)
                ends.append(end)
            pool.close()
            pool.join()
        np.save(f"{options['out']}.index.npy", np.array(ends))
        return {"tokens": end}

    return work


def read_lines(files: list[str]) -> Iterator[bytes]:
    for file in files:
        with open(file, "rb") as lines:
            yield from lines


def start_worker(path: str, eos: str) -> None:
    import tokenizers

    state["inner"] = tokenizers.Tokenizer.from_file(path)
    state["eos"] = state["inner"].token_to_id(eos)


def encode(line: bytes) -> list[int]:
    ids = state["inner"].encode(json.loads(line)["text"], add_special_tokens=False).ids
    return [*ids, state["eos"]]


if __name__ == "__main__":
    serve(get_ready)
