"""Every attention backend that runs on a CPU against the definition in float64, value and gradient; what must
not be seen is changed, and what must not see it must not move by a single bit."""

import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from headrace.attention import AttentionCall, attend, band, choose_backend, xla
from headrace.kernels import band_tpu
from headrace.nn import sharding
from headrace.nn.attention_mask import Mask

AUTO = SimpleNamespace(use="auto")
XLA = SimpleNamespace(use="xla")
CUDNN = SimpleNamespace(use="cudnn")
BLOCKWISE = SimpleNamespace(use="blockwise", block_q=32, block_kv=32)
SPLASH = SimpleNamespace(use="splash", block_q=128, block_kv=128)
BAND = SimpleNamespace(use="band")
V5E = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
BACKENDS = [pytest.param(cfg, id=cfg.use) for cfg in (XLA, BLOCKWISE, SPLASH)]


@dataclass(frozen=True)
class Case:
    mask: Mask = field(default_factory=Mask)
    packed: bool = False
    soft_cap: float | None = None
    scale: float | None = None
    heads: tuple[int, int] = (4, 2)


CASES = {
    "causal": Case(),
    "bidirectional": Case(Mask(causal=False)),
    "causal window": Case(Mask(window=24)),
    "bidirectional window": Case(Mask(causal=False, window=25)),
    "window wider than the sequence": Case(Mask(causal=False, window=1000)),
    "packed": Case(packed=True),
    "packed bidirectional": Case(Mask(causal=False), packed=True),
    "soft cap, one kv head": Case(soft_cap=2.0, heads=(4, 1)),
    "soft cap, packed window": Case(Mask(causal=False, window=40), packed=True, soft_cap=1.5),
    "own scale, as many kv heads": Case(scale=0.3, heads=(2, 2)),
}


@dataclass(frozen=True)
class Inputs:
    """Random q, k, v and a gradient for the output; two documents and padding in every row."""

    length: int = 128
    heads: tuple[int, int] = (4, 2)
    batch: int = 2
    head_dim: int = 16
    dtype: Any = jnp.float32
    arrays: list[Any] = field(init=False)
    segments: Any = field(init=False)

    def __post_init__(self) -> None:
        n, k = self.heads
        shapes = [(self.batch, self.length, heads, self.head_dim) for heads in (n, k, k, n)]
        keys = jax.random.split(jax.random.key(0), 4)
        arrays = [
            jax.random.normal(key, shape).astype(self.dtype) for key, shape in zip(keys, shapes, strict=True)
        ]
        object.__setattr__(self, "arrays", arrays)
        position = jnp.arange(self.length)
        first = position >= self.length * 3 // 8
        real = position < self.length * 7 // 8
        row = jnp.where(real, 1 + first, 0).astype(jnp.int32)
        object.__setattr__(self, "segments", jnp.broadcast_to(row, (self.batch, self.length)))


