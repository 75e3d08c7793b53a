"""Recipes: a mistake gives a one-line error with its location, and valid values are read as written."""

import dataclasses
import importlib
import json
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.config import reader, recipe, run_length, sections
from headrace.errors import UserError

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
SECTIONS = [path for path in RECIPES if "use" in yaml.safe_load(path.read_text())]
FULL_RECIPES = [path for path in RECIPES if path not in SECTIONS]
PARTS = [
    (folder, name)
    for folder in ("models", "objectives", "losses", "optim", "schedules", "attention", "data/sources")
    for name in reader.part_names(folder)
    if name != "auto"
]

TRAINING = """\
run_dir: runs/test
seed: 0
model: {use: llama, layers: 2, embed: 64, heads: 4, kv_heads: 2, mlp: 128}
data: {path: nowhere, sequence_length: 64}
objective: {use: causal}
loss: {use: cross_entropy, z_loss: 1e-4}
optimizer: {use: adamw, learning_rate: 3e-3, max_grad_norm: 1.0}
schedule: {use: cosine, steps: 20, warmup: 2}
batch: {sequences: 8}
mesh: {fsdp: auto}
compute: {dtype: float32}
"""
DATA = """\
path: data/test
sources: {books: {use: files, path: texts}}
tokenizer: {use: bpe, vocab: 4096}
pack: {sequence_length: 64, eval_fraction: 0.05}
seed: 1
"""

