"""The tiny recipe of every family, found by looking into the folder, on the demo's corpus."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from millrace import config, recipe, sections, train
from millrace.checkpoint import Checkpoints
from millrace.data.prepare import prepare
from millrace.folder import open_run

ROOT = Path(__file__).parent.parent
TINY = sorted((ROOT / "recipes/tiny").glob("*.yaml"))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("demo") / "data"
    prepare(recipe.load_data(ROOT / "recipes/data/demo.yaml", [f"path={path}"]), lambda line: None)
    return str(path)


def test_every_family_has_a_tiny_recipe():
    assert {recipe.load(path).model.use for path in TINY} == set(config.names("models"))


@pytest.mark.parametrize("path", TINY, ids=lambda path: path.stem)
def test_a_tiny_run_learns_and_goes_on_bit_for_bit(path, demo, tmp_path):
    def load(name: str) -> sections.Run:
        return recipe.load(path, [f"run={tmp_path}/{name}", f"data.path={demo}"])

    def losses(cfg: sections.Run, name: str) -> dict[int, Any]:
        rows = map(json.loads, (Path(cfg.run) / "metrics.jsonl").read_text().splitlines())
        return {row["step"]: row[name] for row in rows if name in row}

    def weights(cfg: sections.Run) -> Any:
        return jax.device_get(open_run(recipe.load_run(cfg.run)).params)

    whole, again = load("whole"), load("again")
    assert train.run(whole) == 0
    assert losses(whole, "evaluate/loss")[20] < 6.9  # before training it is 7.6, the logarithm of 2,048
    shutil.copytree(whole.run, again.run)
    shutil.rmtree(f"{again.run}/checkpoints/20")
    assert Checkpoints(again.run).latest() == 10
    assert train.run(again) == 0
    for name in ("loss", "grad_norm", "evaluate/loss"):
        assert losses(again, name) == losses(whole, name)
    jax.tree.map(np.testing.assert_array_equal, weights(again), weights(whole))
