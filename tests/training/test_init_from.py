"""Runs that start with the weights of another model, and frozen weights."""

import dataclasses
import math
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from headrace import model_wrappers
from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.open_run import open_run
from headrace.config import reader, recipe
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.data.tokenizer import train as tokenizer_train
from headrace.errors import UserError
from headrace.hardware.slices import parse_slice
from headrace.models import llama
from headrace.nn import module, sharding
from headrace.nn.module import Axes
from headrace.plan import estimate
from headrace.quantize import run as quantize_run
from headrace.training import grow, setup
from headrace.training.init_from import load
from headrace.training.init_from.check import check_source, read_model_config
from headrace.training.init_from.load import load_weights
from headrace.training.init_from.vocab_rows import read_vocab
from tests.training.test_step import Bench, weights

SIZES: dict[str, Any] = dict(layers=2, embed=32, heads=4, kv_heads=2, mlp=48)


def model(**settings: Any) -> Any:
    return reader.part_class("models", settings.pop("use", "llama"))(**SIZES | settings)


def save_tokenizer(folder: Path, text: str) -> dict[str, int]:
    """Train a tokenizer on a text. Returns its vocabulary."""
    folder.mkdir(exist_ok=True)
    tokenizer_io.save(tokenizer_train.train_tokenizer([text] * 3, kind="bpe", vocab=280), folder)
    vocab = read_vocab(str(folder))
    assert vocab is not None
    return vocab


@pytest.fixture
def run(tmp_path) -> tuple[str, Any, dict[str, int]]:
    """A run folder, its weights, and the vocabulary of its tokenizer."""
    folder = tmp_path / "old"
    vocab = save_tokenizer(folder, "the mill turns, the water falls, the wheel, the stone")
    tree = {"run_dir": str(folder), "model": SIZES | {"use": "llama", "vocab": 300}}
    tree |= {"data": {"path": "data/none", "sequence_length": 64}, "schedule": {"steps": 10}}
    (folder / "recipe.yaml").write_text(reader.dump(tree | {"optimizer": {"learning_rate": 1e-3}}))
    params = module.init(llama.Model, model(vocab=300), jax.random.key(7))
    checkpoints = Checkpoints(str(folder))
    checkpoints.save_params(params, {"step": 0})
    checkpoints.close()
    return str(folder), params, vocab


def initialize_from(
    path: str, cfg: Any, data: str, init_weights: str | None = None, **sizes: int
) -> tuple[Any, Any, str]:
    """Initialize a model on a mesh. Returns its fresh weights, those with the source's, and the summary."""
    mesh = sharding.make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])
    family = llama.Model
    with jax.set_mesh(mesh):
        shardings = sharding.shardings(module.axes(family, cfg), module.shapes(family, cfg), mesh)
        fresh = jax.jit(lambda: module.init(family, cfg, jax.random.key(1)), out_shardings=shardings)()
        before = jax.device_get(fresh)
        params, summary = load_weights(check_source(path, cfg, init_weights), cfg, fresh, mesh, data)
    assert all(jax.tree.leaves(jax.tree.map(lambda w, expected: w.sharding == expected, params, shardings)))
    return before, params, summary


def test_tokens_get_the_rows_of_the_same_text_and_new_ones_the_mean(run, tmp_path):
    path, source, source_vocab = run
    vocab = save_tokenizer(tmp_path / "data", "a kiln burns, the fire falls, the bricks, the stone")
    assert source_vocab != vocab and len(source_vocab.keys() & vocab.keys()) > 200
    _, params, summary = initialize_from(path, model(vocab=288), str(tmp_path / "data"), fsdp=2, tensor=2)
    mean = np.asarray(source.embedding).mean(axis=0)
    for token, row in vocab.items():
        expected = source.embedding[source_vocab[token]] if token in source_vocab else mean
        np.testing.assert_allclose(params.embedding[row], expected, atol=1e-6, err_msg=token)
    for row in set(range(288)) - set(vocab.values()):
        np.testing.assert_allclose(params.embedding[row], mean, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, params.blocks, source.blocks)
    shared = len(source_vocab.keys() & vocab.keys())
    assert summary.endswith(
        f"; {shared} tokens by their text, {288 - shared} new ones as the mean of the old"
    )


def test_with_the_same_tokenizer_rows_keep_their_numbers(run):
    path, source, _ = run
    _, params, summary = initialize_from(path, model(vocab=320), path)
    np.testing.assert_array_equal(params.embedding[:300], source.embedding)
    np.testing.assert_allclose(params.embedding[310], np.asarray(source.embedding).mean(axis=0), atol=1e-6)
    assert summary.endswith("300 tokens by their numbers, 20 new ones as the mean of the old")
    assert initialize_from(path, model(vocab=300), path)[2] == f"init_from: 11 of 11 weights from {path}"