# Replaced text, replacement, start of the message after the file name, and further parts of the message.
MISTAKES = [
    ("layers: 2", "layer: 2", ":3: model.layer: unknown key; did you mean model.layers?"),
    ("layers: 2", "xyz: 2", ":3: model.xyz: unknown key, expected one of use, layers, embed,", "and 4 more"),
    ("batch:", "batsh:", ":9: batsh: unknown key; did you mean batch?"),
    (
        "learning_rate",
        "lr",
        ":7: optimizer.lr: unknown key; it is called optimizer.learning_rate here",
    ),
    ("seed: 0", "steps: 9", ":2: steps: unknown key; did you mean schedule.steps?"),
    ("use: adamw", "use: lion, eps: 1", ":7: optimizer.eps: ", "it belongs to optimizer.use: adamw"),
    (
        "seed: 0",
        "model.tie_embeddings: true",
        ":2: model.tie_embeddings: found a dotted key, expected model: {tie_embeddings: ...}",
    ),
    ("seed: 0", "7: 0", ":2: found 7 for a key, expected a name"),
    # Types.
    ("layers: 2", "layers: two", ':3: model.layers: found "two", expected a whole number'),
    ("layers: 2", "layers: 2.5", ":3: model.layers: found 2.5, expected a whole number"),
    ("layers: 2", "layers: 2.0", ":3: model.layers: found 2.0, expected a whole number; write 2"),
    ("layers: 2", "layers: yes", ":3: model.layers: found yes, expected a whole number"),
    ("layers: 2", "layers: [2]", ":3: model.layers: found [2], expected a whole number"),
    ("layers: 2", "layers: null", ":3: model.layers: found null, expected a whole number"),
    ("3e-3", "fast", ':7: optimizer.learning_rate: found "fast", expected a number'),
    ("3e-3", ".nan", ":7: optimizer.learning_rate: found .nan, expected a finite number"),
    ("3e-3", ".inf", ":7: optimizer.learning_rate: found .inf, expected a finite number"),
    (
        "float32",
        "bf16",
        ':11: compute.dtype: found "bf16", expected one of bfloat16, float32; did you mean b',
    ),
    ("runs/test", "''", ':1: run_dir: found "", expected text'),
    ("runs/test", "", ":1: run_dir: found nothing, expected text"),
    # Missing keys.
    ("layers: 2, ", "", ":3: model.layers: found nothing, expected a whole number; it is required"),
    ("layers: 2, embed: 64, ", "", ":3: model.layers: found nothing", "required here: layers, embed"),
    ("run_dir: runs/test\n", "", ":1: run_dir: found nothing, expected text; it is required"),
    ("data: {path: nowhere, sequence_length: 64}\n", "", ":1: data.path: found nothing, expected text"),
    ("use: llama, ", "", ":3: model.use: found nothing, expected one of", "llama"),
    # Sections and parts.
    ("llama", "lama", ':3: model.use: found "lama", expected one of', "did you mean llama?"),
    ("use: adamw", "use: null", ":7: optimizer.use: found null, expected one of"),
    ("{sequences: 8}", "[8]", ":9: batch: found [8], expected `key: value` pairs or the path of a .yaml"),
    ("{sequences: 8}", "null", ":9: batch: found null, expected `key: value` pairs"),
    ("{sequences: 8}", "", ":9: batch: found nothing, expected `key: value` pairs"),
    ("{use: causal}", "causal", ':5: objective: found "causal", expected', "mean objective: {use: causal}?"),
    # YAML.
    ("mesh:", "seed: 1\nmesh:", ":10: seed: found a second time, expected once; it is also in line 2"),
    ("layers: 2", "layers: 2, layers: 3", ":3: model.layers: found a second time", "line 3"),
    ("64}", "64", ":5: not YAML:", "in what starts in line 4"),
    ("seed: 0", "seed 0", ":2: found a line without `:`, expected `key: value`"),
    ("seed: 0", "seed: 0\n  more: 1", ":3: found a `:` too many or too deep an indent, expected"),
    ("{sequences: 8}", "\n\tsequences: 8", ":10: found a tab, expected spaces"),
    ("seed: 0", "seed: !x 0", ":2: not YAML:"),
    ("seed: 0", "seed: !!int zero", ": not YAML: invalid literal"),
    ("mesh:", "---\nmesh:", ":10: found a second document after `---`, expected one"),
    ("runs/test", "runs/${sed}", ':1: run_dir: found "runs/${sed}", expected ${...} to name another key'),
    # The schedule.
    ("20", "-4", ":8: schedule.steps: found -4, expected a whole number of steps or '3B tokens'"),
    ("20", "0", ":8: schedule.steps: found 0, expected 1 step or more"),
    ("20", "2147483648", ":8: schedule.steps: found 2147483648, expected 1 step or more, and fewer than"),
    ("20", "many", ':8: schedule.steps: found "many", expected a whole number of steps'),
    ("20", "2e1", ":8: schedule.steps: found 2e1, expected a whole number of steps"),
    (
        "warmup: 2",
        "warmup: 21",
        ":8: schedule.warmup: found 21, expected at most schedule.steps, which is 20",
    ),
    ("use: cosine", "use: wsd, decay: 19", ":8: schedule.decay: found 19, expected at most the 18 steps"),
    (
        "use: cosine",
        "use: two_stage, stage2_start: 1",
        ":8: schedule.stage2_start: found 1, expected a step after the",
    ),
    (
        "use: cosine",
        "use: constant, min_lr_ratio: 0.2",
        ":8: schedule.min_lr_ratio: found 0.2, expected nothing",
    ),
    ("use: cosine", "use: cosine, min_lr_ratio: 2", ":8: schedule.min_lr_ratio: found 2, expected a share"),
    # The mesh and what it must divide.
    ("fsdp: auto", "fsdp: 0", ":10: mesh.fsdp: found 0, expected 1 or more"),
    ("fsdp: auto", "fsdp: all", ':10: mesh.fsdp: found "all", expected a number of devices or auto'),
    ("fsdp: auto", "data: auto", ':10: mesh.fsdp: found "auto", the default, expected a number', "(data is)"),
    ("fsdp: auto", "fsdp: 3", ":9: batch.sequences: found 8, expected a multiple of", "here 1 x 1 x 3"),
    ("fsdp: auto", "tensor: 3", ":10: mesh.tensor: found 3, expected a divisor of model.heads, 4"),
    (
        "fsdp: auto",
        "context: 3",
        ":10: mesh.context: found 3, expected a divisor of data.sequence_length, 64",
    ),
    (
        "sequences: 8",
        "sequences: 8, microbatches: 3",
        ":9: batch.microbatches: found 3, expected a divisor of",
    ),
    # Single values, and values without effect.
    ("3e-3", "-1", ":7: optimizer.learning_rate: found -1, expected 0 or more"),
    ("z_loss: 1e-4", "soft_cap: 0", ":6: loss.soft_cap: found 0, expected a number above 0"),
    ("max_grad_norm: 1.0", "b1: 1", ":7: optimizer.b1: found 1, expected a number from 0"),
    ("max_grad_norm: 1.0", "eps: -1", ":7: optimizer.eps: found -1, expected a number above 0"),
    ("use: adamw", "use: stable_adamw, eps: 0", ":7: optimizer.eps: found 0, expected a number above 0"),
    ("use: adamw", "use: muon, eps: -1e-8", ":7: optimizer.eps: found -1e-8, expected a number above 0"),
    ("3e-3", "nan", ':7: optimizer.learning_rate: found "nan", expected a finite number'),
    ("mlp: 128", "mlp: 128, rope_factor: 8", ":3: model.rope_factor: found 8, expected"),
    (
        "mlp: 128",
        "mlp: 128, rope_original_length: 4096",
        ":3: model.rope_original_length: found 4096, expected rope_scal",
    ),
    (
        "mlp: 128",
        "mlp: 128, rope_scaling: linear, rope_factor: 2, rope_original_length: 4096",
        ":3: model.rope_original_length: found 4096, expected rope_scaling to be yarn or llama3",
    ),
    (
        "use: llama",
        "use: eurobert",
        ':5: objective.use: found "causal", expected masked, since eurobert reads',
    ),
    (
        "seed: 0",
        "profile_steps: '21:25'",
        ':2: profile_steps: found "21:25", expected a first step of at most schedule.steps, which is 20',
    ),
    (
        "z_loss: 1e-4",
        "filter_eps: 1e-4, backend: tokens",
        ":6: loss.filter_eps: found 1e-4, expected 0 with loss",
    ),
    ("seed: 0", "seed: -1", ":2: seed: found -1, expected a number from 0 to 4294967295"),
]
DATA_MISTAKES = [
    ("4096", "100", ":3: tokenizer.vocab: found 100, expected 260 or more"),
    ("use: bpe", "use: bpe, path: x.json", ':3: tokenizer.path: found "x.json", expected nothing'),
    ("use: bpe", "use: file, path: x.json", ":3: tokenizer.vocab: found 4096, expected nothing"),
    ("use: bpe, vocab: 4096", "use: file", ":3: tokenizer.path: found nothing, expected the path of a"),
    ("use: files", "use: file", ':2: sources.books.use: found "file", expected one', "did you mean files?"),
    ("path: texts", "pth: x", ":2: sources.books.pth: unknown key; did you mean sources.books.path?"),
    ("path: texts", "weight: 2", ":2: sources.books.path: found nothing, expected text; it is required"),
    ("path: texts", "path: x, weight: 0", ":2: sources.books.weight: found 0, expected a number above 0"),
    ("use: files", "use: python_library", ":2: sources.books.path: ", "it belongs to sources.books.use"),
    ("books: {use: files, path: texts}", "", ":2: sources: found {}, expected one or more by name"),
    ("{books: {use: files, path: texts}}", "texts", ':2: sources: found "texts", expected one or more by'),
    ("books", "a b", ":2: sources: found ", "expected names of letters, digits, _, . and -, not 'a b'"),
    ("path: data/test", "path: gs://bucket/data", ':1: path: found "gs://bucket/data", expected a'),
    ("seed: 1", "workers: 0", ":5: workers: found 0, expected auto or a number of processes"),
    ("seed: 1", "normalize: {max_chars: 0}", ":5: normalize.max_chars: found 0, expected at least normal"),
    ("0.05", "1", ":4: pack.eval_fraction: found 1, expected a share from 0"),
]


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load_error(text: str, *overrides: str) -> str:
    """The error message for a recipe with this text."""
    Path("recipe.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        recipe.load_any("recipe.yaml", overrides)
    error_text = str(caught.value)
    assert "\n" not in error_text
    return error_text


def load(*overrides: str, text: str = TRAINING) -> sections.TrainRecipe:
    Path("recipe.yaml").write_text(text)
    return recipe.load("recipe.yaml", overrides)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[1])
