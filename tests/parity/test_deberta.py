"""DeBERTa against transformers' on random configurations, its attention, and its training in pairs."""

import dataclasses
import math
import typing
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
from transformers.activations import ACT2FN

from headrace.attention import _disentangled
from headrace.checkpoint.open_run import open_run
from headrace.config import reader, recipe, sections
from headrace.convert import from_huggingface, to_huggingface
from headrace.errors import UserError
from headrace.model_formats import hf_tensors
from headrace.model_wrappers import load_family
from headrace.models import deberta
from headrace.nn import mlp, module, sharding
from headrace.nn.activations import PLAIN
from headrace.nn.stack import Execution
from headrace.objectives import Batch, SpecialTokens, TrainTask, rtd
from headrace.training import run as training_run
from tests.support import parity
from tests.training.test_step import Bench, assert_close, computed_shapes, weights

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
        hidden_act=draw(st.sampled_from(["gelu", "silu", "relu", "relu2"])),
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
    found = _disentangled.distance_buckets(distance, 2 * half, half + more)
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
    rows = _disentangled.distance_buckets(np.array(list(found)), buckets, reach) - buckets
    assert rows.tolist() == list(found.values())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("xsmall", 70_682_112), ("small", 141_304_320), ("base", 183_831_552), ("large", 434_012_160)],
)
def test_the_encoder_has_its_published_size(name, parameters):
    cfg = recipe.load(f"recipes/deberta-v3-{name}.yaml").model
    both, generator = (module.count(deberta.Model, one) for one in (cfg, deberta.generator_config(cfg)))
    head = cfg.embed**2 + 4 * cfg.embed + 1  # dense with a bias, a norm with a bias, and the answer with one
    assert both - generator - head == parameters


def arrays(length: int, *, buckets: int = 4, heads: int = 2, width: int = 5) -> list[Any]:
    """q, k, v and the two tables."""
    draw = np.random.default_rng(length).normal
    rows, table = (2, length, heads, width), (2 * buckets, heads, width)
    return [jnp.asarray(draw(size=shape), jnp.float32) for shape in (rows, rows, rows, table, table)]


def plainly(reach: int, segments: Any, q: Any, k: Any, v: Any, k_table: Any, q_table: Any) -> Any:
    """By the definition, each score with the vectors of its own distance."""
    index = np.arange(q.shape[1])
    rows = _disentangled.distance_buckets(index[:, None] - index, len(k_table) // 2, reach)
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
    cfg = reader.part_class("attention", how.pop("use"))(**how)
    segments = jnp.asarray(np.arange(length) // (length // 3))[None] + jnp.zeros((2, 1), jnp.int32)
    given = arrays(length)
    weight = jnp.asarray(np.random.default_rng(0).normal(size=given[0].shape))

    def ours(q: Any, k: Any, v: Any, k_table: Any, q_table: Any) -> Any:
        return _disentangled.attend(
            cfg, q, k, v, k_table=k_table, q_table=q_table, max_distance=7, segments=segments
        )

    def both(function: Any) -> Any:
        out, pull = jax.vjp(function, *given)
        return [out, *pull(weight)]

    wanted = jax.jit(lambda: both(lambda *given: plainly(7, segments, *given)))()
    for found, value in zip(jax.jit(lambda: both(ours))(), wanted, strict=True):
        np.testing.assert_allclose(found, value, atol=2e-5)


@pytest.mark.parametrize("use", ["xla", "blockwise"])
def test_attention_has_no_scatter_and_no_gather_as_large_as_the_scores(use):
    cfg = reader.part_class("attention", use)()
    given = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in arrays(1024, buckets=256)]

    def ours(q: Any, k: Any, v: Any, k_table: Any, q_table: Any) -> Any:
        return _disentangled.attend(cfg, q, k, v, k_table=k_table, q_table=q_table, max_distance=512).sum()

    program = jax.jit(jax.grad(ours, argnums=(0, 1, 2, 3, 4))).lower(*given).as_text()
    assert "scatter" not in program
    sizes = [shape for line in program.splitlines() if "stablehlo.gather" in line for shape in [line]]
    assert sizes and all("1024x1024" not in line for line in sizes)


def test_attention_over_long_rows_makes_nothing_of_the_length_squared():
    length, cfg = 16384, reader.part_class("attention", "auto")()
    given = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in arrays(length, buckets=256)]

    def ours(q: Any, k: Any, v: Any, k_table: Any, q_table: Any) -> Any:
        return _disentangled.attend(cfg, q, k, v, k_table=k_table, q_table=q_table, max_distance=512).sum()

    traced = jax.jit(jax.grad(ours, argnums=(0, 1, 2, 3, 4))).trace(*given)
    sizes = [math.prod(shape) for shape in computed_shapes(traced.jaxpr.jaxpr)]
    assert max(sizes) <= 2 * 2 * 2 * 512 * length  # rows, heads; a block, and as much again for its distances