def definition(inputs: Inputs, case: Case) -> list[np.ndarray]:
    """Output, dq, dk and dv in float64, straight from the formulas."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in inputs.arrays)
    s, n, h = q.shape[1:]
    group = n // k.shape[2]
    k, v = (x.repeat(group, axis=2) for x in (k, v))
    scale = h**-0.5 if case.scale is None else case.scale
    scores = scale * np.einsum("bsnh,btnh->bnst", q, k)
    slope = np.ones_like(scores)
    if case.soft_cap is not None:
        slope = 1 - np.tanh(scores / case.soft_cap) ** 2
        scores = case.soft_cap * np.tanh(scores / case.soft_cap)
    i, j = np.arange(s)[:, None], np.arange(s)[None, :]
    seen = (j <= i) if case.mask.causal else np.ones((s, s), bool)
    if case.mask.window is not None:
        seen = seen & (
            (i - j < case.mask.window) if case.mask.causal else abs(i - j) <= case.mask.window // 2
        )
    seen = np.broadcast_to(seen, scores.shape)
    if case.packed:
        ids = np.asarray(inputs.segments)
        seen = seen & (ids[:, None, :, None] == ids[:, None, None, :])
    exponentials = np.where(seen, np.exp(scores), 0)
    weights = exponentials / exponentials.sum(-1, keepdims=True)
    out = np.einsum("bnst,btnh->bsnh", weights, v)
    d_weights = np.einsum("bsnh,btnh->bnst", d_out, v)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) * slope * scale
    d_q = np.einsum("bnst,btnh->bsnh", d_scores, k)
    d_k = np.einsum("bnst,bsnh->btnh", d_scores, q)
    d_v = np.einsum("bnst,bsnh->btnh", weights, d_out)
    d_k, d_v = (x.reshape(*x.shape[:2], -1, group, h).sum(3) for x in (d_k, d_v))
    return [out, d_q, d_k, d_v]


def computed(cfg: Any, inputs: Inputs, case: Case) -> list[np.ndarray]:
    """The same four from a backend, compiled; on a mesh by way of the order in which it holds positions."""

    @jax.jit
    def run(q: Any, k: Any, v: Any, d_out: Any, segments: Any) -> Any:
        def forward(q: Any, k: Any, v: Any) -> Any:
            q, k, v, ids = (sharding.to_balanced_order(x) for x in (q, k, v, segments))
            return sharding.from_balanced_order(call(cfg, q, k, v, ids, case))

        out, pull = jax.vjp(forward, q, k, v)
        return out, *pull(d_out)

    results = run(*inputs.arrays, inputs.segments)
    assert [x.dtype for x in results] == [inputs.dtype] * 4
    return [np.asarray(x, np.float64) for x in results]


def call(cfg: Any, q: Any, k: Any, v: Any, segments: Any, case: Case) -> Any:
    ids = segments if case.packed else None
    return attend(cfg, q, k, v, mask=case.mask, segments=ids, soft_cap=case.soft_cap, scale=case.scale)


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
def test_a_band_is_all_that_a_window_lets_see(case: Case, length: int) -> None:
    inputs = Inputs(length=length, heads=case.heads)
    assert_same(computed(BAND, inputs, case), definition(inputs, case), 2e-5)


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
def test_the_kernels_of_a_band_give_what_a_window_lets_see(
    monkeypatch: pytest.MonkeyPatch, case: Case, length: int
) -> None:
    monkeypatch.setattr(band, "device", lambda: V5E)
    monkeypatch.setattr(band_tpu, "MAX_TILE", 256)
    inputs = Inputs(length=length, heads=case.heads)
    assert_same(computed(BAND, inputs, case), definition(inputs, case), 2e-5)


def test_in_16_bits_the_kernels_of_a_band_are_as_near_as_16_bits_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(band, "device", lambda: V5E)
    inputs, case = Inputs(length=384, dtype=jnp.bfloat16), Case(Mask(causal=False, window=128), packed=True)
    for one, other in zip(computed(BAND, inputs, case), definition(inputs, case), strict=True):
        assert 1e-4 < np.linalg.norm(one - other) / np.linalg.norm(other) < 4e-3


def test_the_kernels_of_a_band_have_no_scores_in_memory_and_keep_their_inputs_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(band, "device", lambda: V5E)
    q, k = (jax.ShapeDtypeStruct((2, 2048, heads, 64), jnp.bfloat16) for heads in (4, 2))
    run = lambda q, k, v: attend(BAND, q, k, v, mask=Mask(causal=False, window=128))
    text = (
        jax.jit(lambda *given: jax.vjp(run, *given)[1](given[0]))
        .trace(q, k, k)
        .lower(lowering_platforms=("tpu",))
        .as_text()
    )
    assert "band_backward" in text
    shapes = [map(int, found.split("x")) for found in re.findall(r"tensor<([\dx]+)x\w+>", text)]
    assert max(map(math.prod, shapes)) == math.prod(q.shape)
    kept = jax.tree.leaves(jax.eval_shape(lambda *given: jax.vjp(run, *given)[1], q, k, k))
    arrays = [x for x in kept if x.ndim]  # the rest says which platform it is
    assert sum(math.prod(x.shape) for x in arrays) == sum(math.prod(x.shape) for x in (q, k, k))


def test_the_work_of_a_band_grows_with_the_length_alone() -> None:
    def flops(length: int) -> float:
        q, k = (jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for heads in (4, 2))
        run = jax.jit(lambda q, k, v: attend(BAND, q, k, v, mask=Mask(causal=False, window=128)))
        return run.lower(q, k, k).cost_analysis()["flops"]

    assert flops(8192) == pytest.approx(4 * flops(2048), rel=0.02)


def assert_same(found: list[np.ndarray], expected: list[np.ndarray], tolerance: float) -> None:
    for name, x, y in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.thin(3)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("cfg", BACKENDS)
def test_output_and_gradients_are_those_of_the_definition(cfg: Any, case: Case) -> None:
    inputs = Inputs(heads=case.heads)
    assert_same(computed(cfg, inputs, case), definition(inputs, case), 2e-5)


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", ["causal", "packed bidirectional", "soft cap, packed window"])
@pytest.mark.parametrize("head_dim", [96, 128])
def test_splash_lays_out_heads_that_fill_a_register_otherwise_and_gives_the_same(
    head_dim: int, name: str
) -> None:
    inputs = Inputs(length=256, head_dim=head_dim)
    assert_same(computed(SPLASH, inputs, CASES[name]), definition(inputs, CASES[name]), 2e-5)


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
    inputs, case = Inputs(length=length), CASES[name]
    *given, d_out = inputs.arrays

    def pulled(*given: Any) -> Any:
        return jax.vjp(lambda *x: call(SPLASH, *x, inputs.segments, case), *given)[1](d_out)

    lowered = jax.jit(pulled).trace(*given).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") == kernels
    assert_same(computed(SPLASH, inputs, case), definition(inputs, case), 2e-5)


@pytest.mark.parametrize("name", ["causal", "packed", "soft cap, packed window"])
@pytest.mark.parametrize(("threads", "batch"), [(2, 4), (3, 6), (8, 4), (2, 3), (4, 16)])
def test_rows_by_the_thread_give_the_output_and_gradients_of_the_definition(
    threads: int, batch: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with as many rows as there are tokens in one, and other documents in each."""
    monkeypatch.setattr(xla, "threads", lambda: threads)
    inputs = Inputs(length=16, batch=batch)
    rows = [jnp.roll(ids, row) for row, ids in enumerate(inputs.segments)]
    object.__setattr__(inputs, "segments", jnp.stack(rows))
    assert_same(computed(XLA, inputs, CASES[name]), definition(inputs, CASES[name]), 2e-5)


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
def test_a_length_that_is_no_multiple_of_the_block_changes_nothing(cfg: Any, length: int, name: str) -> None:
    inputs = Inputs(length=length)
    assert_same(computed(cfg, inputs, CASES[name]), definition(inputs, CASES[name]), 2e-5)