def test_a_mistake_is_reported_in_a_single_line_with_its_location(mistake: tuple[str, ...]) -> None:
    check_message(TRAINING, *mistake)


@pytest.mark.parametrize("mistake", DATA_MISTAKES, ids=lambda mistake: mistake[1])
def test_a_mistake_in_a_data_recipe_is_reported_in_a_single_line_with_its_location(
    mistake: tuple[str, ...],
) -> None:
    check_message(DATA, *mistake)


def check_message(text: str, old: str, new: str, prefix: str, *fragments: str) -> None:
    assert text.count(old) == 1
    error_text = load_error(text.replace(old, new))
    assert error_text.startswith("recipe.yaml" + prefix)
    for fragment in fragments:
        assert fragment in error_text


@pytest.mark.parametrize(
    "content, expected",
    [
        (b"", "recipe.yaml:1: found an empty file, expected `key: value` lines"),
        (b"# only a comment\n", "recipe.yaml:1: found an empty file, expected `key: value` lines"),
        (b"- a\n- b\n", "recipe.yaml:1: found a list or plain text, expected `key: value` lines"),
        (b"hello\n", "recipe.yaml:1: found a list or plain text, expected `key: value` lines"),
        (bytes(range(256)), "recipe.yaml: found a file that is not text, expected a .yaml file"),
        (b"run_dir: a\x00b\n", "recipe.yaml: found a file that is not text, expected a .yaml file"),
        (b"a: " + b"[" * 5000, "recipe.yaml:1: found brackets nested too deeply, expected sections"),
        (b"use: splash\nblock_q: 128\n", "recipe.yaml:1: found a single section, expected a whole recipe"),
    ],
)
def test_a_file_that_is_not_a_recipe_is_refused(content: bytes, expected: str) -> None:
    Path("recipe.yaml").write_bytes(content)
    with pytest.raises(UserError) as caught:
        recipe.load_any("recipe.yaml")
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    "path, included_as",
    [("recipes/attention/tiles.yaml", "attention/tiles.yaml"), ("parts/tiles.yaml", "tiles.yaml")],
)
def test_a_section_file_is_refused_as_a_recipe_with_the_line_that_includes_it(
    path: str, included_as: str
) -> None:
    Path(path).parent.mkdir(parents=True)
    Path(path).write_text("use: splash\n")
    with pytest.raises(UserError, match=f"includes it with `attention: {included_as}`"):
        recipe.load(path)
    recipe_dir = Path(path).parent.parent if "/" in included_as else Path(path).parent
    (recipe_dir / "recipe.yaml").write_text(TRAINING + f"attention: {included_as}\n")
    assert recipe.load(recipe_dir / "recipe.yaml").attention.use == "splash"


