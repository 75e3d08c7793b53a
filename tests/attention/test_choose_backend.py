"""Which backend `attention.use: auto` chooses, and why a named one is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from headrace.attention import AttentionCall, choose_backend
from headrace.nn.attention_mask import Mask
from tests.attention.reference import AUTO, BAND, CUDNN, SPLASH, XLA


def choose(
    cfg: Any,
    length: int,
    mask: Mask,
    *,
    dtype: Any = jnp.bfloat16,
    platform: str = "cpu",
    has_segments: bool = False,
    **options: Any,
) -> str:
    q, k = (jax.ShapeDtypeStruct((2, length, heads, 64), dtype) for heads in (4, 2))
    call = AttentionCall(q, k, mask, 1.0, has_segments=has_segments, platform=platform, **options)
    return choose_backend(cfg, call)


CAUSAL = Mask()
NEAR, FAR = (Mask(causal=False, window=window) for window in (128, 4096))


@pytest.mark.parametrize(
    ("length", "mask", "options", "name"),
    [
        (1024, CAUSAL, {}, "xla"),
        (1025, CAUSAL, {}, "blockwise"),
        (8192, NEAR, {}, "band"),
        (64, NEAR, {}, "xla"),  # fewer scores than chunks would have
        (8192, FAR, {}, "blockwise"),
        (8192, NEAR, dict(context=2), "blockwise"),
    ],
)
def test_auto_on_a_cpu(length: int, mask: Mask, options: dict[str, Any], name: str) -> None:
    assert choose(AUTO, length, mask, **options) == name


@pytest.mark.parametrize(
    ("length", "mask", "options", "name"),
    [
        (8192, NEAR, {}, "band"),
        (512, CAUSAL, dict(dtype=jnp.float32), "blockwise"),
        (512, CAUSAL, dict(soft_cap=30.0), "blockwise"),
        (65536, CAUSAL, dict(has_segments=True), "blockwise"),
    ],
)
def test_auto_on_a_gpu_that_is_not_attached(
    length: int, mask: Mask, options: dict[str, Any], name: str
) -> None:
    assert choose(AUTO, length, mask, platform="gpu", **options) == name


@pytest.mark.parametrize(
    ("length", "mask", "options", "name"),
    [
        (8192, NEAR, {}, "band"),
        (8192, FAR, {}, "splash"),
        (8192, NEAR, dict(soft_cap=30.0), "splash"),
        (8192, NEAR, dict(context=2), "splash"),
        (16384, NEAR, {}, "splash"),
        (8192, NEAR, dict(dtype=jnp.float32), "splash"),
        (512, CAUSAL, dict(has_segments=True), "splash"),
        (200, CAUSAL, dict(context=2), "blockwise"),
    ],
)
def test_auto_on_a_tpu(length: int, mask: Mask, options: dict[str, Any], name: str) -> None:
    assert choose(AUTO, length, mask, platform="tpu", **options) == name


@pytest.mark.parametrize(
    ("cfg", "platform", "length", "mask", "options", "reason"),
    [
        (CUDNN, "cpu", 200, CAUSAL, {}, "needs an NVIDIA GPU"),
        (CUDNN, "gpu", 200, CAUSAL, dict(dtype=jnp.float32), "these activations are float32"),
        (CUDNN, "gpu", 200, CAUSAL, dict(soft_cap=30.0), "no soft cap"),
        (CUDNN, "gpu", 200, CAUSAL, dict(context=2), "mesh.context"),
        (CUDNN, "gpu", 2**22, CAUSAL, {}, "2,147,483,648 numbers"),
        (SPLASH, "gpu", 200, CAUSAL, {}, "for TPUs"),
        (SPLASH, "tpu", 200, CAUSAL, dict(context=2), "not multiples of 128"),
        (SPLASH, "tpu", 200, CAUSAL, dict(dtype=jnp.uint32), "uint32"),  # only the compiler refuses it
        (XLA, "cpu", 16384, CAUSAL, {}, "2,147,483,648 numbers"),
        (BAND, "tpu", 200, Mask(window=64), {}, "200 positions are not a multiple of 128"),
        (BAND, "tpu", 200, Mask(window=64), dict(soft_cap=30.0), "no soft cap"),
    ],
)
def test_a_named_backend_that_does_not_support_the_call_is_refused_with_the_reason(
    cfg: Any, platform: str, length: int, mask: Mask, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"^attention.use: {cfg.use} cannot be used here: .*{reason}"):
        choose(cfg, length, mask, platform=platform, **options)
