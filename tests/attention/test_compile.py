"""Attention compiled for TPUs that are not attached, and checked on a GPU that is."""

import math
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from headrace.nn import sharding
from headrace.nn.attention_mask import Mask
from tests.attention.reference import AUTO, CASES, Case, attend_case


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "name", ["causal", "bidirectional window", "packed", "packed bidirectional", "soft cap, packed window"]
)
def test_splash_compiles_for_a_tpu(libtpu: None, name: str, head_dim: int) -> None:
    cfg = SimpleNamespace(use="splash", block_q=512, block_kv=512)
    on_chip = SingleDeviceSharding(tpu_devices("v5e:2x2")[0])
    assert_kernels_compile(loss_gradient(cfg, CASES[name]).lower(*shapes((2, 1024), head_dim, on_chip)))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 2, 2, 1), (1, 1, 2, 2), (1, 1, 1, 4)])
def test_auto_compiles_splash_for_a_tpu_slice_and_splits_the_sequence(
    libtpu: None, sizes: tuple[int, ...]
) -> None:
    devices = tpu_devices("v5e:2x2")[: math.prod(sizes)]
    mesh = sharding.make_mesh(dict(zip(sharding.AXES, sizes, strict=False)), devices)
    with jax.set_mesh(mesh):
        lowered = loss_gradient(AUTO, CASES["packed"]).lower(*shapes((2, 1024), 128, None))
    assert_kernels_compile(lowered)


@pytest.mark.slow
@pytest.mark.parametrize("slice_name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_kernels_of_windows_fit_the_chip(libtpu: None, slice_name: str) -> None:
    """With the longest rows and the widest window that they support, and keys that heads share."""
    chip = tpu_devices(slice_name)[0]
    with jax.set_mesh(sharding.make_mesh(dict(data=1, fsdp=1, tensor=1, context=1), [chip])):
        for window, length, head_dim in ((512, 4096, 128), (512, 8192, 64), (128, 640, 64), (128, 128, 32)):
            case = Case(Mask(causal=False, window=window), packed=True)
            arrays = shapes((2, length), head_dim, SingleDeviceSharding(chip))
            text = loss_gradient(AUTO, case).lower(*arrays).compile().as_text()
            assert {"band_forward", "band_backward"} <= set(re.findall(r"band_\w+ward", text))


def tpu_devices(slice_name: str) -> Any:
    options = dict(chip_config_name="megacore") if slice_name.startswith("v4") else {}
    return topologies.get_topology_desc(topology_name=slice_name, platform="tpu", **options).devices


def shapes(rows: tuple[int, int], head_dim: int, sharding: Any) -> list[jax.ShapeDtypeStruct]:
    """The shapes of q, k, v and segments."""
    q, k = (
        jax.ShapeDtypeStruct((*rows, heads, head_dim), jnp.bfloat16, sharding=sharding) for heads in (4, 2)
    )
    return [q, k, k, jax.ShapeDtypeStruct(rows, jnp.int32, sharding=sharding)]


def loss_gradient(cfg: Any, case: Case) -> Any:
    def loss(q: Any, k: Any, v: Any, segments: Any) -> Any:
        return attend_case(cfg, q, k, v, segments, case).astype(jnp.float32).sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


def assert_kernels_compile(lowered: Any) -> None:
    assert lowered.as_text().count("tpu_custom_call") >= 2  # forward, backward
    lowered.compile()


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs an NVIDIA GPU")
def test_the_gpu_backends_pass_the_checks_of_their_benchmark() -> None:
    """benchmarks/attention_gpu.py, in a process that may use the GPU."""
    env = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.attention_gpu"], env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
