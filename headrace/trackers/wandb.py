"""Weights & Biases. Project and mode come from its own environment variables where they are set
(WANDB_PROJECT, WANDB_MODE=offline)."""

import importlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.storage import files as store

PATIENCE = 60  # seconds; it waits 90 by itself, in silence


class Wandb:
    name = "wandb"
    optional = True

    def __init__(self, run_folder: Path, *, recipe: dict[str, Any], say: Callable[[str], None]) -> None:
        try:
            wandb = importlib.import_module("wandb")
        except ImportError:
            raise ImportError('it is not installed (pip install ".[wandb]")') from None
        say(f"connecting to Weights & Biases, for {PATIENCE} s at most")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "headrace"),
            id=_identity(run_folder),
            name=_name(run_folder, str(recipe.get("run", ""))),
            dir=str(run_folder),
            resume="allow",
            config=recipe,
            # It would copy every redraw of our terminal, and ask for a key until somebody answers.
            settings=wandb.Settings(console="off", silent=True, login_timeout=30, init_timeout=PATIENCE),
        )
        # Against our own step: wandb's only grows, and it drops the rows of a run that went back.
        for group in ("train/*", "evaluate/*", "badput/*"):
            self._run.define_metric(group, step_metric="step")

    def write(self, step: int, row: dict[str, Any]) -> None:
        values = {key: value for key, value in row.items() if key != "step" and value is not None}
        self._run.log(
            {"step": step} | {k if "/" in k else f"train/{k}": value for k, value in values.items()}
        )

    def event(self, message: str, level: str) -> None:
        pass

    def back(self, step: int) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


def _name(run_folder: Path, run: str) -> str:
    """Of a run at a URL, whose files are written elsewhere first, the last part of that."""
    return run.rstrip("/").rpartition("/")[2] if store.is_url(run) else run_folder.resolve().name


def _identity(run_folder: Path) -> str:
    """Drawn once and kept in the run folder, so that a resumed run goes on in the same chart and equal
    paths on two machines do not meet."""
    path = run_folder / "wandb" / "headrace-id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text().strip()
