"""The head and its loss in fp8, or with logits in bf16, against numbers rounded by ml_dtypes and summed in
float64."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from headrace.errors import UserError
from headrace.kernels.linear_cross_entropy.dispatch import fused_cross_entropy
from headrace.low_precision.support import emulation_warning
from headrace.nn import sharding
from headrace.nn.compile import compiler_options
from tests.losses.test_fused_losses import PLAIN_CE, SMOOTHED, Problem, problem
from tests.training.test_step import Bench


def gradients(per_token: Any, p: Problem, **options: Any) -> tuple[np.ndarray, ...]:
    loss = lambda hidden, unembed: (
        fused_cross_entropy(per_token, hidden, unembed, p.targets, p.weights, **options).loss
    )
    value, (d_hidden, d_unembed) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(p.hidden, p.unembed)
    return tuple(np.asarray(x, np.float64) for x in (value, d_hidden, d_unembed))


def narrowed(x: Any, dtype: Any, most: float) -> np.ndarray:
    """x as 8 bits hold it, with a scale that is a power of two."""
    scale = 2.0 ** np.ceil(np.log2(most / float(ml_dtypes.finfo(dtype).max)))
    return (np.asarray(x, np.float32) / np.float32(scale)).astype(dtype).astype(np.float64) * scale


def test_the_three_products_are_those_of_the_rounded_numbers() -> None:
    p = problem()
    x, w = (narrowed(a, ml_dtypes.float8_e4m3fn, float(jnp.abs(a).max())) for a in (p.hidden, p.unembed))
    rows, weights = x.reshape(-1, x.shape[-1]), np.asarray(p.weights, np.float64).reshape(-1, 1)
    logits = rows @ w.T
    top = logits.max(1, keepdims=True)
    lse = top + np.log(np.exp(logits - top).sum(1, keepdims=True))
    targets = np.maximum(np.asarray(p.targets).reshape(-1), 0)
    hit = np.arange(w.shape[0]) == targets[:, None]
    loss = (weights * (lse - (logits * hit).sum(1, keepdims=True))).sum()
    d = narrowed(weights * (np.exp(logits - lse) - hit), ml_dtypes.float8_e5m2, 2 * weights.max())
    found = gradients(PLAIN_CE, p, backend="fp8", chunk_size=10_000)
    np.testing.assert_allclose(found[0], loss, rtol=1e-6)
    # A number near the middle of two neighbours may be rounded to either.
    for ours, theirs in zip(found[1:], ((d @ w).reshape(x.shape), d.T @ rows), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-3 * np.abs(theirs).max(), rtol=0)


def test_logits_of_16_bits_are_the_rounded_ones() -> None:
    p = problem()
    p = Problem(p.hidden.astype("bfloat16"), p.unembed.astype("bfloat16"), p.targets, p.weights)
    x, w = (np.asarray(a, np.float64) for a in (p.hidden, p.unembed))
    rows, weights = x.reshape(-1, x.shape[-1]), np.asarray(p.weights, np.float64).reshape(-1, 1)
    exact = rows @ w.T
    logits = exact.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    top = logits.max(1, keepdims=True)
    lse = top + np.log(np.exp(logits - top).sum(1, keepdims=True))
    hit = np.arange(w.shape[0]) == np.maximum(np.asarray(p.targets).reshape(-1), 0)[:, None]
    loss = (weights * (lse - (logits * hit).sum(1, keepdims=True))).sum()
    d = (weights * (np.exp(logits - lse) - hit)).astype(ml_dtypes.bfloat16).astype(np.float64)
    found = gradients(PLAIN_CE, p, backend="bf16", chunk_size=10_000)
    np.testing.assert_allclose(found[0], loss, rtol=1e-6)
    assert (
        abs(found[0] - gradients(PLAIN_CE, p, backend="tokens")[0]) > 1e-5 * loss
    )  # it does make a difference
    for ours, theirs in zip(found[1:], ((d @ w).reshape(x.shape), d.T @ rows), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-3 * np.abs(theirs).max(), rtol=0)


@pytest.mark.parametrize("options", [{}, {"soft_cap": 20.0}, {"excluded_token": 3}], ids=str)
def test_gradients_stay_near_the_exact_ones(options: dict[str, Any]) -> None:
    p = problem(tokens=1024, vocab=512, embed=128)
    p = Problem(p.hidden, p.unembed / 3, jnp.where(p.targets == 3, 4, p.targets), p.weights)
    per_token = PLAIN_CE if options.get("excluded_token") else SMOOTHED
    for narrow, exact in zip(
        gradients(per_token, p, backend="fp8", chunk_size=128, **options),
        gradients(per_token, p, backend="tokens", **options),
        strict=True,
    ):
        assert np.linalg.norm(narrow - exact) < 0.08 * np.linalg.norm(exact)


def test_what_is_only_read_is_not_rounded() -> None:
    p = problem()
    p = Problem(p.hidden.astype("bfloat16"), *p.arrays[1:])
    read = [fused_cross_entropy(PLAIN_CE, *p.arrays, backend=way).nll for way in ("bf16", "fp8", "tokens")]
    assert read[0] == read[1] == read[2]


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"fsdp": 2, "tensor": 4}], ids=str)
def test_a_mesh_changes_scales_and_little_else(sizes: dict[str, int]) -> None:
    p = problem(tokens=256, vocab=512, embed=128, rows=8)
    alone = gradients(SMOOTHED, p, backend="fp8", chunk_size=64)
    with jax.set_mesh(sharding.make_mesh(dict.fromkeys(sharding.AXES, 1) | sizes)):
        spread = gradients(SMOOTHED, p, backend="fp8", chunk_size=64)
    for one, other in zip(spread, alone, strict=True):
        assert np.linalg.norm(one - other) < 0.06 * np.linalg.norm(other)


def test_what_is_not_finite_is_seen() -> None:
    p = problem()
    for bad in (jnp.nan, jnp.inf):
        value, *_ = gradients(PLAIN_CE, Problem(p.hidden.at[0, 0, 0].set(bad), *p.arrays[1:]), backend="fp8")
        assert not np.isfinite(value)


def test_a_run_learns_as_it_does_without(tiny: Any) -> None:
    common = "compute.dtype=bfloat16", "schedule.steps=20"
    exact, short, narrow = (
        [row["nll"] for row in Bench(tiny(f"loss.backend={way}", *common)).run(20)[1]]
        for way in ("tokens", "bf16", "fp8")
    )
    assert exact[-1] < exact[0] - 0.5
    assert abs(short[-1] - exact[-1]) < 0.01 and abs(narrow[-1] - exact[-1]) < 0.02


def test_logits_of_16_bits_are_refused_where_hidden_states_have_32(tiny: Any) -> None:
    with pytest.raises(
        UserError, match=r'loss.backend: found "bf16", expected auto, since compute.dtype is float32'
    ):
        tiny("loss.backend=bf16", "compute.dtype=float32")


def test_what_the_user_tells_the_compiler_is_the_last_word(monkeypatch: Any) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    assert compiler_options("gpu")["xla_gpu_enable_triton_gemm"] is False
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_gpu_enable_triton_gemm=true")
    assert list(compiler_options("gpu")) == ["xla_gpu_enable_latency_hiding_scheduler"]
    (name,) = compiler_options("tpu")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{name}=8")  # XLA_FLAGS would end the process for it
    assert not compiler_options("tpu")


def test_a_chip_without_fp8_says_so() -> None:
    said = emulation_warning("loss.backend", "fp8", jax.devices()[0])
    assert said.startswith("loss.backend: fp8 brings nothing here: cpu") and said.endswith(
        "loss.backend=auto"
    )
