"""Run folders written by an earlier version resume where they stopped, and reach the losses of a run that was
never stopped."""

import json
import shutil
from pathlib import Path

import pytest

from tests.golden.losses import HERE, STEPS, machine
from tests.golden.runs import RUNS, Run, resume

RECORDED = json.loads((HERE / "runs.json").read_text())


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_run_of_an_earlier_version_resumes(run: Run, tmp_path: Path):
    for name in ("data", "runs"):
        shutil.copytree(HERE / name, tmp_path / name)
    expected = [float.fromhex(loss) for loss in RECORDED["losses"][run.name]]
    steps = [int(path.name) for path in (tmp_path / "runs" / run.name / "checkpoints").iterdir()]
    assert max(steps) == STEPS // 2
    exact = RECORDED["machine"] == machine()
    assert resume(run, tmp_path) == (expected if exact else pytest.approx(expected, rel=1e-4))
    assert (tmp_path / "runs" / run.name / "checkpoints" / str(STEPS)).is_dir()
