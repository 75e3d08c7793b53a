"""How a model is run, as opposed to what it computes: dtype, what the backward pass keeps, which kernel."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from millrace.module import Axes
from millrace.products.dot import KEPT
from millrace.products.weight import round_weight

# What the backward pass finds in memory; all else it computes again.
REMAT: dict[str, Callable[..., bool]] = {
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(KEPT),
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
}

# GPU (H200, Llama-3.2-1B, 2026-08): the two together take an unrolled step from 428 to 453 TFLOP/s.
# CPU (demo recipe, 2026-11): 4.6 s to compile instead of 7.8 s, and the step as fast; gone in jaxlib 0.11.
COMPILER_OPTIONS: dict[str, dict[str, bool]] = {
    "cpu": {"xla_cpu_use_fusion_emitters": False},
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_enable_triton_gemm": False},
}

# Fresh weights are drawn once: on a CPU, optimised code for it takes 8.6 s to compile (4M parameters,
# 2026-11), plain code 1.7 s.
INIT_OPTIONS: dict[str, dict[str, int]] = {"cpu": {"xla_backend_optimization_level": 0}}


@dataclass(frozen=True)
class Execution:
    attention: Any  # the recipe's attention section
    compute: str = "bfloat16"
    remat: str = "none"
    unroll: int = 1
    products: str = "compute"  # of the layers: in the compute dtype, in fp8 or in int8
    native: bool = False  # the chip multiplies 8 bits itself (products/support.py)

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.compute)


def default_unroll() -> int:
    """How many layers to compile side by side. On a GPU a loop costs speed: Llama-3.2-1B on an H200 makes
    54,300 tokens/s looped and 65,100 unrolled, for 6 s more of compiling (2026-11)."""
    return 32 if jax.default_backend() == "gpu" else 1


def layers(
    how: Execution, body: Callable[[Any, jax.Array], jax.Array], x: jax.Array, blocks: Any
) -> jax.Array:
    """Runs x through a stack of layers, `body(block, x)` each, compiled once."""
    count = jax.tree.leaves(blocks)[0].shape[0]
    if how.remat != "none":
        # Without a loop between forward and backward, the compiler would merge what is computed twice, and
        # keep it in memory after all. Inside a loop it cannot, and guarding against it costs time.
        body = jax.checkpoint(body, policy=REMAT[how.remat], prevent_cse=how.unroll >= count)
    x, _ = jax.lax.scan(lambda x, block: (body(block, x), None), x, blocks, unroll=min(how.unroll, count))
    return x


def compile_fast(lowered: Any, platform: str) -> Any:
    """Compiles with the options above, or without them where this compiler does not know one of them."""
    try:
        return lowered.compile(compiler_options=COMPILER_OPTIONS.get(platform))
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return lowered.compile()


def cast(params: Any, axes: Any, how: Execution) -> Any:
    """The matrices of the layers in the compute dtype, or in 8 bits. Done once a step and before any weight
    is gathered from other devices, so that half the bytes travel, or a quarter. Norms and embeddings stay as
    they are: their gradients are sums over all tokens, and summed in their own dtype."""

    def one(axes: Axes, w: jax.Array) -> Any:
        if not axes.is_hidden_matrix:
            return w
        if how.products == "compute":
            return w.astype(how.dtype)
        return round_weight(w, axes, dtype=how.dtype, format=how.products, native=how.native)

    return jax.tree.map(one, axes, params, is_leaf=lambda node: isinstance(node, Axes))
