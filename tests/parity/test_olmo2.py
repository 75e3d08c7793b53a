"""OLMo 2 against transformers' on random configurations, and how far its tokens see."""

from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from hypothesis import strategies as st

from headrace.config import reader
from headrace.models import olmo2
from headrace.nn import module, sharding
from headrace.nn.stack import Execution
from tests.support import parity
from tests.training.test_step import Bench


@st.composite
def sizes(draw: Any) -> dict[str, Any]:
    """Settings of transformers; the first of each list is what the first example has."""
    heads = draw(st.sampled_from([4, 2, 1]))
    return dict(
        vocab_size=96,
        hidden_size=heads * draw(st.sampled_from([16, 8])),
        intermediate_size=draw(st.integers(20, 60)),
        num_hidden_layers=draw(st.sampled_from([3, 2, 1])),
        num_attention_heads=heads,
        num_key_value_heads=draw(st.sampled_from([n for n in (2, 1, 4) if heads % n == 0])),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-2])),
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": draw(st.sampled_from([1000.0, 100.0]))},
        tie_word_embeddings=draw(st.booleans()),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        attn_implementation="eager",
    )


@parity.ANEW
@hypothesis.given(settings=sizes())
def test_parity_of_olmo_2(settings, tmp_path_factory):
    theirs = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**settings))
    parity.check(parity.fill(theirs, norm=1.0), tmp_path_factory.mktemp("olmo2"), length=20)


OLMO2 = ("model=null", "model.use=olmo2", "model.layers=2", "model.embed=32", "model.heads=4")
OLMO2 += ("model.kv_heads=2", "model.mlp=64")


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2, 2, 2)], ids=str)
def test_the_mesh_does_not_change_the_loss(tiny, sizes, capfd, no_compilation_cache):
    cfg = tiny(*OLMO2)
    losses = [row["loss"] for row in Bench(cfg, dict(zip(sharding.AXES, sizes, strict=False))).run(2)[1]]
    np.testing.assert_allclose(losses, [row["loss"] for row in Bench(cfg).run(2)[1]], atol=3e-5, rtol=0)
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


def test_tokens_see_neither_what_comes_nor_other_documents():
    cfg = olmo2.Config(layers=2, embed=32, heads=4, kv_heads=2, mlp=48, vocab=50)
    params = module.init(olmo2.Model, cfg, jax.random.key(0))
    exec_opts = Execution(reader.part_class("attention", "auto")(), "float32")
    tokens = jax.random.randint(jax.random.key(1), (1, 24), 4, 50)
    segments = jnp.where(jnp.arange(24) < 10, 1, 2)[None]
    positions = jnp.where(jnp.arange(24) < 10, jnp.arange(24), jnp.arange(24) - 10)[None]
    run = jax.jit(
        lambda tokens: params(cfg, tokens, exec_opts=exec_opts, segments=segments, positions=positions)
    )
    before, first, last = run(tokens), run(tokens.at[0, 3].set(7)), run(tokens.at[0, 20].set(7))
    np.testing.assert_array_equal(before[:, 10:], first[:, 10:])
    np.testing.assert_array_equal(before[:, :20], last[:, :20])
    assert np.abs(before[:, 3:10] - first[:, 3:10]).max() > 1e-3
    assert np.abs(before[:, 20:] - last[:, 20:]).max() > 1e-3
