"""`headrace checkpoint`: what its commands print, remove and return."""

import re
from pathlib import Path

import numpy as np

from headrace.checkpoint import inventory, manifest
from headrace.checkpoint.manager import Checkpoints
from headrace.cli import main as cli_main
from tests.checkpoint.test_manager import damage, save


def run_command(*arguments: object) -> int:
    return cli_main.main(["checkpoint", *map(str, arguments)])


def damage_metadata(run_dir: Path, step: int) -> None:
    damage(run_dir / "checkpoints" / str(step) / "meta" / "metadata", np.random.default_rng(1))


def test_ls_verify_diff_and_prune(tmp_path, capsys):
    run_dir = tmp_path / "run"
    save(run_dir, 1, 2, 3, permanent=1000)
    assert run_command("ls", run_dir) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all("temporary" in line and line.endswith("intact") for line in lines[1:])
    assert run_command("verify", run_dir) == 0
    damage_metadata(run_dir, 2)
    assert run_command("verify", run_dir) == 1
    assert "step 2: damaged: meta/metadata" in capsys.readouterr().out
    assert run_command("verify", run_dir, "3") == 0
    assert run_command("verify", run_dir, "7") == 2
    assert "found no step 7, expected one of 1, 2, 3" in capsys.readouterr().err
    assert run_command("diff", run_dir, "3", "3") == 0
    assert run_command("diff", run_dir, "1", "3") == 1
    output = capsys.readouterr().out
    assert "recipe: seed: 1 -> 3" in output
    assert "params: b: 100.0% of its values differ, by 2 at most, 2 of its norm" in output
    assert run_command("prune", run_dir, "--keep", "1", "--dry-run") == 0
    assert inventory.step_numbers(str(run_dir)) == [1, 2, 3]
    assert run_command("prune", run_dir, "--keep", "1") == 0
    assert inventory.step_numbers(str(run_dir)) == [3]
    save(tmp_path / "other", 3)
    capsys.readouterr()
    assert run_command("diff", run_dir, tmp_path / "other") == 0
    assert run_command("ls", tmp_path) == 2


def test_ls_shows_an_empty_folder_as_an_unverified_step(tmp_path, capsys):
    save(tmp_path, 1)
    (tmp_path / "checkpoints" / "9").mkdir()
    assert run_command("ls", tmp_path) == 0
    assert re.search(r" 9 +unknown +0\.000 GB +- +unverified", capsys.readouterr().out)


def test_ls_skips_a_step_that_its_run_removes_meanwhile(tmp_path, monkeypatch, capsys):
    save(tmp_path, 1, 2, 3)
    verify = manifest.verify

    def remove_step_2_before_reading(path):
        if path.name == "2":
            inventory.remove_step(str(tmp_path), 2)  # as the trainer does
        return verify(path)

    monkeypatch.setattr(manifest, "verify", remove_step_2_before_reading)
    assert run_command("ls", tmp_path) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["step", "1", "3"]
    assert Checkpoints(str(tmp_path)).latest_step() == 3


def test_ls_and_prune_list_what_is_in_quarantine(tmp_path, capsys):
    save(tmp_path, 1, 2)
    inventory.quarantine(str(tmp_path), {1: "a test"})
    assert run_command("ls", tmp_path) == 0
    assert re.search(r"in quarantine: \S+/quarantine/1-", capsys.readouterr().out)
    assert run_command("prune", tmp_path, "--keep", "1") == 0
    assert re.search(r"quarantine/1-\S+: removed", capsys.readouterr().out)
    assert run_command("prune", tmp_path, "--keep", "1") == 0
    assert "nothing to remove" in capsys.readouterr().out


def test_prune_keeps_damaged_steps_and_does_not_count_them(tmp_path, capsys):
    run_dir = str(tmp_path)
    save(tmp_path, 1, 2, 3, permanent=1000)
    inventory.quarantine(run_dir, {1: "a test"})
    damage_metadata(tmp_path, 3)
    assert run_command("prune", run_dir, "--keep", "1") == 0
    output = capsys.readouterr().out
    assert "step 3: damaged: meta/metadata" in output and "quarantine/1-" in output
    assert inventory.step_numbers(run_dir) == [2, 3]
    assert inventory.find_resume_point(run_dir).step == 2
    assert not inventory.list_quarantine(run_dir)
    damage_metadata(tmp_path, 2)
    assert run_command("prune", run_dir, "--keep", "1") == 0
    assert inventory.step_numbers(run_dir) == [2, 3]
