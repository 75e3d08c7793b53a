"""Cost of a checkpoint: how long a save stalls the loop, how long it takes in the background, and the time to
verify and to read one. `python -m benchmarks.checkpoint [MiB]` uses a temporary folder in the working
directory. `python -m benchmarks.checkpoint run` measures the share of the demo's loop that saves take, with
checkpoint.every=64, and the seconds from a kill to the first new step."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from headrace.checkpoint import inventory, manifest
from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.state import State
from headrace.runtime import goodput
from headrace.training import loss_spikes


def timed(call, *args, **kwargs):
    begun = time.perf_counter()
    result = call(*args, **kwargs)
    return result, time.perf_counter() - begun


def main(size: int) -> None:
    rows = size * 2**20 // 3 // 8 // 4096  # weights and two moments, eight arrays each, float32
    make = lambda seed: {
        f"w{n}": jax.random.normal(jax.random.key(seed + n), (rows, 1024), jnp.float32) for n in range(8)
    }
    zero = jnp.zeros((), jnp.int32)
    key = jax.random.key_data(jax.random.key(0))
    state = State(
        zero, make(0), {"mu": make(8), "nu": make(16)}, None, key, zero + 0, loss_spikes.empty_history(2)
    )
    jax.block_until_ready(state)
    about = {"step": 0, "recipe": {}, "tokenizer_sha256": None}
    with tempfile.TemporaryDirectory(dir=".") as run:
        checkpoints = Checkpoints(run, keep=2)
        for number in range(1, 5):
            _, blocked = timed(checkpoints.save, number, state, about)
            _, behind = timed(checkpoints.wait)
            print(f"save {number}: stalls the loop {blocked:.2f} s, then {behind:.2f} s in the background")
        folder = inventory.checkpoints_dir(run) / "4"
        _, sealed = timed(manifest.seal, folder, step=4, tier="temporary")
        _, verified = timed(manifest.verify, folder)
        _, read = timed(lambda: jax.block_until_ready(checkpoints.restore(4, state)))
        stored = inventory.list_steps(run)[-1].size
        print(f"{stored / 2**20:,.0f} MiB stored of {size:,}: seal {sealed:.2f} s")
        print(f"verify {verified:.2f} s, read {read:.2f} s")
        checkpoints.close()


EVERY, STEPS = 64, 256


def train(folder: str) -> None:
    """Run the demo twice: undisturbed, and killed once it has a checkpoint."""
    headrace = [sys.executable, "-m", "headrace"]
    prepare = [*headrace, "data", "prepare", "recipes/data/demo.yaml", f"path={folder}/data"]
    subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
    settings = [f"data.path={folder}/data", f"checkpoint.every={EVERY}", f"schedule.steps={STEPS}"]
    settings += ["eval.every=0", "log.every=1", "log.tensorboard=false"]
    command = [*headrace, "train", "recipes/demo.yaml", *settings]
    subprocess.run([*command, f"run_dir={folder}/whole"], check=True, stdout=subprocess.DEVNULL)
    spent = in_the_loop(Path(folder) / "whole")
    total = sum(spent.values())
    saves, share = 2 * STEPS // EVERY - 1, spent.get("checkpoint_save", 0.0) / total
    each = f"{EVERY} steps of {1000 * total / STEPS:.0f} ms"
    print(f"{saves} saves, two per {each}: {100 * share:.2f} % of the loop")
    print(f"each stalls it for {1000 * share * total / saves:.0f} ms")

    run = Path(folder) / "killed"
    with subprocess.Popen([*command, f"run_dir={run}"], stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: last_step(run) > EVERY + 10, process)
        killed = goodput.read_totals(run / "goodput.jsonl").attempts[-1].pid
        os.kill(killed, signal.SIGKILL)
        begun, reached = time.perf_counter(), rows(run)
        wait_for(lambda: rows(run) > reached, process)
        print(f"from the kill to the first new step: {time.perf_counter() - begun:.1f} s")
        process.terminate()
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def in_the_loop(run: Path) -> dict[str, float]:
    """Seconds by category between the first logged step and the last, without startup and the final save."""
    lines = [json.loads(line) for line in (run / "goodput.jsonl").read_text().splitlines()]
    found: dict[str, float] = {}
    for line in [line for line in lines if "step" in line][1:]:
        for name, seconds in line.get("seconds", {}).items():
            found[name] = found.get(name, 0.0) + seconds
    return found


def rows(run: Path) -> int:
    log = run / "metrics.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def last_step(run: Path) -> int:
    log = run / "goodput.jsonl"
    return goodput.read_totals(log).attempts[-1].last_step if rows(run) else 0


def wait_for(there, process: subprocess.Popen) -> None:
    while not there():
        if process.poll() is not None:
            sys.exit(f"the run exited with {process.returncode}")
        time.sleep(0.05)


if __name__ == "__main__":
    if sys.argv[1:] == ["run"]:
        with tempfile.TemporaryDirectory(dir=".") as scratch:
            train(scratch)
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 512)
