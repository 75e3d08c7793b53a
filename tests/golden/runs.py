"""Run folders that were written by an earlier version, to be resumed: a Llama and a LoRA on one device, and a
masked encoder on eight simulated ones."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.golden.losses import HERE, STEPS, logged_losses
from tests.support import xla_flags

COMMON = """
run_dir: runs/{name}
data: {{path: data, sequence_length: 64}}
optimizer: {{use: adamw, learning_rate: 1e-2, weight_decay: 0.1}}
schedule: {{use: cosine, steps: {steps}, warmup: 4}}
batch: {{sequences: 16}}
compute: {{dtype: float32}}
checkpoint: {{every: {half}, keep: 3}}
eval: {{every: 0, batches: 1}}
log: {{every: 1, tensorboard: false}}
"""
LLAMA = "use: llama, layers: 2, embed: 32, heads: 4, kv_heads: 2, mlp: 64, rope_theta: 10000.0"


class Run(NamedTuple):
    name: str
    devices: int
    recipe: str


RUNS = (
    Run("llama", 1, f"model: {{{LLAMA}}}\n"),
    Run(
        "encoder",
        8,
        "model: {use: eurobert, layers: 2, embed: 32, heads: 4, kv_heads: 4, mlp: 64}\n"
        "objective: {use: masked, mask_rate: 0.3, mask_token_share: 0.8, random_token_share: 0.1}\n"
        "mesh: {data: 2, fsdp: 2, tensor: 2}\n",
    ),
    Run("lora", 1, "init_from: runs/llama\nlora: {rank: 4, alpha: 8}\n"),
)


def start(run: Run, folder: Path) -> list[float]:
    """Train a run in `folder` to its end. Returns the losses of its steps, and removes what was saved in its
    second half, so that it can be resumed from the middle."""
    if not (folder / "data").exists():
        shutil.copytree(HERE / "data", folder / "data")
    recipe = COMMON.format(name=run.name, steps=STEPS, half=STEPS // 2) + run.recipe
    (folder / f"{run.name}.yaml").write_text(recipe)
    losses = resume(run, folder)
    for checkpoint in (folder / "runs" / run.name / "checkpoints").iterdir():
        if checkpoint.name.isdigit() and int(checkpoint.name) > STEPS // 2:
            shutil.rmtree(checkpoint)
    return losses


def resume(run: Run, folder: Path) -> list[float]:
    """Train by the command, with as many simulated devices as the run has. Returns the losses."""
    run_dir = folder / "runs" / run.name
    recipe = f"{run_dir}/recipe.yaml" if run_dir.exists() else f"{run.name}.yaml"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags.flags(run.devices)}
    env |= {"PYTHONPATH": str(HERE.parent.parent)}
    command = [sys.executable, "-m", "headrace", "train", recipe, "--once"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return logged_losses(run_dir)
