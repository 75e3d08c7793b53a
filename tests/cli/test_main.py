"""The command line: exit codes, one line per mistake, and no JAX before the recipe has been checked."""

import argparse
import glob
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from headrace.cli import main as cli_main
from headrace.cli import parser
from headrace.cli.main import main
from headrace.config import json_schema, reader, recipe, sections

ROOT = Path(__file__).parents[2]
RECIPES = [
    p for p in sorted((ROOT / "recipes").rglob("*.yaml")) if "use" not in yaml.safe_load(p.read_text())
]
TRAINING = """\
run_dir: runs/test
model: {use: llama, layers: 2, embed: 64, heads: 4, kv_heads: 2, mlp: 128}
data: {path: nowhere, sequence_length: 64}
optimizer: {use: adamw, learning_rate: 3e-3}
schedule: {use: cosine, steps: 20}
"""
# A process that fails if its command has imported JAX.
WITHOUT_JAX = """\
import sys
from headrace.cli.main import main
code = main(sys.argv[1:])
assert "jax" not in sys.modules
sys.exit(code)
"""


@pytest.fixture(autouse=True)
def in_a_folder_with_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # or a pipe closed early shows at once
    Path("recipe.yaml").write_text(TRAINING)


def error_line(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command with a mistake, and return the one line that it prints."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headrace: ") and err.endswith("\n") and err.count("\n") == 1
    return err.removeprefix("headrace: ").rstrip()


@pytest.mark.parametrize(
    "content, argv, message",
    [
        (b"run: {", ["train", "bad.yaml"], "bad.yaml:1: not YAML"),
        (b"run: a\n\tmodel: b\n", ["train", "bad.yaml"], "bad.yaml:2: found a tab"),
        (b"", ["train", "bad.yaml"], "bad.yaml:1: found an empty file"),
        (bytes(range(256)), ["train", "bad.yaml"], "bad.yaml: found a file that is not text"),
        (b"", ["train", "missing.yaml"], "missing.yaml: found no file"),
        (b"", ["train", "recipe.yaml", "model.layer=3"], "override: model.layer: unknown key"),
        (b"", ["train", "recipe.yaml", "mesh.fsdp=0"], "override: mesh.fsdp: found 0"),
        (b"", ["recipe", "check", "recipe.yaml", "optimizer.use=adam"], "override: optimizer.use: found"),
        (b"sources: 3", ["data", "prepare", "bad.yaml"], "bad.yaml:1: path: found nothing"),
        (b"", ["trian", "recipe.yaml"], "command line: found trian"),
    ],
)
@pytest.mark.fault(19)
def test_a_mistake_ends_in_one_line_and_code_2_before_jax_is_imported(
    content: bytes, argv: list[str], message: str
) -> None:
    Path("bad.yaml").write_bytes(content)
    done = subprocess.run([sys.executable, "-c", WITHOUT_JAX, *argv], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith(f"headrace: {message}")
    assert done.stderr.count("\n") == 1


MISTAKES = {
    "eval run --limit 3": "--limit: found 3, expected --tasks as well, or it has no effect",
    "eval run --tasks x --batch 0": "--batch: found 0, expected 1 or more",
    "eval run schedule.step=3": "override: schedule.step: unknown key; did you mean schedule.steps?",
    "generate run --recurrence 2": "--recurrence: expected nothing: the run has no recurrent depth",
    "generate nowhere": "nowhere: not a run folder",
    "export run out --dtype q8_0": "--dtype: found q8_0, which only .gguf files have",
    "export run out.gguf --packed": "--packed: expected a folder as target",
    "export run out --adapter --dtype float16": "--adapter: expected a folder as target, and the weights in",
    "quantize run --method gptx": 'override: method.use: found "gptx", expected one of gptq, rtn, vptq;',
    "quantize run group=64": "override: method.group: unknown key; did you mean method.group_size?",
    "train recipe.yaml --program nowhere": "--program: no such folder: nowhere",
    "plan recipe.yaml": "plan: expected --slice NAME",
    "plan recipe.yaml --slice v5p-32 --budget 5": "plan: --budget has no effect",
    "report run --samples 0": "--samples: found 0, expected 1 or more",
    "report run --out .": "--out: found a folder, ., expected a file",
    "data prepare recipe.yaml": "recipe.yaml:1: found a training recipe, expected a data recipe",
}
MANY_WITHOUT_JAX = """\
import shlex, sys
from headrace.cli.main import main
for command in sys.argv[1:]:
    assert main(shlex.split(command)) == 2, command
    assert "jax" not in sys.modules, command
"""


def test_options_are_checked_before_jax_is_imported() -> None:
    Path("run").mkdir()
    Path("run/recipe.yaml").write_text(TRAINING)
    command = [sys.executable, "-c", MANY_WITHOUT_JAX, *MISTAKES]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line, message in zip(done.stderr.splitlines(), MISTAKES.values(), strict=True):
        assert line.startswith(f"headrace: {message}")


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "headrace", "recipe", "check", "recipe.yaml"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "recipe.yaml: ok\n", "")
    done = subprocess.run([*command, "seed=x"], capture_output=True, text=True)
    message = 'headrace: override: seed: found "x", expected a whole number\n'
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


