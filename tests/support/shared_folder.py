"""Folders that the workers of xdist share, so that data and runs for many tests are built once a session."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def build_once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], object]) -> Path:
    """The folder of this name, which the first process that needs it builds and the others wait for."""
    session = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        session = session.parent
    folder, done = session / name, session / f"{name}.done"
    with open(session / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir()
            build(folder)
            done.touch()
    return folder
