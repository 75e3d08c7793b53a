"""Weights & Biases.

Its own environment variables choose project and mode (WANDB_PROJECT, WANDB_MODE=offline)."""

import importlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.storage import files
from headrace.trackers.terminal import Level, Row

TIMEOUT = 60  # seconds; wandb's default is 90, without a message


class Wandb:
    name = "wandb"
    optional = True

    def __init__(
        self, run_folder: Path, *, recipe: dict[str, Any], on_message: Callable[[str], None]
    ) -> None:
        try:
            wandb = importlib.import_module("wandb")
        except ImportError:
            raise ImportError("it is not installed (pip install wandb)") from None
        on_message(f"connecting to Weights & Biases, for at most {TIMEOUT} s")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "headrace"),
            id=_run_id(run_folder),
            name=_run_name(run_folder, str(recipe.get("run", ""))),
            dir=str(run_folder),
            resume="allow",
            config=recipe,
            # By default it copies every redraw of the terminal, and prompts for a key without a time limit.
            settings=wandb.Settings(console="off", silent=True, login_timeout=30, init_timeout=TIMEOUT),
        )
        # Plotted over this step: wandb's own only grows, and it drops the rows of a run that was rolled back.
        for group in ("train/*", "evaluate/*", "badput/*"):
            self._run.define_metric(group, step_metric="step")

    def write(self, step: int, row: Row) -> None:
        values = {key: value for key, value in row.items() if key != "step" and value is not None}
        self._run.log(
            {"step": step} | {key if "/" in key else f"train/{key}": value for key, value in values.items()}
        )

    def event(self, message: str, level: Level) -> None:
        pass

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


def _run_name(run_folder: Path, run: str) -> str:
    """Return the name of the run folder, or the last part of a URL (`run_folder` is then a local mirror)."""
    return run.rstrip("/").rpartition("/")[2] if files.is_url(run) else run_folder.resolve().name


def _run_id(run_folder: Path) -> str:
    """Return an id for the run, created at the first call and stored in the run folder.

    A resumed run continues the same chart, and equal paths on two machines do not collide."""
    path = run_folder / "wandb" / "headrace-id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text().strip()
