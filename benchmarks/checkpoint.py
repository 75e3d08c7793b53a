"""What a checkpoint costs: how long a save holds up the loop, how long it takes behind it, and what it takes
to verify and to read one. `python -m benchmarks.checkpoint [MiB]`, in a temporary folder here."""

import sys
import tempfile
import time

import jax
import jax.numpy as jnp

from millrace import manifest, steps
from millrace.checkpoint import Checkpoints
from millrace.state import State


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
    state = State(zero, make(0), {"mu": make(8), "nu": make(16)}, None, key, zero + 0, zero + 0)
    jax.block_until_ready(state)
    about = {"step": 0, "recipe": {}, "tokenizer_sha256": None}
    with tempfile.TemporaryDirectory(dir=".") as run:
        checkpoints = Checkpoints(run, keep=2)
        for number in range(1, 5):
            _, blocked = timed(checkpoints.save, number, state, about)
            _, behind = timed(checkpoints.settle)
            print(f"save {number}: holds up the loop {blocked:.2f} s, goes on behind it for {behind:.2f} s")
        folder = steps.folder(run) / "4"
        _, sealed = timed(manifest.seal, folder, step=4, permanent=False)
        _, verified = timed(manifest.verify, folder)
        _, read = timed(lambda: jax.block_until_ready(checkpoints.restore(4, state)))
        stored = steps.described(run, 4).size
        print(f"{stored / 2**20:,.0f} MiB stored of {size:,}: seal {sealed:.2f} s")
        print(f"verify {verified:.2f} s, read {read:.2f} s")
        checkpoints.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 512)
