"""The steps of a run as others see them: which are whole, which may go, and who looks while they do."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from etils import epath

from headrace.checkpoint import inventory, manifest
from headrace.checkpoint.manager import Checkpoints
from headrace.cli import main as cli_main
from headrace.storage import files
from tests.test_checkpoint import about, damage, save, state


def test_a_step_by_the_number_of_another_is_not_whole(tmp_path):
    """A run that went on from it would pass over what lies between."""
    save(tmp_path, 1, 2)
    (tmp_path / "checkpoints" / "2").rename(tmp_path / "checkpoints" / "7")
    assert inventory.find_resume_point(str(tmp_path)) == inventory.ResumePoint(
        1, {7: "it is step 2 by its manifest.txt"}
    )


def test_what_is_no_step_is_none(tmp_path, capsys):
    save(tmp_path, 1)
    (tmp_path / "checkpoints" / "8").write_text("a file")
    (tmp_path / "checkpoints" / "9").mkdir()
    assert inventory.find_resume_point(str(tmp_path)) == inventory.ResumePoint(1, {9: inventory.UNSEALED})
    assert cli_main.main(["checkpoint", "ls", str(tmp_path)]) == 0
    assert re.search(r" 9 +unknown +0\.000 GB +- +unverified", capsys.readouterr().out)


def test_a_removal_that_fails_is_told_as_that_and_tried_again_and_the_save_counts(tmp_path, monkeypatch):
    checkpoints = Checkpoints(str(tmp_path), keep=1)
    assert checkpoints.save(1, state(1), about(1)) and checkpoints.wait()
    with monkeypatch.context() as patch:
        real = files.remove
        stays = lambda path, **how: (
            fails(path) if path.name == "1.removed" and path.exists() else real(path, **how)
        )
        patch.setattr(files, "remove", stays)
        assert checkpoints.save(2, state(2), about(2)) and checkpoints.wait()
    (told,) = checkpoints.drain_problems()
    assert told.startswith("step 1 could not be removed ([Errno 39]") and checkpoints.last_durable_step == 2
    assert (tmp_path / "checkpoints" / "1.removed").exists()
    assert checkpoints.save(3, state(3), about(3)) and checkpoints.wait() and not checkpoints.drain_problems()
    checkpoints.close()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"3"}


def test_what_cannot_be_removed_stands_in_the_way_of_nothing_else(tmp_path, monkeypatch):
    save(tmp_path, 1, 2, 3)
    (tmp_path / "checkpoints" / "0.removed").mkdir()
    monkeypatch.setattr(
        inventory, "available_bytes", lambda run: (3 - len(inventory.step_numbers(run))) * (2 << 20)
    )
    real = files.remove
    stays = lambda folder, **how: fails(folder) if folder.name == "0.removed" else real(folder, **how)
    monkeypatch.setattr(files, "remove", stays)
    checkpoints = Checkpoints(str(tmp_path), keep=3)
    assert checkpoints.find_resume_step() == 3
    checkpoints.quarantine_damaged()
    assert "0.removed could not be removed" in checkpoints.drain_problems()[0]
    assert checkpoints.save(4, state(4), about(4)) and checkpoints.wait()
    assert "step 1: checkpoint removed, since the disk is full" in checkpoints.drain_problems()
    assert inventory.step_numbers(str(tmp_path)) == [2, 3, 4]
    checkpoints.close()


def fails(folder) -> None:
    """As on NFS, where a reader has it open."""
    raise OSError(39, "Directory not empty", str(folder))


def test_a_folder_that_cannot_be_listed_is_neither_sealed_nor_damaged(tmp_path, monkeypatch):
    save(tmp_path, 1, 2)
    scan = os.scandir

    def broken(path="."):
        if str(path).endswith("2/params"):
            raise OSError(5, "Input/output error", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", broken)
    step = epath.Path(tmp_path / "checkpoints" / "2")
    for look in (
        lambda: inventory.find_resume_point(str(tmp_path)),
        lambda: manifest.seal(step, step=2, tier="temporary"),
    ):
        with pytest.raises(OSError, match="Input/output"):
            look()


def test_who_loses_every_race_looks_again(tmp_path, monkeypatch):
    """All steps that were seen go while they are read, and one that was put aside lies there."""
    run, verify = str(tmp_path), manifest.verify
    save(tmp_path, 1, 2, 9)
    inventory.quarantine(run, {9: "a trial"})

    def late(path):
        if path.name in ("1", "2"):
            if path.name == "2":
                save(tmp_path, 3)
            inventory.remove_step(run, int(path.name))
        return verify(path)

    monkeypatch.setattr(manifest, "verify", late)
    assert inventory.find_readable_step(run, print) == 3


WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from test_checkpoint import *
checkpoints = Checkpoints(sys.argv[2], keep=1)
number = 0
while True:
    number += 1
    checkpoints.save(number, state(number, 8), about(number), tier="interim" if number % 2 else "temporary")
    if number == 2:
        checkpoints.wait()
        print("there", flush=True)
"""


