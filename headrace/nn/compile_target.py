"""What is compiled for, and what its compiler says against a program before anything depends on it."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

OLD_TPUS = ("TPU v2", "TPU v3")  # without products of bfloat16 in kernels


def device() -> Any:
    """One that is compiled for: the mesh's, which need not be attached here, or else our own."""
    mesh = jax.sharding.get_abstract_mesh()
    return (None if mesh.empty else mesh.abstract_device) or jax.devices()[0]


def threads() -> int:
    """How many threads do the work of one device. Only a CPU's can be told what to do at once."""
    if device().platform != "cpu":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // jax.local_device_count(), 1)


def complaint(platform: str, function: Callable[..., Any], *arguments: Any) -> str | None:
    """What the compiler of `platform` says against `function` of these arguments, given as shapes, or None if
    it takes it."""

    def trial() -> str | None:
        try:
            traced = jax.jit(function).trace(*arguments)
            if platform == jax.default_backend():
                traced.lower().compile()
            else:  # compiling for a slice that is not attached: as far as we get without one
                traced.lower(lowering_platforms=(platform,))
        except Exception as error:  # compilers raise errors of every kind
            return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        return None

    # In a thread of its own: the caller's trace and mesh, which belong to its thread, stay out of it.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(trial).result()