@pytest.mark.parametrize("cfg", [*BACKENDS, pytest.param(AUTO, id="auto")])
def test_bfloat16_inputs_give_the_definition_to_bfloat16_precision(cfg: Any) -> None:
    inputs = Inputs(dtype=jnp.bfloat16)
    assert_same(computed(cfg, inputs, Case()), definition(inputs, Case()), 4e-2)


@pytest.mark.parametrize("cfg", BACKENDS)
def test_a_changed_key_or_value_moves_no_query_that_may_not_see_it(cfg: Any) -> None:
    q, k, v, _ = (inputs := Inputs()).arrays
    run = jax.jit(lambda q, k, v: call(cfg, q, k, v, inputs.segments, Case(Mask(window=24))))
    before, after = run(q, k, v), run(q, k.at[:, 70].add(3.0), v.at[:, 70].add(3.0))
    moved = np.flatnonzero(np.any(np.asarray(before != after), axis=(0, 2, 3)))
    np.testing.assert_array_equal(moved, np.arange(70, 70 + 24))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("cfg", BACKENDS)
def test_a_changed_document_moves_no_other_document(cfg: Any, causal: bool) -> None:
    q, k, v, _ = (inputs := Inputs()).arrays
    run = jax.jit(lambda q, k, v: call(cfg, q, k, v, inputs.segments, Case(Mask(causal), packed=True)))
    for document in (1, 2):
        changed = (inputs.segments == document)[..., None, None]
        before, after = run(q, k, v), run(*(jnp.where(changed, -2 * x, x) for x in (q, k, v)))
        moved = np.any(np.asarray(before != after), axis=(2, 3))
        np.testing.assert_array_equal(moved, np.asarray(inputs.segments == document))