def test_a_backend_without_distances_is_refused_in_words():
    q, k, v, k_table, q_table = arrays(8)
    with pytest.raises(UserError, match=r"attention.use: splash cannot be used here.*auto, xla or blockwise"):
        cfg = reader.part_class("attention", "splash")()
        _disentangled.attend(cfg, q, k, v, k_table=k_table, q_table=q_table, max_distance=8)


def test_a_deberta_that_cannot_be_imported_is_refused_in_words():
    settings = deberta.to_hf_config(deberta.Config(layers=2, embed=32, heads=4, mlp=48, vocab=64), 64)
    assert deberta.from_hf_config(settings) == dict(
        use="deberta", vocab=64, layers=2, embed=32, heads=4, mlp=48, position_buckets=256,
        max_relative_positions=512, activation="gelu", mask_decoder=False, norm_eps=1e-7,
    )  # fmt: skip
    for changes, message in (
        ({"hidden_act": "tanh"}, 'hidden_act: found "tanh", expected gelu, silu, relu or relu2'),
        ({"share_att_key": False}, "share_att_key: found false, only true"),
        ({"pos_att_type": "c2p"}, "pos_att_type: found .*only c2p with p2c"),
        ({"position_buckets": -1}, "position_buckets: found -1, expected a whole number"),
        ({"conv_kernel_size": 3}, "convolution cannot be imported"),
        ({"num_attention_heads": 5}, "heads: expected a divisor of embed, 32"),
    ):
        with pytest.raises(UserError, match=message):
            deberta.from_hf_config(settings | changes)
    plain = transformers.DebertaV2Config().to_dict()
    with pytest.raises(UserError, match="relative_attention: found false, only true"):
        deberta.from_hf_config(plain)


@pytest.mark.parametrize("name", typing.get_args(mlp.PlainActivation))
def test_every_activation_is_exported_by_the_name_of_what_it_computes(name):
    cfg = deberta.Config(layers=2, embed=32, heads=4, mlp=48, vocab=64, activation=name)
    exported = deberta.to_hf_config(cfg, 64)
    theirs, x = ACT2FN[exported["hidden_act"]], np.linspace(-8, 8, 99, dtype=np.float32)[None, :, None]
    np.testing.assert_allclose(PLAIN[name](jnp.asarray(x)), theirs(torch.tensor(x)).numpy(), atol=1e-6)
    back = deberta.from_hf_config(exported)[
        "activation"
    ]  # bits are not of the model, but of how it is trained
    assert back == exported["hidden_act"] == name.removesuffix("_bits")


