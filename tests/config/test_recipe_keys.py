"""Meaning of recipe keys: comments, `recipe explain`, the reference page, names of other trainers."""

import json
import re
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.config import explain, json_schema, reader, recipe, reference, synonyms
from headrace.config.sections import DataRecipe, QuantizeRecipe, TrainRecipe
from headrace.errors import UserError

ROOT = Path(__file__).parents[2]
MEANINGS = {
    f"{key} {', '.join(meaning.uses)}".strip(): meaning
    for cls in (TrainRecipe, DataRecipe, QuantizeRecipe)
    for key, found in explain.meanings(cls).items()
    for meaning in found
}
# The first words that a description may not have: it must be complete without the key's name.
INCOMPLETE = {"a", "an", "the", "of", "in", "by", "for", "with", "to", "at", "on", "and", "as", "if", "it"}
INCOMPLETE |= {
    "which",
    "that",
    "this",
    "these",
    "what",
    "how",
    "when",
    "where",
    "why",
    "who",
    "its",
    "0:",
    "null:",
}
DIALECT = {"told", "tells", "kept", "beside", "anew", "whole", "seen", "sees", "learnt", "learns"}
TRAINING = """\
run_dir: runs/test
model: {use: llama, layers: 2, embed: 64, heads: 4, kv_heads: 2, mlp: 128}
data: {path: nowhere, sequence_length: 64}
optimizer: {learning_rate: 3e-3}
schedule: {steps: 20}
"""


@pytest.mark.parametrize("key", MEANINGS)
def test_every_key_is_described_in_plain_words(key: str) -> None:
    text = MEANINGS[key].description.text
    words = re.findall(r"[\w:]+", text)
    assert len(text) >= 9 and not text.endswith("."), text
    assert words[0].lower() not in INCOMPLETE, text
    assert words[0][0].islower() or words[0] in ("PyTorch", "RMSNorm", "Unicode", "TensorBoard", "Weights"), (
        text
    )
    assert not DIALECT & {word.lower() for word in words}, text


def test_descriptions_are_read_from_comments_after_and_above_a_key(tmp_path: Path) -> None:
    path = tmp_path / "part.py"
    path.write_text(
        "class Config:\n"
        "    one: int  # number of ones [steps]\n"
        "    # a long\n"
        "    # description\n"
        "    two: str = '#'\n"
        "    three: int = 3\n\n"
        "    # not of a key\n\n"
        "    def four(self): ...\n"
    )
    descriptions = explain.descriptions.of_file(path, "Config")
    assert {name: (description.text, description.unit) for name, description in descriptions.items()} == {
        "one": ("number of ones", "steps"),
        "two": ("a long description", ""),
    }


def test_the_reference_page_is_up_to_date() -> None:
    assert (ROOT / "docs/reference/recipe-keys.md").read_text() == reference.page(), "run `make reference`"


@pytest.mark.parametrize("cls", [TrainRecipe, DataRecipe])
def test_the_reference_page_and_the_schema_have_every_key(cls: type) -> None:
    page, schema = reference.page(), json.dumps(json_schema.schema(cls))
    for key, meanings in explain.meanings(cls).items():
        assert f"| `{key}` |" in page
        for meaning in meanings:
            text = meaning.description.text
            assert key.endswith(".use") or json.dumps(text)[1:-1] in schema, key


def test_a_key_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "explain", "optimizer.learning_rate"]) == 0
    assert capsys.readouterr().out == (
        "optimizer.learning_rate  (training recipe)\n"
        "  peak learning rate\n"
        "  type       a number\n"
        "  default    required\n"
        "  elsewhere  lr\n"
    )


def test_a_key_of_several_families_is_explained_with_all_defaults() -> None:
    text = explain.explain("model.rope_theta")
    assert "500000.0 (bitnet, llama, olmo2), 10000.0 (eurobert, fanformer, gemma2)" in text
    assert "only with  model.use: gemma3, modernbert, modernbert_decoder" in text


def test_a_section_is_explained_by_its_keys() -> None:
    text = explain.explain("lora")
    assert "Absent unless the recipe has it." in text
    assert [line.split()[0] for line in text.splitlines()[3:]] == [
        f"lora.{key}" for key in ("rank", "alpha", "targets", "dora", "base_bits")
    ]


def test_a_key_of_both_kinds_of_recipes_is_explained_for_each() -> None:
    text = explain.explain("seed")
    assert "seed  (training recipe)" in text and "seed  (data recipe)" in text


@pytest.mark.parametrize(
    "name, hint",
    [
        ("optimizer.learning_rat", "did you mean optimizer.learning_rate?"),
        ("max_grad_norm", "did you mean optimizer.max_grad_norm?"),
        ("hidden_size", "it is called model.embed here"),
        ("optimiser", "did you mean optimizer?"),
    ],
)
def test_an_unknown_key_cannot_be_explained(name: str, hint: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"{name}: unknown key; {hint}")):
        explain.explain(name)


@pytest.mark.parametrize("name", synonyms.KEYS)
def test_names_of_other_trainers_map_to_existing_keys(name: str) -> None:
    keys = {*reader.all_keys(TrainRecipe), *reader.all_keys(DataRecipe), "sources"}
    assert set(synonyms.KEYS[name].keys) <= keys
    taken = {key for key in keys if key.rpartition(".")[2] == name}
    assert not taken, f"{name} is a key here"


@pytest.mark.parametrize("key", synonyms.VALUES)
def test_values_of_other_trainers_map_to_valid_values(key: str) -> None:
    (meaning,) = explain.meanings(TrainRecipe)[key]
    valid = set(re.findall(r"\w+", meaning.type))
    for foreign, replacement in synonyms.VALUES[key].items():
        assert foreign not in valid, foreign
        assert replacement.split()[0] in valid, replacement


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("embed: 64", "hidden_size: 64", "2: model.hidden_size: unknown key; it is called model.embed here"),
        (
            "schedule:",
            "max_steps: 9\nschedule:",
            "5: max_steps: unknown key; it is called schedule.steps here",
        ),
        (
            "{steps: 20}",
            "{steps: 20, warmup_ratio: 0.03}",
            "5: schedule.warmup_ratio: unknown key; it is called schedule.warmup here: a share of the run is "
            'written as "3 %"',
        ),
        (
            "run_dir",
            "per_device_train_batch_size: 4\nrun_dir",
            "1: per_device_train_batch_size: unknown key; it is called batch.sequences here: it counts the "
            "sequences of all devices and microbatches together",
        ),
        (
            "run_dir",
            "num_train_epochs: 3\nrun_dir",
            "1: num_train_epochs: unknown key; there are no epochs to set; set schedule.steps, e.g. to "
            '"2B tokens"',
        ),
        (
            "run_dir",
            "load_in_4bit: true\nrun_dir",
            "1: load_in_4bit: unknown key; it is called lora.base_bits",
        ),
        ("use: llama", "use: bert", '2: model.use: found "bert", expected one of'),
        ("use: llama", "use: bert", "did you mean modernbert or eurobert?"),
        ("schedule:", "objective: {use: mlm}\nschedule:", "did you mean masked?"),
        ("schedule:", "compute: {dtype: bf16}\nschedule:", "did you mean bfloat16?"),
        ("schedule:", "compute: {remat: true}\nschedule:", "did you mean full?"),
    ],
)
def test_names_of_other_trainers_are_recognized(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(TRAINING.replace(old, new))
    with pytest.raises(UserError) as error:
        recipe.load(path)
    error_text = str(error.value)
    assert message in error_text
    assert error_text.startswith(f"{path}:{message[0]}:" if message[0].isdigit() else f"{path}:")
