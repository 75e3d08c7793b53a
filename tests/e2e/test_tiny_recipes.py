"""The tiny recipe of every family, found by looking into the folder: on texts that only context explains, and
on the demo's corpus, as its head says."""

import json
import math
import random
import re
import shutil
import string
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.open_run import open_run
from headrace.config import reader, recipe, sections
from headrace.data.pipeline.prepare import prepare
from headrace.training import run as training_run

ROOT = Path(__file__).parents[2]
TINY = sorted((ROOT / "recipes/tiny").glob("*.yaml"))
LETTERS = string.ascii_lowercase
STATED = "evaluation loss about ([0-9.]+)"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Each text goes to and fro between two letters of its own. All letters are equally common, and the one
    before excludes only itself: of what comes next, who sees no more than that knows next to nothing."""
    folder, rng = tmp_path_factory.mktemp("pairs"), random.Random(0)
    texts = ("".join(rng.sample(LETTERS, 2)) * 31 for _ in range(6000))
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "data.yaml").write_text(
        f"path: {folder}/data\nsources: {{pairs: {{path: {folder}/texts.jsonl}}}}\n"
        "tokenizer: {use: bpe, vocab: 260}\n"  # bytes alone, so a letter is a token
        "pack: {sequence_length: 64, eval_fraction: 0.1}\n"
    )
    prepare(recipe.load_data(folder / "data.yaml"), lambda line: None)
    return f"{folder}/data"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("demo") / "data"
    prepare(recipe.load_data(ROOT / "recipes/data/demo.yaml", [f"path={path}"]), lambda line: None)
    return str(path)


def measured(cfg: sections.TrainRecipe, name: str) -> dict[int, Any]:
    rows = map(json.loads, (Path(cfg.run_dir) / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row[name] for row in rows if name in row}


def entropy(share: float) -> float:
    """What it costs to say yes or no by a coin with that share of yes."""
    return -share * math.log(share) - (1 - share) * math.log(1 - share)


def test_every_family_has_a_tiny_recipe():
    assert {recipe.load(path).model.use for path in TINY} == set(reader.part_names("models"))


@pytest.mark.parametrize("path", TINY, ids=lambda path: path.stem)
def test_a_tiny_run_learns_from_context_and_goes_on_bit_for_bit(path, pairs, tmp_path):
    def load(name: str) -> sections.TrainRecipe:
        return recipe.load(path, [f"run_dir={tmp_path}/{name}", f"data.path={pairs}"])

    def weights(cfg: sections.TrainRecipe) -> Any:
        return jax.device_get(open_run(recipe.load_run(cfg.run_dir)).params)

    whole, again = load("whole"), load("again")
    assert training_run.run(whole) == 0
    last, half = whole.schedule.steps, whole.checkpoint.every
    # Without attention 3.2 nats are the least: a masked letter is one of 26, a next one of 25.
    assert measured(whole, "evaluate/loss")[last] < 0.9 * math.log(len(LETTERS))
    if whole.objective.use == "rtd":
        chance = entropy(measured(whole, "evaluate/discriminator_replaced")[last])
        assert 0.2 * chance < measured(whole, "evaluate/discriminator_loss")[last] < chance
    shutil.copytree(whole.run_dir, again.run_dir)
    shutil.rmtree(f"{again.run_dir}/checkpoints/{last}")
    assert 0 < half < last and Checkpoints(again.run_dir).latest_step() == half
    assert training_run.run(again) == 0
    for name in ("loss", "grad_norm", "evaluate/loss"):
        assert measured(again, name) == measured(whole, name)
    jax.tree.map(np.testing.assert_array_equal, weights(again), weights(whole))


@pytest.mark.parametrize("path", TINY, ids=lambda path: path.stem)
def test_a_tiny_recipe_ends_at_the_loss_that_its_head_states(path, demo, tmp_path):
    stated = re.search(STATED, path.read_text().partition("\n")[0])
    assert stated is not None
    cfg = recipe.load(path, [f"run_dir={tmp_path}/run", f"data.path={demo}"])
    assert training_run.run(cfg) == 0
    assert measured(cfg, "evaluate/loss")[cfg.schedule.steps] == pytest.approx(float(stated[1]), abs=0.1)
