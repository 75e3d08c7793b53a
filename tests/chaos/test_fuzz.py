"""Ten thousand recipes and ten thousand files that nobody meant: each is taken, or refused in one line with
exit code 2; none ends in a traceback, and none never ends."""

import dataclasses
import json
import shutil
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import google_crc32c
import jax
import numpy as np
import pytest
import yaml
from etils import epath

from headrace.checkpoint import inventory, manifest
from headrace.cli import checkpoint as checkpoint_commands
from headrace.cli import main as cli_main
from headrace.config import reader, recipe, sections
from headrace.convert import from_huggingface, to_huggingface
from headrace.data import inspect as data_inspect
from headrace.data.dataset import Dataset
from headrace.data.documents import Problems
from headrace.data.pipeline.prepare import prepare
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.data.verify import verify
from headrace.errors import UserError
from headrace.model_formats.hf_tensors import to_tensors
from headrace.models import load_base_family
from headrace.nn import module
from headrace.runtime import goodput
from tests.contracts.test_models import SIZES
from tests.data.formats.test_documents import COMPRESS, ROWS, TEXTS, documents
from tests.support import mutate

RECIPES = Path(__file__).parents[2] / "recipes"
PATIENCE = 120.0  # seconds for one input, on a machine that has much other work
BOTH = [pytest.param(150), pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.fault(33)])]


