"""Linear cross entropy against full logits, against float64 in torch, and against itself on eight devices."""

import functools
import importlib
import math
import pkgutil
import re
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import headrace.losses
from headrace.kernels.linear_cross_entropy import tpu
from headrace.kernels.linear_cross_entropy.dispatch import add_z_loss, fused_cross_entropy
from headrace.kernels.linear_cross_entropy.stats import (
    SMALL_SOFT_CAP,
    LogitStats,
    LossTotals,
    PerTokenLoss,
)
from headrace.kernels.linear_cross_entropy.tpu import BlockShape
from headrace.losses import cross_entropy, focal
from headrace.nn import sharding

LOSSES = [module.name for module in pkgutil.iter_modules(headrace.losses.__path__)]
SHAPES = [(256, 512, 128), (252, 507, 128), (252, 507, 123)]
# A loss that depends on all three statistics.
SMOOTHED = add_z_loss(partial(cross_entropy.per_token, SimpleNamespace(label_smoothing=0.1)), 1e-3)
PLAIN_CE = add_z_loss(partial(cross_entropy.per_token, SimpleNamespace(label_smoothing=0.0)), 0.0)


BACKEND = "tokens"  # every test of this file runs with each backend


@pytest.fixture(params=["tokens", "vocabulary", "tpu"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(globals(), "BACKEND", request.param)
    # Several blocks of everything, of sizes that no chip would take.
    constants = dict(BLOCK_SHAPES=(BlockShape(64, 32, 64),), LANES=1, ROWS=8, TOKENS_PER_MATMUL=32)
    for name, value in constants.items():
        monkeypatch.setattr(tpu, name, value)
    return request.param


def fused_loss(*arguments: Any, **options: Any) -> LossTotals:
    return fused_cross_entropy(*arguments, **{"backend": BACKEND} | options)


@dataclass(frozen=True)
class Problem:
    """Inputs of a head. Logits have a standard deviation of 6, so that a soft cap of 20 changes them; a fifth
    of the tokens is ignored."""

    hidden: jax.Array
    unembed: jax.Array
    targets: jax.Array
    weights: jax.Array

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return self.hidden, self.unembed, self.targets, self.weights


def make_problem(
    tokens: int = 252, vocab: int = 507, embed: int = 123, *, dtype: Any = jnp.float32, rows: int = 4
) -> Problem:
    rng = np.random.default_rng(0)
    shape = rows, tokens // rows
    ignored = rng.random(shape) < 0.2
    return Problem(
        hidden=jnp.asarray(rng.standard_normal((*shape, embed)), dtype),
        unembed=jnp.asarray(rng.standard_normal((vocab, embed)) * 6 / math.sqrt(embed), dtype),
        targets=jnp.asarray(np.where(ignored, -100, rng.integers(0, vocab, shape)), jnp.int32),
        # Gradients stay below 2, where bf16 itself rounds by no more than 0.004.
        weights=jnp.asarray(np.where(ignored, 0.0, rng.uniform(0.1, 0.3, shape)), jnp.float32),
    )


def reference(
    per_token: PerTokenLoss,
    hidden: jax.Array,
    unembed: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    soft_cap: float | None = None,
) -> jax.Array:
    """The loss from full logits in hidden's own precision, for autodiff."""
    logits = jnp.einsum("bsd,vd->bsv", hidden, unembed).astype(jnp.float32)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    return (weights * per_token(stats_of(logits, jnp.maximum(targets, 0)))).sum()


def stats_of(logits: jax.Array, targets: jax.Array) -> LogitStats:
    target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return LogitStats(jax.nn.logsumexp(logits, axis=-1), target, logits.mean(-1))


def loss_and_gradients(loss: Any, p: Problem) -> tuple[Any, Any, Any]:
    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*p.arrays)
    return value, *gradients


def with_fused_loss(per_token: PerTokenLoss, p: Problem, **options: Any) -> tuple[Any, Any, Any]:
    return loss_and_gradients(lambda *arrays: fused_loss(per_token, *arrays, **options).loss, p)


def with_full_logits(per_token: PerTokenLoss, p: Problem, **options: Any) -> tuple[Any, Any, Any]:
    return loss_and_gradients(lambda *arrays: reference(per_token, *arrays, **options), p)


def in_float64(
    p: Problem, *, soft_cap: float | None = None, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> tuple[np.ndarray, ...]:
    """Compute exact loss and gradients, with the cross entropy and autograd of torch."""
    hidden, unembed = (
        torch.tensor(np.asarray(x, np.float64), requires_grad=True) for x in (p.hidden, p.unembed)
    )
    targets, weights = torch.tensor(np.asarray(p.targets)).long(), torch.tensor(np.asarray(p.weights))
    logits = hidden @ unembed.T
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    ce = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none", label_smoothing=label_smoothing
    )
    loss = (weights.flatten() * (ce + z_loss * logits.logsumexp(-1).flatten() ** 2)).sum()
    gradients = torch.autograd.grad(loss, (hidden, unembed))
    return tuple(x.detach().numpy() for x in (loss, *gradients))


def assert_close(results: Any, expected: Any, *, tolerance: float = 1e-5) -> None:
    """Assert that arrays are equal up to `tolerance` of the largest entry."""
    for result, value in zip(results, expected, strict=True):
        result, value = np.asarray(result, np.float64), np.asarray(value, np.float64)
        np.testing.assert_allclose(result, value, rtol=0, atol=tolerance * np.abs(value).max())


@pytest.mark.thin(7)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("soft_cap", [None, 20.0])
@pytest.mark.parametrize(
    "dtype, tolerance", [(jnp.float32, 5e-4), (jnp.bfloat16, 1e-2)], ids=["float32", "bfloat16"]
)
def test_the_error_is_no_larger_than_with_full_logits(
    dtype: Any, tolerance: float, soft_cap: float | None, z_loss: float, shape: tuple[int, int, int]
) -> None:
    p = make_problem(*shape, dtype=dtype)
    per_token = add_z_loss(partial(cross_entropy.per_token, SimpleNamespace(label_smoothing=0.0)), z_loss)
    exact = in_float64(p, soft_cap=soft_cap, z_loss=z_loss)
    full_logits = with_full_logits(per_token, p, soft_cap=soft_cap)
    results = with_fused_loss(per_token, p, soft_cap=soft_cap, chunk_size=100)
    for value, full, result in zip(exact, full_logits, results, strict=True):
        limit = np.abs(np.asarray(full, np.float64) - value) + tolerance
        error = np.abs(np.asarray(result, np.float64) - value)
        assert (error <= limit).all(), (error - limit).max()
        assert np.linalg.norm(error) <= (2e-6 if dtype == jnp.float32 else 4e-3) * np.linalg.norm(value)


def one_sided(sign: float) -> Problem:
    """All logits around 40, or around -40."""
    p = make_problem()
    return replace(p, hidden=sign * jnp.abs(p.hidden), unembed=jnp.abs(p.unembed))


@pytest.mark.parametrize("soft_cap", [SMALL_SOFT_CAP, SMALL_SOFT_CAP + 0.5, 1e3, 1e6])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_capped_logits_are_exact_wherever_they_are(soft_cap: float, sign: float) -> None:
    """All may be near the cap, or all near its negative, where their exponentials are hardly in the range of
    float32; or far below it, where it hardly changes them."""
    p = one_sided(sign)
    exact = in_float64(p, soft_cap=soft_cap, z_loss=1e-3, label_smoothing=0.1)
    assert_close(with_fused_loss(SMOOTHED, p, soft_cap=soft_cap, chunk_size=100), exact)


@pytest.mark.parametrize("soft_cap", [SMALL_SOFT_CAP, SMALL_SOFT_CAP + 0.5])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_logits_at_the_cap_have_no_gradient(soft_cap: float, sign: float) -> None:
    p = one_sided(sign)
    at = replace(p, hidden=100 * p.hidden)
    loss, *gradients = with_fused_loss(SMOOTHED, at, soft_cap=soft_cap, chunk_size=100)
    assert_close([loss], in_float64(at, soft_cap=soft_cap, z_loss=1e-3, label_smoothing=0.1)[:1])
    assert not any(jnp.abs(gradient).max() > 1e-6 for gradient in gradients)


@functools.cache
def in_one_chunk(tokens: int, vocab: int, embed: int, rows: int) -> tuple[Any, Any, Any]:
    return with_fused_loss(
        SMOOTHED, make_problem(tokens, vocab, embed, rows=rows), soft_cap=20.0, backend="tokens"
    )


# 252 tokens make 23 chunks and 1 token of padding, 5 and 3, 4 and none, and 1 chunk; the 507 rows of the
# vocabulary 47 and 10, 13 and none, 9 and 6, and 1 chunk.
@pytest.mark.parametrize("chunk", [11, 53, 63, 1000])
def test_chunk_size_does_not_change_the_result(backend: str, chunk: int) -> None:
    chunked = with_fused_loss(SMOOTHED, make_problem(252, 507, 123), soft_cap=20.0, chunk_size=chunk)
    # The kernels sum the width in three parts.
    tolerance = 2e-6 if backend == "tpu" else 1e-6
    assert_close(chunked, in_one_chunk(252, 507, 123, 4), tolerance=tolerance)


@pytest.mark.parametrize("chunk", [64, "auto"])
def test_evaluation_computes_the_same_totals_as_training(chunk: int | str) -> None:
    p = make_problem()
    totals = jax.jit(lambda *arrays: fused_loss(SMOOTHED, *arrays, chunk_size=chunk))(*p.arrays)
    assert_close([totals.loss], with_fused_loss(SMOOTHED, p, chunk_size=chunk)[:1], tolerance=1e-6)
    assert_close([totals.nll], in_float64(p)[:1])


def test_logits_are_computed_once_per_pass_and_gradients_only_if_needed(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    p = make_problem()
    loss = lambda *arrays: fused_loss(SMOOTHED, *arrays, chunk_size=64).loss
    # The program has each kernel twice: for a TPU, and for the interpreter.
    forward, with_gradients = {"tokens": (1, 3), "vocabulary": (1, 4), "tpu": (2, 2 * 2 + 2)}[backend]
    monkeypatch.setattr(tpu, "TOKENS_PER_MATMUL", 64)  # one matmul per block
    for function, matmuls in ((loss, forward), (jax.value_and_grad(loss, argnums=(0, 1)), with_gradients)):
        assert str(jax.make_jaxpr(function)(*p.arrays)).count("dot_general[") == matmuls


def test_label_smoothing_is_that_of_torch() -> None:
    p = make_problem()
    per_token = add_z_loss(partial(cross_entropy.per_token, SimpleNamespace(label_smoothing=0.1)), 0.0)
    assert_close(with_fused_loss(per_token, p, chunk_size=64), in_float64(p, label_smoothing=0.1))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal_loss_matches_its_definition(gamma: float) -> None:
    p = make_problem()
    hidden, unembed, targets, weights = (np.asarray(x, np.float64) for x in p.arrays)
    logits = hidden @ unembed.T
    probability = np.exp(logits - logits.max(-1, keepdims=True))
    probability /= probability.sum(-1, keepdims=True)
    target = np.maximum(targets, 0).astype(int)[..., None]
    target_probability = np.take_along_axis(probability, target, axis=-1)[..., 0]
    expected = (weights * (1 - target_probability) ** gamma * -np.log(target_probability)).sum()
    per_token = add_z_loss(partial(focal.per_token, SimpleNamespace(gamma=gamma)), 0.0)
    assert float(fused_loss(per_token, *p.arrays).loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_the_gradient_of_its_full_logits_version(name: str) -> None:
    module = importlib.import_module(f"headrace.losses.{name}")
    per_token, p = add_z_loss(partial(module.per_token, module.Config()), 1e-3), make_problem()
    assert_close(
        with_fused_loss(per_token, p, soft_cap=20.0, chunk_size=64),
        with_full_logits(per_token, p, soft_cap=20.0),
    )


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_falls_when_the_target_logit_rises(name: str) -> None:
    module = importlib.import_module(f"headrace.losses.{name}")
    logits = jax.random.normal(jax.random.key(0), (64, 50))
    targets = jnp.arange(64) % 50
    raised = logits.at[jnp.arange(64), targets].add(0.1)
    before, after = (module.per_token(module.Config(), stats_of(x, targets)) for x in (logits, raised))
    assert (after < before).all()


@pytest.mark.parametrize(
    "per_token", [SMOOTHED, add_z_loss(partial(focal.per_token, SimpleNamespace(gamma=0.5)), 0)]
)
def test_a_batch_without_targets_gives_zero_and_zero_gradients(per_token: PerTokenLoss) -> None:
    p = make_problem()
    empty = Problem(p.hidden, p.unembed, jnp.full_like(p.targets, -100), jnp.zeros_like(p.weights))
    for value in with_fused_loss(per_token, empty, chunk_size=64):
        assert not np.asarray(value).any()


def test_ignored_tokens_have_no_influence() -> None:
    p = make_problem()
    ignored = p.weights == 0
    other = jnp.where(ignored, jnp.where(p.hidden[..., 0] > 0, 2**30, 3), p.targets)
    first = with_fused_loss(SMOOTHED, p, chunk_size=64)
    second = with_fused_loss(SMOOTHED, Problem(p.hidden, p.unembed, other, p.weights), chunk_size=64)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert ignored.any() and not np.asarray(first[1][ignored]).any()


def test_an_ignored_token_may_have_a_loss_that_needs_a_target() -> None:
    p = make_problem()
    # Every logit is about -123, so a token without a target would seem to have one above their logsumexp.
    negative = Problem(-jnp.ones_like(p.hidden), jnp.ones_like(p.unembed), p.targets, p.weights)
    for value in with_fused_loss(lambda stats: jnp.sqrt(stats.lse - stats.target), negative, chunk_size=64):
        assert np.isfinite(value).all()


@pytest.mark.parametrize("gamma", [None, 0.5, 2.0])
def test_extreme_logits_stay_finite(gamma: float | None) -> None:
    per_token = (
        add_z_loss(partial(focal.per_token, SimpleNamespace(gamma=gamma)), 1e-4) if gamma else SMOOTHED
    )
    p = make_problem()
    # Every second token is certain of its target and the others are certain of something else.
    certain = p.unembed[jnp.maximum(p.targets, 0)] * jnp.where(jnp.arange(63) % 2, 1, -1)[:, None]
    extreme = Problem(1e3 * certain, p.unembed, p.targets, p.weights)
    for value in with_fused_loss(per_token, extreme, chunk_size=64):
        assert np.isfinite(value).all()


def test_only_the_loss_is_differentiated_and_its_cotangent_scales_the_gradients() -> None:
    p = make_problem()
    scaled = loss_and_gradients(lambda *arrays: 3 * fused_loss(SMOOTHED, *arrays).loss, p)
    assert_close(scaled, [3 * x for x in with_fused_loss(SMOOTHED, p)], tolerance=1e-6)
    for gradient in loss_and_gradients(lambda *arrays: fused_loss(SMOOTHED, *arrays).nll, p)[1:]:
        assert not np.asarray(gradient).any()


def test_gradients_have_the_dtypes_of_the_weights_and_activations() -> None:
    p = make_problem(dtype=jnp.bfloat16)
    mixed = Problem(p.hidden, p.unembed.astype(jnp.float32), p.targets, p.weights)
    loss, d_hidden, d_unembed = with_fused_loss(SMOOTHED, mixed, chunk_size=64)
    assert (loss.dtype, d_hidden.dtype, d_unembed.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    # The matmuls are the same as with bf16 weights; only the last rounding of d_unembed is omitted.
    assert_close(
        [d_hidden, d_unembed.astype(jnp.bfloat16)],
        with_fused_loss(SMOOTHED, p, chunk_size=64)[1:],
        tolerance=0,
    )


MESHES = {
    "batch over 4, vocabulary over 2": (dict(data=2, fsdp=2, tensor=2, context=1), (4, 512, 128)),
    "vocabulary over 4": (dict(data=1, fsdp=1, tensor=4, context=1), (4, 512, 128)),
    "positions over 2": (dict(data=1, fsdp=1, tensor=1, context=2), (4, 512, 128)),
    "every kind of split": (dict(data=1, fsdp=2, tensor=2, context=2), (4, 512, 128)),
    "a vocabulary that does not divide": (dict(data=1, fsdp=2, tensor=2, context=2), (4, 507, 123)),
    "a batch that does not divide": (dict(data=1, fsdp=4, tensor=2, context=1), (2, 512, 128)),
}


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_does_not_change_loss_or_gradients(name: str) -> None:
    sizes, (rows, vocab, embed) = MESHES[name]
    p = make_problem(64 * rows, vocab, embed, rows=rows)
    single_device = in_one_chunk(64 * rows, vocab, embed, rows)
    devices = jax.devices()[: math.prod(sizes.values())]
    with jax.set_mesh(sharding.make_mesh(sizes, devices)):
        assert_close(
            with_fused_loss(SMOOTHED, p, soft_cap=20.0, chunk_size=20), single_device, tolerance=2e-6
        )
        totals = jax.jit(lambda *arrays: fused_loss(SMOOTHED, *arrays, soft_cap=20.0))(*p.arrays)
    assert_close([totals.loss], single_device[:1], tolerance=2e-6)
    assert_close([totals.nll], in_float64(p, soft_cap=20.0)[:1])


def test_the_gradient_of_the_head_is_sharded_like_the_head() -> None:
    p = make_problem(256, 512, 128)
    with jax.set_mesh(sharding.make_mesh(dict(data=2, fsdp=2, tensor=2, context=1))):
        d_unembed = with_fused_loss(SMOOTHED, p)[2]
    assert {shard.data.shape for shard in d_unembed.addressable_shards} == {(256, 64)}


def test_chunks_need_a_fraction_of_the_memory_of_full_logits() -> None:
    tokens, vocab, embed = 2048, 8192, 64
    arguments = (
        jax.ShapeDtypeStruct((1, tokens, embed), jnp.float32),
        jax.ShapeDtypeStruct((vocab, embed), jnp.float32),
        jax.ShapeDtypeStruct((1, tokens), jnp.int32),
        jax.ShapeDtypeStruct((1, tokens), jnp.float32),
    )

    def temporary_bytes(loss: Any) -> int:
        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        memory: Any = step.lower(*arguments).compile().memory_analysis()
        return memory.temp_size_in_bytes

    full = temporary_bytes(lambda *arrays: reference(PLAIN_CE, *arrays))
    chunked = temporary_bytes(lambda *arrays: fused_loss(PLAIN_CE, *arrays, chunk_size=256).loss)
    assert full >= tokens * vocab * 4
    assert chunked < full / 4


@pytest.mark.parametrize(
    "chunk, by_tokens, by_vocabulary",
    [("auto", 1024, 1024), (4096, 4096, 3200), (2**20, 8192, 128_000)],
    ids=str,
)
def test_chunks_have_the_automatic_or_the_configured_size_but_fewer_than_2_to_the_31_logits(
    backend: str, chunk: int | str, by_tokens: int, by_vocabulary: int
) -> None:
    arguments = (
        jax.ShapeDtypeStruct((2, 8192, 16), jnp.bfloat16),
        jax.ShapeDtypeStruct((256_000, 16), jnp.bfloat16),
        jax.ShapeDtypeStruct((2, 8192), jnp.int32),
        jax.ShapeDtypeStruct((2, 8192), jnp.float32),
    )
    step = jax.value_and_grad(
        lambda *arrays: fused_loss(PLAIN_CE, *arrays, chunk_size=chunk).loss, argnums=(0, 1)
    )
    shapes = re.findall(r"f32\[([\d,]+)\]", str(jax.make_jaxpr(step)(*arguments)))
    # Kernels store no logits: the largest array is the gradient of the matrix.
    largest = {
        "tokens": by_tokens * 256_000,
        "vocabulary": by_vocabulary * 2 * 8192,
        "tpu": 256_000 * 16,
    }[backend]
    assert max(math.prod(map(int, shape.split(","))) for shape in shapes) == largest < 2**31


@pytest.mark.parametrize(
    "make, key",
    [
        (lambda: cross_entropy.Config(label_smoothing=1.0), "label_smoothing"),
        (lambda: cross_entropy.Config(label_smoothing=-0.1), "label_smoothing"),
        (lambda: focal.Config(gamma=-1.0), "gamma"),
    ],
)
def test_an_error_names_the_setting_that_is_out_of_range(make: Any, key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}: "):
        make()
