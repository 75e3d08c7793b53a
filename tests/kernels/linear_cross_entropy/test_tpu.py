"""The loss kernels for TPUs, beyond the tests of every backend in tests/losses/test_fused_losses.py: which
blocks they use, what they do not support, that they are lowered for a TPU and, with its compiler, that they
fit the chips and the memory."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.errors import UserError
from headrace.kernels.linear_cross_entropy import by_tokens, dispatch, tpu
from headrace.kernels.linear_cross_entropy.dispatch import add_z_loss, fused_cross_entropy
from headrace.kernels.linear_cross_entropy.stats import HeadSharding, HeadSpec
from headrace.kernels.linear_cross_entropy.tpu import BlockShape, pick_block_shape
from headrace.losses import cross_entropy
from tests.kernels.linear_cross_entropy.test_hopper import random_inputs

SMOOTHED = add_z_loss(partial(cross_entropy.per_token, SimpleNamespace(label_smoothing=0.1)), 1e-3)
V4, V6E = (SimpleNamespace(platform="tpu", device_kind=kind) for kind in ("TPU v4", "TPU v6 lite"))


make_inputs = partial(random_inputs, vocab=1000)  # not a multiple of a chunk


@pytest.mark.parametrize("width", [0, 128])
def test_blocks_compute_the_same_whether_the_width_is_in_one_part_or_more(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(tpu, "BLOCK_SHAPES", (BlockShape(256, 256, width),))
    inputs, head = make_inputs(width=256), HeadSpec(SMOOTHED, 20.0)
    results, expected = (
        jax.jit(partial(backend.compute_loss_and_gradients, head, HeadSharding()))(inputs)
        for backend in (tpu, by_tokens)
    )
    for result, value in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(result, value, rtol=0, atol=2e-6 * np.abs(value).max())


@pytest.mark.parametrize("device, vmem", [(V4, 16 * 2**20), (V6E, 32 * 2**20)], ids=["v4", "v6e"])
def test_blocks_fit_the_chip_and_divide_the_arrays(
    monkeypatch: pytest.MonkeyPatch, device: Any, vmem: int
) -> None:
    monkeypatch.setattr(tpu, "device", lambda: device)
    for tokens in (128, 384, 1024, 8192, 12_288):
        for width in range(128, tpu.MAX_WIDTH + 1, 128):
            for rows in (256, 2560, 4096):
                blocks, sizes = pick_block_shape(tokens, rows, width), (tokens, rows, width)
                assert not any(size % block for size, block in zip(sizes, blocks, strict=True))
                assert blocks.vmem_bytes < 0.9 * vmem
                assert not blocks.width % 128 and not blocks.tokens % 128
                assert tokens % 256 or blocks.tokens <= tokens // 2


@pytest.mark.parametrize(
    "kind, narrow, wide",
    [
        ("TPU v4", True, True),
        ("TPU v5 lite", True, True),
        ("TPU v5", False, False),
        ("TPU v6 lite", False, True),
    ],
)
def test_kernels_are_used_where_they_are_planned_to_be_faster(
    monkeypatch: pytest.MonkeyPatch, kind: str, narrow: bool, wide: bool
) -> None:
    monkeypatch.setattr(tpu, "device", lambda: SimpleNamespace(platform="tpu", device_kind=kind))
    head, sharded = HeadSpec(SMOOTHED), HeadSharding(width_axes=("fsdp",))
    faster = [tpu.is_faster_than_plain(head, sharded, width) for width in (2304, 4096)]
    assert faster == [narrow, wide]
    assert not tpu.is_faster_than_plain(head, HeadSharding(), 4096)


def test_wide_models_get_blocks_that_keep_a_v6e_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "device", lambda: V6E)
    assert pick_block_shape(8192, 4096, 4096) == (1024, 512, 4096)
    assert pick_block_shape(8192, 4096, 8192) == (2048, 1024, 512)
    monkeypatch.setattr(tpu, "device", lambda: V4)
    assert pick_block_shape(8192, 4096, 2304) == (1024, 256, 2304)
    assert pick_block_shape(8192, 4096, 4096) == (512, 256, 4096)
    assert pick_block_shape(8192, 4096, 8192) == (1024, 1024, 512)


def test_the_kernels_are_lowered_for_a_tpu_with_their_cost() -> None:
    inputs = random_inputs(1024, 1024, 256, jnp.bfloat16)
    hidden, _, *token_arrays = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs)
    for soft_cap, rows in ((None, 1024), (30.0, 1000)):
        unembed = jax.ShapeDtypeStruct((rows, 256), jnp.float32)
        step = jax.jit(
            lambda *arrays, cap=soft_cap: (
                fused_cross_entropy(SMOOTHED, *arrays, soft_cap=cap, backend="tpu").loss
            )
        )
        grad = jax.jit(jax.grad(step, argnums=(0, 1)))
        text = grad.trace(hidden, unembed, *token_arrays).lower(lowering_platforms=("tpu",)).as_text()
        assert text.count("tpu_custom_call") == 2
        assert set(re.findall(r"flops\\22:(\d+)", text)) == {str(2 * 1024 * 1024 * 256)}


def test_the_reason_why_kernels_cannot_run_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, unembed, *_ = make_inputs(width=256, dtype=jnp.bfloat16)
    smoothed = HeadSpec(SMOOTHED)

    def reason(head: HeadSpec = smoothed, hidden: Any = hidden, unembed: Any = unembed) -> str | None:
        return tpu.unsupported_reason(head, HeadSharding(), hidden, unembed)

    assert reason() == "they are for TPUs"
    monkeypatch.setattr(tpu, "device", lambda: V4)
    assert reason(HeadSpec(SMOOTHED, 30.0)) is None
    for found, expected in (
        (reason(hidden=hidden.astype(jnp.float32)), "for bfloat16, and the activations are float32"),
        (reason(hidden=hidden[:, :500]), "500 tokens are not a multiple of 128"),
        (reason(hidden=hidden[..., :200], unembed=unembed[:, :200]), "200 columns are not a multiple of 128"),
        (reason(hidden=jnp.zeros((1, 128, 16_512), jnp.bfloat16)), "16512 columns are more than"),
        (reason(HeadSpec(SMOOTHED, excluded_token=3)), "they cannot exclude a token"),
        (reason(HeadSpec(SMOOTHED, chunk_size=100)), "loss.chunk_size is 100, and they take 256 rows"),
    ):
        assert expected in str(found)
    old = SimpleNamespace(platform="tpu", device_kind="TPU v3")
    monkeypatch.setattr(tpu, "device", lambda: old)
    assert "TPU v3 has no bfloat16 matmuls" in str(reason())


def test_on_a_tpu_kernels_are_picked_if_the_width_is_split_and_they_support_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden, unembed, *_ = make_inputs(width=256, dtype=jnp.bfloat16)
    short = hidden[:, :500]
    for module in (tpu, dispatch):
        monkeypatch.setattr(module, "device", lambda: V4)
    pick = lambda backend, sharding, hidden=hidden: dispatch.pick_backend(
        backend, HeadSpec(SMOOTHED), sharding, hidden, unembed
    )
    sharded = HeadSharding(width_axes=("fsdp",))
    assert pick("auto", sharded) == "tpu"
    assert pick("auto", HeadSharding()) == "tokens"
    assert pick("kernel", HeadSharding()) == "tpu"
    assert pick("vocabulary", sharded) == "vocabulary"
    assert pick("auto", sharded, short) == "vocabulary"
    for module in (tpu, dispatch):
        monkeypatch.setattr(module, "device", lambda: V6E)
    assert pick("auto", sharded) == "vocabulary"  # planned to be faster at this width
    assert pick("kernel", sharded) == "tpu"
    with pytest.raises(UserError, match=r"loss\.backend: kernels cannot be used here: 500 tokens are not"):
        pick("kernel", sharded, short)


FITS = """
import sys
from functools import partial
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from headrace.nn import sharding
from headrace.kernels.linear_cross_entropy import tpu
from headrace.kernels.linear_cross_entropy.stats import HeadInputs, HeadSharding, HeadSpec