@pytest.mark.parametrize("cfg", BACKENDS)
def test_rows_of_nothing_but_padding_stay_finite(cfg: Any) -> None:
    inputs = Inputs()
    object.__setattr__(inputs, "segments", jnp.zeros_like(inputs.segments))
    for result in computed(cfg, inputs, Case(Mask(causal=False, window=24), packed=True)):
        assert np.isfinite(result).all()


@pytest.mark.parametrize(("mask", "poisoned"), [(Mask(), (96, 128)), (Mask(window=24), (0, 32))])
def test_blockwise_never_reads_a_block_out_of_reach(mask: Mask, poisoned: tuple[int, int]) -> None:
    q, k, v, d_out = (inputs := Inputs()).arrays
    k, v = (x.at[:, slice(*poisoned)].set(jnp.nan) for x in (k, v))

    @jax.jit
    def run(q: Any, k: Any, v: Any) -> Any:
        out, pull = jax.vjp(lambda q: call(BLOCKWISE, q, k, v, inputs.segments, Case(mask)), q)
        return out, *pull(d_out)

    out, d_q = run(q, k, v)
    # Blocks of 32: causally only the last one sees itself; a window of 24 reaches one block on.
    clean = slice(0, 96) if mask.window is None else slice(64, 128)
    assert np.isfinite(out[:, clean]).all() and np.isfinite(d_q[:, clean]).all()
    assert np.isnan(out[:, slice(*poisoned)]).all()  # where 0 x NaN shows that they were read


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_blockwise_never_reads_a_block_that_holds_no_document_of_its_own(causal: bool) -> None:
    """Each row skips by its own documents. Where a block is read for nothing, 0 x NaN shows it."""
    q, k, v, d_out = (_inputs := Inputs()).arrays
    # In blocks of 32: row 0 has two documents of two blocks; row 1 one of a block, one of two, and padding.
    row = [1] * 64 + [2] * 64, [1] * 32 + [2] * 64 + [0] * 32
    segments, poisoned = jnp.asarray(row, jnp.int32), ((0, 64), (32, 96))
    for number, place in enumerate(poisoned):
        k, v = (x.at[number, slice(*place)].set(jnp.nan) for x in (k, v))

    @jax.jit
    def run(q: Any, k: Any, v: Any) -> Any:
        def forward(q: Any, k: Any, v: Any) -> Any:
            return call(BLOCKWISE, q, k, v, segments, Case(Mask(causal), packed=True))

        out, pull = jax.vjp(forward, q, k, v)
        return out, *pull(d_out)

    for result in run(q, k, v):
        for number, (begin, end) in enumerate(poisoned):
            read = np.isnan(np.asarray(result[number])).any((1, 2))
            np.testing.assert_array_equal(read, (np.arange(128) >= begin) & (np.arange(128) < end))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_splash_never_reads_a_tile_that_holds_no_document_of_its_own(causal: bool) -> None:
    q, k, v, d_out = Inputs(length=640).arrays
    poisoned = slice(128, 384)  # the second of three documents, of 1, 2 and 2 tiles
    row = jnp.asarray([1] * 128 + [2] * 256 + [3] * 256, jnp.int32)
    segments = jnp.stack([row, row])
    k, v = (x.at[:, poisoned].set(jnp.nan) for x in (k, v))

    @jax.jit
    def run(q: Any, k: Any, v: Any) -> Any:
        def forward(q: Any, k: Any, v: Any) -> Any:
            return call(SPLASH, q, k, v, segments, Case(Mask(causal), packed=True))

        out, pull = jax.vjp(forward, q, k, v)
        return out, *pull(d_out)

    for result in run(q, k, v):
        read = np.isnan(np.asarray(result)).any((0, 2, 3))
        np.testing.assert_array_equal(np.flatnonzero(read), np.arange(640)[poisoned])


