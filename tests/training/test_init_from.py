"""Runs that begin with another model's weights, and weights that stay as they are."""

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


def tokenizer(folder: Path, text: str) -> dict[str, int]:
    folder.mkdir(exist_ok=True)
    tokenizer_io.save(tokenizer_train.train_tokenizer([text] * 3, kind="bpe", vocab=280), folder)
    found = read_vocab(str(folder))
    assert found is not None
    return found


@pytest.fixture
def run(tmp_path) -> tuple[str, Any, dict[str, int]]:
    """A run folder with a tokenizer, its weights and its tokens."""
    folder = tmp_path / "old"
    tokens = tokenizer(folder, "the mill turns, the water falls, the wheel, the stone")
    tree = {"run_dir": str(folder), "model": SIZES | {"use": "llama", "vocab": 300}}
    tree |= {"data": {"path": "data/none", "sequence_length": 64}, "schedule": {"steps": 10}}
    (folder / "recipe.yaml").write_text(reader.dump(tree | {"optimizer": {"learning_rate": 1e-3}}))
    params = module.init(llama.Model, model(vocab=300), jax.random.key(7))
    checkpoints = Checkpoints(str(folder))
    checkpoints.save_params(params, {"step": 0})
    checkpoints.close()
    return str(folder), params, tokens


def begun(path: str, cfg: Any, data: str, take: str | None = None, **sizes: int) -> tuple[Any, Any, str]:
    """Fresh weights of a model on a mesh, what became of them, and what was said."""
    devices = sharding.make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])
    family = llama.Model
    with jax.set_mesh(devices):
        homes = sharding.shardings(module.axes(family, cfg), module.shapes(family, cfg), devices)
        fresh = jax.jit(lambda: module.init(family, cfg, jax.random.key(1)), out_shardings=homes)()
        before = jax.device_get(fresh)
        made, said = load_weights(check_source(path, cfg, take), cfg, fresh, devices, data)
    assert all(jax.tree.leaves(jax.tree.map(lambda w, home: w.sharding == home, made, homes)))
    return before, made, said


def test_tokens_keep_their_rows_by_their_text_and_new_ones_get_the_mean(run, tmp_path):
    path, old, theirs = run
    ours = tokenizer(tmp_path / "data", "a kiln burns, the fire falls, the bricks, the stone")
    assert theirs != ours and len(theirs.keys() & ours.keys()) > 200
    _, made, said = begun(path, model(vocab=288), str(tmp_path / "data"), fsdp=2, tensor=2)
    mean = np.asarray(old.embedding).mean(axis=0)
    for token, number in ours.items():
        wanted = old.embedding[theirs[token]] if token in theirs else mean
        np.testing.assert_allclose(made.embedding[number], wanted, atol=1e-6, err_msg=token)
    for number in set(range(288)) - set(ours.values()):
        np.testing.assert_allclose(made.embedding[number], mean, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, made.blocks, old.blocks)
    shared = len(theirs.keys() & ours.keys())
    assert said.endswith(f"; {shared} tokens by their text, {288 - shared} new ones as the mean of the old")


def test_with_the_same_tokenizer_rows_keep_their_numbers(run):
    path, old, _ = run
    _, made, said = begun(path, model(vocab=320), path)
    np.testing.assert_array_equal(made.embedding[:300], old.embedding)
    np.testing.assert_allclose(made.embedding[310], np.asarray(old.embedding).mean(axis=0), atol=1e-6)
    assert said.endswith("300 tokens by their numbers, 20 new ones as the mean of the old")
    assert begun(path, model(vocab=300), path)[2] == f"init_from: 11 of 11 weights from {path}"


def test_embeddings_alone_can_be_taken(run):
    path, old, _ = run
    before, made, said = begun(path, model(vocab=300, layers=3, mlp=20), path, "embedding", fsdp=2)
    np.testing.assert_array_equal(made.embedding, old.embedding)
    jax.tree.map(np.testing.assert_array_equal, made.blocks, before.blocks)
    assert (
        said.startswith(f"init_from: 1 of 11 weights from {path}; blocks.attn_norm, blocks.")
        and "initialized" in said
    )