@pytest.mark.parametrize("argv", [["recipe", "schema"], ["recipe", "check", "recipe.yaml"]])
def test_a_pipe_that_is_closed_early_is_no_mistake(argv: list[str]) -> None:
    command = [sys.executable, "-m", "headrace", *argv]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_letters_that_the_terminal_lacks_are_printed_by_their_codes() -> None:
    Path("recipe.yaml").rename("mühle.yaml")
    command = [sys.executable, "-m", "headrace", "recipe", "check", "mühle.yaml"]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "m\\xfchle.yaml: ok\n", "")


def test_the_error_of_a_mistyped_command_has_the_closest_one(capsys: pytest.CaptureFixture[str]) -> None:
    message = error_line(capsys, "recipe", "chek", "recipe.yaml")
    expected = (
        "command line: found chek, expected one of show, check, list, explain, schema; did you mean check?"
    )
    assert message.startswith(expected)
    assert "`headrace recipe --help`" in message


@pytest.mark.parametrize(
    "argv, message",
    [
        (["train"], "required: RECIPE (see `headrace train --help`)"),
        (["train", "recipe.yaml", "--steps", "3"], "settings are given as key=value"),
        (["train", "recipe.yaml", "more"], "override: found more, expected key=value"),
        (["generate", "run", "--tokens", "x"], "--tokens: invalid int value: 'x'"),
        (["recipe", "list", "nowhere"], "nowhere: found no .yaml file in it, expected a folder of recipes"),
    ],
)
def test_an_incomplete_or_too_long_command_is_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_line(capsys, *argv)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["schedule.steps=-4"], "override: schedule.steps: found -4, expected a whole number of steps"),
        (["model.layer=4"], "override: model.layer: unknown key; did you mean model.layers?"),
        (["model.layers.deep=4"], 'override: model.layers: found {"deep": 4}, expected a whole number'),
        (["optimizer=lion"], 'override: optimizer: found "lion", expected `key: value` pairs'),
        (["optimizer=null"], "override: optimizer: found null, expected `key: value` pairs"),
        (
            ["model={use: llama, layers: 2}"],
            "override: model.embed: found nothing, expected a whole number",
        ),
        (["attention=nothing.yaml"], 'override: attention: found "nothing.yaml", expected a file'),
        (["schedule.steps"], "override: found schedule.steps, expected key=value, e.g."),
        (["=4"], "override: found =4, expected key=value, e.g."),
        (["model..layers=4"], "override: found model..layers=4, expected key=value, e.g."),
        (["loss={"], "override: loss: found {, expected a value in YAML"),
        (["seed=1", "seed=2"], "override: seed: found a second time, expected once"),
        (["run_dir="], "override: run_dir: found nothing, expected text"),
    ],
)
def test_the_error_of_an_override_names_its_key(
    overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error_line(capsys, "recipe", "check", "recipe.yaml", *overrides).startswith(message)


def test_show_prints_a_recipe_that_reads_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["recipe", "show", "recipe.yaml", "schedule.steps=2B tokens", "optimizer.max_grad_norm=null"])
        == 0
    )
    Path("shown.yaml").write_text(capsys.readouterr().out)
    shown = recipe.load("shown.yaml")
    assert shown == recipe.load("recipe.yaml", ["schedule.steps=2B tokens", "optimizer.max_grad_norm=null"])
    assert set(reader.to_dict(shown)["log"]) == {"every", "tensorboard", "wandb"}


