"""metrics.jsonl: one JSON object per logged row.

Reports are made from it, so that it survives kills, full disks and resuming from an earlier step."""

import json
import math
import os
from pathlib import Path
from typing import Any

from headrace.trackers.terminal import Level, Row


class Jsonl:
    name = "metrics.jsonl"
    optional = False

    def __init__(self, path: Path, *, step: int = 0) -> None:
        """Open the file for a run that continues from `step`. Later rows are removed."""
        self.path = path
        self._size = _remove_after(path, step)
        self._pending = b""

    def write(self, step: int, row: Row) -> None:
        """Append a row, after those that could not be written before."""
        self._pending += (json.dumps(_encode({"step": step} | row | {"step": step})) + "\n").encode()
        # After a partial write (full disk), the next one starts at the same position, with all rows since.
        with self.path.open("r+b") as file:
            file.seek(self._size)
            file.write(self._pending)
        self._size += len(self._pending)
        self._pending = b""

    def event(self, message: str, level: Level) -> None:
        pass

    def rewind(self, step: int) -> None:
        self._size, self._pending = _remove_after(self.path, step), b""

    def close(self) -> None:
        pass


def _encode(row: Row) -> Row:
    """Replace NaN and infinity, which JSON lacks, by null, and mark the row with `finite: false`."""
    values = {key: value if _is_plain(value) else float(value) for key, value in row.items()}
    bad = [key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
    return values | dict.fromkeys(bad) | ({"finite": False} if bad else {})


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, int | float | str)


def _remove_after(path: Path, step: int) -> int:
    """Remove incomplete rows and those after `step`, and return the size of the file."""
    before = path.read_bytes() if path.exists() else None
    remaining = b"".join(line + b"\n" for line in (before or b"").split(b"\n") if _step_of(line) <= step)
    if remaining != before:
        new_path = path.with_name(path.name + ".new")
        with new_path.open("wb") as file:
            file.write(remaining)
            file.flush()
            os.fsync(file.fileno())
        new_path.replace(path)
    return len(remaining)


def _step_of(line: bytes) -> float:
    """Return the step of a row; infinity if the line is incomplete or not a row."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
