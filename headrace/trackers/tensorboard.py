"""Scalars for TensorBoard, as tensorboardX event files in the run folder."""

import importlib
import logging
import os
import time
from pathlib import Path
from typing import Any

from headrace.trackers.terminal import Level, Row

FLUSH_SECONDS = 10.0


class TensorBoard:
    """Scalars as event files.

    Events are written directly rather than with SummaryWriter, whose thread ends when the disk is full and
    then blocks every later call (tensorboardX 2.6.5)."""

    name = "tensorboard"
    optional = True

    _flushed_at: float

    def __init__(self, folder: Path, *, step: int = 0) -> None:
        try:
            event_files = importlib.import_module("tensorboardX.event_file_writer")
            self._proto = importlib.import_module("tensorboardX.proto.event_pb2")
            self._scalar = importlib.import_module("tensorboardX.summary").scalar
        except ImportError:
            raise ImportError("it is not installed (pip install tensorboardX)") from None
        # It would print a warning for every NaN over the display, which shows it anyway.
        logging.getLogger("tensorboardX").setLevel(logging.ERROR)
        folder.mkdir(parents=True, exist_ok=True)
        # Two attempts of a run may start within one second, the resolution of the file name.
        self._file = event_files.EventsWriter(str(folder / "events"), f".{os.getpid()}.{step}")
        self.rewind(step)

    def write(self, step: int, row: Row) -> None:
        """Write the numbers of a row, with the tag train/NAME if their key has no group."""
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float):
                tag = key if "/" in key else f"train/{key}"
                self._put(step, summary=self._scalar(tag, value))
        if time.monotonic() - self._flushed_at > FLUSH_SECONDS:
            self._file.flush()
            self._flushed_at = time.monotonic()

    def event(self, message: str, level: Level) -> None:
        pass

    def rewind(self, step: int) -> None:
        """Hide the scalars after `step`, from which the run continues."""
        start = self._proto.SessionLog(status=self._proto.SessionLog.START)
        self._put(step + 1, session_log=start)
        self._file.flush()
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        self._file.close()

    def _put(self, step: int, **content: Any) -> None:
        self._file.write_event(self._proto.Event(wall_time=time.time(), step=step, **content))