def test_list_prints_every_file_with_its_head(capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipes/deep").mkdir(parents=True)
    Path("recipes/one.yaml").write_text("# the first\nrun_dir: x\n")
    Path("recipes/deep/two.yaml").write_text("run: x\n")
    Path("recipes/binary.yaml").write_bytes(bytes(range(256)))
    assert main(["recipe", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["recipes/binary.yaml", "recipes/deep/two.yaml", "recipes/one.yaml       the first"]


@pytest.mark.parametrize("flags, cls", [([], sections.TrainRecipe), (["--data"], sections.DataRecipe)])
def test_schema_prints_json(flags: list[str], cls: type, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "schema", *flags]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema.schema(cls)


@pytest.mark.parametrize("cls", [sections.TrainRecipe, sections.DataRecipe])
def test_the_schema_has_every_key(cls: type) -> None:
    found = set()
    for name, section in json_schema.schema(cls)["properties"].items():
        parts = section.get("anyOf", [])
        if parts and "additionalProperties" in parts[0] and parts[0]["additionalProperties"]:
            name, parts = f"{name}.NAME", parts[0]["additionalProperties"]["anyOf"]
        inner = [key for one in parts for key in one.get("properties", ())]
        found |= {f"{name}.{key}" for key in inner} or {name}
    assert found == set(reader.all_keys(cls))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_recipe_fits_the_schema(path: Path, demo_run: None) -> None:
    cfg = recipe.load_any(path)
    rules = json_schema.schema(type(cfg))
    assert fits(reader.to_dict(cfg), rules)
    assert not fits(reader.to_dict(cfg) | {"sead": 1}, rules)
    assert not fits(reader.to_dict(cfg) | {"seed": "one"}, rules)
    assert not fits({"seed": 1}, rules)


def test_the_schema_accepts_a_recipe_without_its_shape_if_it_starts_from_a_model() -> None:
    rules = json_schema.schema(sections.TrainRecipe)
    tree = {"run_dir": "runs/x", "data": {"path": "d", "sequence_length": 8}, "schedule": {"steps": 1}}
    tree["optimizer"] = {"learning_rate": 1e-3}
    assert not fits(tree, rules)
    assert fits(tree | {"init_from": "runs/base"}, rules)
    assert fits(tree | {"init_from": "runs/base", "model": {"rope_theta": 5e5}}, rules)


def fits(value: Any, rules: dict[str, Any]) -> bool:
    return jsonschema.Draft202012Validator(rules).is_valid(value)


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    assert exit_info.value.code == 0
    output = capsys.readouterr().out
    for command in ("train", "data", "eval", "generate", "export", "import", "recipe"):
        assert f"\n  {command} " in output


@pytest.mark.parametrize("argv, usage", [([], "usage: headrace "), (["recipe"], "usage: headrace recipe ")])
def test_without_a_command_help_is_printed(
    argv: list[str], usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert capsys.readouterr().out.startswith(usage)


def test_every_command_has_its_function(capsys: pytest.CaptureFixture[str]) -> None:
    for command in iter_commands(parser.make_parser()):
        function = command.get_default("command")
        module = importlib.import_module(f"headrace.cli.{function.module}")
        assert callable(getattr(module, function.name)), command.prog


def iter_commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Iterate over the parsers of all commands that have no commands of their own."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield parser
    for command in groups[0].choices.values() if groups else ():
        yield from iter_commands(command)


def test_libtpu_is_hidden_where_there_is_no_tpu(tmp_path, monkeypatch):
    if glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*") or entry_points(group="jax_plugins"):
        pytest.skip("a machine with an accelerator")
    (tmp_path / "libtpu.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    cli_main.hide_libtpu_without_devices()
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    cli_main.hide_libtpu_without_devices()
    assert os.environ["JAX_PLATFORMS"] == "tpu"