def test_converted_values_give_no_warning() -> None:
    assert load("log.wandb=1").log.wandb is True  # warnings are errors in these tests


def test_a_two_stage_schedule_ends_at_zero_by_default() -> None:
    assert load("schedule.use=two_stage").schedule.min_lr_ratio == 0
    assert load("schedule.use=two_stage", "schedule.min_lr_ratio=0.2").schedule.min_lr_ratio == 0.2
    assert load().schedule.min_lr_ratio == 0.1


def test_the_error_for_a_missing_file_names_the_closest_file() -> None:
    Path("recipe.yaml").write_text(TRAINING)
    with pytest.raises(UserError, match=r"^recipes.yaml: found no file, .*; did you mean recipe.yaml\?$"):
        recipe.load("recipes.yaml")
    with pytest.raises(UserError, match=r"^[.]: found a folder, expected a .yaml file$"):
        recipe.load(".")


def test_the_error_for_the_other_kind_of_recipe_names_its_command() -> None:
    Path("recipe.yaml").write_text(DATA)
    with pytest.raises(
        UserError, match="found a data recipe, expected a training recipe; `headrace data prepare"
    ):
        recipe.load("recipe.yaml")
    Path("recipe.yaml").write_text(TRAINING)
    with pytest.raises(UserError, match="found a training recipe, expected a data recipe; `headrace train"):
        recipe.load_data("recipe.yaml")