@pytest.mark.parametrize("seconds", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_whoever_looks_at_a_run_that_goes_on_sees_whole_steps(tmp_path, seconds, capsys):
    """Steps come and go while they are read."""
    run = str(tmp_path)
    command = [sys.executable, "-c", WRITER, str(Path(__file__).parent), run]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        until = time.monotonic() + seconds
        try:
            while time.monotonic() < until:
                assert inventory.find_readable_step(run, print) > 1
                assert cli_main.main(["checkpoint", "ls", run]) == 0
                cli_main.main(["checkpoint", "verify", run])  # 1 while one is being written
                inventory.prune(run, 1, print, dry_run=True)
                assert inventory.find_resume_point(run).step is not None
        finally:
            process.kill()
    said = capsys.readouterr()
    assert "damaged" not in said.out and not said.err


@pytest.mark.parametrize("reads", [False, True], ids=["before it is read", "while it is read"])
def test_a_step_that_goes_while_it_is_looked_at_is_left_out(tmp_path, reads, monkeypatch, capsys):
    run, verify = str(tmp_path), manifest.verify
    save(tmp_path, 1, 2, 3)

    def late(path):
        if path.name == "2":
            inventory.remove_step(run, 2)  # as the trainer does
            if reads:
                raise FileNotFoundError(path / "_METADATA")
        return verify(path)

    monkeypatch.setattr(manifest, "verify", late)
    assert cli_main.main(["checkpoint", "ls", run]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["step", "1", "3"]
    assert Checkpoints(run).latest_step() == 3


def test_pruning_keeps_whole_steps_and_counts_no_others(tmp_path, capsys):
    run = str(tmp_path)
    save(tmp_path, 1, 2, 3, permanent=1000)
    inventory.quarantine(run, {1: "a trial"})
    damage(tmp_path / "checkpoints" / "3" / "meta" / "metadata", np.random.default_rng(1))
    assert cli_main.main(["checkpoint", "prune", run, "--keep", "1"]) == 0
    said = capsys.readouterr().out
    assert "step 3: damaged: meta/metadata" in said and "quarantine/1-" in said
    assert (
        inventory.step_numbers(run) == [2, 3]
        and inventory.find_resume_point(run).step == 2
        and not inventory.list_quarantine(run)
    )
    damage(tmp_path / "checkpoints" / "2" / "meta" / "metadata", np.random.default_rng(1))
    assert cli_main.main(["checkpoint", "prune", run, "--keep", "1"]) == 0
    assert inventory.step_numbers(run) == [2, 3]


def test_only_the_last_steps_put_aside_are_kept(tmp_path):
    run = str(tmp_path)
    save(tmp_path, 1, 2, 3, 4, permanent=1000)
    for number in (1, 2, 3):
        told = inventory.quarantine(run, {number: "a trial"})
    assert [name.split("-")[0] for name in inventory.list_quarantine(run)] == ["2", "3"]
    assert "1-" in told[-1] and "removed" in told[-1]


def test_a_list_that_names_files_elsewhere_is_not_followed(tmp_path):
    save(tmp_path, 1)
    folder = inventory.checkpoints_dir(str(tmp_path)) / "1"
    known = manifest.read(folder)
    assert known is not None
    bad = manifest.Manifest(1, "temporary", {"../../secret": (0, 0)})
    (folder / manifest.NAME).write_bytes(manifest._text(bad))
    with pytest.raises(manifest.Damaged, match="outside of the folder"):
        manifest.verify(folder)


@pytest.mark.fault(8)
def test_a_full_disk_costs_no_more_than_it_must_and_what_was_put_aside_first(tmp_path, monkeypatch):
    run, size = str(tmp_path), 2 << 20
    save(tmp_path, 10, 20, 30, 40)
    inventory.quarantine(run, {40: "a trial"})
    taken = lambda run: len(inventory.step_numbers(run)) + len(inventory.list_quarantine(run))
    monkeypatch.setattr(inventory, "available_bytes", lambda run: (4 - taken(run)) * size)
    checkpoints = Checkpoints(run, keep=3)
    assert checkpoints.save(35, state(35), about(35), tier="interim") and checkpoints.wait()
    (told,) = checkpoints.drain_problems()
    assert told.startswith("quarantine/40-") and inventory.step_numbers(run) == [10, 20, 30, 35]
    assert checkpoints.save(40, state(40), about(40)) and checkpoints.wait()
    assert checkpoints.drain_problems() == ["step 10: checkpoint removed, since the disk is full"]
    assert inventory.step_numbers(run) == [20, 30, 40]
    checkpoints.close()


def test_the_commands_list_verify_compare_and_prune(tmp_path, capsys):
    run = str(tmp_path / "run")
    save(tmp_path / "run", 1, 2, 3, permanent=1000)
    assert cli_main.main(["checkpoint", "ls", run]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all("temporary" in line and line.endswith("whole") for line in lines[1:])
    assert cli_main.main(["checkpoint", "verify", run]) == 0
    damage(tmp_path / "run" / "checkpoints" / "2" / "meta" / "metadata", np.random.default_rng(1))
    assert cli_main.main(["checkpoint", "verify", run]) == 1
    assert "step 2: damaged: meta/metadata" in capsys.readouterr().out
    assert cli_main.main(["checkpoint", "verify", run, "3"]) == 0
    assert cli_main.main(["checkpoint", "verify", run, "7"]) == 2
    assert "found no step 7, expected one of 1, 2, 3" in capsys.readouterr().err
    assert cli_main.main(["checkpoint", "diff", run, "3", "3"]) == 0
    assert cli_main.main(["checkpoint", "diff", run, "1", "3"]) == 1
    said = capsys.readouterr().out
    assert "recipe: seed: 1 -> 3" in said
    assert "params: b: 100.0% of its values differ, by 2 at most, 2 of its norm" in said
    assert cli_main.main(["checkpoint", "prune", run, "--keep", "1", "--dry-run"]) == 0
    assert inventory.step_numbers(run) == [1, 2, 3]
    assert cli_main.main(["checkpoint", "prune", run, "--keep", "1"]) == 0
    assert inventory.step_numbers(run) == [3]
    save(tmp_path / "other", 3)
    capsys.readouterr()
    assert cli_main.main(["checkpoint", "diff", run, str(tmp_path / "other")]) == 0
    assert cli_main.main(["checkpoint", "ls", str(tmp_path)]) == 2
