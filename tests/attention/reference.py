"""Attention by its definition in float64, random inputs, and the cases that backends are compared in."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.attention import attend
from headrace.nn import sharding
from headrace.nn.attention_mask import Mask

AUTO = SimpleNamespace(use="auto")
XLA = SimpleNamespace(use="xla")
CUDNN = SimpleNamespace(use="cudnn")
BLOCKWISE = SimpleNamespace(use="blockwise", block_q=32, block_kv=32)
SPLASH = SimpleNamespace(use="splash", block_q=128, block_kv=128)
BAND = SimpleNamespace(use="band")
BACKENDS = [pytest.param(cfg, id=cfg.use) for cfg in (XLA, BLOCKWISE, SPLASH)]  # for any mask, on a CPU
CAUSAL = Mask()


@dataclass(frozen=True)
class Case:
    mask: Mask = CAUSAL
    packed: bool = False
    soft_cap: float | None = None
    scale: float | None = None
    heads: tuple[int, int] = (4, 2)  # of queries, and of keys and values


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
    """q, k, v, a gradient of the output, and segments."""

    arrays: list[jax.Array]
    segments: jax.Array

    @property
    def dtype(self) -> Any:
        return self.arrays[0].dtype


def random_inputs(
    length: int = 128,
    heads: tuple[int, int] = (4, 2),
    *,
    batch: int = 2,
    head_dim: int = 16,
    dtype: Any = jnp.float32,
    segments: Any = None,
) -> Inputs:
    """Draw inputs. By default every row has two documents and padding."""
    n, kv = heads
    shapes = [(batch, length, count, head_dim) for count in (n, kv, kv, n)]
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]
    if segments is None:
        position = np.arange(length)
        row = np.where(position < length * 7 // 8, 1 + (position >= length * 3 // 8), 0)
        segments = np.tile(row, (batch, 1))
    return Inputs(arrays, jnp.asarray(segments, jnp.int32))


def expected_results(inputs: Inputs, case: Case) -> list[np.ndarray]:
    """Compute output, dq, dk and dv in float64, straight from the formulas."""
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
    exponentials = np.where(visible_keys(inputs, case, s), np.exp(scores), 0)
    weights = exponentials / exponentials.sum(-1, keepdims=True)
    out = np.einsum("bnst,btnh->bsnh", weights, v)
    d_weights = np.einsum("bsnh,btnh->bnst", d_out, v)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) * slope * scale
    d_q = np.einsum("bnst,btnh->bsnh", d_scores, k)
    d_k = np.einsum("bnst,bsnh->btnh", d_scores, q)
    d_v = np.einsum("bnst,bsnh->btnh", weights, d_out)
    d_k, d_v = (x.reshape(*x.shape[:2], -1, group, h).sum(3) for x in (d_k, d_v))
    return [out, d_q, d_k, d_v]


def visible_keys(inputs: Inputs, case: Case, length: int) -> np.ndarray:
    """Booleans that broadcast to scores [b n s t]."""
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    visible = (j <= i) if case.mask.causal else np.ones((length, length), bool)
    if case.mask.window is not None:
        is_near = i - j < case.mask.window if case.mask.causal else abs(i - j) <= case.mask.window // 2
        visible = visible & is_near
    if not case.packed:
        return visible
    ids = np.asarray(inputs.segments)
    return visible & (ids[:, None, :, None] == ids[:, None, None, :])


def run_backend(cfg: Any, inputs: Inputs, case: Case) -> list[np.ndarray]:
    """Compute output, dq, dk and dv with a backend, compiled. On a mesh, positions are in its order in
    between."""

    @jax.jit
    def run(q: Any, k: Any, v: Any, d_out: Any, segments: Any) -> Any:
        def forward(q: Any, k: Any, v: Any) -> Any:
            q, k, v, ids = (sharding.to_balanced_order(x) for x in (q, k, v, segments))
            return sharding.from_balanced_order(attend_case(cfg, q, k, v, ids, case))

        out, pull = jax.vjp(forward, q, k, v)
        return out, *pull(d_out)

    results = run(*inputs.arrays, inputs.segments)
    assert [x.dtype for x in results] == [inputs.dtype] * 4
    return [np.asarray(x, np.float64) for x in results]


def attend_case(cfg: Any, q: Any, k: Any, v: Any, segments: Any, case: Case) -> Any:
    ids = segments if case.packed else None
    return attend(cfg, q, k, v, mask=case.mask, segments=ids, soft_cap=case.soft_cap, scale=case.scale)


def assert_equals_definition(cfg: Any, inputs: Inputs, case: Case, tolerance: float = 2e-5) -> None:
    """Assert that output and gradients of a backend are those of the definition."""
    results, expected = run_backend(cfg, inputs, case), expected_results(inputs, case)
    for name, x, y in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=name)
