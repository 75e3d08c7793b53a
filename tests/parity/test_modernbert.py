"""ModernBERT and its causal twin against transformers' on random configurations."""

import dataclasses
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from hypothesis import strategies as st

from headrace.checkpoint.open_run import open_run
from headrace.config import reader, recipe
from headrace.errors import UserError
from headrace.models import modernbert, modernbert_decoder
from headrace.nn import module, sharding
from headrace.nn.bias import BIAS_COLUMNS
from headrace.nn.module import Axes
from headrace.nn.stack import Execution
from headrace.training import grow
from headrace.training import run as training_run
from headrace.training.init_from.check import check_source
from tests.support import parity
from tests.training.test_step import Bench


@st.composite
def sizes(draw: Any) -> dict[str, Any]:
    """Settings of transformers: any number of layers beside the period. The first of each list is what the
    first example has."""
    heads, layers = draw(st.sampled_from([4, 2, 1])), draw(st.sampled_from([5, 4, 3, 2]))
    every = draw(st.sampled_from([3, 2, 1, 4]))
    local, whole = "sliding_attention", "full_attention"
    theta = st.sampled_from([1000.0, 100.0, 10_000.0])
    ropes = {kind: {"rope_type": "default", "rope_theta": draw(theta)} for kind in (local, whole)}
    return dict(
        vocab_size=96,
        hidden_size=heads * draw(st.sampled_from([16, 8])),
        intermediate_size=draw(st.integers(20, 60)),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        local_attention=draw(st.sampled_from([8, 7, 3, 2, 64])),
        norm_eps=draw(st.sampled_from([1e-5, 1e-2])),
        max_position_embeddings=64,
        rope_parameters=ropes,
        layer_types=[whole if n % every == 0 else local for n in range(layers)],
        pad_token_id=0,
        attn_implementation="eager",
    )


@parity.ANEW
@hypothesis.given(settings=sizes())
def test_parity_of_modernbert(settings, tmp_path_factory):
    theirs = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**settings))
    parity.check(parity.fill(theirs, norm=1.0), tmp_path_factory.mktemp("modernbert"), length=20)


@parity.ANEW
@hypothesis.given(settings=sizes())
def test_parity_of_the_decoder(settings, tmp_path_factory):
    theirs = transformers.ModernBertDecoderForCausalLM(transformers.ModernBertDecoderConfig(**settings))
    parity.check(parity.fill(theirs, norm=1.0), tmp_path_factory.mktemp("decoder"), length=20)


SMALL = dict(layers=4, embed=32, heads=4, mlp=48, window=8)


def overrides(**sizes: int) -> list[str]:
    chosen = [f"model.{key}={value}" for key, value in (SMALL | sizes).items()]
    return ["model=null", "model.use=modernbert", *chosen, "objective.use=masked", "objective.mask_rate=0.3"]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 4, 2, 1), (1, 2, 2, 2)], ids=str)
def test_the_mesh_does_not_change_the_loss(tiny, sizes, capfd, no_compilation_cache):
    cfg = tiny(*overrides())
    losses = [row["loss"] for row in Bench(cfg, dict(zip(sharding.AXES, sizes, strict=False))).run(2)[1]]
    np.testing.assert_allclose(losses, [row["loss"] for row in Bench(cfg).run(2)[1]], atol=3e-5, rtol=0)
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


def test_the_body_has_its_published_size():
    run = recipe.load("recipes/modernbert-base.yaml")
    head = run.model.embed**2 + run.model.embed + run.model.vocab  # dense, its norm, the bias
    assert module.count(modernbert.Model, run.model) - head == 149_014_272


def test_a_window_reaches_half_of_it_to_either_side():
    """Of two layers the second has the window: what is further away than that cannot be seen at all, once the
    first, which sees everything, is made to pass nothing on."""
    for family, ahead, back in ((modernbert, 4, 4), (modernbert_decoder, 0, 3)):
        cfg = family.Config(layers=2, embed=32, heads=4, mlp=48, window=8, vocab=64)
        params = module.init(family.Model, cfg, jax.random.key(0))
        blocks = dataclasses.replace(params.blocks, w_o=params.blocks.w_o.at[0].set(0) * 50)
        params = dataclasses.replace(params, blocks=blocks)
        exec_opts = Execution(reader.part_class("attention", "xla")(), "float32")
        tokens = jnp.arange(24)[None] + 4
        run = jax.jit(
            lambda tokens, params=params, cfg=cfg, exec_opts=exec_opts: params(
                cfg, tokens, exec_opts=exec_opts
            )
        )
        apart = jnp.abs(run(tokens) - run(tokens.at[0, 12].set(60))).max(-1)[0]
        seen = np.flatnonzero(apart > 1e-6)
        # Who sees position 12: those after it by at most `back`, and before it by at most `ahead`.
        assert (seen.min(), seen.max()) == (12 - ahead, 12 + back)


def test_the_bias_of_the_head_is_added_to_the_logits():
    cfg = modernbert.Config(**SMALL, vocab=64)
    params = module.init(modernbert.Model, cfg, jax.random.key(0))
    bias = jnp.arange(64.0)
    exec_opts = Execution(reader.part_class("attention", "xla")(), "float32")
    logits = []
    for one in (params, dataclasses.replace(params, head_bias=bias)):
        hidden = jax.jit(lambda one: one(cfg, jnp.arange(8)[None], exec_opts=exec_opts))(one)
        assert hidden.shape == (1, 8, 32 + BIAS_COLUMNS)
        logits.append(hidden @ one.unembed.T)
    np.testing.assert_allclose(logits[1] - logits[0], jnp.broadcast_to(bias, (1, 8, 64)), atol=1e-5)


