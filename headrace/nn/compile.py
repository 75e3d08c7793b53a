"""Compiler options by platform, and a check that a compiler can offload to the host's memory."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from headrace.errors import UserError
from headrace.nn.remat import REMAT_POLICIES

# GPU (H200, Llama-3.2-1B, 2026-08): the two together take an unrolled step from 428 to 453 TFLOP/s.
# TPU (Llama 3 8B, 3 rows of 8,192 per chip, v6e-16, planned by libtpu 0.0.51, 2026-11): without it XLA splits
# matrix products into one part per device of the ring, and each part reads and writes the whole result:
# 144 ms per layer instead of 103.
# CPU (demo recipe, two cores with AVX-512, 2026-11): a step in 5 % less CPU time.
COMPILER_OPTIONS: dict[str, dict[str, bool | int]] = {
    "cpu": {"xla_cpu_prefer_vector_width": 512},
    "tpu": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000},
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_enable_triton_gemm": False},
}

# Weights are initialized once: on a CPU the optimized program takes 8.6 s to compile (4M parameters,
# 2026-11), the plain one 1.7 s.
INIT_OPTIONS: dict[str, dict[str, int]] = {"cpu": {"xla_backend_optimization_level": 0}}


def compiler_options(platform: str) -> dict[str, bool | int]:
    """The platform's `COMPILER_OPTIONS` without those that the user sets in the environment."""
    flags = os.environ.get(flags_variable(platform), "").split()
    user_set = {flag.lstrip("-").partition("=")[0] for flag in flags}
    return {name: value for name, value in COMPILER_OPTIONS.get(platform, {}).items() if name not in user_set}


def flags_variable(platform: str) -> str:
    """The environment variable that the platform's compiler reads options from."""
    return "LIBTPU_INIT_ARGS" if platform == "tpu" else "XLA_FLAGS"


def compile_fast(
    lowered: jax.stages.Lowered, platform: str, log: Callable[[str], object] = lambda line: None
) -> jax.stages.Compiled:
    """Compile with the platform's options, or without them if this compiler does not know one of them.

    Logs which options were used."""
    options: Any = compiler_options(platform)  # ints are not in JAX's annotation
    try:
        program = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return lowered.compile()
    if options:
        shown = " ".join(f"{name}={str(value).lower()}" for name, value in options.items())
        log(f"compiled with {shown}; {flags_variable(platform)} can override it")
    return program


def check_offload(devices: Mesh) -> None:
    """Check that the compiler can offload to the host's memory, by compiling a tiny program that does.

    Raises UserError if it cannot: no compiler lists what it supports."""

    def tiny_loss(w: jax.Array, x: jax.Array) -> jax.Array:
        body = jax.checkpoint(lambda x, w: (jnp.sin(x @ w), None), policy=REMAT_POLICIES["offload"])
        return jnp.sum(jax.lax.scan(body, x, w)[0])

    replicated = NamedSharding(devices, PartitionSpec())
    w, x = (jax.ShapeDtypeStruct((*lead, 8, 8), jnp.float32, sharding=replicated) for lead in ((2,), ()))
    try:
        jax.jit(jax.grad(tiny_loss)).lower(w, x).compile()
    except Exception as error:  # compilers raise errors of every kind
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise UserError(
            "compute.remat: offload cannot be used on these devices, whose compiler does not keep "
            f"activations in the host's memory ({reason}); expected none, dots, attention or full"
        ) from error