@pytest.mark.parametrize("cfg", [BLOCKWISE, SPLASH], ids=["blockwise", "splash"])
def test_no_document_is_skipped_whatever_the_order_of_their_numbers(cfg: Any) -> None:
    inputs = Inputs(length=512)
    numbers = jnp.asarray([7, 2, 0, 9, 2, 7, 1, 0])  # some lie in two places
    object.__setattr__(inputs, "segments", jnp.stack([numbers.repeat(64), jnp.roll(numbers, 3).repeat(64)]))
    for case in (Case(packed=True), Case(Mask(causal=False, window=140), packed=True)):
        assert_same(computed(cfg, inputs, case), definition(inputs, case), 2e-5)


def test_blockwise_memory_grows_with_the_length_and_not_its_square() -> None:
    def temporaries(cfg: Any, length: int) -> int:
        def loss(q: Any, k: Any, v: Any) -> Any:
            return attend(cfg, q, k, v, mask=Mask()).sum()

        shapes = [jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for heads in (4, 2, 2)]
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    blockwise = SimpleNamespace(use="blockwise", block_q=128, block_kv=128)
    assert temporaries(blockwise, 8192) < 4.5 * temporaries(blockwise, 2048)
    assert temporaries(XLA, 2048) > 8 * temporaries(XLA, 512)  # the measure can tell the two apart


MESHES = {
    "data 2, fsdp 2, tensor 2": dict(data=2, fsdp=2, tensor=2, context=1),
    "context 2": dict(data=1, fsdp=2, tensor=2, context=2),
    "context 4": dict(data=2, fsdp=1, tensor=1, context=4),
    "tensor 4 with 2 kv heads": dict(data=2, fsdp=1, tensor=4, context=1),
    "heads that do not divide": dict(data=1, fsdp=1, tensor=8, context=1),
    "a batch that does not divide": dict(data=1, fsdp=8, tensor=1, context=1),
}


@pytest.mark.thin(5)
@pytest.mark.parametrize("name", ["packed", "soft cap, packed window"])
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES.keys())
@pytest.mark.parametrize("cfg", BACKENDS[:2])
def test_a_mesh_changes_neither_output_nor_gradients(cfg: Any, sizes: dict[str, int], name: str) -> None:
    inputs, case = Inputs(batch=4), CASES[name]
    with jax.set_mesh(sharding.make_mesh(sizes)):
        assert_same(computed(cfg, inputs, case), definition(inputs, case), 2e-5)