def refused(call: Callable[[], Any]) -> bool:
    """Whether it was refused, as it should be: in one line, and soon."""
    try:
        with mutate.ends_within(PATIENCE):
            call()
    except UserError as error:
        log_lines = str(error)
        first, *rest = log_lines.split("\n")  # a list of faults may follow
        assert error.exit_code == 2 and first.strip() and all(line.startswith("  ") for line in rest), (
            log_lines
        )
        assert len(log_lines) < 8000, log_lines
        return True
    return False


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of all recipes, among which bad ones can be put."""
    folder = tmp_path_factory.mktemp("kitchen") / "recipes"
    shutil.copytree(RECIPES, folder)
    return folder


def settings(random: Random) -> list[str]:
    """Overrides of the command line, most of keys that exist."""
    known = [*reader.all_keys(sections.TrainRecipe), *reader.all_keys(sections.DataRecipe)]
    odd_keys = ["", ".", "model.", ".x", "model.layers.x", "é", "a.b.c.d", "sources.x.path", "model", "data"]
    found = []
    for _ in range(random.choice([0, 0, 1, 1, 2])):
        key = random.choice(odd_keys) if random.random() < 0.2 else random.choice(known)
        value = mutate.text(random, "1") if random.random() < 0.2 else str(mutate.odd(random))
        found.append(f"{key}={value}" if random.random() < 0.95 else key + value)
    return found


def bad_recipe(random: Random, source: Path) -> bytes:
    written = source.read_text()
    kind = random.random()
    if kind < 0.1:
        return mutate.content(random, written.encode())
    if kind < 0.4:
        return mutate.text(random, written).encode("utf-8", "surrogatepass")
    try:
        made = yaml.safe_dump(
            mutate.tree(random, yaml.safe_load(written)), allow_unicode=random.random() < 0.5
        )
    except RecursionError:
        made = "a: " * 3000
    return made.encode("utf-8", "surrogatepass")


@pytest.mark.parametrize("cases", BOTH)
def test_any_recipe_is_taken_or_refused(cases, kitchen, capsys, record_property):
    sources = sorted(RECIPES.rglob("*.yaml"))
    loads = [recipe.load, recipe.load_train, recipe.load_data, recipe.load_any, recipe.load_any]
    count = 0
    for number in range(cases):
        random = Random(f"recipe {number}")
        source = random.choice(sources)
        folder = kitchen / source.parent.relative_to(RECIPES)
        path = folder / "bad.yaml"
        path.write_bytes(bad_recipe(random, source) if random.random() < 0.9 else source.read_bytes())
        items = settings(random)
        if number % 10 == 0:
            count += not taken_by_command(
                ["recipe", random.choice(["show", "check"]), str(path), *items], capsys
            )
            continue
        load = random.choice(loads)
        found: list[Any] = []
        if refused(lambda: found.append(load(path, items))):  # noqa: B023
            count += 1
        else:  # what was understood can be written down and is then understood as the same
            path.write_text(reader.to_yaml(found[0]), encoding="utf-8", errors="surrogatepass")
            assert recipe.load_any(path) == found[0], (number, items)
    assert 0.2 * cases < count < cases
    record_property("seen", f"{cases:,} recipes, {count:,} refused")


def taken_by_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> bool:
    with mutate.ends_within(PATIENCE):
        code = cli_main.main(words)
    _out, error = capsys.readouterr()
    assert code in (0, 2) and (code == 0) == (not error), (code, error)
    assert code == 0 or (error.startswith("headrace: ") and error.count("\n") == 1), error
    return code == 0


Case = Callable[[Random], bool]  # one bad input, and whether it was refused


def changed(file: Path, random: Random, change: mutate.Change, call: Callable[[], Any]) -> bool:
    """Calls with a file changed, or now and then gone, and puts it back."""
    before = file.read_bytes()
    try:
        if random.random() < 0.02:
            file.unlink()
        else:
            file.write_bytes(change(random, before))
        return refused(call)
    finally:
        file.unlink(missing_ok=True)
        file.write_bytes(before)


def packed_data(folder: Path) -> Case:
    """A prepared folder: its index, its shards and its tokenizer."""
    files = sorted(file for file in folder.iterdir() if file.suffix in (".json", ".npy"))
    files += [folder / "index.json"] * (len(files) // 2)

    def read() -> None:
        data = Dataset.open(folder)
        for split in ("train", "evaluation"):
            for step in range(3):
                order = data.train_order(4, seed=step) if split == "train" else data.eval_order(4)
                data.batch(order, step)

    calls = [
        read,
        read,
        lambda: verify(folder, lambda line: None),
        lambda: data_inspect.inspect(folder, rows=2),
    ]
    calls.append(lambda: tokenizer_io.load(folder, "tokenizers").encode("a text"))

    def case(random: Random) -> bool:
        file = random.choice(files)
        change = mutate.json_file if file.suffix == ".json" else mutate.content
        return changed(file, random, change, random.choice(calls))

    return case


def records(random: Random, value: bytes) -> bytes:
    """JSON lines of which some have other values."""
    lines = [json.loads(line) for line in value.splitlines()]
    lines[0]["messages"] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    return b"\n".join(mutate.as_json(mutate.tree(random, line)) for line in lines)


def sources(folder: Path, tokenizer: Path) -> Case:
    """Documents in files of every format; a few go on to packed rows."""
    formats = {name: make() for name, make in ROWS.items()} | {"x.txt": TEXTS[2].encode()}
    formats |= {f"x.jsonl{suffix}": press(ROWS["x.jsonl"]()) for suffix, press in COMPRESS.items()}
    folder.mkdir()

    def prepared(file: Path, errors: str) -> None:
        section = {"path": str(folder / "out"), "sources": {"x": {"path": str(file)}}, "on_error": errors}
        section |= {"tokenizer": {"use": "file", "path": str(tokenizer)}, "workers": 1}
        (folder / "recipe.yaml").write_text(reader.dump(section | {"pack": {"sequence_length": 16}}))
        try:
            prepare(recipe.load_data(folder / "recipe.yaml"), lambda line: None)
        finally:
            shutil.rmtree(folder / "out", ignore_errors=True)

    def case(random: Random) -> bool:
        name, errors = random.choice(list(formats)), random.choice(["stop", "skip"])
        is_lines = name in ("x.jsonl", "x.ndjson")
        change = records if is_lines and random.random() < 0.7 else mutate.content
        file = folder / name
        file.write_bytes(change(random, formats[name]))
        keys = random.choice(
            [
                {},
                {},
                {"id_column": "n"},
                {"meta_columns": "n"},
                {"text_column": "n"},
                {"text_column": "messages"},
            ]
        )
        try:
            if random.random() < 0.01:
                return refused(lambda: prepared(file, errors))
            return refused(lambda: documents(file, Problems(errors), **keys))
        finally:
            file.unlink()

    return case


def models(folder: Path) -> Case:
    """Folders of Hugging Face, one of each family: config.json and the weights."""
    folder.mkdir()
    made = []
    for name in reader.part_names("models"):
        cls = reader.part_class("models", name)
        known = {f.name for f in dataclasses.fields(cls)}
        if "module" in known:
            continue
        family = load_base_family(name)
        expected = SIZES | {"layers": 2, "load_balance": "loss"}
        cfg = cls(**{key: value for key, value in expected.items() if key in known})
        target = folder / name
        target.mkdir()
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), module.shapes(family.Model, cfg))
        (target / "config.json").write_text(json.dumps(family.hf_naming.to_config(cfg, 64)))
        to_huggingface.save_shards(to_tensors(family.tensor_table(cfg), zeros, "float32"), target)
        made.append(target)

    def header(random: Random, value: bytes) -> bytes:
        """The list of tensors that stands before them."""
        length = int.from_bytes(value[:8], "little")
        text = mutate.as_json(mutate.tree(random, json.loads(value[8 : 8 + length])))
        return len(text).to_bytes(8, "little") + text + value[8 + length :]

    def case(random: Random) -> bool:
        source, run = random.choice(made), folder / "run"
        file = source / ("config.json" if random.random() < 0.7 else "model.safetensors")
        change = mutate.json_file if file.suffix == ".json" else random.choice([header, mutate.content])
        try:
            return changed(file, random, change, lambda: from_huggingface.import_model(str(source), str(run)))
        finally:
            shutil.rmtree(run, ignore_errors=True)

    return case


def checkpoints(run: Path) -> Case:
    """The list of a checkpoint's files, also by one who knows how it is summed, and the account of time."""
    step = run / "checkpoints" / "5"
    step.mkdir(parents=True)
    (step / "weights").write_bytes(b"weights")
    manifest.seal(epath.Path(step), step=5, tier="temporary")
    lines = [{"begin": 0, "pid": 1, "host": "a"}, {"step": 5, "seconds": {"productive": 3.0}}, {"back": 3}]
    lines += [{"exit": 1, "why": "x"}, {"begin": 2, "seconds": {"compilation": 1.0}}, {"step": 9}, {"end": 0}]
    account = run / "goodput.jsonl"
    account.write_text("".join(json.dumps({"time": 10.0 * n} | line) + "\n" for n, line in enumerate(lines)))

    def forged(random: Random, value: bytes) -> bytes:
        body = mutate.content(random, value.partition(b"\n")[2])
        return f"{manifest.HEADER} {google_crc32c.value(body):08x}\n".encode() + body

    def look() -> None:
        checkpoint_commands.ls(Namespace(run=str(run)))
        inventory.find_resume_point(str(run))

    def spent() -> None:
        goodput.summary_line(goodput.read_totals(account))

    def moments(random: Random, value: bytes) -> bytes:
        return b"\n".join(mutate.json_file(random, line) for line in value.splitlines())

    def case(random: Random) -> bool:
        if random.random() < 0.5:
            return changed(account, random, moments, spent)
        return changed(step / "manifest.txt", random, random.choice([forged, mutate.content]), look)

    return case


@pytest.mark.parametrize("cases", BOTH)
def test_any_file_is_taken_or_refused(cases, packed, tmp_path, record_property):
    data = Path(shutil.copytree(packed, tmp_path / "data"))
    kinds = {
        "packed data": packed_data(data),
        "sources": sources(tmp_path / "sources", data / "tokenizer.json"),
        "models": models(tmp_path / "models"),
        "checkpoints": checkpoints(tmp_path / "run"),
    }
    count: Counter[str] = Counter()
    for number in range(cases):
        random = Random(f"file {number}")
        kind = random.choice(list(kinds))
        count[kind] += kinds[kind](random)
    assert all(count[kind] > 0.05 * cases / len(kinds) for kind in kinds), count
    record_property("seen", f"{cases:,} files, {sum(count.values()):,} refused")
