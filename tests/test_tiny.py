"""The smallest recipes, one for each family and objective: each learns, and goes on as if never stopped."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from millrace import module, recipe, train
from millrace.folder import open_run

RECIPES = sorted((Path(__file__).parent.parent / "recipes/tiny").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_tiny_recipe_learns_and_goes_on_as_if_never_stopped(path, packed, tmp_path):
    cfg = recipe.load(path, [f"run={tmp_path}/run", f"data.path={packed}", "log.tensorboard=false"])

    def train_to_the_end() -> tuple[dict[str, np.ndarray], list[float]]:
        assert train.run(cfg) == 0
        rows = [json.loads(line) for line in Path(cfg.run, "metrics.jsonl").read_text().splitlines()]
        losses = [row["evaluate/loss"] for row in rows if "evaluate/loss" in row]
        params = open_run(recipe.load_run(cfg.run)).params
        return {name: np.asarray(leaf) for name, leaf in module.named(params)}, losses

    weights, losses = train_to_the_end()
    assert losses[-1] < 5.2, losses  # a vocabulary of 300, of which a guess knows nothing: 5.7
    shutil.rmtree(Path(cfg.run, "checkpoints", "20"))
    again, repeated = train_to_the_end()
    for name, value in weights.items():
        np.testing.assert_array_equal(value, again[name], err_msg=name)
    assert repeated[-1] == losses[-1]
