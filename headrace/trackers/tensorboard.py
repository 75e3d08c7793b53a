"""Scalars for TensorBoard, as tensorboardX event files in the run folder."""

import importlib
import logging
import os
import time
from pathlib import Path
from typing import Any

FLUSH_SECONDS = 10.0


class TensorBoard:
    """Writes its events itself rather than through SummaryWriter, whose thread dies of a full disk and
    then blocks every later call for good (tensorboardX 2.6.5)."""

    name = "tensorboard"
    optional = True

    _flushed: float

    def __init__(self, folder: Path, *, step: int = 0) -> None:
        try:
            files = importlib.import_module("tensorboardX.event_file_writer")
            self._proto = importlib.import_module("tensorboardX.proto.event_pb2")
            self._scalar = importlib.import_module("tensorboardX.summary").scalar
        except ImportError:
            raise ImportError("it is not installed (pip install tensorboardX)") from None
        # It would warn of every NaN, across the display, which says so itself.
        logging.getLogger("tensorboardX").setLevel(logging.ERROR)
        folder.mkdir(parents=True, exist_ok=True)
        # Two lives of a run may start within the second that the file name holds.
        self._file = files.EventsWriter(str(folder / "events"), f".{os.getpid()}.{step}")
        self.back(step)

    def write(self, step: int, row: dict[str, Any]) -> None:
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float):
                tag = key if "/" in key else f"train/{key}"
                self._put(step, summary=self._scalar(tag, value))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def event(self, message: str, level: str) -> None:
        pass

    def back(self, step: int) -> None:
        """Hides what was written after the step that the run goes on from."""
        start = self._proto.SessionLog(status=self._proto.SessionLog.START)
        self._put(step + 1, session_log=start)
        self._file.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()

    def _put(self, step: int, **content: Any) -> None:
        self._file.write_event(self._proto.Event(wall_time=time.time(), step=step, **content))
