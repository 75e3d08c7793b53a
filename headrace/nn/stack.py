"""How a model is run, as opposed to what it computes: dtype, what the backward pass keeps, which kernel."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from headrace.errors import UserError
from headrace.attention import is_kernel
from headrace.nn.module import Axes
from headrace.low_precision.dot import KEPT
from headrace.low_precision.weight import Weight, round_weight
from headrace.model_wrappers.qat import rounded

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
# CPU (demo recipe, two cores with AVX-512, 2026-11): a step in 5 % less CPU time.
COMPILER_OPTIONS: dict[str, dict[str, bool | int]] = {
    "cpu": {"xla_cpu_prefer_vector_width": 512},
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
    rounds: Any = None  # of recurrent depth (depth.py), where they are not the model's usual ones
    loop: Any = None  # what runs the layers in the place of one after the other; set by the model

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.compute)

    def merges(self, layers: int, period: int = 1) -> bool:
        """Without a loop between forward and backward, the compiler would merge what is computed twice, and
        keep it in memory after all. Inside a loop it cannot, and guarding against it costs time. A loop is
        over whole periods of layers, where these differ."""
        return max(self.unroll // period, 1) >= layers // period


def default_unroll() -> int:
    """How many layers to compile side by side. On a GPU a loop costs speed: Llama-3.2-1B on an H200 makes
    54,300 tokens/s looped and 65,100 unrolled, for 6 s more of compiling (2026-11)."""
    return 32 if jax.default_backend() == "gpu" else 1


def layers(
    how: Execution, body: Callable[[Any, jax.Array], jax.Array], x: jax.Array, blocks: Any
) -> jax.Array:
    """Runs x through a stack of layers, `body(block, x)` each, compiled once."""
    return layers_in_turn(how, [body], x, blocks)


def layers_in_turn(
    how: Execution, bodies: Sequence[Callable[[Any, jax.Array], jax.Array]], x: jax.Array, blocks: Any
) -> jax.Array:
    """Runs x through a stack of layers that differ in what is fixed when compiling, such as the reach of
    their attention: layer i by body i, and from the start again after the last of them."""
    if how.loop is not None:
        return how.loop.run(how, bodies, x, blocks)
    period, count = len(bodies), depth(blocks)
    if how.remat != "none":
        # What is left over of the periods is in no loop.
        guard = how.merges(count, period) or count % period > 0
        bodies = [jax.checkpoint(body, policy=REMAT[how.remat], prevent_cse=guard) for body in bodies]
    steps = [lambda x, block, body=body: (body(block, x), None) for body in bodies]
    return scan_in_turn(steps, x, blocks, unroll=how.unroll)[0]


def cached_layers(
    how: Execution, bodies: Sequence[Callable[..., Any]], x: jax.Array, blocks: Any, cache: Any
) -> tuple[jax.Array, Any]:
    """Runs the next tokens through a stack of layers by `body(x, (block, its cache))`, which gives x and the
    cache with these tokens; the cache has a leading axis of layers."""
    if how.loop is not None:
        return how.loop.decode(bodies, x, blocks, cache)
    return scan_in_turn(bodies, x, (blocks, cache))


def scan_in_turn(bodies: Sequence[Callable[..., Any]], carry: Any, stack: Any, *, unroll: int = 1) -> Any:
    """`jax.lax.scan` over a stack of layers by several bodies in turn. The loop goes over whole periods, each
    body compiled once; the layers that are left follow it."""
    period, count = len(bodies), depth(stack)
    if period == 1:
        return jax.lax.scan(bodies[0], carry, stack, unroll=min(unroll, count))
    looped, left = by_turns(stack, period)

    def run(carry: Any, layers: Sequence[Any]) -> tuple[Any, list[Any]]:
        made = []
        for body, layer in zip(bodies, layers, strict=False):
            carry, out = body(carry, layer)
            made.append(out)
        return carry, made

    outs = []
    if count >= period:
        together = max(unroll // period, 1)
        carry, made = jax.lax.scan(run, carry, looped, unroll=min(together, count // period))
        whole = jax.tree.map(lambda *turns: jnp.stack(turns, axis=1), *made)
        outs.append(jax.tree.map(lambda w: w.reshape(-1, *w.shape[2:]), whole))
    if left:
        carry, made = run(carry, left)
        outs.append(jax.tree.map(lambda *layers: jnp.stack(layers), *made))
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outs)


def by_turns(stack: Any, period: int) -> tuple[list[Any], list[Any]]:
    """Each body's layers of the whole periods, as stacks, and the layers that are left over. Cut out here and
    not within the loop, which would hand what it cut out to its backward pass: a copy of every weight. By
    splitting, since the gradient of an index is an addition to zeros as large as the whole."""
    leaves, tree = jax.tree.flatten(stack)
    turns, left = [], []
    for w in leaves:
        periods, rest = divmod(len(w), period)
        whole, tail = jax.lax.split(w, [periods * period, rest])
        whole = whole.reshape(periods, period, *w.shape[1:])
        turns.append([turn.squeeze(1) for turn in jax.lax.split(whole, [1] * period, axis=1)])
        left.append([layer.squeeze(0) for layer in jax.lax.split(tail, [1] * rest)] if rest else [])
    together = lambda pieces: [jax.tree.unflatten(tree, one) for one in zip(*pieces, strict=True)]
    return together(turns), together(left)


def depth(stack: Any) -> int:
    """How many layers are in it."""
    return jax.tree.leaves(stack)[0].shape[0]


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


def compiler_options(platform: str) -> dict[str, bool | int]:
    """Those above, less what the user says otherwise."""
    said = os.environ.get(flags_of(platform), "").split()
    own = {flag.lstrip("-").partition("=")[0] for flag in said}
    return {name: value for name, value in COMPILER_OPTIONS.get(platform, {}).items() if name not in own}


def flags_of(platform: str) -> str:
    """The variable in which that compiler looks for options."""
    return "LIBTPU_INIT_ARGS" if platform == "tpu" else "XLA_FLAGS"


def compile_fast(lowered: Any, platform: str, say: Callable[[str], object] = lambda words: None) -> Any:
    """Compiles with the options above, or without them where this compiler does not know one of them."""
    chosen = compiler_options(platform)
    try:
        program = lowered.compile(compiler_options=chosen)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return lowered.compile()
    if chosen:
        words = " ".join(f"{name}={str(value).lower()}" for name, value in chosen.items())
        say(f"compiled with {words}; {flags_of(platform)} can say otherwise")
    return program


def cast(params: Any, axes: Any, how: Execution) -> Any:
    """The matrices of the layers in the compute dtype, or in 8 bits. Done once a step, however many parts the
    batch has, and before any weight is gathered from other devices, so that half the bytes travel, or a
    quarter. Norms and embeddings stay as they are: their gradients are sums over all tokens, and summed in
    their own dtype."""

    def one(axes: Axes, w: Any) -> Any:
        if axes.grid is not None:
            return rounded(w, axes.grid).astype(how.dtype)
        if axes.exact or not axes.is_hidden_matrix or not isinstance(w, jax.Array):  # rounded already
            return w
        if how.products == "compute":
            return w.astype(how.dtype)
        return round_weight(w, axes, dtype=how.dtype, format=how.products, native=how.native)

    return jax.tree.map(one, axes, params, is_leaf=lambda node: isinstance(node, Axes))


def without_gradients(model: Any, axes: Any, these: Any) -> Any:
    """A cast model in which these weights have no gradient, nor the 8 bits of the others: what those learn
    comes through what the 8 bits were made of."""

    def one(axes: Axes, stays: bool, w: Any) -> Any:
        if stays:
            return jax.lax.stop_gradient(w)
        if isinstance(w, Weight):
            return replace(w, values=jax.lax.stop_gradient(w.values), scale=jax.lax.stop_gradient(w.scale))
        return w

    return jax.tree.map(one, axes, these, model, is_leaf=lambda node: isinstance(node, Axes))