@pytest.mark.parametrize(
    "override, value",
    [
        ("seed=7", 7),
        ("batch.sequences=1_024", 1024),
        ("optimizer.learning_rate=3e-4", 3e-4),
        ("optimizer.learning_rate=1", 1.0),
        ("optimizer.max_grad_norm=null", None),
        ("data.isolate_documents=false", False),
        ("compute.remat=dots", "dots"),
        ("schedule.steps=2B tokens", "2B tokens"),
        ("schedule.warmup=5 %", "5 %"),
        ("schedule.warmup=3", 3),
        ("mesh.fsdp=2", 2),
        ("mesh.fsdp=auto", "auto"),
        ("run_dir=runs/a=b", "runs/a=b"),
        ("run_dir=2024", "2024"),
        ("run_dir=1.10", "1.10"),
        ("run_dir=yes", "yes"),
        ("run_dir=runs/${seed}", "runs/0"),
        ("run_dir=runs/${model.layers}", "runs/2"),
    ],
)
def test_an_override_has_the_type_its_key_declares(override: str, value: Any) -> None:
    parsed: Any = load(override)
    for name in override.partition("=")[0].split("."):
        parsed = getattr(parsed, name)
    assert parsed == value
    assert type(parsed) is type(value)


def test_text_in_a_file_is_read_verbatim() -> None:
    for text in ("yes", "1.10", "010", "2024-10-05"):
        assert load(text=TRAINING.replace("runs/test", text)).run_dir == text


def test_a_reference_is_resolved_after_the_overrides() -> None:
    assert load("seed=5", text=TRAINING.replace("runs/test", "runs/${seed}")).run_dir == "runs/5"


def test_an_override_can_choose_another_part() -> None:
    assert load("schedule.use=wsd", "schedule.decay=3").schedule.decay == 3


def test_a_section_file_is_resolved_relative_to_the_recipe() -> None:
    Path("attention").mkdir()
    Path("recipes").mkdir()
    Path("attention/tiles.yaml").write_text("use: blockwise\nblock_q: 64\n")
    Path("recipes/one.yaml").write_text(TRAINING + "attention: ../attention/tiles.yaml\n")
    assert recipe.load("recipes/one.yaml").attention.block_q == 64
    assert recipe.load("recipes/one.yaml", ["attention.block_q=32"]).attention.block_q == 32


def test_a_section_file_on_the_command_line_is_resolved_relative_to_the_working_directory() -> None:
    Path("tiles.yaml").write_text("use: blockwise\nblock_q: 64\n")
    Path("recipes").mkdir()
    Path("recipes/one.yaml").write_text(TRAINING)
    run = recipe.load("recipes/one.yaml", ["attention=tiles.yaml", "attention.block_q=16"])
    assert run.attention.block_q == 16


@pytest.mark.parametrize(
    "section, expected",
    [
        ("# tiles\nuse: blockwise\nblok: 64\n", "parts/tiles.yaml:3: attention.blok: unknown key"),
        (
            "# tiles\nuse: blockwise\nblock_q: no\n",
            "parts/tiles.yaml:3: attention.block_q: found no, expected",
        ),
        (
            "use: blockwise\nblock_q: 0\n",
            "parts/tiles.yaml:2: attention.block_q: found 0, expected 1 or more",
        ),
        (
            "use: blockwise\nblock_q: 1\nblock_q: 2\n",
            "parts/tiles.yaml:3: attention.block_q: found a second time",
        ),
        ("use: {\n", "parts/tiles.yaml:2: not YAML"),
        ("- a\n", "parts/tiles.yaml:1: found a list or plain text"),
    ],
)
def test_a_mistake_in_a_section_from_another_file_names_that_file(section: str, expected: str) -> None:
    Path("parts").mkdir()
    Path("parts/tiles.yaml").write_text(section)
    assert load_error(TRAINING + "attention: parts/tiles.yaml\n").startswith(expected)


