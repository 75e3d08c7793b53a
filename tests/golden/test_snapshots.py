"""What users and their scripts see changes only on purpose: `python -m tests.golden.record snapshots`."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.golden.runs import RUNS, resume
from tests.golden.snapshots import HERE, all_help, recipe_schema, run_folder

FOLDER = HERE / "snapshots"


@pytest.mark.skipif(
    sys.version_info[:2] > (3, 12), reason="later versions of argparse print help in another form"
)
def test_help_of_all_commands(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert all_help() == (FOLDER / "help.txt").read_text()


def test_schema_of_recipes():
    assert recipe_schema() == (FOLDER / "schema.json").read_text()


def test_files_and_metrics_of_a_run(tmp_path: Path):
    shutil.copytree(HERE / "data", tmp_path / "data")
    shutil.copytree(HERE / "runs", tmp_path / "runs")
    resume(RUNS[0], tmp_path)
    assert run_folder(tmp_path / "runs" / RUNS[0].name) == (FOLDER / "run-folder.txt").read_text()
