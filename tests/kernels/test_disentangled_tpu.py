"""DeBERTa's attention in kernels for TPUs: they compute the same as plain JAX, also on a mesh, give reasons
for what they do not support, are lowered for a TPU and, with its compiler, fit the chips."""

import math
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from headrace.attention import _disentangled
from headrace.config import reader
from headrace.kernels import disentangled_tpu
from headrace.kernels.tpu_rolls import roll_rows
from headrace.nn import sharding
from tests.kernels.linear_cross_entropy.test_tpu import V4, V6E, run
from tests.parity.test_deberta import plainly

AUTO = reader.part_class("attention", "auto")()
REACH = 100


def arrays(length: int, *, heads: int = 2, width: int = 64, dtype: Any = jnp.float32) -> list[Any]:
    """Make q, k, v and the two tables."""
    draw = np.random.default_rng(length).normal
    rows, table = (2, length, heads, width), (128, heads, width)
    return [jnp.asarray(draw(size=shape), dtype) for shape in (rows, rows, rows, table, table)]


def documents(length: int) -> Any:
    ends = np.array([[length // 3, length // 2], [length // 5, length - 1]])
    return jnp.asarray((np.arange(length) >= ends[..., None]).sum(1) + 1)


def with_gradients(function: Any, inputs: list[Any]) -> list[Any]:
    d_out = jnp.asarray(np.random.default_rng(0).normal(size=inputs[0].shape), inputs[0].dtype)

    def run() -> Any:
        out, pull = jax.vjp(function, *inputs)
        return [out, *pull(d_out)]

    return [np.asarray(x, np.float32) for x in jax.jit(run)()]


def attend(segments: Any, q: Any, k: Any, v: Any, k_table: Any, q_table: Any) -> Any:
    tables = dict(k_table=k_table, q_table=q_table)
    return _disentangled.attend(AUTO, q, k, v, max_distance=REACH, segments=segments, **tables)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels, in the interpreter, with tiles as small as possible."""
    monkeypatch.setattr(disentangled_tpu, "unsupported_reason", lambda *_: None)
    monkeypatch.setattr(disentangled_tpu, "MAX_TILE", 128)


@pytest.mark.parametrize("heads, width", [(2, 64), (1, 128), (4, 32)])
def test_kernels_and_their_gradients_are_those_of_the_definition(kernels, heads, width):
    inputs, segments = arrays(256, heads=heads, width=width), documents(256)
    expected = with_gradients(partial(plainly, REACH, segments), inputs)
    for result, value in zip(with_gradients(partial(attend, segments), inputs), expected, strict=True):
        np.testing.assert_allclose(result, value, rtol=0, atol=1e-5 * np.abs(value).max())


def test_in_bf16_their_error_is_that_of_plain_sums(monkeypatch):
    """The tables are excluded: XLA's CPU compiler does not support their gradient in bf16 with the flags of
    tests."""
    inputs, segments = arrays(128, dtype=jnp.bfloat16), jnp.ones((2, 128), jnp.int32)
    rows, tables = inputs[:3], inputs[3:]
    in_float32 = [x.astype(jnp.float32) for x in inputs]
    exact = with_gradients(lambda *rows: plainly(REACH, segments, *rows, *in_float32[3:]), in_float32[:3])
    plain = with_gradients(lambda *rows: attend(None, *rows, *tables), rows)
    monkeypatch.setattr(disentangled_tpu, "unsupported_reason", lambda *_: None)
    results = with_gradients(lambda *rows: attend(None, *rows, *tables), rows)
    for result, plain_result, value in zip(results, plain, exact, strict=True):
        error, plain_error = (
            np.linalg.norm(x - value) / np.linalg.norm(value) for x in (result, plain_result)
        )
        assert error < 1.05 * plain_error and error < 4e-3


def test_queries_of_a_part_of_the_row_have_the_right_distances(kernels):
    """A device may have a chunk of the row's queries."""
    (q, *other_inputs), segments, part = arrays(384), documents(384), slice(128, 256)
    expected = with_gradients(partial(plainly, REACH, segments), [q, *other_inputs])[0]
    out = jax.jit(
        lambda q, *other_inputs: _disentangled._attend_by_kernel(
            REACH, q, *other_inputs, (segments[:, part], segments), jnp.int32(128)
        )
    )(q[:, part], *other_inputs)
    np.testing.assert_allclose(out, expected[:, part], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_on_a_mesh_they_compute_the_same_as_plain_sums_on_one_device(monkeypatch):
    """Heads, rows of the batch and the sequence are split, the latter into two chunks of 128 per device."""
    inputs, segments = arrays(512, heads=4), documents(512)
    expected = with_gradients(partial(attend, segments), inputs)

    def attend_sharded(*inputs: Any) -> Any:
        rows = [sharding.to_balanced_order(x) for x in (*inputs[:3], segments)]
        return sharding.from_balanced_order(attend(rows[3], *rows[:3], *inputs[3:]))

    monkeypatch.setattr(disentangled_tpu, "unsupported_reason", lambda *_: None)
    with jax.set_mesh(sharding.make_mesh(dict(data=2, fsdp=1, tensor=2, context=2))):
        results = with_gradients(attend_sharded, inputs)
    for result, value in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, value, rtol=0, atol=1e-5 * np.abs(value).max())


def test_a_chip_without_a_strided_roll_rolls_each_row_by_a_different_distance():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(128, 256)), jnp.float32)
    expected = np.stack([np.roll(row, 1 + i) for i, row in enumerate(np.asarray(x))])
    for strided in (True, False):

        def body(x: Any, out: Any, strided: bool = strided) -> None:
            out[...] = roll_rows(x[...], 1, strided)

        np.testing.assert_array_equal(pl.pallas_call(body, x, interpret=True)(x), expected)


def test_the_reason_why_kernels_cannot_run_is_given(monkeypatch):
    q = jnp.zeros((2, 256, 12, 64), jnp.bfloat16)
    assert disentangled_tpu.unsupported_reason(q, q, True) == "they are for TPUs"
    monkeypatch.setattr(disentangled_tpu, "device", lambda: V4)
    assert disentangled_tpu.unsupported_reason(q, q, True) is None
    for x, why in (
        (q.astype(jnp.float32), "for bfloat16, and the activations are float32"),
        (q[:, :, :3], "3 heads of 64 do not fill registers of 128"),
        (q[..., :48], "12 heads of 48 do not fill"),
        (q[:, :200], "200 positions are not a multiple of 128"),
        (jnp.zeros((1, 1152, 2, 64), jnp.bfloat16), "rows of 1152 are longer than 1024"),
    ):
        assert why in str(disentangled_tpu.unsupported_reason(x, x, True))
    monkeypatch.setattr(
        disentangled_tpu, "device", lambda: SimpleNamespace(platform="tpu", device_kind="TPU v3")
    )
    assert "TPU v3 has no bfloat16 matmuls" in str(disentangled_tpu.unsupported_reason(q, q, True))


@pytest.mark.parametrize("device", [V4, V6E], ids=["v4", "v6e"])
def test_on_a_tpu_no_scores_are_in_memory(monkeypatch, device):
    """No array is as large as the scores or the products by distance: 2 rows x 2 heads x 512 x 512."""
    monkeypatch.setattr(disentangled_tpu, "device", lambda: device)
    inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays(512, dtype=jnp.bfloat16)]
    grad = jax.jit(jax.value_and_grad(lambda *inputs: attend(None, *inputs).sum(), argnums=(0, 1, 2, 3, 4)))
    text = grad.trace(*inputs).lower(lowering_platforms=("tpu",)).as_text()
    assert {"disentangled_forward", "disentangled_backward"} <= set(re.findall(r"disentangled_\w+ward", text))
    shapes = [map(int, found.split("x")) for found in re.findall(r"tensor<([\dx]+)x\w+>", text)]
    assert max(map(math.prod, shapes)) < 2 * 2 * 512 * 512