@pytest.mark.thin(5)
@pytest.mark.parametrize(
    "name", ["packed", "bidirectional", "causal window", "window wider than the sequence"]
)
@pytest.mark.parametrize(
    "sizes", [dict(data=1, fsdp=2, tensor=2, context=2), dict(data=1, fsdp=1, tensor=4, context=2)]
)
def test_splash_sees_from_the_right_place_when_the_sequence_is_split(
    sizes: dict[str, int], name: str
) -> None:
    inputs, case = Inputs(batch=2, length=512), CASES[name]
    with jax.set_mesh(sharding.make_mesh(sizes)):
        assert_same(computed(SPLASH, inputs, case), definition(inputs, case), 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bidirectional", "causal window", "packed", "packed bidirectional"])
def test_eight_parts_of_a_sequence_give_the_output_and_gradients_of_the_whole(name: str) -> None:
    inputs, case = Inputs(batch=1), CASES[name]
    with jax.set_mesh(sharding.make_mesh(dict(data=1, fsdp=1, tensor=1, context=8))):
        assert_same(computed(BLOCKWISE, inputs, case), definition(inputs, case), 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packed", "packed bidirectional", "causal window"])
def test_splash_gives_the_whole_from_four_parts(name: str) -> None:
    inputs, case = Inputs(batch=1, length=1024), CASES[name]
    with jax.set_mesh(sharding.make_mesh(dict(data=1, fsdp=1, tensor=1, context=4), jax.devices()[:4])):
        assert_same(computed(SPLASH, inputs, case), definition(inputs, case), 2e-5)


@pytest.mark.parametrize("mask", [Mask(), Mask(window=24)])
def test_a_query_alone_with_its_offset_gives_its_row_of_the_whole(mask: Mask) -> None:
    q, k, v, _ = Inputs().arrays
    whole = attend(BLOCKWISE, q, k, v, mask=mask)
    decode = jax.jit(lambda q, offset: attend(SPLASH, q, k, v, mask=mask, offset=offset))
    for row in (0, 63, 127):
        alone = decode(q[:, row : row + 1], row)
        np.testing.assert_allclose(alone, whole[:, row : row + 1], rtol=2e-5, atol=2e-5)


def shapes(length: int, dtype: Any = jnp.bfloat16) -> list[Any]:
    return [jax.ShapeDtypeStruct((2, length, heads, 64), dtype) for heads in (4, 2)]


def chosen(
    cfg: Any, q: Any, k: Any, *, mask: Mask, platform: str = "cpu", has_segments: bool = False, **options: Any
) -> str:
    call = AttentionCall(q, k, mask, 1.0, has_segments=has_segments, platform=platform, **options)
    return choose_backend(cfg, call)


def test_auto_takes_the_fastest_backend_that_does_not_refuse() -> None:
    causal = Mask()
    assert chosen(AUTO, *shapes(1024), mask=causal) == "xla"
    assert chosen(AUTO, *shapes(1025), mask=causal) == "blockwise"
    near, far = (Mask(causal=False, window=window) for window in (128, 4096))
    assert chosen(AUTO, *shapes(8192), mask=near) == "band"
    assert chosen(AUTO, *shapes(64), mask=near) == "xla"  # fewer scores than chunks would have
    assert chosen(AUTO, *shapes(8192), mask=near, platform="gpu") == "band"
    assert chosen(AUTO, *shapes(8192), mask=near, platform="tpu") == "band"
    for options in (dict(mask=far), dict(mask=near, soft_cap=30.0), dict(mask=near, context=2)):
        assert chosen(AUTO, *shapes(8192), platform="tpu", **options) == "splash"
    assert chosen(AUTO, *shapes(16384), mask=near, platform="tpu") == "splash"
    assert chosen(AUTO, *shapes(8192, jnp.float32), mask=near, platform="tpu") == "splash"
    assert chosen(AUTO, *shapes(8192), mask=far) == "blockwise"
    assert chosen(AUTO, *shapes(8192), mask=near, context=2) == "blockwise"
    assert chosen(AUTO, *shapes(512, jnp.float32), mask=causal, platform="gpu") == "blockwise"
    assert chosen(AUTO, *shapes(512), mask=causal, soft_cap=30.0, platform="gpu") == "blockwise"
    assert chosen(AUTO, *shapes(65536), mask=causal, has_segments=True, platform="gpu") == "blockwise"
    assert chosen(AUTO, *shapes(512), mask=causal, has_segments=True, platform="tpu") == "splash"
    assert chosen(AUTO, *shapes(200), mask=causal, context=2, platform="tpu") == "blockwise"


@pytest.mark.parametrize(
    ("cfg", "platform", "dtype", "options", "reason"),
    [
        (CUDNN, "cpu", jnp.bfloat16, {}, "needs an NVIDIA GPU"),
        (CUDNN, "gpu", jnp.float32, {}, "these activations are float32"),
        (CUDNN, "gpu", jnp.bfloat16, dict(soft_cap=30.0), "no soft cap"),
        (CUDNN, "gpu", jnp.bfloat16, dict(context=2), "mesh.context"),
        (SPLASH, "gpu", jnp.bfloat16, {}, "for TPUs"),
        (XLA, "cpu", jnp.bfloat16, dict(length=16384), "2,147,483,648 numbers"),
        (CUDNN, "gpu", jnp.bfloat16, dict(length=2**22), "2,147,483,648 numbers"),
        (SPLASH, "tpu", jnp.bfloat16, dict(context=2), "not multiples of 128"),
        (SPLASH, "tpu", jnp.uint32, {}, "uint32"),  # nobody but the compiler says so
        (BAND, "tpu", jnp.bfloat16, dict(mask=Mask(window=64)), "200 positions are not a multiple of 128"),
        (BAND, "tpu", jnp.bfloat16, dict(mask=Mask(window=64), soft_cap=30.0), "no soft cap"),
    ],
)
def test_a_named_backend_that_cannot_do_it_says_why(
    cfg: Any, platform: str, dtype: Any, options: dict[str, Any], reason: str
) -> None:
    settings = {"mask": Mask()} | {name: value for name, value in options.items() if name != "length"}
    with pytest.raises(ValueError, match=f"^attention.use: {cfg.use} cannot be used here: .*{reason}"):
        chosen(cfg, *shapes(options.get("length", 200), dtype), platform=platform, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "name", ["causal", "bidirectional window", "packed", "packed bidirectional", "soft cap, packed window"]
)
def test_splash_compiles_for_a_tpu(libtpu: None, name: str, head_dim: int) -> None:
    slice_ = topologies.get_topology_desc(topology_name="v5e:2x2", platform="tpu")
    compile_for(slice_.devices[:1], None, CASES[name], head_dim)


@pytest.mark.slow
@pytest.mark.parametrize("slice_name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_kernels_of_a_band_fit_the_chip(libtpu: None, slice_name: str) -> None:
    """With the longest rows and the widest window that they take, and keys that heads share."""
    more = dict(chip_config_name="megacore") if slice_name.startswith("v4") else {}
    chip = topologies.get_topology_desc(topology_name=slice_name, platform="tpu", **more).devices[0]
    with jax.set_mesh(sharding.make_mesh(dict(data=1, fsdp=1, tensor=1, context=1), [chip])):
        for window, length, head_dim in ((512, 4096, 128), (512, 8192, 64), (128, 640, 64), (128, 128, 32)):
            one = SingleDeviceSharding(chip)
            q, k = (
                jax.ShapeDtypeStruct((2, length, heads, head_dim), jnp.bfloat16, sharding=one)
                for heads in (4, 2)
            )
            ids = jax.ShapeDtypeStruct((2, length), jnp.int32, sharding=one)
            case = Case(Mask(causal=False, window=window), packed=True)
            loss = lambda q, k, v, ids, case=case: call(AUTO, q, k, v, ids, case).astype(jnp.float32).sum()
            made = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(q, k, k, ids).compile()
            assert {"band_forward", "band_backward"} <= set(re.findall(r"band_\w+ward", made.as_text()))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 2, 2, 1), (1, 1, 2, 2), (1, 1, 1, 4)])