def test_the_mask_decoder_asks_the_last_layer_twice_with_absolute_positions():
    """The last layer of transformers' model, asked by hand; what it is asked with has the position added, and
    keys and values are the last but one hidden states both times."""
    settings = deberta.to_hf_config(
        deberta.Config(
            layers=3, embed=32, heads=4, mlp=48, vocab=96, position_buckets=8, max_relative_positions=24
        ),
        20,
    )
    theirs = parity.fill(
        transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**settings)), norm=1.0
    )
    cfg = deberta.Config(**SMALL, vocab=96, layers=3, mask_decoder=True)
    places = np.random.default_rng(1).normal(size=(24, 32)).astype(np.float32)
    named = {name: w.detach().numpy() for name, w in theirs.named_parameters()}
    named[deberta.HF_TENSORS["places"][0]] = places
    shapes = module.shapes(deberta.Model, cfg)

    def leaf(path: Any, wanted: Any) -> Any:
        theirs, pattern = deberta.HF_TENSORS[module.path_name(path)]
        one = lambda name, shape: hf_tensors.rearrange(
            named[name], pattern, dict(zip(pattern.split(" -> ")[1].split(), shape, strict=True))
        )
        if "{" not in theirs:
            return jnp.asarray(one(theirs, wanted.shape))
        return jnp.stack([jnp.asarray(one(theirs.format(n), wanted.shape[1:])) for n in range(3)])

    params = jax.tree_util.tree_map_with_path(leaf, shapes)
    tokens = np.random.default_rng(0).integers(4, 96, (2, 20))
    with torch.no_grad():
        states = theirs.deberta(torch.tensor(tokens), output_hidden_states=True).hidden_states[-2]
        asked = states + torch.tensor(places[:20])
        encoder, mask = theirs.deberta.encoder, torch.ones(2, 1, 20, 20)
        for _ in range(2):
            table = encoder.get_rel_embedding()
            asked = encoder.layer[-1](states, mask, query_states=asked, rel_embeddings=table)[0]
        wanted = theirs.lm_predictions(asked, theirs.deberta.embeddings.word_embeddings).numpy()
    found = jax.jit(lambda p, t: p(cfg, t, exec_opts=HOW) @ p.unembed.T)(params, jnp.asarray(tokens))
    assert np.abs(wanted).max() > 2
    np.testing.assert_allclose(found, wanted, atol=2e-5)


SMALL = dict(embed=32, heads=4, mlp=48, position_buckets=8, max_relative_positions=24)
HOW = Execution(reader.part_class("attention", "auto")(), "float32")
SGD = {"optimizer.use": "sgd", "optimizer.momentum": 0.0, "optimizer.weight_decay": 0.0}
SGD |= {"optimizer.learning_rate": 0.5, "schedule.use": "constant", "schedule.warmup": 0}


def pair(changes: dict[str, Any] | None = None) -> list[str]:
    """Overrides for a small pair."""
    sizes = SMALL | dict(use="deberta", layers=2, generator_layers=1, max_relative_positions=64)
    keys = {f"model.{name}": value for name, value in sizes.items()} | {"objective.use": "rtd"}
    return ["model=null", *(f"{key}={value}" for key, value in (keys | (changes or {})).items())]


def test_a_vocabulary_is_drawn_from_by_its_probabilities():
    logits = np.random.default_rng(0).normal(size=(2, 101)).astype(np.float32) * 2
    draws = np.broadcast_to((np.arange(5000) + 0.5) / 5000, (2, 5000)).astype(np.float32)
    said = rtd.draw_from_logits(jnp.broadcast_to(logits[:, None], (2, 5000, 101)), jnp.asarray(draws))
    for row in range(2):
        wanted = np.exp(logits[row]) / np.exp(logits[row]).sum()
        shares = np.bincount(np.asarray(said[row]), minlength=101) / 5000
        np.testing.assert_allclose(shares, wanted, atol=2.1 / 5000)


def test_both_begin_with_the_same_embedding_and_only_the_generator_moves_it():
    cfg = reader.part_class("models", "deberta")(**SMALL, layers=1, generator_layers=1, vocab=64)
    task = TrainTask(
        model=cfg,
        objective=reader.part_class("objectives", "rtd")(),
        loss=reader.part_class("losses", "cross_entropy", sections.LossKeys)(),
        exec_opts=HOW,
        special_tokens=SpecialTokens(64, pad=0, bos=1, eos=2, mask=3),
        family=load_family(cfg),
    )
    params = module.init(deberta.Model, cfg, jax.random.key(0))
    np.testing.assert_array_equal(params.full_embedding(cfg), params.generator.embedding)
    assert float(jnp.abs(params.generator.embedding).max()) > 0
    tokens = jnp.asarray(np.random.default_rng(0).integers(4, 64, (2, 20)))
    batch = Batch(tokens, jnp.ones_like(tokens), jnp.broadcast_to(jnp.arange(20), tokens.shape))

    def loss(params: Any, pairs: Any) -> Any:
        following = rtd.generator_loss(task, params, pairs).carry
        return rtd.discriminator_loss(task, params, following).loss

    grads = jax.jit(jax.grad(loss))(params, rtd.prepare(task, batch, jax.random.key(0)))
    assert all(float(jnp.abs(g).max()) == 0 for g in jax.tree.leaves(grads.generator))
    assert all(float(jnp.abs(g).max()) > 0 for _, g in module.named_leaves(grads.blocks))
    assert float(jnp.abs(grads.embedding).max()) > 0


