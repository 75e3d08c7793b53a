"""Llama, Qwen 3 and EuroBERT against transformers' on random configurations."""

from typing import Any

import hypothesis
import pytest
import transformers
from hypothesis import strategies as st

from tests.support import parity

KINDS = {"Llama": "ForCausalLM", "Qwen3": "ForCausalLM", "EuroBert": "ForMaskedLM"}


@st.composite
def sizes(draw: Any) -> dict[str, Any]:
    """Settings of transformers; the first of each list is what the first example has."""
    heads = draw(st.sampled_from([4, 2, 1]))
    kind = draw(st.sampled_from(["default", "linear", "yarn", "llama3"]))
    rope = {"rope_type": kind, "rope_theta": draw(st.sampled_from([1000.0, 100.0, 10_000.0]))}
    if kind != "default":
        rope |= {"factor": draw(st.sampled_from([4.0, 2.0]))}
    if kind in ("yarn", "llama3"):
        rope |= {"original_max_position_embeddings": draw(st.sampled_from([16, 32]))}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return dict(
        vocab_size=96,
        hidden_size=heads * draw(st.sampled_from([16, 8])),
        intermediate_size=draw(st.integers(20, 60)),
        num_hidden_layers=draw(st.sampled_from([3, 2, 1])),
        num_attention_heads=heads,
        num_key_value_heads=draw(st.sampled_from([n for n in (2, 1, 4) if heads % n == 0])),
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-2])),
        max_position_embeddings=64,
        rope_parameters=rope,
        tie_word_embeddings=draw(st.booleans()),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        attn_implementation="eager",
    )


@pytest.mark.parametrize("kind", KINDS)
@parity.ANEW
@hypothesis.given(
    settings=sizes(), activation=st.sampled_from(["silu", "gelu_pytorch_tanh", "relu", "relu2"])
)
def test_parity_of_llama_and_its_kin(kind, settings, activation, tmp_path_factory):
    if kind == "EuroBert":  # which has neither
        plain = {"rope_type": "default", "rope_theta": settings["rope_parameters"]["rope_theta"]}
        settings |= {"rope_parameters": plain, "tie_word_embeddings": False, "mask_token_id": 3}
    else:
        settings |= {"hidden_act": activation}
    if kind == "Qwen3":
        settings |= {"head_dim": 8}
    cfg = getattr(transformers, f"{kind}Config")(**settings)
    theirs = getattr(transformers, kind + KINDS[kind])(cfg)
    parity.check(parity.fill(theirs, norm=1.0), tmp_path_factory.mktemp(kind), length=20)
