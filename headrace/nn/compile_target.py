"""The device that is compiled for, and trials of what its compiler accepts."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

ArrayShape = jax.Array | jax.ShapeDtypeStruct  # where only shape and dtype are used

OLD_TPUS = ("TPU v2", "TPU v3")  # kernels on them have no products of bfloat16


def device() -> Any:
    """A device that is compiled for: one of the mesh, which need not be attached, or the first attached
    one."""
    mesh = jax.sharding.get_abstract_mesh()
    return (None if mesh.empty else mesh.abstract_device) or jax.devices()[0]


def threads() -> int:
    """The number of CPU threads that work for one device; 1 for other platforms."""
    if device().platform != "cpu":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // jax.local_device_count(), 1)


def compile_error(platform: str, function: Callable[..., Any], *arguments: Any) -> str | None:
    """Compile a function for arguments given as shapes. Returns the compiler's message if it fails, or
    None."""

    def compile_trial() -> str | None:
        try:
            traced = jax.jit(function).trace(*arguments)
            if platform == jax.default_backend():
                traced.lower().compile()
            else:  # for devices that are not attached, only lowering is possible
                traced.lower(lowering_platforms=(platform,))
        except Exception as error:  # compilers raise errors of every kind
            return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        return None

    # In a thread of its own, which does not have the caller's trace and mesh.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(compile_trial).result()
