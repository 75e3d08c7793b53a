"""Which chips multiply 8 bits faster than 16: asked of their compilers, with one product each."""

import re
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from headrace.hardware.chips import find_chip

# Rows and columns of the product that is tried: on TPUs so many that matrix units, not memory, set its time.
SIZE = 4096
# By libtpu's cycles for it, int8 takes 0.50 of what bf16 takes on v5e and v5p, 0.75 on v6e, 1.0 on v4 and
# TPU7x; fp8 0.47 on TPU7x and 1.0 or more on all others (libtpu 0.0.51, 2026-11).
GAIN = 0.85

TRIED = {"fp8": (jnp.float8_e4m3fn, jnp.bfloat16), "int8": (jnp.int8, jnp.int32)}


def has_fast_matmul(device: Any, format: str) -> bool:
    """Whether the chip gains by the format. The device need not be attached."""
    format = "int8" if format == "ternary" else format  # in which -1, 0 and 1 are multiplied
    if device.platform not in ("tpu", "gpu") or (device.platform, format) == ("gpu", "int8"):
        return False  # NVIDIA's int8 has no kernel that takes these scales, and fp8 is as fast
    return _tried(_Device(device), format)


def emulation_warning(key: str, format: str, device: Any) -> str:
    """What is to be said of a format, the value of a key, that the chip does not multiply."""
    better = "loss.backend=auto"
    if key == "compute.matmul":
        better = f"{key}={next((other for other in TRIED if has_fast_matmul(device, other)), 'compute')}"
    return (
        f"{key}: {format} brings nothing here: {device.device_kind} does not multiply it faster. "
        f"Numbers are rounded to {format} and multiplied in the compute dtype, which is slower than {better}"
    )


class _Device:
    """Devices of one kind are alike."""

    def __init__(self, device: Any) -> None:
        self.device, self.kind = device, (device.platform, device.device_kind)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Device) and self.kind == other.kind

    def __hash__(self) -> int:
        return hash(self.kind)


@lru_cache(64)
def _tried(one: _Device, format: str) -> bool:
    dtype, wanted = TRIED[format]
    if (
        one.device.platform == "gpu"
    ):  # there XLA turns what the GPU has into calls of cuBLASLt, and names them
        return "__cublas$lt$matmul$f8" in _compiled(one.device, dtype, wanted)
    narrow = _cycles(_compiled(one.device, dtype, wanted))
    wide = _cycles(_compiled(one.device, jnp.bfloat16, jnp.bfloat16))
    if not narrow or not wide:  # a compiler that tells no cycles: by the table, then
        chip = find_chip(one.device.device_kind)
        return chip is not None and chip.matmul_flops(format) is not None
    return narrow < GAIN * wide


def _compiled(device: Any, dtype: Any, wanted: Any) -> str:
    home = jax.sharding.SingleDeviceSharding(device)
    shape = jax.ShapeDtypeStruct((SIZE, SIZE), dtype, sharding=home)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.dot(x, w, preferred_element_type=wanted)

    # Not as a step is compiled: with Triton's products, by XLA_FLAGS, it would not show what cuBLAS can do.
    options: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False} if device.platform == "gpu" else {}
    return jax.jit(product).lower(shape, shape).compile(compiler_options=options).as_text() or ""


def _cycles(program: str) -> int:
    return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', program)))
