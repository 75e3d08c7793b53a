"""Logits at every position, compared with those that generation computes from its cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.checkpoint.open_run import LoadedRun
from headrace.config import recipe
from headrace.errors import UserError
from headrace.inference.logits import logits
from headrace.model_wrappers import load_family
from headrace.nn import module, sharding
from headrace.nn.linear import project
from headrace.nn.stack import Execution

TOKENS = [3, 17, 5, 5, 29, 11, 2]
MODELS = {
    "llama": "{use: llama, layers: 2, embed: 32, heads: 4, kv_heads: 2, mlp: 64, vocab: 32}",
    "modernbert": "{use: modernbert, layers: 2, embed: 32, heads: 4, mlp: 64, vocab: 32}",
    "deberta": "{use: deberta, layers: 2, embed: 32, heads: 4, mlp: 64, vocab: 32, generator_layers: 1}",
}


@pytest.fixture
def make_run(tmp_path):
    """Make a run with random weights on one device."""

    def make(use: str, *sections: str) -> LoadedRun:
        lines = [
            f"run_dir: {tmp_path}/run",
            f"model: {MODELS[use]}",
            "data: {path: x, sequence_length: 8}",
            "optimizer: {learning_rate: 1e-3}",
            "schedule: {steps: 1}",
            "compute: {dtype: float32}",
            *sections,
        ]
        (tmp_path / "recipe.yaml").write_text("\n".join(lines))
        loaded = recipe.load(tmp_path / "recipe.yaml")
        params = module.init(load_family(loaded.model).Model, loaded.model, jax.random.key(0))
        mesh = sharding.make_mesh({}, jax.devices()[:1])
        return LoadedRun(loaded, jax.device_put(params, mesh.devices.flat[0]), 0, mesh, None, None)

    return make


def test_logits_of_a_decoder_are_those_of_its_cache(make_run):
    run = make_run("llama", "loss: {soft_cap: 3.0}")
    model, exec_opts = run.recipe.model, Execution(run.recipe.attention, "float32")
    cache = run.model.init_cache(model, 1, 16, jnp.float32)
    hidden, _ = run.model.decode(model, jnp.asarray([TOKENS]), cache, exec_opts=exec_opts)
    uncapped = project(run.model.unembed, hidden, "bsd,vd->bsv")[0]
    result = logits(run, TOKENS)
    assert result.shape == (len(TOKENS), 32) and result.dtype == jnp.float32
    np.testing.assert_allclose(result, 3 * np.tanh(uncapped / 3), atol=1e-5)


def test_several_texts_of_one_length_have_the_logits_of_each(make_run):
    run = make_run("llama")
    rows = np.array([TOKENS, TOKENS[::-1]])
    result = logits(run, rows)
    for row, expected in zip(rows, result, strict=True):
        np.testing.assert_allclose(logits(run, row.tolist()), expected, atol=1e-5)


def test_logits_of_an_encoder_depend_on_tokens_on_both_sides(make_run):
    run = make_run("modernbert", "objective: {use: masked}")
    changed = logits(run, [*TOKENS[:-1], 30])
    assert np.abs(changed[0] - logits(run, TOKENS)[0]).max() > 1e-4


def test_a_classifier_has_logits_of_its_labels(make_run):
    run = make_run("llama", "objective: {use: classify}", "classifier: {labels: 3}")
    result = logits(run, TOKENS)
    assert result.shape == (len(TOKENS), 3)
    # The text's logits are at its first token, and depend on its last.
    assert np.abs(logits(run, [*TOKENS[:-1], 30])[0] - result[0]).max() > 1e-4


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([0, 32], "tokens: found ids from 0 to 32, expected 0 to 31"),
        ([-1, 3], "tokens: found ids from -1 to 3"),
        ([], "expected token ids"),
        ([[[1]]], "expected token ids"),
        ([0.5], "expected token ids"),
    ],
)
def test_other_things_than_token_ids_are_refused(make_run, tokens, message):
    with pytest.raises(UserError, match=message):
        logits(make_run("llama"), tokens)


def test_a_model_that_predicts_no_tokens_is_refused(make_run):
    with pytest.raises(UserError, match="detects replaced tokens"):
        logits(make_run("deberta", "objective: {use: rtd}"), TOKENS)


def test_wrapped_weights_are_merged(make_run):
    run = make_run("llama", "lora: {rank: 2}", "init_from: elsewhere")
    up = jax.tree.map_with_path(
        lambda path, w: w + 0.1 if module.path_name(path).endswith(".up") else w, run.params
    )
    run = dataclasses.replace(run, params=up)
    np.testing.assert_allclose(logits(run, TOKENS), logits(run.merged(), TOKENS), atol=1e-4)
    assert np.abs(logits(run, TOKENS) - logits(make_run("llama"), TOKENS)).max() > 1e-3