chip = topologies.get_topology_desc(topology_name=sys.argv[1], platform="tpu").devices[0]
array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(
    shape, dtype, sharding=SingleDeviceSharding(chip)
)
with jax.set_mesh(sharding.make_mesh(dict(data=1, fsdp=1, tensor=1, context=1), [chip])):
    for width in map(int, sys.argv[2:]):
        hidden, tokens = array(1, 8192, width, dtype=jnp.bfloat16), array(1, 8192)
        inputs = HeadInputs(hidden, array(4000, width), array(1, 8192, dtype=jnp.int32), tokens)
        head = HeadSpec(lambda stats: stats.lse - stats.target + stats.mean, 30.0, 2048)
        step = jax.jit(partial(tpu.compute_loss_and_gradients, head, HeadSharding()))
        step.lower(inputs).compile()
        print("fits", width)
"""


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_the_widest_of_each_kind_of_block_fits_the_chip(libtpu: None, chip: str) -> None:
    widths = ["1664", "2432", "4096", "4352", "5248", "16384"]
    assert re.findall(r"fits (\d+)", run("-c", FITS, chip, *widths)) == widths


@pytest.mark.slow
def test_the_head_of_gemma_takes_200_mebibytes_besides_its_gradients(libtpu: None) -> None:
    output = run("-m", "benchmarks.loss_tpu", "--json").splitlines()[-1]
    rows = {row["name"]: row for row in json.loads(output)}
    assert rows["vocabulary"]["extra_mib"] <= 200 and rows["kernel"]["extra_mib"] <= 200
    assert rows["kernel"]["ms"] < rows["vocabulary"]["ms"]


def run(*command: str) -> str:
    env = os.environ | {"XLA_FLAGS": "", "TPU_WORKER_HOSTNAMES": "localhost"}
    result = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout
