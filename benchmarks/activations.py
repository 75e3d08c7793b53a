"""Memory and time of an MLP's activation: the gradient of 8 scanned layers of width 2048 with 8192 hidden
units, 8192 tokens in bfloat16, in plain JAX, saving less but exact, and with few bits.

    python -m benchmarks.activations          on the device of this machine: temporaries and time
    python -m benchmarks.activations --tpu    temporaries by the compiler of TPU v5e; needs no TPU

Where w_down is frozen, that matrix is not trained, so only the activation needs the hidden units."""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

REPEATS = 20
LAYERS, TOKENS, EMBED, HIDDEN = 8, 8192, 2048, 8192
Body = Callable[..., Any]


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--tpu", action="store_true")
    options.add_argument("--only", default="", help="only rows whose names contain this")
    args = options.parse_args()
    if args.tpu:
        os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    print("| MLP | temporaries MiB | ms |\n|---|---|---|")
    for name, body, gated, frozen in rows():
        if args.only in name:
            mebibytes, milliseconds = measured(body, gated, frozen, tpu=args.tpu)
            print(f"| {name} | {mebibytes:,.0f} | {milliseconds} |", flush=True)


def rows() -> list[tuple[str, Body, bool, bool]]:
    """Names, layers, whether they have a gate, and whether w_down is frozen."""
    import jax
    import jax.numpy as jnp

    from headrace.nn import activations
    from headrace.nn.mlp import glu, project_gated

    def plain(activation: Body) -> Body:
        return lambda x, w, w_down: activation(x @ w) @ w_down

    def again(activation: Body) -> Body:
        down = jax.checkpoint(lambda h, w: activation(h) @ w, prevent_cse=False)
        return lambda x, w, w_down: down(x @ w, w_down)

    def by_bits(x: Any, w_gate: Any, w_up: Any, w_down: Any) -> Any:
        """Save as little as few bits allow: silu(gate), up and two bits; the hidden units are recomputed."""
        down = jax.checkpoint(lambda active, up, w: (active * up) @ w, prevent_cse=False)
        return down(silu_bits(x @ w_gate), x @ w_up, w_down)

    silu_bits = partial(activations.smooth_bits, "silu")
    square = lambda x: jnp.square(jax.nn.relu(x))
    ours = lambda x, g, u, w: project_gated("swiglu", x @ g, x @ u, w, prevent_cse=False)
    return [
        ("SwiGLU, plain JAX", lambda x, g, u, w: (jax.nn.silu(x @ g) * (x @ u)) @ w, True, False),
        ("SwiGLU, saves gate, up, hidden", lambda x, g, u, w: glu("swiglu", x @ g, x @ u) @ w, True, False),
        ("SwiGLU, saves gate, up", ours, True, False),
        ("SwiGLU, saves silu(gate), up, 2 bits", by_bits, True, False),
        ("SiLU, plain JAX", plain(jax.nn.silu), False, False),
        ("SiLU, saves its input", again(jax.nn.silu), False, False),
        ("SiLU, saves its output, 2 bits", plain(silu_bits), False, False),
        ("ReLU, plain JAX", plain(jax.nn.relu), False, False),
        ("ReLU, saves its output", plain(activations.relu), False, False),
        ("ReLU, saves its output, 1 bit", plain(activations.relu_bits), False, False),
        ("ReLU squared, plain JAX", plain(square), False, False),
        ("ReLU squared, saves its output", plain(activations.relu2), False, False),
        ("SiLU, w_down frozen, saves its input", again(jax.nn.silu), False, True),
        ("SiLU, w_down frozen, saves 2 bits", plain(silu_bits), False, True),
        ("ReLU, w_down frozen, plain JAX", plain(jax.nn.relu), False, True),
        ("ReLU, w_down frozen, saves 1 bit", plain(activations.relu_bits), False, True),
        ("SwiGLU, w_down frozen, saves gate, up", ours, True, True),
        ("SwiGLU, w_down frozen, saves silu(gate), up, 2 bits", by_bits, True, True),
    ]


def measured(body: Body, gated: bool, frozen: bool, *, tpu: bool) -> tuple[float, str]:
    """MiB of temporaries, and the median of the milliseconds of some runs."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    def loss(trained: list[Any], x: Any, held: list[Any]) -> Any:
        return jnp.sum(jax.lax.scan(lambda x, w: (x + body(x, *w), None), x, [*trained, *held])[0])

    place = jax.devices()[0]
    if tpu:
        place = topologies.get_topology_desc(topology_name="v5e:2x2", platform="tpu").devices[0]
    home = SingleDeviceSharding(place)
    sides = [(EMBED, HIDDEN)] * (2 if gated else 1) + [(HIDDEN, EMBED)]
    shapes = [jax.ShapeDtypeStruct((LAYERS, *side), jnp.bfloat16, sharding=home) for side in sides]
    x = jax.ShapeDtypeStruct((TOKENS // 2048, 2048, EMBED), jnp.bfloat16, sharding=home)
    trained = shapes[: len(shapes) - frozen]
    program = jax.jit(jax.grad(loss)).lower(trained, x, shapes[len(trained) :]).compile()
    found: Any = program.memory_analysis()
    if tpu:
        return found.temp_size_in_bytes / 2**20, "-"
    draw = lambda shape: 0.02 * jax.random.normal(jax.random.key(0), shape.shape, shape.dtype)
    inputs = jax.tree.map(draw, (trained, x, shapes[len(trained) :]))
    times = []
    for _ in range(REPEATS + 2):
        began = time.perf_counter()
        jax.block_until_ready(program(*inputs))
        times.append(1000 * (time.perf_counter() - began))
    return found.temp_size_in_bytes / 2**20, f"{statistics.median(times[2:]):.1f}"


if __name__ == "__main__":
    main()
