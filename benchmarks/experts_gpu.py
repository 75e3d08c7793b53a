"""A layer of experts, forward and backward, on one accelerator: `jax.lax.ragged_dot` against matmuls with the
same FLOPs, with each of XLA's implementations on a GPU.

python -m benchmarks.experts_gpu [experts] [top_k]"""

import sys
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from headrace.nn import experts

TOKENS, EMBED, MLP = 16_384, 2048, 1024
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "grouped matmuls": {"xla_gpu_experimental_use_ragged_dot_grouped_gemm": True},
    "fused": {"xla_gpu_experimental_use_ragged_dot_fusion": True},
}


def layer(x: Any, chosen: Any, weights: Any, w: Any, d: Any) -> Any:
    run = lambda x, weights, w: experts.mix("swiglu", x, experts.Routing(chosen, weights), w)
    out, pull = jax.vjp(run, x, weights, experts.ExpertWeights(*w))
    return out, pull(d)


def plain(x: Any, w: Any, d: Any) -> Any:
    """As many FLOPs, in three plain matmuls."""
    run = lambda x, gate, up, down: (jax.nn.silu(x @ gate) * (x @ up)) @ down
    out, pull = jax.vjp(run, x, *w)
    return out, pull(d)


def seconds(run: Any, *inputs: Any, turns: int = 10) -> float:
    jax.block_until_ready(run(*inputs))
    begun = time.perf_counter()
    for _ in range(turns):
        out = run(*inputs)
    jax.block_until_ready(out)
    return (time.perf_counter() - begun) / turns


def main(count: int = 32, top_k: int = 4) -> None:
    keys = jax.random.split(jax.random.key(0), 6)
    draw = partial(jax.random.normal, dtype=jnp.bfloat16)
    x, d = (draw(key, (1, TOKENS, EMBED)) for key in keys[:2])
    chosen = jax.lax.top_k(draw(keys[2], (1, TOKENS, count)), top_k)[1]
    weights = jax.random.uniform(keys[3], chosen.shape)
    w = [draw(keys[4], shape) for shape in ((count, EMBED, MLP), (count, EMBED, MLP), (count, MLP, EMBED))]
    flops = 18 * TOKENS * top_k * EMBED * MLP
    many = [jnp.repeat(one[0], top_k, axis=0) for one in (x, d)]
    took = seconds(jax.jit(plain), many[0], [one[0] for one in w], many[1])
    print(f"plain matmuls of as many rows: {1e3 * took:.2f} ms, {flops / took / 1e12:.0f} TFLOP/s")
    for name, options in WAYS.items():
        lowered = jax.jit(layer).lower(x, chosen, weights, w, d)
        try:
            compiled = lowered.compile(compiler_options=options)
            took = seconds(compiled, x, chosen, weights, w, d)
        except jax.errors.JaxRuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0][:120]}")
            continue
        memory = compiled.memory_analysis().temp_size_in_bytes / 2**30
        print(f"{name}: {1e3 * took:.2f} ms, {flops / took / 1e12:.0f} TFLOP/s, {memory:.2f} GiB")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
