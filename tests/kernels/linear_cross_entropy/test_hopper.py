"""The loss kernels for Hopper GPUs, as far as a CPU can test them: they are lowered for one, and the code
around them is right, with plain JAX in the place of each. On a GPU: python -m benchmarks.loss_gpu"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from headrace.errors import UserError
from headrace.kernels.linear_cross_entropy import by_tokens, hopper
from headrace.kernels.linear_cross_entropy.dispatch import add_z_loss, collect_warnings, fused_cross_entropy
from headrace.kernels.linear_cross_entropy.hopper_kernels import TOKENS, VOCAB, TileSchedule
from headrace.kernels.linear_cross_entropy.stats import (
    HeadInputs,
    HeadSharding,
    HeadSpec,
    LossAndGradients,
    negative_log_likelihood,
)
from headrace.losses import cross_entropy
from headrace.nn.soft_cap import apply_soft_cap

PLAIN = add_z_loss(partial(cross_entropy.per_token, SimpleNamespace(label_smoothing=0.0)), 1e-3)
SMOOTHED = add_z_loss(partial(cross_entropy.per_token, SimpleNamespace(label_smoothing=0.1)), 0.0)


def random_inputs(
    tokens: int = 512, vocab: int = 2048, width: int = 256, dtype: Any = jnp.float32
) -> HeadInputs:
    keys = jax.random.split(jax.random.key(0), 4)
    return HeadInputs(
        jax.random.normal(keys[0], (1, tokens, width)).astype(dtype),
        (0.3 * jax.random.normal(keys[1], (vocab, width))).astype(dtype),
        jax.random.randint(keys[2], (1, tokens), 0, vocab),
        jnp.where(jax.random.uniform(keys[3], (1, tokens)) < 0.2, 0.0, 1.0),
    )


def compute(backend: Any, head: HeadSpec, inputs: HeadInputs) -> LossAndGradients:
    return jax.jit(partial(backend.compute_loss_and_gradients, head, HeadSharding()))(inputs)


def multiply(a: Any, b: Any) -> Any:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace each kernel by plain JAX that rounds where the kernel does.

    Unused slots have values that must never be read. The list has the number of tiles of each round."""
    rounds: list[int] = []

    def compute_tile_max_and_logsumexp(x: Any, w: Any, cap: Any) -> Any:
        logits = apply_soft_cap(multiply(x, w.T), cap).reshape(len(x), -1, VOCAB)
        return logits.max(2).T, jax.nn.logsumexp(logits, axis=2).T

    def compute_tile_d_logits(x: Any, w: Any, per_token: Any, schedule: TileSchedule, cap: Any) -> Any:
        jax.debug.callback(lambda used: rounds.append(int(used)), schedule.used)
        out = jnp.full((len(schedule.tiles), TOKENS, VOCAB), jnp.nan, x.dtype)

        def write(slot: Any, out: Any) -> Any:
            i, j = (op(schedule.tiles[slot], len(x) // TOKENS) for op in (jnp.mod, jnp.floor_divide))
            tokens, rows = (slice_blocks(x, i, TOKENS), slice_blocks(w, j, VOCAB))
            logits = apply_soft_cap(multiply(tokens, rows.T), cap)
            stats = jax.lax.dynamic_slice_in_dim(per_token, i * TOKENS, TOKENS, 1)
            lse, d_lse, target, d_target = stats[..., None]
            is_target = jnp.arange(VOCAB) + j * VOCAB == target
            d = d_lse * jnp.exp(logits - lse) + jnp.where(is_target, d_target, 0)
            d = d if cap is None else d * (1 - (logits / cap) ** 2)
            return out.at[slot].set(d.astype(out.dtype))

        return jax.lax.fori_loop(0, schedule.used, write, out).reshape(-1, VOCAB)

    def write_unembed_gradient(d_ref: Any, d_logits: Any, x: Any, schedule: TileSchedule) -> None:
        d_logits, blocks = d_logits.reshape(-1, TOKENS, VOCAB), len(x) // TOKENS
        first_row, end_row = schedule.row_span

        def write_row(j: Any, out: Any) -> Any:
            def add(slot: Any, total: Any) -> Any:
                return total + multiply(
                    d_logits[slot].T, slice_blocks(x, schedule.tiles[slot] % blocks, TOKENS)
                )

            start, end = (schedule.row_ends[row] - schedule.row_ends[first_row] for row in (j, j + 1))
            total = jax.lax.fori_loop(start, end, add, jnp.zeros((VOCAB, x.shape[1])))
            return jax.lax.dynamic_update_slice_in_dim(out, total.astype(out.dtype), j * VOCAB, 0)

        d_ref[...] = jax.lax.fori_loop(first_row, end_row, write_row, d_ref[...])

    def add_hidden_gradient(
        high_ref: Any, low_ref: Any, d_logits: Any, w: Any, schedule: TileSchedule
    ) -> None:
        d_logits, blocks = d_logits.reshape(-1, TOKENS, VOCAB), len(schedule.block_starts) - 1

        def add_block(i: Any, sums: Any) -> Any:
            def add(n: Any, total: Any) -> Any:
                slot = schedule.slots_by_block[n]
                return total + multiply(
                    d_logits[slot], slice_blocks(w, schedule.tiles[slot] // blocks, VOCAB)
                )

            high, low = (slice_blocks(x, i, TOKENS) for x in sums)
            start, end = schedule.block_starts[i], schedule.block_starts[i + 1]
            total = jax.lax.fori_loop(start, end, add, jnp.zeros(high.shape, jnp.float32)) + high + low
            rounded = total.astype(high.dtype)
            return tuple(
                jax.lax.dynamic_update_slice_in_dim(x, part, i * TOKENS, 0)
                for x, part in zip(sums, (rounded, (total - rounded).astype(high.dtype)), strict=True)
            )

        high_ref[...], low_ref[...] = jax.lax.fori_loop(0, blocks, add_block, (high_ref[...], low_ref[...]))

    for function in (
        compute_tile_max_and_logsumexp,
        compute_tile_d_logits,
        write_unembed_gradient,
        add_hidden_gradient,
    ):
        monkeypatch.setattr(hopper, function.__name__, function)
    monkeypatch.setattr(hopper, "MIN_SLOTS", 4)
    monkeypatch.setattr(hopper, "LIST", 4)
    return rounds


def slice_blocks(x: Any, block: Any, size: int) -> Any:
    return jax.lax.dynamic_slice_in_dim(x, block * size, size)


@pytest.mark.parametrize(("loss", "cap"), [(PLAIN, None), (PLAIN, 20.0), (SMOOTHED, None)])
def test_rounds_of_tiles_compute_all_gradients(plain: list[int], loss: Any, cap: float | None) -> None:
    inputs, head = random_inputs(), HeadSpec(loss, cap)
    results, expected = (compute(backend, head, inputs) for backend in (hopper, by_tokens))
    for result, value in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(result, value, rtol=2e-4, atol=2e-5 * np.abs(value).max())
    jax.effects_barrier()
    assert plain == [4] * 8
    totals = jax.jit(partial(hopper.compute_loss, head, HeadSharding()))(inputs)
    assert float(totals.loss) == pytest.approx(float(expected.totals.loss), rel=1e-5)


@pytest.mark.parametrize("loss", [PLAIN, SMOOTHED])
def test_a_split_vocabulary_has_the_gradients_of_one_that_is_not(plain: list[int], loss: Any) -> None:
    inputs, head, sharding = random_inputs(), HeadSpec(loss), HeadSharding(vocab_axes=("tensor",))
    compute_sharded = jax.shard_map(
        lambda *arrays: tuple(hopper.compute_loss_and_gradients(head, sharding, HeadInputs(*arrays))),
        mesh=jax.sharding.Mesh(jax.devices()[:2], ("tensor",)),
        in_specs=(P(), P("tensor"), P(), P()),
        out_specs=(P(), P(), P("tensor")),
        check_vma=False,
    )
    results, expected = jax.jit(compute_sharded)(*inputs), compute(by_tokens, head, inputs)
    for result, value in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(result, value, rtol=2e-4, atol=2e-5 * np.abs(value).max())


def with_unlikely_rows(inputs: HeadInputs) -> HeadInputs:
    """Give nearly all probability to the first two of eight rows of tiles."""
    scales = jnp.where(jnp.arange(len(inputs.unembed)) < 512, 4.0, 1e-3)
    return inputs._replace(unembed=inputs.unembed * scales[:, None])


def test_smoothing_trains_rows_that_a_filter_skips(plain: list[int]) -> None:
    inputs = with_unlikely_rows(random_inputs())
    inputs = inputs._replace(targets=inputs.targets % 512)
    head = HeadSpec(SMOOTHED, filter_eps=2.0**-12)
    results, expected = (compute(backend, head, inputs) for backend in (hopper, by_tokens))
    jax.effects_barrier()
    assert sum(plain) == 2 * 4 + 6
    # Rows whose tiles are skipped have the gradient of smoothing, which is all that they have.
    result, value = results.d_unembed[1024:], expected.d_unembed[1024:]
    assert np.linalg.norm(value) > 0 and np.linalg.norm(result - value) <= 1e-3 * np.linalg.norm(value)


def test_a_filter_skips_small_probabilities_but_no_targets(plain: list[int]) -> None:
    inputs = with_unlikely_rows(random_inputs())
    few_elsewhere = jnp.where(jnp.arange(512) < 128, inputs.targets % 512, 1800)
    inputs = inputs._replace(targets=few_elsewhere)
    head = HeadSpec(PLAIN, filter_eps=2.0**-12)
    results, expected = (compute(backend, head, inputs) for backend in (hopper, by_tokens))
    jax.effects_barrier()
    # Of 8 x 4 tiles: the first two rows of four, the first of each other, and three with the target 1,800.
    assert sum(plain) == 2 * 4 + 6 + 3
    for result, value in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(result - value) <= 2e-3 * np.linalg.norm(value)


@pytest.mark.parametrize("filter_eps", [0.0, 2.0**-12])
@pytest.mark.parametrize("cap", [None, 20.0])
def test_gradients_in_bf16_are_closer_to_exact_than_those_of_full_logits_in_bf16(
    plain: list[int], cap: float | None, filter_eps: float
) -> None:
    inputs = random_inputs(dtype=jnp.bfloat16)
    inputs = HeadInputs(
        inputs.hidden,
        inputs.unembed.at[512:].multiply(0.25),  # rows that few tokens give a probability
        inputs.targets % 512,
        inputs.weights / inputs.weights.sum(),
    )
    head = HeadSpec(negative_log_likelihood, cap, filter_eps=filter_eps)
    results = compute(hopper, head, inputs)[1:]
    full_logits = jax.jit(partial(gradients_of_full_logits, cap=cap))(*inputs)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in inputs[:2]]
        exact = [np.asarray(x) for x in gradients_of_full_logits(*wide, *inputs[2:], cap=cap)]
    for result, full, value in zip(results, full_logits, exact, strict=True):
        error, full_error = (np.abs(np.asarray(x, np.float64) - value) for x in (result, full))
        assert (error <= full_error + 1e-2).all()  # the tolerance of cut cross entropy's own tests
        assert np.linalg.norm(error) <= min(np.linalg.norm(full_error), 2.7e-3 * np.linalg.norm(value))
    jax.effects_barrier()
    assert (sum(plain) < 8 * 4) == (filter_eps > 0)


def gradients_of_full_logits(x: Any, w: Any, targets: Any, weights: Any, *, cap: float | None) -> Any:
    """Compute both gradients from logits in the dtype of x and w."""

    def loss(x: Any, w: Any) -> Any:
        logits = apply_soft_cap(x @ w.T, cap)
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return (weights * (jax.nn.logsumexp(logits, axis=-1) - target)).sum()

    return jax.grad(loss, argnums=(0, 1))(x, w)


def test_ignored_tokens_select_no_tile(plain: list[int]) -> None:
    inputs = random_inputs()
    inputs = inputs._replace(weights=jnp.zeros_like(inputs.weights))
    results = compute(hopper, HeadSpec(PLAIN, filter_eps=1e-4), inputs)
    jax.effects_barrier()
    assert sum(plain) == 8 and not any(np.asarray(x).any() for x in jax.tree.leaves(results))


def test_the_kernels_are_lowered_for_a_gpu() -> None:
    hidden, unembed, *rows = (
        jax.ShapeDtypeStruct(x.shape, x.dtype) for x in random_inputs(256, 512, 256, jnp.bfloat16)
    )
    for cap, dtype in ((None, jnp.bfloat16), (30.0, jnp.float32)):
        inputs = HeadInputs(hidden, jax.ShapeDtypeStruct(unembed.shape, dtype), *rows)
        head = HeadSpec(PLAIN, cap, filter_eps=2.0**-12)
        step = jax.jit(partial(hopper.compute_loss_and_gradients, head, HeadSharding()))
        text = step.trace(inputs).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("mosaic_gpu") >= 4


@pytest.fixture
def hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the attached device is a Hopper GPU, whose compiler accepts everything."""
    device = SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(hopper.jax, "devices", lambda: [device])
    monkeypatch.setattr(hopper, "_try_to_compile", lambda *_: None)


def test_without_a_hopper_gpu_kernels_are_an_error_and_a_filter_changes_nothing() -> None:
    inputs = random_inputs(dtype=jnp.bfloat16)
    with pytest.raises(
        UserError, match=r"loss.backend: kernels cannot be used here: they are for Hopper GPUs"
    ):
        fused_cross_entropy(PLAIN, *inputs, backend="kernel")
    filtered = fused_cross_entropy(PLAIN, *inputs, filter_eps=1e-3)
    assert float(filtered.loss) == float(fused_cross_entropy(PLAIN, *inputs).loss)


def test_the_reason_why_kernels_cannot_run_is_given(hopper_gpu: None) -> None:
    hidden, unembed, *_ = random_inputs(dtype=jnp.bfloat16)
    plain = HeadSpec(PLAIN)

    def reason(
        head: HeadSpec = plain, hidden: Any = hidden, unembed: Any = unembed, **axes: Any
    ) -> str | None:
        return hopper.unsupported_reason(head, HeadSharding(**axes), hidden, unembed)

    assert reason() is None
    assert reason(HeadSpec(SMOOTHED)) is None
    for found, expected in (
        (reason(HeadSpec(SMOOTHED, 30.0)), "mean of capped logits"),
        (reason(HeadSpec(PLAIN, excluded_token=3)), "they cannot exclude a token"),
        (reason(hidden=hidden.astype(jnp.float32)), "bfloat16"),
        (reason(hidden=hidden[:, :500]), "500 tokens are not a multiple of 128"),
        (reason(unembed=unembed[:2000]), "2000 rows are not a multiple of 256"),
        (reason(unembed=unembed[:, :128]), "128 columns are not a multiple of 256"),
        (reason(width_axes=("fsdp",)), "mesh.fsdp"),
    ):
        assert expected in str(found)


def test_a_filter_without_effect_is_warned_of_with_the_reason(hopper_gpu: None) -> None:
    def warnings(tokens: int, filter_eps: float) -> list[str]:
        hidden, *inputs = random_inputs(tokens, 512, 256, jnp.bfloat16)
        loss = lambda x: fused_cross_entropy(PLAIN, x, *inputs, filter_eps=filter_eps).loss
        with collect_warnings() as lines:
            jax.make_jaxpr(jax.grad(loss))(hidden)
            jax.make_jaxpr(loss)(hidden)
        return lines

    assert warnings(256, 1e-3) == warnings(250, 0.0) == []
    (line,) = warnings(250, 1e-3)
    assert line.startswith("loss.filter_eps: 0.001 has no effect here")
    assert "since 250 tokens are not a multiple of 128" in line