def test_a_folder_of_hugging_face_is_a_start_too(tmp_path):
    settings = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    settings |= dict(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    theirs.save_pretrained(tmp_path)
    found = read_model_config(str(tmp_path))
    _, made, said = begun(str(tmp_path), model(vocab=100, rope_theta=found.rope_theta), str(tmp_path), fsdp=4)
    table = theirs.model.embed_tokens.weight.detach()
    np.testing.assert_array_equal(made.embedding[:96], table)
    np.testing.assert_allclose(made.embedding[99], torch.mean(table, 0), atol=1e-6)
    query = theirs.model.layers[1].self_attn.q_proj.weight.detach().numpy()
    np.testing.assert_array_equal(np.asarray(made.blocks.w_q[1]).reshape(32, 32), query.T)
    assert "4 new ones" in said


def test_a_vocabulary_is_changed_along_its_own_axis_alone():
    weight = jnp.arange(12.0).reshape(3, 4)
    made = grow.grow_weight(weight, Axes(("embed", "vocab")), (3, 5), (1, 1), np.array([3, -1, 0, 0, -1]))
    np.testing.assert_array_equal(made[1], [7, 5.5, 4, 4, 5.5])


@pytest.mark.parametrize(
    ("settings", "take", "message"),
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
def test_what_cannot_be_taken_is_refused(run, settings, take, message):
    with pytest.raises(UserError, match=message):
        check_source(run[0], model(**{"vocab": 300} | settings), take)


def test_a_quantised_folder_is_named_as_what_it_is(run, tmp_path):
    opened = open_run(recipe.load_run(run[0]))
    method = recipe.load_method("rtn", ["bits=4", "group_size=0"])
    quantize_run.quantize(
        opened, quantize_run.QuantizeRequest(str(tmp_path / "four"), method, 1, "float32", "none"), print
    )
    with pytest.raises(UserError, match=r"init_from: .*four holds a quantized model, expected the run"):
        check_source(str(tmp_path / "four"), model(vocab=300))


def test_an_encoder_can_take_the_embeddings_of_a_decoder(run):
    assert check_source(run[0], model(use="eurobert", vocab=400), "embed*").selected == {"embedding"}


SGD = ("optimizer.use=sgd", "optimizer.learning_rate=0.5")


@pytest.mark.parametrize("use", ["adamw", "muon", "adafactor"])
def test_frozen_weights_stay_and_have_no_moments(tiny, use):
    cfg = tiny(f"optimizer.use={use}", "freeze='embedding, blocks.w_[qk]'", "batch.microbatches=2")
    bench = Bench(cfg)
    before = weights(bench.state())
    state, _ = bench.run(2)
    still = {name for name, value in weights(state).items() if (value == before[name]).all()}
    assert still == {"embedding", "blocks.w_q", "blocks.w_k"}
    kept = [name for name, _ in module.named_leaves(state.optimizer)]
    assert not any(name.endswith(tuple(still)) for name in kept)
    assert any(name.endswith("blocks.w_v") for name in kept)


def test_freezing_changes_nothing_for_the_others_and_no_mesh_does(tiny):
    free, rows = Bench(tiny(*SGD, "optimizer.max_grad_norm=null")).run(1)
    cfg = tiny(*SGD, "optimizer.max_grad_norm=null", "freeze=blocks.w_gate")
    (one, alone), (other, split) = Bench(cfg).run(1), Bench(cfg, {"fsdp": 2, "tensor": 2}).run(1)
    for name, value in weights(one).items():
        np.testing.assert_allclose(value, weights(other)[name], atol=1e-5, err_msg=name)
        if name != "blocks.w_gate":
            np.testing.assert_allclose(value, weights(free)[name], atol=1e-6, err_msg=name)
    assert alone[0]["grad_norm"] < rows[0]["grad_norm"]
    assert split[0]["grad_norm"] == pytest.approx(alone[0]["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("freeze=blocks.w_u", "freeze: found blocks.w_u, which matches no weight .* expected blocks.w_up"),
        ("freeze='*'", "freeze: found \\*, expected some weight to be left to train"),
    ],
)
def test_what_cannot_be_frozen_is_refused(tiny, override, message):
    with pytest.raises(UserError, match=message):
        Bench(tiny(override))


def test_init_weights_without_init_from_are_refused(tiny):
    with pytest.raises(UserError, match=r"init_weights: .*expected init_from to be set"):
        tiny("init_weights=embedding")


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", [("lora.rank=4", "lora.base_bits=4"), ("qat.bits=4", "qat.rank=4")], ids=str)
def test_a_frozen_model_is_begun_without_all_of_its_weights_at_once(run, tiny, tmp_path, monkeypatch, kind):
    path, old, _ = run
    cfg = tiny(
        f"init_from={path}",
        *(f"model.{key}={value}" for key, value in (SIZES | {"vocab": 300}).items()),
        *kind,
    )
    bench = Bench(cfg)
    with jax.set_mesh(bench.devices):
        _, blank = setup.make_state(cfg, bench.task, bench.update, bench.devices, has_init=True)
        temporary = [f.lower().compile().memory_analysis().temp_size_in_bytes for f in (blank, bench.fresh)]
        assert temporary[0] < 0.2 * temporary[1]

        each, read = load.iter_weights, []

        def one_by_one(*source: Any) -> Any:
            before = lambda: None
            for name, w in each(*source):
                assert before() is None, f"the weight before {name} is still there"
                before = weakref.ref(w)
                read.append(name)
                yield name, w
                del w

        def begin(path: str) -> Any:
            fresh, source = blank().params, check_source(path, bench.task.model)
            made, _ = load_weights(source, bench.task.model, fresh, bench.devices, "none")
            assert all(w.is_deleted() or name.endswith(".down") for name, w in module.named_leaves(fresh))
            return made

        monkeypatch.setattr(load, "iter_weights", one_by_one)
        made, drawn = begin(path), dict(module.named_leaves(bench.fresh().params))
    assert read == [name for name, _ in module.named_leaves(old)]
    plain = model_wrappers.unwrap_params(llama.Model, bench.task.model, made)
    for (name, ours), (_, theirs) in zip(module.named_leaves(plain), module.named_leaves(old), strict=True):
        assert jnp.abs(ours - theirs).max() < 0.2 * jnp.abs(theirs).max() + 1e-9, name
    downs = {name: w for name, w in module.named_leaves(made) if name.endswith(".down")}
    assert len(downs) == 7 and all((w == drawn[name]).all() and w.any() for name, w in downs.items())

    second = tmp_path / "second"  # a model that is frozen itself, merged before it is frozen anew
    second.mkdir()
    (second / "recipe.yaml").write_text(reader.to_yaml(dataclasses.replace(cfg, run_dir=str(second))))
    checkpoints = Checkpoints(str(second))
    checkpoints.save_params(made, {"step": 0})
    checkpoints.close()
    with jax.set_mesh(bench.devices):
        again = model_wrappers.unwrap_params(llama.Model, bench.task.model, begin(str(second)))
    for (name, ours), (_, theirs) in zip(module.named_leaves(again), module.named_leaves(plain), strict=True):
        assert jnp.abs(ours - theirs).max() < 0.1 * jnp.abs(theirs).max() + 1e-9, name


def test_a_plan_counts_neither_moments_nor_gradients_of_frozen_weights():
    path = Path(__file__).parents[2] / "recipes/llama3-8b.yaml"
    free, frozen = (
        estimate.estimate_step(recipe.load(path, more), parse_slice("v5p-32"))
        for more in ([], ["freeze=blocks.*"])
    )
    assert frozen.weight_bytes == free.weight_bytes
    assert frozen.optimizer_bytes < 0.2 * free.optimizer_bytes
    assert frozen.temp_bytes < free.temp_bytes - 0.5 * free.weight_bytes
