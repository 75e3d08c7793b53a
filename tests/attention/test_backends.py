"""Attention backends that run on a CPU: equal to the definition in float64, value and gradient. If a key that
a query must not see is changed, the query's output does not change by a single bit."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.attention import attend, xla
from headrace.nn.attention_mask import Mask
from tests.attention.reference import (
    AUTO,
    BACKENDS,
    BLOCKWISE,
    CASES,
    SPLASH,
    XLA,
    Case,
    assert_equals_definition,
    attend_case,
    random_inputs,
    run_backend,
)


@pytest.mark.thin(3)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("cfg", BACKENDS)
def test_output_and_gradients_equal_the_definition(cfg: Any, case: Case) -> None:
    assert_equals_definition(cfg, random_inputs(heads=case.heads), case)


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", ["causal", "packed bidirectional", "soft cap, packed window"])
@pytest.mark.parametrize("head_dim", [96, 128])
def test_splash_equals_the_definition_in_either_layout(head_dim: int, name: str) -> None:
    assert_equals_definition(SPLASH, random_inputs(length=256, head_dim=head_dim), CASES[name])


@pytest.mark.parametrize(
    ("name", "length", "kernels"),
    [
        ("causal", 512, 2),  # forward, and all gradients: four tiles of keys
        ("packed bidirectional", 512, 2),
        ("packed bidirectional", 640, 3),
        ("soft cap, packed window", 384, 3),
    ],
)
def test_splash_has_one_kernel_for_all_gradients_of_short_rows(name: str, length: int, kernels: int) -> None:
    inputs, case = random_inputs(length=length), CASES[name]
    *arrays, d_out = inputs.arrays

    def gradients(*arrays: Any) -> Any:
        return jax.vjp(lambda *x: attend_case(SPLASH, *x, inputs.segments, case), *arrays)[1](d_out)

    lowered = jax.jit(gradients).trace(*arrays).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") == kernels
    assert_equals_definition(SPLASH, inputs, case)


@pytest.mark.parametrize("name", ["causal", "packed", "soft cap, packed window"])
@pytest.mark.parametrize(("threads", "batch"), [(2, 4), (3, 6), (8, 4), (2, 3), (4, 16)])
def test_xla_equals_the_definition_whatever_number_of_products_it_splits_rows_into(
    threads: int, batch: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with as many rows as a row has tokens, and with other documents in each row."""
    monkeypatch.setattr(xla, "threads", lambda: threads)
    row = np.asarray(random_inputs(length=16).segments[0])
    segments = np.stack([np.roll(row, shift) for shift in range(batch)])
    assert_equals_definition(XLA, random_inputs(length=16, batch=batch, segments=segments), CASES[name])


@pytest.mark.thin(5)
@pytest.mark.parametrize("name", ["causal", "bidirectional", "bidirectional window", "packed"])
@pytest.mark.parametrize(
    ("cfg", "length"),
    [
        (SimpleNamespace(use="blockwise", block_q=64, block_kv=32), 200),
        (SimpleNamespace(use="blockwise", block_q=32, block_kv=64), 37),
        (SPLASH, 200),
    ],
    ids=["blockwise 200", "blockwise 37", "splash 200"],
)
def test_the_length_need_not_be_a_multiple_of_the_block(cfg: Any, length: int, name: str) -> None:
    assert_equals_definition(cfg, random_inputs(length=length), CASES[name])


@pytest.mark.parametrize("cfg", [*BACKENDS, pytest.param(AUTO, id="auto")])
def test_bfloat16_inputs_give_the_definition_to_bfloat16_precision(cfg: Any) -> None:
    assert_equals_definition(cfg, random_inputs(dtype=jnp.bfloat16), Case(), tolerance=4e-2)


@pytest.mark.parametrize("cfg", BACKENDS)
def test_a_changed_key_and_value_change_only_queries_that_see_it(cfg: Any) -> None:
    q, k, v, _ = (inputs := random_inputs()).arrays
    run = jax.jit(lambda q, k, v: attend_case(cfg, q, k, v, inputs.segments, Case(Mask(window=24))))
    before, after = run(q, k, v), run(q, k.at[:, 70].add(3.0), v.at[:, 70].add(3.0))
    changed = np.flatnonzero(np.any(np.asarray(before != after), axis=(0, 2, 3)))
    np.testing.assert_array_equal(changed, np.arange(70, 70 + 24))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("cfg", BACKENDS)
def test_a_changed_document_changes_no_other_document(cfg: Any, causal: bool) -> None:
    q, k, v, _ = (inputs := random_inputs()).arrays
    case = Case(Mask(causal), packed=True)
    run = jax.jit(lambda q, k, v: attend_case(cfg, q, k, v, inputs.segments, case))
    for document in (1, 2):
        in_document = (inputs.segments == document)[..., None, None]
        before, after = run(q, k, v), run(*(jnp.where(in_document, -2 * x, x) for x in (q, k, v)))
        changed = np.any(np.asarray(before != after), axis=(2, 3))
        np.testing.assert_array_equal(changed, np.asarray(inputs.segments == document))


@pytest.mark.parametrize("cfg", BACKENDS)
def test_rows_of_padding_only_give_finite_results(cfg: Any) -> None:
    inputs = random_inputs(segments=np.zeros((2, 128)))
    for result in run_backend(cfg, inputs, Case(Mask(causal=False, window=24), packed=True)):
        assert np.isfinite(result).all()