def test_fresh_weights_stay_within_two_deviations():
    cfg = modernbert.Config(**SMALL, vocab=640)
    params = module.init(modernbert.Model, cfg, jax.random.key(0))
    for w, std in ((params.embedding, 0.02), (params.blocks.w_down, 0.02 / np.sqrt(8))):
        assert 1.9 * std < jnp.abs(w).max() <= 2 * std
        assert jnp.std(w) == pytest.approx(0.88 * std, rel=0.05)  # of a normal that is cut there


@hypothesis.settings(max_examples=30, deadline=None, database=None)
@hypothesis.given(st.integers(1, 6), st.integers(0, 14), st.integers(1, 5), st.integers(0, 9))
def test_weights_are_tiled_from_the_middle(rows, more_rows, columns, more_columns):
    small = np.arange(rows * columns).reshape(rows, columns)
    padding = [(more // 2, more - more // 2) for more in (more_rows, more_columns)]
    shape = (rows + more_rows, columns + more_columns)
    found = grow.grow_weight(jnp.asarray(small), Axes(("embed", "mlp")), shape, (2, 3))
    np.testing.assert_array_equal(found, np.pad(small, padding, mode="wrap"))


def test_layers_are_repeated_in_place():
    small = jnp.arange(22)[:, None]
    found = grow.grow_weight(small, Axes(("layers", "embed"), stacked=1), (28, 1), (22, 28))[:, 0]
    assert found.tolist() == [round(i * 22 / 28) for i in range(28)]
    # A weight that the first layer has not comes from the same layers as the others.
    later = grow.grow_weight(small[1:], Axes(("later_layers", "embed"), stacked=1), (27, 1), (22, 28))[:, 0]
    assert later.tolist() == found[1:].tolist()
    twice = grow.grow_weight(small[:2], Axes(("layers", "embed"), stacked=1), (8, 1), (2, 8))[:, 0]
    assert twice.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]


@pytest.mark.slow
def test_a_run_starts_from_the_weights_of_a_smaller_one(tiny, tmp_path):
    short = ["schedule.steps=1", "schedule.warmup=0", "optimizer.learning_rate=0.0", "mesh.fsdp=2"]
    small = tiny(*overrides(), *short, f"run_dir={tmp_path}/small")
    assert training_run.run(small) == 0
    short += [f"init_from={tmp_path}/small", f"run_dir={tmp_path}/large", "optimizer.ema_decay=0.5"]
    large = tiny(*overrides(layers=6, embed=48, heads=6, mlp=80), *short)
    assert training_run.run(large) == 0
    before, after = (open_run(recipe.load_run(cfg.run_dir)).params for cfg in (small, large))
    wider = np.pad(np.asarray(before.embedding), [(0, 0), (8, 8)], mode="wrap")
    np.testing.assert_array_equal(after.embedding, wider)
    layer, heads = np.asarray(before.blocks.w_q[1]), [(8, 8), (1, 1), (0, 0)]
    np.testing.assert_array_equal(after.blocks.w_q[2], np.pad(layer, heads, mode="wrap"))
    assert training_run.run(large) == 0  # which is finished, and looks at no other run

    for sizes, message in (
        ({"vocab": 300, "mlp": 40}, "blocks.w_gate is 48 along mlp in .*small, expected at most 40"),
    ):
        with pytest.raises(UserError, match=message):
            check_source(small.run_dir, reader.part_class("models", "modernbert")(**SMALL | sizes))
    twin = reader.part_class("models", "modernbert_decoder")(**SMALL)
    with pytest.raises(
        UserError, match=r"init_from: .*small holds a modernbert, expected a modernbert_decoder"
    ):
        check_source(small.run_dir, twin)
    with pytest.raises(UserError, match="not a run folder"):
        training_run.run(tiny(*overrides(), f"init_from={tmp_path}/nowhere", f"run_dir={tmp_path}/other"))


SETTINGS = transformers.ModernBertConfig(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4
).to_dict()


def test_the_published_config_of_transformers_4_is_read():
    new = modernbert.from_hf_config(SETTINGS)
    old = {key: value for key, value in SETTINGS.items() if key not in ("layer_types", "rope_parameters")}
    old |= dict(global_attn_every_n_layers=2, global_rope_theta=5e5, local_rope_theta=7e3)
    assert modernbert.from_hf_config(old) == new | dict(global_every=2, rope_theta=5e5, rope_local_theta=7e3)
    assert new == dict(use="modernbert", vocab=96, **SMALL | dict(window=128)) | dict(
        global_every=3, norm_eps=1e-5, rope_theta=160_000.0, rope_local_theta=10_000.0
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types: found .*every n-th"),
        ({"norm_bias": True}, "norm_bias: found true, only false"),
        ({"decoder_bias": False}, "decoder_bias: found false, only true"),
        ({"hidden_activation": "silu"}, 'hidden_activation: found "silu", only "gelu"'),
        ({"tie_word_embeddings": False}, "modernbert with tie_embeddings False: only True"),
        ({"local_attention": 1}, "window: expected 2 or more"),
        ({"num_attention_heads": 32}, "heads: expected embed, 32, to be an even multiple"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}}, "rope_scaling yarn"),
    ],
    ids=str,
)
def test_a_modernbert_that_cannot_be_imported_is_refused_in_words(changes, message):
    with pytest.raises(UserError, match=message):
        modernbert.from_hf_config(SETTINGS | changes)
