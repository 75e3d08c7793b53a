"""Chips that multiply 8 bits faster than 16, found by compiling one product of each for them."""

import re
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from headrace.hardware.chips import find_chip

# Rows and columns of the product that is compiled: so many that on TPUs matrix units, not memory, set its
# time.
SIZE = 4096
# By libtpu's cycles for it, int8 takes 0.50 of what bf16 takes on v5e and v5p, 0.75 on v6e, 1.0 on v4 and
# TPU7x; fp8 0.47 on TPU7x and 1.0 or more on all others (libtpu 0.0.51, 2026-11).
MAX_TIME_SHARE = 0.85

DTYPES = {"fp8": (jnp.float8_e4m3fn, jnp.bfloat16), "int8": (jnp.int8, jnp.int32)}  # of factors and product


def has_fast_matmul(device: jax.Device, format: str) -> bool:
    """Whether a format's products are faster than those of bfloat16. The device need not be attached."""
    format = "int8" if format == "ternary" else format  # the format in which -1, 0 and 1 are multiplied
    if device.platform not in ("tpu", "gpu") or (device.platform, format) == ("gpu", "int8"):
        return False  # NVIDIA's int8 has no kernel for these scales, and fp8 is as fast
    return _is_faster(_DeviceKind(device), format)


def emulation_warning(key: str, format: str, device: jax.Device) -> str:
    """The warning that a format, the value of the recipe's `key`, has no advantage on a device."""
    better = "loss.backend=auto"
    if key == "compute.matmul":
        better = f"{key}={next((other for other in DTYPES if has_fast_matmul(device, other)), 'compute')}"
    return (
        f"{key}: {format} brings nothing here: {device.device_kind} does not multiply it faster. "
        f"Numbers are rounded to {format} and multiplied in the compute dtype, which is slower than {better}"
    )


class _DeviceKind:
    """A device as a cache key that is equal for all devices of its kind."""

    def __init__(self, device: jax.Device) -> None:
        self.device, self.kind = device, (device.platform, device.device_kind)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _DeviceKind) and self.kind == other.kind

    def __hash__(self) -> int:
        return hash(self.kind)


@lru_cache(64)
def _is_faster(kind: _DeviceKind, format: str) -> bool:
    device, (dtype, product_dtype) = kind.device, DTYPES[format]
    program = _compile_product(device, dtype, product_dtype)
    if device.platform == "gpu":  # XLA compiles what the GPU supports to calls of cuBLASLt, by this name
        return "__cublas$lt$matmul$f8" in program
    cycles = _estimated_cycles(program)
    bf16_cycles = _estimated_cycles(_compile_product(device, jnp.bfloat16, jnp.bfloat16))
    if not cycles or not bf16_cycles:  # the compiler estimates none: by the table of chips
        chip = find_chip(device.device_kind)
        return chip is not None and chip.matmul_flops(format) is not None
    return cycles < MAX_TIME_SHARE * bf16_cycles


def _compile_product(device: jax.Device, dtype: DTypeLike, product_dtype: DTypeLike) -> str:
    """Compile a product of two matrices of `dtype` for a device. Returns the compiled program's text."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    shape = jax.ShapeDtypeStruct((SIZE, SIZE), dtype, sharding=sharding)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.dot(x, w, preferred_element_type=product_dtype)

    # Without Triton's products, which steps are compiled with (XLA_FLAGS): they would hide what cuBLAS has.
    options: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False} if device.platform == "gpu" else {}
    return jax.jit(product).lower(shape, shape).compile(compiler_options=options).as_text() or ""


def _estimated_cycles(program: str) -> int:
    return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', program)))