FITS = """
import sys
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from headrace.config import reader
from headrace.nn import sharding
from headrace.attention import _disentangled

name, *lengths = sys.argv[1:]
kind = dict(chip_config_name="megacore") if name.startswith("v4") else {}
chip = topologies.get_topology_desc(topology_name=name, platform="tpu", **kind).devices[0]
auto = reader.part_class("attention", "auto")()
array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(
    shape, dtype, sharding=SingleDeviceSharding(chip)
)

def loss(segments, q, k, v, k_table, q_table):
    return _disentangled.attend(
        auto, q, k, v, k_table=k_table, q_table=q_table, max_distance=512, segments=segments
    ).astype(jnp.float32).sum()

with jax.set_mesh(sharding.make_mesh(dict(data=1, fsdp=1, tensor=1, context=1), [chip])):
    for length in map(int, lengths):
        row, table = array(4, length, 4, 64), array(512, 4, 64)
        step = jax.jit(jax.grad(loss, argnums=(1, 2, 3, 4, 5)))
        program = step.lower(array(4, length, dtype=jnp.int32), row, row, row, table, table).compile()
        assert "disentangled_backward" in program.as_text()
        print("fits", length)
"""


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_rows_up_to_the_longest_fit_the_chip(libtpu: None, chip: str) -> None:
    lengths = ["128", "512", "640", str(disentangled_tpu.MAX_KEYS)]
    assert re.findall(r"fits (\d+)", run("-c", FITS, chip, *lengths)) == lengths