def test_embeddings_can_be_initialized_without_the_rest(run):
    path, source, _ = run
    before, params, summary = initialize_from(
        path, model(vocab=300, layers=3, mlp=20), path, "embedding", fsdp=2
    )
    np.testing.assert_array_equal(params.embedding, source.embedding)
    jax.tree.map(np.testing.assert_array_equal, params.blocks, before.blocks)
    assert summary.startswith(f"init_from: 1 of 11 weights from {path}; blocks.attn_norm, blocks.")
    assert "initialized" in summary


def test_a_hugging_face_folder_can_be_the_source(tmp_path):
    settings = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    settings |= dict(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    hf_model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    hf_model.save_pretrained(tmp_path)
    source = read_model_config(str(tmp_path))
    cfg = model(vocab=100, rope_theta=source.rope_theta)
    _, params, summary = initialize_from(str(tmp_path), cfg, str(tmp_path), fsdp=4)
    table = hf_model.model.embed_tokens.weight.detach()
    np.testing.assert_array_equal(params.embedding[:96], table)
    np.testing.assert_allclose(params.embedding[99], torch.mean(table, 0), atol=1e-6)
    query = hf_model.model.layers[1].self_attn.q_proj.weight.detach().numpy()
    np.testing.assert_array_equal(np.asarray(params.blocks.w_q[1]).reshape(32, 32), query.T)
    assert "4 new ones" in summary


def test_a_vocabulary_is_remapped_along_its_own_axis_only():
    weight = jnp.arange(12.0).reshape(3, 4)
    grown = grow.grow_weight(weight, Axes(("embed", "vocab")), (3, 5), (1, 1), np.array([3, -1, 0, 0, -1]))
    np.testing.assert_array_equal(grown[1], [7, 5.5, 4, 4, 5.5])


@pytest.mark.parametrize(
    ("settings", "init_weights", "message"),
    [
        (
            dict(use="eurobert"),
            None,
            "init_from: .*old holds a llama, expected a eurobert, or `init_weights`",
        ),
        (dict(mlp=40), None, "init_from: blocks.w_gate is 48 along mlp in .*old, expected at most 40"),
        (dict(tie_embeddings=False), None, "init_from: head is a weight of only one of"),
        (dict(tie_embeddings=False), "head", "init_weights: .*old, a llama, has no weight head"),
        (
            {},
            "embeding",
            "init_weights: found embeding, which matches no weight of this model; expected embedding",
        ),
    ],
    ids=str,
)
def test_weights_that_do_not_fit_are_refused(run, settings, init_weights, message):
    with pytest.raises(UserError, match=message):
        check_source(run[0], model(**{"vocab": 300} | settings), init_weights)


def test_a_quantized_folder_is_refused_as_such(run, tmp_path):
    opened = open_run(recipe.load_run(run[0]))
    method = recipe.load_method("rtn", ["bits=4", "group_size=0"])
    quantize_run.quantize(
        opened, quantize_run.QuantizeRequest(str(tmp_path / "four"), method, 1, "float32", "none"), print
    )
    with pytest.raises(UserError, match=r"init_from: .*four holds a quantized model, expected the run"):
        check_source(str(tmp_path / "four"), model(vocab=300))


def test_an_encoder_can_start_with_the_embeddings_of_a_decoder(run):
    assert check_source(run[0], model(use="eurobert", vocab=400), "embed*").selected == {"embedding"}


SGD = ("optimizer.use=sgd", "optimizer.learning_rate=0.5")


@pytest.mark.parametrize("use", ["adamw", "muon", "adafactor"])
def test_frozen_weights_do_not_change_and_have_no_moments(tiny, use):
    cfg = tiny(f"optimizer.use={use}", "freeze='embedding, blocks.w_[qk]'", "batch.microbatches=2")
    bench = Bench(cfg)
    before = weights(bench.state())
    state, _ = bench.run(2)
    unchanged = {name for name, value in weights(state).items() if (value == before[name]).all()}
    assert unchanged == {"embedding", "blocks.w_q", "blocks.w_k"}
    moments = [name for name, _ in module.named_leaves(state.optimizer)]
    assert not any(name.endswith(tuple(unchanged)) for name in moments)
    assert any(name.endswith("blocks.w_v") for name in moments)


def test_freezing_does_not_change_the_other_weights_on_any_mesh(tiny):
    unfrozen, rows = Bench(tiny(*SGD, "optimizer.max_grad_norm=null")).run(1)
    cfg = tiny(*SGD, "optimizer.max_grad_norm=null", "freeze=blocks.w_gate")
    state, frozen_rows = Bench(cfg).run(1)
    sharded, sharded_rows = Bench(cfg, {"fsdp": 2, "tensor": 2}).run(1)
    for name, value in weights(state).items():
        np.testing.assert_allclose(value, weights(sharded)[name], atol=1e-5, err_msg=name)
        if name != "blocks.w_gate":
            np.testing.assert_allclose(value, weights(unfrozen)[name], atol=1e-6, err_msg=name)
    assert frozen_rows[0]["grad_norm"] < rows[0]["grad_norm"]
    assert sharded_rows[0]["grad_norm"] == pytest.approx(frozen_rows[0]["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("freeze=blocks.w_u", "freeze: found blocks.w_u, which matches no weight .* expected blocks.w_up"),
        ("freeze='*'", "freeze: found \\*, expected some weight to be left to train"),
    ],
)
def test_patterns_that_freeze_nothing_or_everything_are_refused(tiny, override, message):
    with pytest.raises(UserError, match=message):
        Bench(tiny(override))


def test_init_weights_without_init_from_are_refused(tiny):
    with pytest.raises(UserError, match=r"init_weights: .*expected init_from to be set"):
        tiny("init_weights=embedding")


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", [("lora.rank=4", "lora.base_bits=4"), ("qat.bits=4", "qat.rank=4")], ids=str)
def test_a_frozen_base_is_loaded_one_weight_at_a_time(run, tiny, tmp_path, monkeypatch, kind):
    path, source, _ = run
    cfg = tiny(
        f"init_from={path}",
        *(f"model.{key}={value}" for key, value in (SIZES | {"vocab": 300}).items()),
        *kind,
    )
    bench = Bench(cfg)
    with jax.set_mesh(bench.devices):
        _, init = setup.make_state(cfg, bench.task, bench.update, bench.devices, has_init=True)
        temp_bytes = [f.lower().compile().memory_analysis().temp_size_in_bytes for f in (init, bench.fresh)]
        assert temp_bytes[0] < 0.2 * temp_bytes[1]

        iter_weights, names = load.iter_source_weights, []

        def iter_with_check(*args: Any) -> Any:
            previous = lambda: None
            for name, w in iter_weights(*args):
                assert previous() is None, f"the weight before {name} was not freed"
                previous = weakref.ref(w)
                names.append(name)
                yield name, w
                del w

        def initialize(path: str) -> Any:
            fresh, source = init().params, check_source(path, bench.task.model)
            params, _ = load_weights(source, bench.task.model, fresh, bench.devices, "none")
            assert all(w.is_deleted() or name.endswith(".down") for name, w in module.named_leaves(fresh))
            return params

        monkeypatch.setattr(load, "iter_source_weights", iter_with_check)
        params, random_params = initialize(path), dict(module.named_leaves(bench.fresh().params))
    assert names == [name for name, _ in module.named_leaves(source)]
    plain = model_wrappers.unwrap_params(llama.Model, bench.task.model, params)
    for (name, w), (_, expected) in zip(module.named_leaves(plain), module.named_leaves(source), strict=True):
        assert jnp.abs(w - expected).max() < 0.2 * jnp.abs(expected).max() + 1e-9, name
    downs = {name: w for name, w in module.named_leaves(params) if name.endswith(".down")}
    assert len(downs) == 7 and all((w == random_params[name]).all() and w.any() for name, w in downs.items())

    second = tmp_path / "second"  # a source with a frozen base itself, which is merged first
    second.mkdir()
    (second / "recipe.yaml").write_text(reader.to_yaml(dataclasses.replace(cfg, run_dir=str(second))))
    checkpoints = Checkpoints(str(second))
    checkpoints.save_params(params, {"step": 0})
    checkpoints.close()
    with jax.set_mesh(bench.devices):
        merged = model_wrappers.unwrap_params(llama.Model, bench.task.model, initialize(str(second)))
    for (name, w), (_, expected) in zip(module.named_leaves(merged), module.named_leaves(plain), strict=True):
        assert jnp.abs(w - expected).max() < 0.1 * jnp.abs(expected).max() + 1e-9, name


def test_a_plan_counts_neither_moments_nor_gradients_of_frozen_weights():
    path = Path(__file__).parents[2] / "recipes/llama3-8b.yaml"
    trained, frozen = (
        estimate.estimate_step(recipe.load(path, overrides), parse_slice("v5p-32"))
        for overrides in ([], ["freeze=blocks.*"])
    )
    assert frozen.weight_bytes == trained.weight_bytes
    assert frozen.optimizer_bytes < 0.2 * trained.optimizer_bytes
    assert frozen.temp_bytes < trained.temp_bytes - 0.5 * trained.weight_bytes
