"""Headrace's BPE training on the documents of JSON lines, all cores."""

from pathlib import Path
from typing import Any

from serve import read_texts, serve


def get_ready() -> Any:
    from headrace.data.tokenizer import tokenizer as tokenizer_io
    from headrace.data.tokenizer import train as tokenizer_train

    texts: list[str] = []

    def work(options: dict[str, Any]) -> dict[str, Any]:
        if "files" in options:
            texts[:] = read_texts(options["files"])
            return {}
        trained = tokenizer_train.train_tokenizer(texts, kind="bpe", vocab=options["vocab"])
        tokenizer_io.save(trained, Path(options["out"]))
        return {}

    return work


if __name__ == "__main__":
    serve(get_ready)