def test_a_missing_section_file_is_reported_at_the_line_that_includes_it() -> None:
    error_text = load_error(TRAINING + "attention: tiles.yaml\n")
    assert (
        error_text
        == 'recipe.yaml:12: attention: found "tiles.yaml", expected a file, and there is no tiles.yaml'
    )


def test_a_run_folder_may_be_named_like_a_recipe() -> None:
    assert load("run_dir=runs/x.yaml").run_dir == "runs/x.yaml"


@pytest.mark.parametrize(
    "packed, overrides, expected",
    [
        (
            {},
            ["model.vocab=70000"],
            "model.vocab: found 70000, expected at most 65536, all that packed's uint16",
        ),
        ({}, ["model.vocab=700"], "model.vocab: found 700, expected 4096 or more, the vocabulary of packed"),
        ({"sequence_length": 96}, [], "data.sequence_length: found 64, expected a divisor of 96"),
        (
            {"special": {"mask": None}},
            ["objective.use=masked", "model.use=eurobert"],
            'objective.use: found "masked", expected another, since packed\'s tokenizer has no mask token',
        ),
    ],
)
def test_a_recipe_is_checked_against_packed_data(
    packed: dict[str, Any], overrides: list[str], expected: str
) -> None:
    index = {"sequence_length": 128, "dtype": "uint16", "vocab": 4096, "special": {"mask": 3}}
    Path("packed").mkdir()
    Path("packed/index.json").write_text(json.dumps(index))
    text = TRAINING.replace("nowhere", "packed")
    load("model.vocab=5000", text=text)
    Path("packed/index.json").write_text(json.dumps(index | packed))
    assert expected in load_error(text, *overrides)


def test_a_damaged_index_is_ignored_when_a_recipe_is_read() -> None:
    Path("packed").mkdir()
    Path("packed/index.json").write_text("{")
    assert load("data.path=packed", "model.vocab=70000").model.vocab == 70000


def test_lengths_in_tokens_and_percentages_become_steps() -> None:
    durations = run_length.durations(load("schedule.steps=1M tokens", "schedule.warmup=10 %"))
    assert durations == {"steps": 1954, "warmup": 196}  # a step is 8 x 64 tokens


@pytest.mark.parametrize("path", FULL_RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_recipe_survives_a_round_trip_through_yaml(path: Path, tmp_path: Path, demo_run: None) -> None:
    cfg = recipe.load_any(path)
    (tmp_path / "copy.yaml").write_text(reader.to_yaml(cfg))
    assert recipe.load_any(tmp_path / "copy.yaml") == cfg


@pytest.mark.parametrize("path", SECTIONS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_section_file_is_valid_for_the_section_named_after_its_folder(path: Path) -> None:
    section = getattr(load(f"{path.parent.name}={path}"), path.parent.name)
    assert reader.to_dict(section) == yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", FULL_RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_recipe_starts_with_its_command(path: Path, demo_run: None) -> None:
    command = "train" if isinstance(recipe.load_any(path), sections.TrainRecipe) else "data prepare"
    assert path.read_text().startswith(f"# headrace {command} {path.relative_to(ROOT)}   ")


@pytest.mark.parametrize("folder, name", PARTS)
def test_the_config_parsed_from_source_equals_the_imported_config(folder: str, name: str) -> None:
    imported = importlib.import_module(f"headrace.{folder.replace('/', '.')}.{name}").Config
    parsed = reader.part_class(folder, name)
    assert fields(parsed) == fields(imported)
    assert imported.__dataclass_params__.frozen


def fields(cls: Any) -> list[tuple[str, Any, Any]]:
    hints = typing.get_type_hints(cls)
    declared = [f for f in dataclasses.fields(cls) if f.name in reader.own_keys(cls)]
    return [(f.name, hints[f.name], f.default) for f in declared]
