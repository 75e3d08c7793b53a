"""The kernels for TPUs beyond what tests/losses/test_fused_losses.py checks of every implementation: which
blocks they take, what they refuse, that they are lowered for a TPU and, with its compiler, that they fit the
chips and the memory."""

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
from headrace.kernels.linear_cross_entropy.dispatch import fused_cross_entropy, with_z_loss
from headrace.kernels.linear_cross_entropy.stats import HeadSharding, HeadSpec
from headrace.kernels.linear_cross_entropy.tpu import Blocks, blocks
from headrace.losses import cross_entropy
from tests.kernels.linear_cross_entropy.test_hopper import arrays as drawn

SMOOTHED = with_z_loss(cross_entropy.per_token, SimpleNamespace(label_smoothing=0.1, z_loss=1e-3))
V4, V6E = (SimpleNamespace(platform="tpu", device_kind=kind) for kind in ("TPU v4", "TPU v6 lite"))


arrays = partial(drawn, vocab=1000)  # not a multiple of a chunk


@pytest.mark.parametrize("width", [0, 128])
def test_blocks_of_a_tpu_make_the_same_whether_the_width_is_whole_or_in_parts(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(tpu, "SHAPES", (Blocks(256, 256, width),))
    p, head = arrays(width=256), HeadSpec(SMOOTHED, 20.0)
    ours = jax.jit(lambda *p: tpu.totals_and_gradients(head, HeadSharding(), *p))(*p)
    theirs = jax.jit(lambda *p: by_tokens.totals_and_gradients(head, HeadSharding(), *p))(*p)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6 * np.abs(other).max())


@pytest.mark.parametrize("device, room", [(V4, 16 * 2**20), (V6E, 32 * 2**20)], ids=["v4", "v6e"])
def test_blocks_fit_the_chip_and_divide_the_arrays(
    monkeypatch: pytest.MonkeyPatch, device: Any, room: int
) -> None:
    monkeypatch.setattr(tpu, "device", lambda: device)
    for tokens in (128, 384, 1024, 8192, 12_288):
        for width in range(128, tpu.WIDEST + 1, 128):
            for rows in (256, 2560, 4096):
                found = blocks(tokens, rows, width)
                assert not any(size % block for size, block in zip((tokens, rows, width), found, strict=True))
                assert found.bytes < 0.9 * room and not found.width % 128 and not found.tokens % 128
                assert tokens % 256 or found.tokens <= tokens // 2


@pytest.mark.parametrize(
    "kind, narrow, wide",
    [
        ("TPU v4", True, True),
        ("TPU v5 lite", True, True),
        ("TPU v5", False, False),
        ("TPU v6 lite", False, True),
    ],
)
def test_kernels_are_taken_where_the_plan_has_them_ahead(
    monkeypatch: pytest.MonkeyPatch, kind: str, narrow: bool, wide: bool
) -> None:
    monkeypatch.setattr(tpu, "device", lambda: SimpleNamespace(platform="tpu", device_kind=kind))
    assert (tpu.is_faster_than_plain(2304), tpu.is_faster_than_plain(4096)) == (narrow, wide)


def test_wide_models_get_blocks_that_keep_a_v6e_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "device", lambda: V6E)
    assert blocks(8192, 4096, 4096) == (1024, 512, 4096)
    assert blocks(8192, 4096, 8192) == (2048, 1024, 512)
    monkeypatch.setattr(tpu, "device", lambda: V4)
    assert blocks(8192, 4096, 2304) == (1024, 256, 2304)
    assert blocks(8192, 4096, 4096) == (512, 256, 4096)
    assert blocks(8192, 4096, 8192) == (1024, 1024, 512)


def test_the_kernels_are_lowered_for_a_tpu_with_what_they_cost() -> None:
    p = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in drawn(1024, 1024, 256, jnp.bfloat16)]
    for soft_cap, rows in ((None, 1024), (30.0, 1000)):
        unembed = jax.ShapeDtypeStruct((rows, 256), jnp.float32)
        step = jax.jit(
            lambda *p, cap=soft_cap: fused_cross_entropy(SMOOTHED, *p, soft_cap=cap, split="mosaic").loss
        )
        grad = jax.jit(jax.grad(step, argnums=(0, 1)))
        text = grad.trace(p[0], unembed, *p[2:]).lower(lowering_platforms=("tpu",)).as_text()
        assert text.count("tpu_custom_call") == 2
        assert set(re.findall(r"flops\\22:(\d+)", text)) == {str(2 * 1024 * 1024 * 256)}


