"""Gemma 2 and 3 against transformers' on random configurations, and what is special about them."""

from typing import Any

import hypothesis
import numpy as np
import pytest
import transformers
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.models import gemma2, gemma3
from headrace.nn import module, sharding
from headrace.nn.attention_mask import Mask
from tests.support import parity
from tests.training.test_step import Bench


@st.composite
def sizes(draw: Any, nested: bool) -> dict[str, Any]:
    """Settings of transformers: any number of layers beside the period, heads of any grouping."""
    # The first of each list is what the first example has.
    heads, layers = draw(st.sampled_from([4, 2, 1])), draw(st.sampled_from([5, 4, 3, 2, 1]))
    every = draw(st.sampled_from([2, 3, 1, 4]))
    local, whole = "sliding_attention", "full_attention"
    theta = st.sampled_from([100.0, 1000.0, 10_000.0])
    rope = {"rope_type": "default", "rope_theta": draw(theta)}
    factor = draw(st.sampled_from([4.0, 1.0]))
    scaled = rope if factor == 1 else {"rope_type": "linear", "rope_theta": draw(theta), "factor": factor}
    return dict(
        vocab_size=96,
        hidden_size=heads * draw(st.sampled_from([16, 8])),
        intermediate_size=draw(st.integers(20, 60)),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=draw(st.sampled_from([n for n in (2, 1, 4) if heads % n == 0])),
        head_dim=draw(st.sampled_from([32, 8, 16])),
        sliding_window=draw(st.sampled_from([8, 7, 3, 1, 30])),
        query_pre_attn_scalar=draw(st.sampled_from([8, 16, 24])),
        max_position_embeddings=64,
        rope_parameters={local: rope, whole: scaled} if nested else rope,
        layer_types=[whole if (n + 1) % every == 0 else local for n in range(layers)],
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        attn_implementation="eager",
    )


@parity.ANEW
@hypothesis.given(
    settings=sizes(nested=False), caps=st.sampled_from([(2.0, 3.0), (50.0, 30.0), (None, None)])
)
def test_parity_of_gemma_2(settings, caps, tmp_path_factory):
    more = dict(attn_logit_softcapping=caps[0], final_logit_softcapping=caps[1])
    theirs = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**settings | more))
    parity.check(parity.fill(theirs, norm=0.0), tmp_path_factory.mktemp("gemma2"), length=20)


@parity.ANEW
@hypothesis.given(settings=sizes(nested=True), cap=st.sampled_from([None, 3.0]))
def test_parity_of_gemma_3(settings, cap, tmp_path_factory):
    cfg = transformers.Gemma3TextConfig(**settings, final_logit_softcapping=cap)
    theirs = transformers.Gemma3ForCausalLM(cfg)
    parity.check(parity.fill(theirs, norm=0.0), tmp_path_factory.mktemp("gemma3"), length=20)


GEMMA = ("model=null", "model.layers=3", "model.embed=32", "model.heads=4", "model.kv_heads=2")
GEMMA += ("model.mlp=64", "model.head_dim=8", "model.window=8", "model.global_every=2")


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 4, 2, 1), (1, 2, 2, 2)], ids=str)
def test_the_mesh_does_not_change_the_loss(tiny, sizes, capfd, no_compilation_cache):
    cfg = tiny(*GEMMA, "model.use=gemma2", "loss.soft_cap=3.0")
    losses = [row["loss"] for row in Bench(cfg, dict(zip(sharding.AXES, sizes, strict=False))).run(2)[1]]
    np.testing.assert_allclose(losses, [row["loss"] for row in Bench(cfg).run(2)[1]], atol=3e-5, rtol=0)
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("sizes", "parameters"),
    [
        (dict(layers=26, embed=2304, heads=8, kv_heads=4, mlp=9216, vocab=256_000), 2_614_341_888),
        (dict(layers=46, embed=4608, heads=32, kv_heads=16, mlp=36_864, head_dim=128, vocab=256_000), None),
    ],
    ids=["2B", "27B"],
)
def test_other_published_sizes(sizes, parameters):
    found = module.count(gemma2.Model, gemma2.Config(**sizes))
    assert found == parameters if parameters else 27.2e9 < found < 27.3e9


def test_flops_count_no_more_than_a_window_of_keys():
    """Against the mask itself, counted."""
    places = np.arange(200)
    for mask in (Mask(), Mask(window=30), Mask(False), Mask(False, 30), Mask(window=300), Mask(False, 900)):
        seen = np.asarray(mask.allows(places[:, None], places[None, :])).sum() / 200
        assert mask.keys(200) == pytest.approx(seen, abs=1.1)  # itself, and half a key at each edge
    cfg = gemma3.Config(layers=8, embed=32, heads=4, kv_heads=2, mlp=48, vocab=64, head_dim=8, window=30)
    scores = gemma3.flops_per_token(cfg, 200) - gemma3.flops_per_token(cfg, 0)
    keys = Mask(window=30).keys(200) * 7 + Mask().keys(200)  # the sixth layer sees all
    assert scores == pytest.approx(12 * 32 * keys)


SETTINGS = transformers.Gemma3TextConfig(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=7, num_attention_heads=4
).to_dict()


def test_a_config_of_transformers_4_is_read():
    new = gemma3.from_hf_config(SETTINGS | {"sliding_window": 16})
    old = {key: value for key, value in SETTINGS.items() if key not in ("layer_types", "rope_parameters")}
    old |= dict(sliding_window=16, sliding_window_pattern=3, rope_theta=5e5, rope_local_base_freq=7e3)
    old |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    more = dict(global_every=3, rope_theta=5e5, rope_local_theta=7e3, rope_factor=8.0)
    assert gemma3.from_hf_config(old) == new | more


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 6 + ["sliding_attention"]}, "layer_types: found .*every n-th"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: found true"),
        ({"attn_logit_softcapping": 50.0}, "gemma3_text with attention_soft_cap 50.0: only None"),
        ({"sliding_window": None}, "sliding_window: found nothing"),
        ({"hidden_activation": "silu"}, "gemma3_text with activation swiglu: only geglu"),
        ({"tie_word_embeddings": False}, "gemma3_text with tie_embeddings False: only True"),
        ({"rope_parameters": {"full_attention": 3}}, "rope_parameters: found .* expected values in braces"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "scaled positions in windows",
        ),
    ],
    ids=str,
)
def test_a_gemma_that_cannot_be_imported_is_refused_in_words(changes, message):
    with pytest.raises(UserError, match=message):
        gemma3.from_hf_config(SETTINGS | changes)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"window": 0}, "window"),
        ({"global_every": 0}, "global_every"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"query_scale": -1}, "query_scale"),
        ({"rope_theta": 0.0}, "rope_theta"),
    ],
)
@pytest.mark.parametrize("family", [gemma2, gemma3], ids=["gemma2", "gemma3"])
def test_sizes_that_cannot_be_are_refused(family, settings, key):
    with pytest.raises(ValueError, match=f"^{key}: expected"):
        family.Config(**dict(layers=2, embed=64, heads=4, kv_heads=2, mlp=112) | settings)
    with pytest.raises(ValueError, match=r"^attention_soft_cap: expected"):
        gemma2.Config(layers=2, embed=64, heads=4, kv_heads=2, mlp=112, attention_soft_cap=0.0)
