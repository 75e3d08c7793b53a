"""Recipes that start from a model and do not describe its shape: it is the source's."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.config import reader, recipe
from headrace.errors import UserError

ROOT = Path(__file__).parents[2]
RECIPE = """\
run_dir: runs/new
init_from: SOURCE
data: {path: nowhere, sequence_length: 64}
optimizer: {learning_rate: 1e-3}
schedule: {steps: 20}
"""
SHAPE = "use: llama, layers: 2, embed: 64, heads: 4, kv_heads: 2, mlp: 128, vocab: 320, rope_theta: 1e4"
HF_CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 320,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
}


@pytest.fixture(autouse=True)
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder, as far as recipes are concerned."""
    monkeypatch.chdir(tmp_path)
    return make_run("runs/base", f"model: {{{SHAPE}}}\n")


def make_run(folder: str, sections: str) -> Path:
    path = Path(folder)
    path.mkdir(parents=True)
    text = RECIPE.replace("init_from: SOURCE\n", "").replace("runs/new", folder) + sections
    (path / "recipe.yaml").write_text(text)
    cfg = recipe.load(path / "recipe.yaml")
    (path / "recipe.yaml").write_text(reader.to_yaml(cfg))
    return path


def load(*overrides: str, sections: str = "", source: str = "runs/base") -> reader.Any:
    Path("recipe.yaml").write_text(RECIPE.replace("SOURCE", source) + sections)
    return recipe.load("recipe.yaml", overrides)


def message(*overrides: str, sections: str = "", source: str = "runs/base") -> str:
    with pytest.raises(UserError) as error:
        load(*overrides, sections=sections, source=source)
    return str(error.value)


def test_the_shape_is_read_from_a_run_and_the_vocabulary_from_the_data() -> None:
    model = load(sections="lora: {rank: 8}\n").model
    assert (model.use, model.layers, model.embed, model.rope_theta) == ("llama", 2, 64, 1e4)
    assert model.vocab == 0
    assert model.lora is not None and model.lora.rank == 8


def test_the_shape_is_read_from_a_hugging_face_folder() -> None:
    Path("hf").mkdir()
    Path("hf/config.json").write_text(json.dumps(HF_CONFIG))
    model = load(source="hf").model
    assert (model.use, model.layers, model.embed, model.mlp, model.norm_eps) == ("llama", 2, 64, 128, 1e-6)
    assert not model.tie_embeddings and model.vocab == 0


def test_the_shape_of_a_run_is_read_without_jax() -> None:
    load()
    program = "import sys; from headrace.config import recipe; recipe.load('recipe.yaml')"
    program += "; print('jax' in sys.modules)"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_explicit_keys_override_those_of_the_source() -> None:
    model = load("model.rope_theta=5e5", "model.layers=3", "model.vocab=400").model
    assert (model.rope_theta, model.layers, model.vocab, model.embed) == (5e5, 3, 400, 64)


def test_derived_sizes_follow_explicit_sizes() -> None:
    assert load("model.embed=128").model.head_dim == 32
    assert load("model.mlp=256").model.head_dim == 16


def test_a_complete_section_needs_no_source() -> None:
    section = "model: {use: llama, layers: 2, embed: 64, heads: 4, kv_heads: 2, mlp: 128}\n"
    assert load(sections=section, source="runs/not-yet").model.rope_theta == 500_000
    assert load(sections=section).model.rope_theta == 500_000


def test_the_wrappers_of_the_source_are_not_inherited_except_for_recurrent_depth() -> None:
    make_run(
        "runs/loop", f"model: {{{SHAPE.replace('layers: 2', 'layers: 4')}}}\nrecurrence: {{rounds: 3}}\n"
    )
    cfg = load(source="runs/loop")
    assert cfg.recurrence is not None and cfg.recurrence.rounds == 3
    assert load(sections="recurrence: null\n", source="runs/loop").recurrence is None
    lora = f"init_from: runs/base\nmodel: {{{SHAPE}}}\nlora: {{rank: 4}}\n"
    make_run("runs/lora", lora)
    assert load(source="runs/lora").lora is None


def test_the_generator_of_a_pair_is_inherited_only_for_replaced_token_detection() -> None:
    pair = "model: {use: deberta, layers: 2, embed: 32, heads: 4, mlp: 64, generator_layers: 1}\n"
    make_run("runs/pair", pair + "objective: {use: rtd}\n")
    assert load("objective.use=rtd", source="runs/pair").model.generator_layers == 1
    assert load("objective.use=masked", source="runs/pair").model.generator_layers == 0


def test_sizes_that_do_not_fit_the_weights_are_refused_with_both_values() -> None:
    expected = "model.layers: found 1, expected at least 2, as in runs/base: weights can grow and not shrink"
    assert expected in message("model.layers=1")
    expected = "model.tie_embeddings: found false, expected true, as in runs/base"
    assert expected in message("model.tie_embeddings=false")
    expected = "model.use: found eurobert, expected llama, as in runs/base, or all required keys"
    assert expected in message("model.use=eurobert").replace('"', "")


def test_an_error_about_an_inherited_key_names_the_source() -> None:
    assert "model.heads, 4" in message("mesh.tensor=3")
    error_text = message("model.heads=8", "model.kv_heads=3")
    assert re.search(r"override: model.kv_heads: found 3, expected a divisor of heads, 8", error_text)
    loop = message("recurrence.rounds=2")
    assert (
        "recurrence.prelude: found 1, the default, expected prelude + coda to be less than layers, 2" in loop
    )


@pytest.mark.parametrize("section", ["", "model: {rope_theta: 5e5}\n"])
def test_a_missing_source_is_reported(section: str) -> None:
    error_text = message(sections=section, source="runs/nowhere")
    assert error_text.startswith(
        "recipe.yaml:2: init_from: found runs/nowhere, where there is no recipe.yaml or config.json"
    )
    assert ("no model section" in error_text) == (not section)


def test_without_a_source_the_section_is_required() -> None:
    Path("recipe.yaml").write_text(RECIPE.replace("init_from: SOURCE\n", ""))
    with pytest.raises(UserError, match=r"model.use: found nothing, expected one of"):
        recipe.load("recipe.yaml")


def test_a_run_that_resumes_needs_no_source_anymore() -> None:
    cfg = load()
    run = Path("runs/new")
    (run / "checkpoints/10").mkdir(parents=True)
    (run / "recipe.yaml").write_text(reader.to_yaml(cfg))
    Path("runs/base").rename("runs/moved")
    assert load().model == cfg.model


def test_the_recipe_in_a_run_folder_has_the_complete_model_section() -> None:
    tree = reader.to_dict(load())
    assert tree["model"]["layers"] == 2 and "lora" not in tree
    Path("again.yaml").write_text(reader.dump(tree))
    Path("runs/base").rename("runs/moved")
    assert recipe.load("again.yaml").model.layers == 2
