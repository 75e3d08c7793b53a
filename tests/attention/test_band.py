"""Attention within a window, in plain products and in kernels for TPUs."""

import math
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.attention import attend, band
from headrace.kernels import band_tpu
from headrace.nn.attention_mask import Mask
from tests.attention.reference import (
    BAND,
    Case,
    assert_equals_definition,
    expected_results,
    random_inputs,
    run_backend,
)


@pytest.fixture
def on_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels, in the interpreter."""
    device = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
    monkeypatch.setattr(band, "device", lambda: device)


@pytest.mark.thin(3)
@pytest.mark.parametrize("length", [128, 100, 64, 300, 513])
@pytest.mark.parametrize(
    "case",
    [
        Case(Mask(window=24)),
        Case(Mask(window=200), packed=True),
        Case(Mask(causal=False, window=25), packed=True),
        Case(Mask(causal=False, window=128), heads=(4, 1)),
        Case(Mask(causal=False, window=300), packed=True, soft_cap=1.5, scale=0.3, heads=(2, 2)),
    ],
    ids=str,
)
def test_plain_products_equal_the_definition(case: Case, length: int) -> None:
    assert_equals_definition(BAND, random_inputs(length=length, heads=case.heads), case)


@pytest.mark.usefixtures("on_tpu")
@pytest.mark.parametrize("length", [128, 384, 1024])
@pytest.mark.parametrize(
    "case",
    [
        Case(Mask(window=24)),
        Case(Mask(window=200), packed=True, heads=(4, 1)),
        Case(Mask(causal=False, window=25), packed=True, heads=(2, 2)),
        Case(Mask(causal=False, window=300), packed=True, scale=0.3),
    ],
    ids=str,
)
def test_kernels_equal_the_definition(monkeypatch: pytest.MonkeyPatch, case: Case, length: int) -> None:
    monkeypatch.setattr(band_tpu, "MAX_TILE", 256)
    assert_equals_definition(BAND, random_inputs(length=length, heads=case.heads), case)


@pytest.mark.usefixtures("on_tpu")
def test_kernels_in_bfloat16_are_as_exact_as_bfloat16() -> None:
    inputs = random_inputs(length=384, dtype=jnp.bfloat16)
    case = Case(Mask(causal=False, window=128), packed=True)
    for x, y in zip(run_backend(BAND, inputs, case), expected_results(inputs, case), strict=True):
        assert 1e-4 < np.linalg.norm(x - y) / np.linalg.norm(y) < 4e-3


@pytest.mark.usefixtures("on_tpu")
def test_kernels_store_no_scores_and_save_only_their_inputs() -> None:
    q, k = (jax.ShapeDtypeStruct((2, 2048, heads, 64), jnp.bfloat16) for heads in (4, 2))
    run = lambda q, k, v: attend(BAND, q, k, v, mask=Mask(causal=False, window=128))
    gradients = jax.jit(lambda *arrays: jax.vjp(run, *arrays)[1](arrays[0]))
    text = gradients.trace(q, k, k).lower(lowering_platforms=("tpu",)).as_text()
    assert "band_backward" in text
    shapes = [map(int, shape.split("x")) for shape in re.findall(r"tensor<([\dx]+)x\w+>", text)]
    assert max(map(math.prod, shapes)) == math.prod(q.shape)
    residuals = jax.tree.leaves(jax.eval_shape(lambda *arrays: jax.vjp(run, *arrays)[1], q, k, k))
    arrays = [x for x in residuals if x.ndim]  # scalars say which platform it is
    assert sum(math.prod(x.shape) for x in arrays) == sum(math.prod(x.shape) for x in (q, k, k))


def test_flops_grow_with_the_length_and_not_with_its_square() -> None:
    def flops(length: int) -> float:
        q, k = (jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for heads in (4, 2))
        run: Any = jax.jit(lambda q, k, v: attend(BAND, q, k, v, mask=Mask(causal=False, window=128)))
        return run.lower(q, k, k).cost_analysis()["flops"]

    assert flops(8192) == pytest.approx(4 * flops(2048), rel=0.02)
