"""DeBERTa against transformers' on random configurations, its attention, and its training in pairs."""

import warnings
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hypothesis import strategies as st

from millrace import config
from millrace.errors import UserError
from millrace.layers import disentangled
from millrace.models import deberta
from tests import parity

with warnings.catch_warnings():  # torch.jit.script, of which transformers makes use, is on its way out
    warnings.simplefilter("ignore", DeprecationWarning)
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position


@st.composite
def sizes(draw: Any) -> dict[str, Any]:
    """Settings of transformers. The first of each list is what the first example has: rows longer than the
    reach of distances."""
    heads, buckets = draw(st.sampled_from([4, 2, 1])), draw(st.sampled_from([8, 4, 16, 64]))
    return dict(
        vocab_size=96,
        hidden_size=heads * draw(st.sampled_from([16, 8, 5])),
        intermediate_size=draw(st.integers(20, 60)),
        num_hidden_layers=draw(st.sampled_from([2, 3, 1])),
        num_attention_heads=heads,
        position_buckets=buckets,
        max_relative_positions=draw(st.sampled_from([-1, buckets, 2 * buckets])),
        max_position_embeddings=max(14, buckets),
        layer_norm_eps=draw(st.sampled_from([1e-7, 1e-2])),
        pos_att_type=draw(st.sampled_from(["p2c|c2p", ["c2p", "p2c"]])),
        norm_rel_ebd="layer_norm",
        relative_attention=True,
        share_att_key=True,
        position_biased_input=False,
        type_vocab_size=0,
        legacy=False,
    )


@parity.ANEW
@hypothesis.given(settings=sizes())
def test_parity_of_deberta(settings, tmp_path_factory):
    theirs = transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**settings))
    parity.check(parity.fill(theirs, norm=1.0), tmp_path_factory.mktemp("deberta"), length=20)


@hypothesis.settings(max_examples=20, deadline=None, database=None)
@hypothesis.given(st.integers(2, 40), st.integers(2, 100))
def test_parity_of_buckets(half, more):
    distance = np.arange(-700, 701)
    found = disentangled.vectors(distance, 2 * half, half + more)
    theirs = make_log_bucket_position(torch.tensor(distance), 2 * half, half + more)
    wanted = torch.clamp(theirs.long() + 2 * half, 0, 4 * half - 1).numpy()
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("buckets", "reach", "found"),
    [
        (256, 512, {0: 0, 64: 64, 128: 128, 150: 143, 256: 192, 300: 207, -300: -207, 500: 254, 511: 255}),
        (16, 64, {9: 9, 12: 10, 20: 12, 31: 13, 50: 15, 63: 15}),
    ],
)
def test_distances_fall_into_the_published_buckets(buckets, reach, found):
    rows = disentangled.vectors(np.array(list(found)), buckets, reach) - buckets
    assert rows.tolist() == list(found.values())


def arrays(length: int, *, buckets: int = 4, heads: int = 2, width: int = 5) -> list[Any]:
    """q, k, v and the two tables."""
    draw = np.random.default_rng(length).normal
    rows, table = (2, length, heads, width), (2 * buckets, heads, width)
    return [jnp.asarray(draw(size=shape), jnp.float32) for shape in (rows, rows, rows, table, table)]


def plainly(reach: int, segments: Any, q: Any, k: Any, v: Any, k_table: Any, q_table: Any) -> Any:
    """By the definition, each score with the vectors of its own distance."""
    index = np.arange(q.shape[1])
    rows = disentangled.vectors(index[:, None] - index, len(k_table) // 2, reach)
    scores = jnp.einsum("bsnh,btnh->bnst", q, k)
    scores += jnp.einsum("bsnh,stnh->bnst", q, k_table[rows])
    scores += jnp.einsum("btnh,stnh->bnst", k, q_table[rows])
    scores = jnp.where(segments[:, None, :, None] == segments[:, None, None, :], scores, -1e9)
    weights = jax.nn.softmax(scores / np.sqrt(3 * q.shape[-1]), axis=-1)
    return jnp.einsum("bnst,btnh->bsnh", weights, v)


@pytest.mark.parametrize(
    ("length", "how"),
    [(24, {"use": "xla"}), (130, {"use": "auto"}), (30, {"use": "blockwise", "block_q": 8})],
    ids=str,
)
def test_attention_and_its_gradients_are_those_of_the_definition(length, how):
    how = dict(how)
    cfg = config.part_class("attention", how.pop("use"))(**how)
    segments = jnp.asarray(np.arange(length) // (length // 3))[None] + jnp.zeros((2, 1), jnp.int32)
    given = arrays(length)
    weight = jnp.asarray(np.random.default_rng(0).normal(size=given[0].shape))

    def ours(q: Any, k: Any, v: Any, k_table: Any, q_table: Any) -> Any:
        return disentangled.attend(cfg, q, k, v, k_table=k_table, q_table=q_table, reach=7, segments=segments)

    def both(function: Any) -> Any:
        out, pull = jax.vjp(function, *given)
        return [out, *pull(weight)]

    wanted = jax.jit(lambda: both(lambda *given: plainly(7, segments, *given)))()
    for found, value in zip(jax.jit(lambda: both(ours))(), wanted, strict=True):
        np.testing.assert_allclose(found, value, atol=2e-5)


@pytest.mark.parametrize("use", ["xla", "blockwise"])
def test_attention_has_no_scatter_and_no_gather_as_large_as_the_scores(use):
    cfg = config.part_class("attention", use)()
    given = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in arrays(1024, buckets=256)]

    def ours(q: Any, k: Any, v: Any, k_table: Any, q_table: Any) -> Any:
        return disentangled.attend(cfg, q, k, v, k_table=k_table, q_table=q_table, reach=512).sum()

    program = jax.jit(jax.grad(ours, argnums=(0, 1, 2, 3, 4))).lower(*given).as_text()
    assert "scatter" not in program
    sizes = [shape for line in program.splitlines() if "stablehlo.gather" in line for shape in [line]]
    assert sizes and all("1024x1024" not in line for line in sizes)


def test_a_backend_without_distances_is_refused_in_words():
    q, k, v, k_table, q_table = arrays(8)
    with pytest.raises(UserError, match="attention.use: splash cannot be used here.*auto, xla or blockwise"):
        cfg = config.part_class("attention", "splash")()
        disentangled.attend(cfg, q, k, v, k_table=k_table, q_table=q_table, reach=8)


def test_a_deberta_that_cannot_be_imported_is_refused_in_words():
    settings = deberta.to_hf(deberta.Config(layers=2, embed=32, heads=4, mlp=48, vocab=64), 64)
    assert deberta.from_hf(settings) == dict(
        use="deberta", vocab=64, layers=2, embed=32, heads=4, mlp=48, buckets=256, reach=512,
        mask_decoder=False, norm_eps=1e-7,
    )  # fmt: skip
    for changes, message in (
        ({"hidden_act": "relu"}, 'hidden_act: found "relu", only "gelu"'),
        ({"share_att_key": False}, "share_att_key: found false, only true"),
        ({"pos_att_type": "c2p"}, "pos_att_type: found .*only c2p with p2c"),
        ({"position_buckets": -1}, "position_buckets: found -1, expected a whole number"),
        ({"conv_kernel_size": 3}, "convolution cannot be imported"),
        ({"num_attention_heads": 5}, "heads: expected a divisor of embed, 32"),
    ):
        with pytest.raises(UserError, match=message):
            deberta.from_hf(settings | changes)
    plain = transformers.DebertaV2Config().to_dict()
    with pytest.raises(UserError, match="relative_attention: found false, only true"):
        deberta.from_hf(plain)
