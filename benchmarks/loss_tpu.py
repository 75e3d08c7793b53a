"""Planned time and extra memory of the head and its loss, forward and backward, on one TPU that is not
present: by tokens, by vocabulary in plain JAX and in kernels, compiled by libtpu and timed as `headrace plan`
times a step. The default shape is Gemma 2 2B's. From the repository's root: python -m benchmarks.loss_tpu"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from headrace.hardware.slices import parse_slice
from headrace.plan import device_rates, hlo, timing
from headrace.plan.aot import ENVIRONMENT

WAYS = ("tokens", "vocabulary", "kernel")
Row = dict[str, Any]


def main() -> None:
    options = arguments()
    if options.way:
        compile_one(options)
        return
    rows = [in_a_process_of_its_own(way) for way in WAYS]
    if options.json:
        print(json.dumps(rows))
        return
    sizes = f"{options.tokens:,} tokens, {options.embed:,} wide, vocabulary {options.vocab:,}, bfloat16"
    print(f"{options.slice}, one device: {sizes}\n")
    print(
        "| backend | planned ms | extra MiB | matmuls, TFLOP | compiler's cycles, ms |\n|---|---|---|---|---|"
    )
    for row in rows:
        # The compiler estimates no cycles for kernels, so these are not included.
        cycles = f"{row['cycles']:.1f}" if not row["kernel_tflop"] else f"{row['cycles']:.1f} without kernels"
        numbers = f"{row['ms']:.1f} | {row['extra_mib']:,.0f} | {row['tflop']:.1f} | {cycles}"
        print(f"| {row['name']} | {numbers} |")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slice", default="v5p-8")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--embed", type=int, default=2304)
    parser.add_argument("--vocab", type=int, default=256_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    return parser.parse_args()


def in_a_process_of_its_own(way: str) -> Row:
    """Compile in a subprocess, because the flags for the compiler's dump are read only once."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
        command = [sys.executable, "-m", "benchmarks.loss_tpu", *sys.argv[1:], "--way", way]
        environment = os.environ | ENVIRONMENT | {"XLA_FLAGS": flags, "LOSS_DUMP": folder}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{way}: the compiler exited with code {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compile_one(options: argparse.Namespace) -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from headrace.kernels.linear_cross_entropy.dispatch import fused_cross_entropy
    from headrace.kernels.linear_cross_entropy.stats import negative_log_likelihood
    from headrace.nn import sharding
    from headrace.nn.compile import compile_fast

    where = parse_slice(options.slice)
    chip = topologies.get_topology_desc(where.topology_name, "tpu", **where.topology_options).devices[0]

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(chip))

    def head(*arrays: Any) -> Any:
        def loss(*arrays: Any) -> Any:
            return fused_cross_entropy(negative_log_likelihood, *arrays, backend=options.way).loss

        return jax.value_and_grad(loss, argnums=(0, 1))(*arrays)

    tokens = 1, options.tokens
    shapes = (
        array(*tokens, options.embed),
        array(options.vocab, options.embed),
        array(*tokens, dtype=jnp.int32),
        array(*tokens, dtype=jnp.float32),
    )
    with jax.set_mesh(sharding.make_mesh(dict(data=1, fsdp=1, tensor=1, context=1), [chip])):
        memory: Any = compile_fast(jax.jit(head).lower(*shapes), "tpu").memory_analysis()
    dumped = next(Path(os.environ["LOSS_DUMP"]).glob("*jit_head*after_codegen.txt"))
    found = timing.time_step(hlo.read_program(dumped), device_rates.make_rates(where))
    assert not found.caveats, found.caveats
    row = dict(
        name=options.way,
        ms=1000 * found.seconds,
        extra_mib=memory.temp_size_in_bytes / 2**20,
        tflop=(found.matrix_flops + found.kernel_flops) / 1e12,
        kernel_tflop=found.kernel_flops / 1e12,
        cycles=1000 * found.cycles,
    )
    print(json.dumps(row))


if __name__ == "__main__":
    main()