def test_what_the_kernels_cannot_do_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    p = arrays(width=256, dtype=jnp.bfloat16)
    assert tpu.unsupported_reason(HeadSpec(SMOOTHED), HeadSharding(), *p[:2]) == "they are for TPUs"
    monkeypatch.setattr(tpu, "device", lambda: V4)
    assert tpu.unsupported_reason(HeadSpec(SMOOTHED, 30.0), HeadSharding(), *p[:2]) is None
    for head, hidden, unembed, why in (
        (HeadSpec(SMOOTHED), p[0].astype(jnp.float32), p[1], "for bfloat16, and the activations are float32"),
        (HeadSpec(SMOOTHED), p[0][:, :500], p[1], "500 tokens are not a multiple of 128"),
        (HeadSpec(SMOOTHED), p[0][..., :200], p[1][:, :200], "200 columns are not a multiple of 128"),
        (HeadSpec(SMOOTHED), jnp.zeros((1, 128, 16_512), jnp.bfloat16), p[1], "16512 columns are more than"),
        (HeadSpec(SMOOTHED, chunk=100), p[0], p[1], "loss.chunk_size is 100, and they take 256 rows"),
    ):
        assert why in str(tpu.unsupported_reason(head, HeadSharding(), hidden, unembed))
    old = SimpleNamespace(platform="tpu", device_kind="TPU v3")
    monkeypatch.setattr(tpu, "device", lambda: old)
    assert "TPU v3 has no products of bfloat16" in str(
        tpu.unsupported_reason(HeadSpec(SMOOTHED), HeadSharding(), *p[:2])
    )


def test_on_a_tpu_a_width_in_parts_is_for_the_kernels_if_they_do_not_refuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p = arrays(width=256, dtype=jnp.bfloat16)
    for module in (tpu, dispatch):
        monkeypatch.setattr(module, "device", lambda: V4)
    chosen = lambda way, split, hidden=p[0]: dispatch._pick_backend(
        True, HeadSpec(SMOOTHED), way, split, hidden, p[1]
    ).__module__.rpartition(".")[2]
    split = HeadSharding(width=("fsdp",))
    assert chosen("auto", split) == "tpu"
    assert chosen("auto", HeadSharding()) == "by_tokens"
    assert chosen("kernel", HeadSharding()) == "tpu"
    assert chosen("vocabulary", split) == "by_vocab"
    assert chosen("auto", split, p[0][:, :500]) == "by_vocab"
    for module in (tpu, dispatch):
        monkeypatch.setattr(module, "device", lambda: V6E)
    assert chosen("auto", split) == "by_vocab"  # planned to be faster at this width
    assert chosen("kernel", split) == "tpu"
    with pytest.raises(UserError, match=r"loss.backend: kernels cannot be used here: 500 tokens are not"):
        chosen("kernel", split, p[0][:, :500])


FITS = """
import sys
from functools import partial
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from headrace.nn import sharding
from headrace.kernels.linear_cross_entropy import tpu
from headrace.kernels.linear_cross_entropy.stats import HeadSpec, HeadSharding

chip = topologies.get_topology_desc(topology_name=sys.argv[1], platform="tpu").devices[0]
array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(
    shape, dtype, sharding=SingleDeviceSharding(chip)
)
with jax.set_mesh(sharding.make_mesh(dict(data=1, fsdp=1, tensor=1, context=1), [chip])):
    for width in map(int, sys.argv[2:]):
        hidden, tokens = array(1, 8192, width, dtype=jnp.bfloat16), array(1, 8192)
        numbers = array(1, 8192, dtype=jnp.int32)
        head = HeadSpec(lambda stats: stats.lse - stats.target + stats.mean, 30.0, 2048)
        step = jax.jit(partial(tpu.totals_and_gradients, head, HeadSharding()))
        step.lower(hidden, array(4000, width), numbers, tokens).compile()
        print("fits", width)
"""


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_the_widest_of_each_kind_of_block_fits_the_chip(libtpu: None, chip: str) -> None:
    widths = ["1664", "2432", "4096", "4352", "5248", "16384"]
    done = run("-c", FITS, chip, *widths)
    assert re.findall(r"fits (\d+)", done) == widths


@pytest.mark.slow
def test_the_head_of_gemma_takes_200_mebibytes_beside_its_gradients(libtpu: None) -> None:
    found = json.loads(run("-m", "benchmarks.loss_tpu", "--json").splitlines()[-1])
    rows = {row["name"]: row for row in found}
    assert rows["vocabulary"]["extra_mib"] <= 200 and rows["kernel"]["extra_mib"] <= 200
    assert rows["kernel"]["ms"] < rows["vocabulary"]["ms"]


def run(*command: str) -> str:
    env = os.environ | {"XLA_FLAGS": "", "TPU_WORKER_HOSTNAMES": "localhost"}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
