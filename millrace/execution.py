"""How a model is run, as opposed to what it computes: dtype, what the backward pass keeps, which kernel."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from millrace.errors import UserError
from millrace.layers.attention import is_kernel
from millrace.module import Axes
from millrace.products.dot import KEPT
from millrace.products.weight import Weight, round_weight

policies = jax.checkpoint_policies
HOST = dict(offload_src="device", offload_dst="pinned_host")


def _offload(operation: Any, *inputs: Any, **settings: Any) -> Any:
    """To the host's memory with what `dots` keeps."""
    named = dict(names_which_can_be_saved=[], names_which_can_be_offloaded=[KEPT])
    if operation.name == "name":
        return policies.save_and_offload_only_these_names(**named, **HOST)(operation, *inputs, **settings)
    return policies.offload_dot_with_no_batch_dims(*HOST.values())(operation, *inputs, **settings)


# What the backward pass finds in memory; all else it computes again.
REMAT: dict[str, Callable[..., Any]] = {
    "dots": policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(KEPT)
    ),
    "offload": _offload,
    "attention": is_kernel,
    "full": policies.nothing_saveable,
}

# GPU (H200, Llama-3.2-1B, 2026-08): the two together take an unrolled step from 428 to 453 TFLOP/s.
# TPU (Llama 3 8B, 3 rows of 8,192 a chip, v6e-16, planned by libtpu 0.0.51, 2026-11): without it products go
# round the ring of devices in as many parts as there are, each of which reads and writes all of the result:
# 144 ms a layer instead of 103.
# CPU (demo recipe, 2026-11): 4.6 s to compile instead of 7.8 s, and the step as fast; gone in jaxlib 0.11.
COMPILER_OPTIONS: dict[str, dict[str, bool | int]] = {
    "cpu": {"xla_cpu_use_fusion_emitters": False},
    "tpu": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000},
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
    products: str = "compute"  # of the layers: in the compute dtype, in fp8, in int8 or ternary
    native: bool = False  # the chip multiplies 8 bits itself (products/support.py)

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.compute)

    def merges(self, layers: int) -> bool:
        """Without a loop between forward and backward, the compiler would merge what is computed twice, and
        keep it in memory after all. Inside a loop it cannot, and guarding against it costs time."""
        return self.unroll >= layers


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
        body = jax.checkpoint(body, policy=REMAT[how.remat], prevent_cse=how.merges(count))
    x, _ = jax.lax.scan(lambda x, block: (body(block, x), None), x, blocks, unroll=min(how.unroll, count))
    return x


def own_products(model: Any) -> str:
    """How a family multiplies, where that is part of the model and not of how it is run: its Config then says
    so."""
    return getattr(model, "products", "compute")


def products_of(run: Any) -> str:
    """How the layers of a recipe multiply."""
    own = own_products(run.model)
    return run.memory.products if own == "compute" else own


def check_offload(devices: Mesh) -> None:
    """Whether a compiler can keep things in the host's memory is known by asking it, for something tiny."""

    def tiny(w: jax.Array, x: jax.Array) -> jax.Array:
        body = jax.checkpoint(lambda x, w: (jnp.sin(x @ w), None), policy=REMAT["offload"])
        return jnp.sum(jax.lax.scan(body, x, w)[0])

    everywhere = NamedSharding(devices, PartitionSpec())
    w, x = (jax.ShapeDtypeStruct((*n, 8, 8), jnp.float32, sharding=everywhere) for n in ((2,), ()))
    try:
        jax.jit(jax.grad(tiny)).lower(w, x).compile()
    except Exception as error:  # compilers raise errors of every kind
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise UserError(
            "memory.remat: offload cannot be used here, where the compiler keeps nothing in the host's "
            f"memory ({said}); expected none, dots, attention or full"
        ) from error


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

    def one(axes: Axes, w: Any) -> Any:
        if not axes.is_hidden_matrix or isinstance(w, Weight):  # done already
            return w
        if how.products == "compute":
            return w.astype(how.dtype)
        return round_weight(w, axes, dtype=how.dtype, format=how.products, native=how.native)

    return jax.tree.map(one, axes, params, is_leaf=lambda node: isinstance(node, Axes))