@pytest.mark.parametrize(("mask", "poisoned"), [(Mask(), (96, 128)), (Mask(window=24), (0, 32))])
def test_blockwise_never_reads_a_block_out_of_reach(mask: Mask, poisoned: tuple[int, int]) -> None:
    q, k, v, d_out = (inputs := random_inputs()).arrays
    k, v = (x.at[:, slice(*poisoned)].set(jnp.nan) for x in (k, v))

    @jax.jit
    def run(q: Any, k: Any, v: Any) -> Any:
        out, pull = jax.vjp(lambda q: attend_case(BLOCKWISE, q, k, v, inputs.segments, Case(mask)), q)
        return out, *pull(d_out)

    out, d_q = run(q, k, v)
    # Blocks of 32: with a causal mask only the last block sees itself; a window of 24 reaches the next block.
    clean = slice(0, 96) if mask.window is None else slice(64, 128)
    assert np.isfinite(out[:, clean]).all() and np.isfinite(d_q[:, clean]).all()
    assert np.isnan(out[:, slice(*poisoned)]).all()  # 0 x NaN shows that they were read


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_blockwise_never_reads_a_block_without_a_document_of_the_queries(causal: bool) -> None:
    """Each row skips blocks by its own documents. 0 x NaN shows a block that is read in vain."""
    # In blocks of 32: row 0 has two documents of two blocks; row 1 one of a block, one of two, and padding.
    segments = jnp.asarray([[1] * 64 + [2] * 64, [1] * 32 + [2] * 64 + [0] * 32], jnp.int32)
    poisoned = ((0, 64), (32, 96))
    q, k, v, d_out = random_inputs().arrays
    for row, (start, end) in enumerate(poisoned):
        k, v = (x.at[row, start:end].set(jnp.nan) for x in (k, v))
    results = output_and_gradients(BLOCKWISE, q, k, v, d_out, segments, Case(Mask(causal), packed=True))
    for result in results:
        for row, (start, end) in enumerate(poisoned):
            is_nan = np.isnan(np.asarray(result[row])).any((1, 2))
            np.testing.assert_array_equal(is_nan, (np.arange(128) >= start) & (np.arange(128) < end))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_splash_never_reads_a_tile_without_a_document_of_the_queries(causal: bool) -> None:
    q, k, v, d_out = random_inputs(length=640).arrays
    poisoned = slice(128, 384)  # the second of three documents, of 1, 2 and 2 tiles
    row = jnp.asarray([1] * 128 + [2] * 256 + [3] * 256, jnp.int32)
    segments = jnp.stack([row, row])
    k, v = (x.at[:, poisoned].set(jnp.nan) for x in (k, v))
    for result in output_and_gradients(SPLASH, q, k, v, d_out, segments, Case(Mask(causal), packed=True)):
        is_nan = np.isnan(np.asarray(result)).any((0, 2, 3))
        np.testing.assert_array_equal(np.flatnonzero(is_nan), np.arange(640)[poisoned])


def output_and_gradients(cfg: Any, q: Any, k: Any, v: Any, d_out: Any, segments: Any, case: Case) -> Any:
    @jax.jit
    def run(q: Any, k: Any, v: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: attend_case(cfg, q, k, v, segments, case), q, k, v)
        return out, *pull(d_out)

    return run(q, k, v)


@pytest.mark.parametrize("cfg", [BLOCKWISE, SPLASH], ids=["blockwise", "splash"])
def test_no_document_is_skipped_if_segments_are_in_any_order(cfg: Any) -> None:
    numbers = np.array([7, 2, 0, 9, 2, 7, 1, 0])  # some are in two places
    segments = np.stack([numbers.repeat(64), np.roll(numbers, 3).repeat(64)])
    inputs = random_inputs(length=512, segments=segments)
    for case in (Case(packed=True), Case(Mask(causal=False, window=140), packed=True)):
        assert_equals_definition(cfg, inputs, case)


def test_blockwise_memory_grows_with_the_length_and_not_with_its_square() -> None:
    def temporary_bytes(cfg: Any, length: int) -> int:
        def loss(q: Any, k: Any, v: Any) -> Any:
            return attend(cfg, q, k, v, mask=Mask()).sum()

        shapes = [jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for heads in (4, 2, 2)]
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    blockwise = SimpleNamespace(use="blockwise", block_q=128, block_kv=128)
    assert temporary_bytes(blockwise, 8192) < 4.5 * temporary_bytes(blockwise, 2048)
    assert temporary_bytes(XLA, 2048) > 8 * temporary_bytes(XLA, 512)  # the measure tells them apart


@pytest.mark.parametrize("mask", [Mask(), Mask(window=24)])
def test_a_single_query_with_its_offset_gives_its_row_of_the_output(mask: Mask) -> None:
    q, k, v, _ = random_inputs().arrays
    full = attend(BLOCKWISE, q, k, v, mask=mask)
    decode = jax.jit(lambda q, offset: attend(SPLASH, q, k, v, mask=mask, offset=offset))
    for row in (0, 63, 127):
        out = decode(q[:, row : row + 1], row)
        np.testing.assert_allclose(out, full[:, row : row + 1], rtol=2e-5, atol=2e-5)
