"""Losses of short runs are what they were.

`python -m tests.golden.record losses` records them anew, in a commit that says why they differ."""

import json
from pathlib import Path

import pytest

from tests.golden.cases import TINY
from tests.golden.losses import HERE, losses, machine

RECORDED = json.loads((HERE / "losses.json").read_text())


def test_every_tiny_recipe_is_recorded():
    assert set(RECORDED["losses"]) == {path.stem for path in TINY}


@pytest.mark.parametrize("path", TINY, ids=lambda path: path.stem)
def test_the_losses_of_a_tiny_run_are_the_recorded_ones(path: Path, tmp_path: Path):
    expected = [float.fromhex(loss) for loss in RECORDED["losses"][path.stem]]
    if RECORDED["machine"] == machine():
        assert losses(path, tmp_path / "run") == expected
    else:  # another JAX or CPU rounds differently
        assert losses(path, tmp_path / "run") == pytest.approx(expected, rel=1e-4)
