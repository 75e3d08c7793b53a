"""Head and loss in fp8, or with logits in bf16, compared with numbers that ml_dtypes rounded, summed in
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
from tests.losses.test_fused_losses import PLAIN_CE, SMOOTHED, Problem, make_problem
from tests.training.test_step import Bench


def compute_loss(per_token: Any, p: Problem, **options: Any) -> tuple[np.ndarray, ...]:
    """Compute the loss and the gradients of both inputs."""
    loss = lambda hidden, unembed: (
        fused_cross_entropy(per_token, hidden, unembed, p.targets, p.weights, **options).loss
    )
    value, (d_hidden, d_unembed) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(p.hidden, p.unembed)
    return tuple(np.asarray(x, np.float64) for x in (value, d_hidden, d_unembed))


def round_to_8_bits(x: Any, dtype: Any, bound: float) -> np.ndarray:
    """Round x to 8 bits, with a scale that is a power of two and fits numbers up to `bound`."""
    scale = 2.0 ** np.ceil(np.log2(bound / float(ml_dtypes.finfo(dtype).max)))
    return (np.asarray(x, np.float32) / np.float32(scale)).astype(dtype).astype(np.float64) * scale


def test_the_three_matmuls_are_those_of_the_rounded_numbers() -> None:
    p = make_problem()
    x, w = (
        round_to_8_bits(a, ml_dtypes.float8_e4m3fn, float(jnp.abs(a).max())) for a in (p.hidden, p.unembed)
    )
    rows, weights = x.reshape(-1, x.shape[-1]), np.asarray(p.weights, np.float64).reshape(-1, 1)
    logits = rows @ w.T
    top = logits.max(1, keepdims=True)
    lse = top + np.log(np.exp(logits - top).sum(1, keepdims=True))
    targets = np.maximum(np.asarray(p.targets).reshape(-1), 0)
    hit = np.arange(w.shape[0]) == targets[:, None]
    loss = (weights * (lse - (logits * hit).sum(1, keepdims=True))).sum()
    d = round_to_8_bits(weights * (np.exp(logits - lse) - hit), ml_dtypes.float8_e5m2, 2 * weights.max())
    result, *d_results = compute_loss(PLAIN_CE, p, backend="fp8", chunk_size=10_000)
    np.testing.assert_allclose(result, loss, rtol=1e-6)
    # A number near the middle of two neighbors may be rounded to either.
    for d_result, expected in zip(d_results, ((d @ w).reshape(x.shape), d.T @ rows), strict=True):
        np.testing.assert_allclose(d_result, expected, atol=2e-3 * np.abs(expected).max(), rtol=0)


def test_logits_in_bf16_are_the_rounded_ones() -> None:
    p = make_problem()
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
    result, *d_results = compute_loss(PLAIN_CE, p, backend="bf16", chunk_size=10_000)
    np.testing.assert_allclose(result, loss, rtol=1e-6)
    in_float32 = compute_loss(PLAIN_CE, p, backend="tokens")[0]
    assert abs(result - in_float32) > 1e-5 * loss  # rounding makes a difference
    for d_result, expected in zip(d_results, ((d @ w).reshape(x.shape), d.T @ rows), strict=True):
        np.testing.assert_allclose(d_result, expected, atol=5e-3 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("options", [{}, {"soft_cap": 20.0}, {"excluded_token": 3}], ids=str)
def test_gradients_are_close_to_the_exact_ones(options: dict[str, Any]) -> None:
    p = make_problem(tokens=1024, vocab=512, embed=128)
    p = Problem(p.hidden, p.unembed / 3, jnp.where(p.targets == 3, 4, p.targets), p.weights)
    per_token = PLAIN_CE if options.get("excluded_token") else SMOOTHED
    for narrow, exact in zip(
        compute_loss(per_token, p, backend="fp8", chunk_size=128, **options),
        compute_loss(per_token, p, backend="tokens", **options),
        strict=True,
    ):
        assert np.linalg.norm(narrow - exact) < 0.08 * np.linalg.norm(exact)


def test_evaluation_is_not_rounded() -> None:
    p = make_problem()
    p = Problem(p.hidden.astype("bfloat16"), *p.arrays[1:])
    backends = ("bf16", "fp8", "tokens")
    losses = [fused_cross_entropy(PLAIN_CE, *p.arrays, backend=backend).nll for backend in backends]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"fsdp": 2, "tensor": 4}], ids=str)
def test_a_mesh_changes_scales_and_little_else(sizes: dict[str, int]) -> None:
    p = make_problem(tokens=256, vocab=512, embed=128, rows=8)
    expected = compute_loss(SMOOTHED, p, backend="fp8", chunk_size=64)
    with jax.set_mesh(sharding.make_mesh(dict.fromkeys(sharding.AXES, 1) | sizes)):
        results = compute_loss(SMOOTHED, p, backend="fp8", chunk_size=64)
    for result, value in zip(results, expected, strict=True):
        assert np.linalg.norm(result - value) < 0.06 * np.linalg.norm(value)


def test_the_loss_of_numbers_that_are_not_finite_is_not_finite() -> None:
    p = make_problem()
    for bad in (jnp.nan, jnp.inf):
        value, *_ = compute_loss(
            PLAIN_CE, Problem(p.hidden.at[0, 0, 0].set(bad), *p.arrays[1:]), backend="fp8"
        )
        assert not np.isfinite(value)


def test_a_run_learns_as_well_as_in_float32(tiny: Any) -> None:
    common = "compute.dtype=bfloat16", "schedule.steps=20"
    float32, bf16, fp8 = (
        [row["nll"] for row in Bench(tiny(f"loss.backend={backend}", *common)).run(20)[1]]
        for backend in ("tokens", "bf16", "fp8")
    )
    assert float32[-1] < float32[0] - 0.5
    assert abs(bf16[-1] - float32[-1]) < 0.01 and abs(fp8[-1] - float32[-1]) < 0.02


def test_logits_in_bf16_are_an_error_if_hidden_states_are_float32(tiny: Any) -> None:
    with pytest.raises(
        UserError, match=r'loss.backend: found "bf16", expected auto, since compute.dtype is float32'
    ):
        tiny("loss.backend=bf16", "compute.dtype=float32")


def test_compiler_options_of_the_user_are_not_overridden(monkeypatch: Any) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    assert compiler_options("gpu")["xla_gpu_enable_triton_gemm"] is False
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_gpu_enable_triton_gemm=true")
    assert list(compiler_options("gpu")) == ["xla_gpu_enable_latency_hiding_scheduler"]
    (name,) = compiler_options("tpu")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{name}=8")  # XLA_FLAGS would end the process for it
    assert not compiler_options("tpu")


def test_a_warning_names_the_setting_if_a_chip_has_no_fp8() -> None:
    warning = emulation_warning("loss.backend", "fp8", jax.devices()[0])
    assert warning.startswith("loss.backend: fp8 brings nothing here: cpu")
    assert warning.endswith("loss.backend=auto")
