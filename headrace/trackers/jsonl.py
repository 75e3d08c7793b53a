"""metrics.jsonl: one JSON object a logged row. It is the record that reports are made of, so it
survives kills, full disks and resuming from an earlier step."""

import json
import math
import os
from pathlib import Path
from typing import Any


class Jsonl:
    name = "metrics.jsonl"
    optional = False

    def __init__(self, path: Path, *, step: int = 0) -> None:
        """Opens the file for a run that goes on from `step`: later rows of an earlier life go."""
        self.path = path
        self._size = _keep_until(path, step)
        self._pending = b""

    def write(self, step: int, row: dict[str, Any]) -> None:
        self._pending += (json.dumps(_encode({"step": step} | row | {"step": step})) + "\n").encode()
        # A write that fails halfway (disk full) is written over, with the rows since, by the next one.
        with self.path.open("r+b") as file:
            file.seek(self._size)
            file.write(self._pending)
        self._size += len(self._pending)
        self._pending = b""

    def event(self, message: str, level: str) -> None:
        pass

    def back(self, step: int) -> None:
        self._size, self._pending = _keep_until(self.path, step), b""

    def close(self) -> None:
        pass


def _encode(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has neither NaN nor infinity: such a value is null, and the row says so."""
    values = {key: value if _is_plain(value) else float(value) for key, value in row.items()}
    bad = [key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
    return values | dict.fromkeys(bad) | ({"finite": False} if bad else {})


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, int | float | str)


def _keep_until(path: Path, step: int) -> int:
    """Leaves the whole rows up to `step` and returns the size of the file."""
    before = path.read_bytes() if path.exists() else None
    kept = b"".join(line + b"\n" for line in (before or b"").split(b"\n") if _step(line) <= step)
    if kept != before:
        beside = path.with_name(path.name + ".new")
        with beside.open("wb") as file:
            file.write(kept)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    return len(kept)


def _step(line: bytes) -> float:
    """The step of a row; infinity for a line that was cut off, which is no row."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
