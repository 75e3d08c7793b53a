"""What the scripts here have in common: get ready, then do a round of work for each line of JSON that comes,
and answer with one."""

import json
import sys
from collections.abc import Callable
from typing import Any


def serve(get_ready: Callable[[], Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """`get_ready` imports what is needed and returns the work of a round."""
    try:
        work = get_ready()
    except ImportError as error:
        answer({"missing": f"not installed: {error}"})
        return
    answer({})
    for line in sys.stdin:
        answer(work(json.loads(line)))


def read_texts(files: list[str]) -> list[str]:
    """The documents of JSON lines."""
    texts: list[str] = []
    for file in files:
        with open(file, "rb") as lines:
            texts += [json.loads(line)["text"] for line in lines]
    return texts


def answer(value: dict[str, Any]) -> None:
    print("ANSWER", json.dumps(value), flush=True)