def test_auto_compiles_splash_for_a_tpu_slice_and_splits_the_sequence(
    libtpu: None, sizes: tuple[int, ...]
) -> None:
    slice_ = topologies.get_topology_desc(topology_name="v5e:2x2", platform="tpu")
    devices = slice_.devices[: math.prod(sizes)]
    compile_for(devices, dict(zip(sharding.AXES, sizes, strict=False)), CASES["packed"], 128)


def compile_for(devices: Any, sizes: dict[str, int] | None, case: Case, head_dim: int) -> None:
    """Compiles output and gradients and checks that the kernel is in there, forward and backward."""

    def loss(q: Any, k: Any, v: Any, segments: Any) -> Any:
        cfg = SimpleNamespace(use="splash", block_q=512, block_kv=512) if sizes is None else AUTO
        return call(cfg, q, k, v, segments, case).astype(jnp.float32).sum()

    one = SingleDeviceSharding(devices[0]) if sizes is None else None
    arrays = [jax.ShapeDtypeStruct((2, 1024, n, head_dim), jnp.bfloat16, sharding=one) for n in (4, 2, 2)]
    segments = jax.ShapeDtypeStruct((2, 1024), jnp.int32, sharding=one)
    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    if sizes is None:
        lowered = gradient.lower(*arrays, segments)
    else:
        with jax.set_mesh(sharding.make_mesh(sizes, devices)):
            lowered = gradient.lower(*arrays, segments)
    assert lowered.as_text().count("tpu_custom_call") >= 2  # forward, backward
    lowered.compile()


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs an NVIDIA GPU")
def test_cudnn_is_right_causal_and_keeps_documents_apart() -> None:
    """On a GPU machine: the checks of benchmarks/attention_gpu.py, in a process that may use the GPU."""
    env = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.attention_gpu"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
