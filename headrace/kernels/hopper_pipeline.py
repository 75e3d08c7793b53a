"""Building blocks of Pallas kernels for Hopper GPUs: matrices in shared memory, and loops in which one
warpgroup loads blocks while the others multiply them."""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.ref import AbstractRef
from jax.typing import DTypeLike

from headrace.nn.module import PyTree

Array = jax.Array
Ref = jax.Ref  # Pallas annotates some parameters as AbstractRef, which cannot be indexed
Barrier = AbstractRef
BlockIndex = Callable[[Array], tuple[int | Array, int | Array]]  # step of a loop -> block of a matrix

WARPGROUPS = 2  # that multiply; one more loads


class Pipeline(Protocol):
    """A loop over blocks that one warpgroup loads while the others compute."""

    def __call__(self, *refs: Ref, allocations: PyTree = None) -> None:
        """Run the loop over these matrices, with buffers made by `get_allocations` or with new ones."""

    def get_allocations(self, *refs: Ref) -> PyTree:
        """Make the types of the buffers in shared memory."""


def make_pipeline(
    steps: int | Array,
    specs: list[plgpu.BlockSpec],
    body: Callable[..., PyTree],
    context: Callable[[Callable[[PyTree], PyTree]], None],
    *,
    stages: int,
    releases_blocks: bool = False,
) -> Pipeline:
    """Make a loop over `steps` blocks of matrices, one spec each, of which up to `stages` are in memory.

    The warpgroups that compute run `context(run_loop)`, where `run_loop` takes a carry and returns it after
    the last step. `body(step, *blocks, carry)` returns the next carry. With `releases_blocks` it also gets a
    barrier for each block, before the carry, and arrives there when the block may be overwritten."""
    return plgpu.emit_pipeline_warp_specialized(
        body,
        grid=(steps,),
        memory_registers=40,
        in_specs=specs,
        wg_axis="wg",
        num_compute_wgs=WARPGROUPS,
        max_concurrent_steps=stages,
        manual_consumed_barriers=releases_blocks,
        compute_context=context,
    )


def block_spec(shape: tuple[int, int], index: BlockIndex) -> plgpu.BlockSpec:
    """Make the spec of a matrix's blocks: their shape, and the block of each step."""
    return plgpu.BlockSpec(shape, index, transforms=swizzle(), memory_space=plgpu.SMEM)


def swizzle(dtype: DTypeLike = jnp.bfloat16) -> tuple[plgpu.Transform, ...]:
    """The layout in shared memory that matrices have to be multiplied from."""
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


def transpose(ref: Ref) -> Ref:
    """Transpose a matrix in shared memory, without moving it."""
    return plgpu.transpose_ref(ref, (1, 0))  # type: ignore[return-value]
