"""Short runs whose losses are guarded, on packed data that is stored beside this file."""

import hashlib
import json
from pathlib import Path

import jax

from headrace.config import recipe
from headrace.training import run as training_run

HERE = Path(__file__).parent
STEPS = 20


def losses(path: Path, folder: Path) -> list[float]:
    """Train a tiny recipe for 20 steps and return the loss of each."""
    overrides = [
        f"run_dir={folder}", f"data.path={HERE / 'data'}", f"schedule.steps={STEPS}", "eval.batches=1",
        "log.every=1", "log.tensorboard=false", "checkpoint.every=100",
    ]  # fmt: skip
    assert training_run.run(recipe.load(path, overrides)) == 0
    return logged_losses(folder)


def logged_losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def machine() -> dict[str, str]:
    """What the last bits of a loss depend on: the version of JAX, and which instructions the CPU has."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    features = hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:16]
    return {"jax": jax.__version__, "cpu": features}