def test_the_discriminator_reads_what_was_drawn_and_sees_the_updated_embedding(tiny):
    """A whole step by hand: the generator's update, and then, with its new embedding, the other's. Each has
    its own norm to be clipped by."""
    bench = Bench(tiny(*pair(SGD | {"optimizer.max_grad_norm": 0.1})))
    task, start, batch = bench.task, bench.state().params, bench.batch()
    start = jax.tree.map(jnp.array, start)

    @jax.jit
    def by_hand(params: Any, key: Any) -> Any:
        pairs = rtd.prepare(task, batch, jax.random.fold_in(jax.random.wrap_key_data(key), 0))

        def moved(own: Any, loss: Any) -> Any:
            (told, norm), grads = loss(own)
            grads = jax.tree.map(lambda g: g / told.sums["count"], grads)
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
            return told, jax.tree.map(lambda w, g: w - 0.5 * g * jnp.minimum(1, 0.1 / norm), own, grads), norm

        def loss_of(function: Any, put: Any, given: Any) -> Any:
            def value(own: Any) -> Any:
                told = function(task, put(own), given)
                return told.loss, (told, 0)

            def both(own: Any) -> Any:
                grads, aux = jax.grad(value, has_aux=True)(own)
                return aux, grads

            return both

        put = lambda own: dataclasses.replace(params, generator=own)
        told, generator, first = moved(params.generator, loss_of(rtd.generator_loss, put, pairs))
        put_other = lambda own: dataclasses.replace(own, generator=generator)
        other = dataclasses.replace(params, generator=None)
        found, other, second = moved(other, loss_of(rtd.discriminator_loss, put_other, told.carry))
        new = dataclasses.replace(other, generator=generator)
        return new, told.carry.examples, found.sums, first, second

    state = bench.state()
    wanted, examples, sums, first, second = by_hand(start, state.key)
    new, rows = bench.run(1)
    for name, value in module.named_leaves(wanted):
        np.testing.assert_allclose(weights(new)[name], value, atol=2e-6, err_msg=name)
    assert rows[0]["grad_norm"] == pytest.approx(float(first), rel=1e-4) and float(first) > 0.1
    assert rows[0]["discriminator_grad_norm"] == pytest.approx(float(second), rel=1e-4)
    hidden, replaced = np.asarray(examples.weights) > 0, np.asarray(examples.inputs != examples.targets)
    assert not replaced[~hidden].any() and replaced[hidden].mean() > 0.8  # it knows nothing yet
    share = rows[0]["discriminator_replaced"]
    assert share == pytest.approx(replaced.sum() / float(sums["count"]), abs=1e-6)


@pytest.mark.parametrize("sharing", ["gdes", pytest.param("nes", marks=pytest.mark.slow)])
def test_both_of_a_pair_learn(tiny, sharing):
    _, rows = Bench(tiny(*pair({"model.embedding_sharing": sharing, "schedule.steps": 40}))).run(40)
    first, last = rows[0], {name: np.mean([row[name] for row in rows[-5:]]) for name in rows[0]}
    assert last["loss"] < first["loss"] - 0.5
    # Better than to say of all of them how often one was replaced.
    share = last["discriminator_replaced"]
    chance = -share * np.log(share) - (1 - share) * np.log(1 - share)
    assert last["discriminator_loss"] < min(chance, first["discriminator_loss"] - 0.2)


