"""Rotary positions: the published numbers, transformers' own formulas, and exactness in bfloat16."""

import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.nn.rope import Rope, inverse_frequencies, rotate

LLAMA31 = Rope(500_000.0, "llama3", factor=8.0, original=8192)


def test_llama_31_scaling_gives_the_published_frequencies():
    frequencies, magnitude = inverse_frequencies(128, LLAMA31)
    published = {
        0: 1.0,
        20: 0.016560440883,
        28: 0.003211446106,  # the last that is kept
        29: 0.002166570630,
        30: 0.001371893683,
        31: 0.000856751460,
        32: 0.000524846022,
        33: 0.000312693650,
        34: 0.000178507791,
        35: 9.556212e-05,  # the first that is divided by 8
        63: 3.068925878e-07,
    }
    assert magnitude == 1
    for pair, value in published.items():
        assert frequencies[pair] == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "theta", "factor", "original"),
    [
        ("linear", 10_000.0, 4.0, 8192),
        ("llama3", 500_000.0, 32.0, 8192),
        ("yarn", 1_000_000.0, 4.0, 32_768),
        ("yarn", 10_000.0, 40.0, 4096),
        ("yarn", 100.0, 16.0, 64),
    ],
)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_scaled_frequencies_are_those_of_transformers(kind, theta, factor, original, head_dim):
    rope = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind != "linear":
        rope["original_max_position_embeddings"] = original
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    settings = transformers.LlamaConfig(
        head_dim=head_dim, max_position_embeddings=int(factor * original), rope_parameters=rope
    )
    wanted, wanted_magnitude = ROPE_INIT_FUNCTIONS[kind](settings)
    frequencies, magnitude = inverse_frequencies(head_dim, Rope(theta, kind, factor, original))
    np.testing.assert_allclose(frequencies, wanted.numpy(), rtol=2e-6)
    assert magnitude == pytest.approx(wanted_magnitude, abs=1e-12)


def test_ntk_scaling_is_a_larger_base():
    stretched, magnitude = inverse_frequencies(64, Rope(10_000.0, "ntk", factor=8.0))
    base = 10_000.0 * 8.0 ** (64 / 62)
    np.testing.assert_allclose(stretched, base ** (-np.arange(0, 64, 2) / 64), rtol=1e-6)
    assert magnitude == 1
    # Its point: the slowest pair is stretched by the whole factor, the fastest not at all.
    plain, _ = inverse_frequencies(64, Rope(10_000.0))
    assert plain[-1] / stretched[-1] == pytest.approx(8.0, rel=1e-5)
    assert plain[0] == stretched[0] == 1


def test_positions_beyond_256_stay_exact_in_bfloat16():
    positions = jnp.array([[255, 256, 257, 258, 4095, 100_001]])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 2, 32)), jnp.bfloat16)
    turned = rotate(x, positions, Rope(10_000.0))
    assert turned.dtype == jnp.bfloat16

    pairs = np.asarray(x, np.float64)
    first, second = pairs[..., :16], pairs[..., 16:]
    frequencies = (10_000.0 ** (-np.arange(16) / 16)).astype(np.float32)
    angles = (np.asarray(positions, np.float32)[..., None, None] * frequencies).astype(np.float64)
    cos, sin = np.cos(angles), np.sin(angles)
    wanted = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    # One rounding at the end, half of 1/128 at most; with a position rounded to 256 it would be some 0.8 off.
    np.testing.assert_allclose(np.asarray(turned, np.float64), wanted, rtol=1 / 200, atol=1e-5)


def test_only_the_distance_between_positions_counts():
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 32)).astype(np.float32)

    def score(at_q: int, at_k: int) -> float:
        turned = [rotate(jnp.asarray(x), jnp.array([[at]]), LLAMA31) for x, at in ((q, at_q), (k, at_k))]
        return float((turned[0] * turned[1]).sum())

    assert score(7, 3) == pytest.approx(score(1007, 1003), abs=1e-3)
    assert abs(score(7, 3) - score(7, 4)) > 0.05