@pytest.mark.slow
def test_accumulation_gives_the_pair_the_update_of_the_whole_batch(tiny):
    whole, rows = Bench(tiny(*pair(SGD))).run(2)
    parts, part_rows = Bench(tiny(*pair(SGD | {"batch.microbatches": 4}))).run(2)
    assert_close(whole, parts, 1e-5)
    assert rows[1]["discriminator_loss"] == pytest.approx(part_rows[1]["discriminator_loss"], abs=1e-5)


@pytest.mark.parametrize("sizes", [(1, 2, 2, 2), pytest.param((2, 2, 2, 1), marks=pytest.mark.slow)], ids=str)
def test_the_mesh_does_not_change_the_losses_of_the_pair(tiny, sizes, capfd, no_compilation_cache):
    cfg = tiny(*pair(SGD))
    alone = Bench(cfg).run(3)[1]
    split = Bench(cfg, dict(zip(sharding.AXES, sizes, strict=False))).run(3)[1]
    for name in ("loss", "discriminator_loss", "discriminator_replaced"):
        np.testing.assert_allclose([row[name] for row in split], [row[name] for row in alone], atol=3e-5)
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_pair_is_exported_as_two_models(tiny, tmp_path):
    short = {"schedule.steps": 1, "schedule.warmup": 0, "eval.batches": 1}
    cfg = tiny(*pair(short | {"model.generator_layers": 2, "model.mask_decoder": "true"}))
    assert training_run.run(cfg) == 0
    run = open_run(recipe.load_run(cfg.run_dir))
    to_huggingface.export(run, str(tmp_path / "out"), "float32")
    tokens = np.random.default_rng(0).integers(4, 300, (2, 30))
    model, info = transformers.DebertaV2Model.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert all(name.startswith("mask_predictions.") for name in info["unexpected_keys"])
    params, own = run.params, run.recipe.model

    @jax.jit
    def states(params: Any) -> Any:
        x = params.embed(own, params.full_embedding(own), jnp.asarray(tokens), jnp.float32)
        return params.encode(own, x, params.blocks, exec_opts=HOW, segments=None)

    assert float(jnp.abs(params.embedding).max()) > 0  # merged with the generator's
    with torch.no_grad():
        wanted = model.eval()(torch.tensor(tokens)).last_hidden_state.numpy()
    np.testing.assert_allclose(states(params), wanted, atol=2e-5)
    loaded, info = transformers.DebertaV2ForMaskedLM.from_pretrained(
        tmp_path / "out" / "generator", output_loading_info=True
    )
    assert not any(info.values()), info
    embedding = loaded.deberta.embeddings.word_embeddings.weight.detach().numpy()
    np.testing.assert_array_equal(embedding, params.generator.embedding)
    assert from_huggingface.import_model(
        str(tmp_path / "out" / "generator"), str(tmp_path / "back")
    ).model.mask_decoder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective.use": "masked"}, "objective.use: .*expected rtd, which trains the generator"),
        (
            {"model.generator_layers": 0},
            "objective.use: .*expected another, or a model with model.generator_layers",
        ),
        ({"model.mask_decoder": "true"}, "model.generator_layers: .*expected 2 or more, since mask_decoder"),
        ({"model.position_buckets": 7}, "model.position_buckets: .*expected an even number"),
        (
            {"model.max_relative_positions": 5},
            "model.max_relative_positions: .*expected more than half of position_buckets",
        ),
        ({"objective.mask_rate": 0.0}, "objective.mask_rate: .*expected a share above 0"),
    ],
    ids=str,
)
def test_a_pair_that_does_not_fit_is_refused_in_words(tiny, change, message):
    with pytest.raises(UserError, match=message):
        tiny(*pair(change))


def test_rows_beyond_the_positions_of_the_mask_decoder_are_refused_in_words(tiny):
    cfg = tiny(
        *pair({"model.max_relative_positions": 32, "model.mask_decoder": "true", "model.generator_layers": 2})
    )
    with pytest.raises(
        UserError, match=r"model.max_relative_positions: found 32, expected data.sequence_length, 64, or more"
    ):
        Bench(cfg)
