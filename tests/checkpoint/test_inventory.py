"""Checkpoint inventory: which exist, which are intact, which to use or remove, on disk and in a bucket.

Steps are written by hand, two small files and a manifest, so that a test takes milliseconds. How Orbax writes
them is tested in test_manager.py."""

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.checkpoint import disk_space, inventory, manifest
from headrace.checkpoint.inventory import UNSEALED, Problem, ResumePoint, StoredStep
from headrace.checkpoint.manifest import Tier
from headrace.config.sections import CheckpointKeys
from headrace.errors import UserError
from headrace.storage import files

BUCKET_RUN = "gs://bucket/run"


@pytest.fixture(params=["disk", "bucket"])
def run_dir(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A run folder without checkpoints, on a disk and in a bucket: nearly every rule holds for both."""
    if request.param == "disk":
        return str(tmp_path / "run")
    request.getfixturevalue("bucket")  # starts the fake Google Cloud Storage of tests/conftest.py
    return BUCKET_RUN


def write_steps(run_dir: str, *steps: int, tier: Tier = "temporary", is_sealed: bool = True) -> None:
    for step in steps:
        directory = inventory.step_dir(run_dir, step)
        files.write(directory / "meta/metadata", b"{}")
        files.write(directory / "params/weights", b"weights %d" % step)
        if files.is_url(run_dir):
            files.write(directory / files.COMMITTED, b"done")
        if is_sealed:
            manifest.seal(directory, step=step, tier=tier)


def damage(run_dir: str, step: int, name: str = "params/weights") -> None:
    path = inventory.step_dir(run_dir, step) / name
    content = files.read(path)
    files.write(path, bytes([content[0] ^ 1]) + content[1:])


def read_all(run_dir: str, folder: str = "") -> dict[str, bytes]:
    """The content of all files below a folder of the checkpoints."""
    directory = inventory.checkpoints_dir(run_dir) / folder
    return {name: files.read(directory / name) for name in files.list_files(directory)}


def check_all(run_dir: str) -> dict[int, Problem | None]:
    return dict(inventory.inspect_each(run_dir, inventory.step_numbers(run_dir), inventory.check_step))


def removable_steps(run_dir: str, keep: int) -> list[int]:
    return [stored.step for stored in inventory.find_removable(run_dir, keep)]


def call_before_reading(monkeypatch: pytest.MonkeyPatch, action: Callable[[int], None]) -> None:
    """Have `action(step)` called just before a step is read, as if another process did it."""
    verify = manifest.verify
    monkeypatch.setattr(manifest, "verify", lambda path: (action(int(path.name)), verify(path))[1])


def test_a_run_resumes_from_its_newest_intact_step(run_dir):
    assert inventory.find_resume_point(run_dir) == ResumePoint(None, {})
    write_steps(run_dir, 9, 10)
    assert inventory.find_resume_point(run_dir) == ResumePoint(10, {})
    damage(run_dir, 10)
    point = inventory.find_resume_point(run_dir)
    assert point.step == 9 and point.rejected[10].is_damage


def test_a_flipped_bit_a_cut_or_a_missing_file_is_noticed(tmp_path):
    run_dir = str(tmp_path)
    write_steps(run_dir, 1, 2)
    for name, content in read_all(run_dir, "2").items():
        flipped = [bytes([*content[:at], content[at] ^ 1, *content[at + 1 :]]) for at in range(len(content))]
        shortened = [content[:length] for length in range(len(content))]
        for changed in flipped + shortened:
            files.write(inventory.step_dir(run_dir, 2) / name, changed)
            point = inventory.find_resume_point(run_dir)
            assert point.step == 1 and point.rejected[2].is_damage, f"{name} is now {changed!r}"
        (tmp_path / "checkpoints/2" / name).unlink()
        assert inventory.find_resume_point(run_dir).step == 1, f"{name} is missing"
        files.write(inventory.step_dir(run_dir, 2) / name, content)
    assert inventory.find_resume_point(run_dir) == ResumePoint(2, {})


def test_a_step_in_the_folder_of_another_step_is_damaged(run_dir):
    """A run that resumed from it would skip the steps between the two numbers."""
    write_steps(run_dir, 1, 2)
    files.move(inventory.step_dir(run_dir, 2), inventory.step_dir(run_dir, 7))
    point = inventory.find_resume_point(run_dir)
    assert point.step == 1 and point.rejected[7].is_damage


def test_an_unsealed_step_is_used_only_if_no_step_is_intact(run_dir):
    write_steps(run_dir, 1, 3)
    write_steps(run_dir, 2, is_sealed=False)
    damage(run_dir, 3)
    assert inventory.find_resume_point(run_dir).step == 1
    damage(run_dir, 1)
    point = inventory.find_resume_point(run_dir)
    assert (point.step, point.is_sealed, list(point.rejected)) == (2, False, [3])


def test_a_run_without_a_usable_step_is_refused_each_time_and_nothing_is_moved(run_dir):
    write_steps(run_dir, 1, 2)
    damage(run_dir, 1)
    damage(run_dir, 2, "meta/metadata")
    before = read_all(run_dir)
    for _ in range(2):
        with pytest.raises(UserError, match=r"step 2: meta/metadata .*; step 1: params/weights "):
            inventory.find_resume_point(run_dir)
        assert read_all(run_dir) == before
    inventory.quarantine(run_dir, {1: "a test", 2: "a test"})
    with pytest.raises(UserError, match=r"quarantine holds 1-\S+, 2-"):
        inventory.find_resume_point(run_dir)


def test_a_file_with_a_number_is_no_step_and_an_empty_folder_is_an_unsealed_one(tmp_path):
    run_dir = str(tmp_path)
    write_steps(run_dir, 1)
    (tmp_path / "checkpoints/8").write_text("a file")
    (tmp_path / "checkpoints/9").mkdir()
    assert inventory.find_resume_point(run_dir) == ResumePoint(1, {9: UNSEALED})
    assert inventory.describe_step(run_dir, 9) == StoredStep(9, "unknown", 0, 0.0, UNSEALED)


def test_a_disk_that_cannot_be_read_is_an_error_and_not_damage(tmp_path, monkeypatch):
    write_steps(str(tmp_path), 1, 2)
    scandir = os.scandir

    def fail_for_params(path):
        if path.endswith("2/params"):
            raise OSError(5, "Input/output error", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail_for_params)
    with pytest.raises(OSError, match="Input/output"):
        inventory.find_resume_point(str(tmp_path))


def test_a_sealed_step_in_a_bucket_that_lost_a_file_is_damaged_and_not_removed(bucket):
    write_steps(BUCKET_RUN, 2)
    del bucket.buckets["bucket"][f"run/checkpoints/2/{files.COMMITTED}"]
    inventory.remove_unfinished(BUCKET_RUN)
    assert inventory.step_numbers(BUCKET_RUN) == [2]
    with pytest.raises(UserError, match=f"step 2: {files.COMMITTED} is missing"):
        inventory.find_resume_point(BUCKET_RUN)


@pytest.mark.parametrize("moment", ["before it is read", "while it is read"])
def test_a_step_that_its_run_removes_meanwhile_is_skipped(run_dir, moment, monkeypatch):
    write_steps(run_dir, 1, 2, 3)

    def remove_step_2(step):
        if step == 2:
            inventory.remove_step(run_dir, 2)
            if moment == "while it is read":
                raise FileNotFoundError("params/weights")

    call_before_reading(monkeypatch, remove_step_2)
    assert check_all(run_dir) == {1: None, 3: None}


def test_a_reader_prefers_a_step_that_its_run_will_keep_and_warns_of_an_unsealed_one(run_dir):
    write_steps(run_dir, 2, is_sealed=False)
    step, (warning,) = inventory.find_readable_step(run_dir)
    assert step == 2 and "checkpoints/2 is used" in warning and "no manifest" in warning
    write_steps(run_dir, 6, tier="interim")
    step, (warning,) = inventory.find_readable_step(run_dir)
    assert step == 6 and "checkpoints/2 is not used" in warning and "no manifest" in warning
    write_steps(run_dir, 4)
    assert inventory.find_readable_step(run_dir) == (4, [])
    assert inventory.find_resume_point(run_dir).step == 6  # a run resumes from any


def test_a_reader_looks_again_if_all_steps_are_removed_meanwhile(run_dir, monkeypatch):
    write_steps(run_dir, 1, 2, 9)
    inventory.quarantine(run_dir, {9: "a test"})

    def save_step_3_and_remove(step):
        if step == 2:
            write_steps(run_dir, 3)
        if step != 3:
            inventory.remove_step(run_dir, step)

    call_before_reading(monkeypatch, save_step_3_and_remove)
    assert inventory.find_readable_step(run_dir) == (3, [])


def test_readers_find_no_damage_while_a_run_saves_and_removes_steps(tmp_path):
    run_dir = str(tmp_path)
    write_steps(run_dir, 2)

    def save_and_remove():
        for step in range(3, 100):
            time.sleep(0.005)
            write_steps(run_dir, step, tier="interim" if step % 2 else "temporary")
            assert inventory.apply_retention(run_dir, keep=1) == []

    trainer = threading.Thread(target=save_and_remove)
    trainer.start()
    while trainer.is_alive():
        assert inventory.find_readable_step(run_dir)[0] >= 2
        assert set(check_all(run_dir).values()) <= {None, UNSEALED}


def test_steps_are_described_by_their_manifests_alone(run_dir):
    write_steps(run_dir, 8, tier="permanent")
    write_steps(run_dir, 9, is_sealed=False)
    damage(run_dir, 8)  # goes unnoticed
    sealed, unsealed = inventory.list_steps(run_dir)
    assert (sealed.step, sealed.tier, sealed.problem) == (8, "permanent", None)
    assert sealed.size >= len(b"weights 8") and abs(sealed.written_at - time.time()) < 60
    assert (unsealed.step, unsealed.tier, unsealed.problem) == (9, "unknown", UNSEALED)


@pytest.mark.parametrize("every", range(2, 12))
def test_a_kill_loses_at_most_every_steps_even_if_each_save_takes_until_the_next(every):
    config = CheckpointKeys(every=every, keep_every=10)
    saves = [0, *(step for step in range(1, 100) if inventory.tier_due(config, step))]
    # When a save begins, the one before is sealed. A kill just before the next one begins falls back to that.
    assert all(saves[i + 2] - saves[i] <= every for i in range(len(saves) - 2))


def test_old_temporary_steps_are_removed_and_permanent_ones_stay(run_dir):
    for step in range(1, 9):
        write_steps(run_dir, step, tier="permanent" if step % 3 == 0 else "temporary")
        assert inventory.apply_retention(run_dir, keep=2) == []
    assert inventory.step_numbers(run_dir) == [3, 6, 7, 8]


def test_an_interim_step_stays_until_a_newer_one_is_sealed_and_does_not_count(run_dir):
    config, remaining = CheckpointKeys(every=4, keep_every=10), {}
    for step in range(1, 15):
        if tier := inventory.tier_due(config, step):
            write_steps(run_dir, step, tier=tier)
            inventory.apply_retention(run_dir, keep=2)
            remaining[step] = inventory.step_numbers(run_dir)
    assert remaining.pop(14) == [8, 10, 12, 14] and remaining.pop(12) == [8, 10, 12]
    assert remaining == {2: [2], 4: [4], 6: [4, 6], 8: [4, 8], 10: [4, 8, 10]}


def test_steps_that_a_kill_left_unremoved_are_removed_later(run_dir):
    write_steps(run_dir, 4, 8, 12)
    write_steps(run_dir, 10, 14, tier="interim")
    assert removable_steps(run_dir, keep=2) == [4, 10]
    assert removable_steps(run_dir, keep=0) == [4, 8, 10, 12]  # never the newest
    inventory.apply_retention(run_dir, keep=2)
    assert inventory.step_numbers(run_dir) == [8, 12, 14]


def test_a_damaged_step_is_never_removed_and_an_unsealed_one_only_if_a_newer_one_is_sealed(run_dir):
    write_steps(run_dir, 1, 5, is_sealed=False)
    write_steps(run_dir, 2, 3)
    damage(run_dir, 2, manifest.NAME)
    assert removable_steps(run_dir, keep=0) == [1]
    damage(run_dir, 3, manifest.NAME)
    assert removable_steps(run_dir, keep=0) == []


def test_a_step_found_damaged_does_not_count_as_one_that_is_kept(run_dir):
    write_steps(run_dir, 1, 2, 3)
    is_intact = lambda step: inventory.check_step(run_dir, step) is None
    damage(run_dir, 3)
    assert [stored.step for stored in inventory.find_removable(run_dir, 1, is_intact)] == [1]
    damage(run_dir, 2)
    assert inventory.find_removable(run_dir, 1, is_intact) == []


def test_a_folder_that_cannot_be_removed_is_reported_and_others_are_removed(run_dir, monkeypatch):
    write_steps(run_dir, 1, 2, 3, 4)
    directory, remove = inventory.checkpoints_dir(run_dir), files.remove
    files.write(directory / "0.removed/weights", b"")

    def fail_for_0_and_1(folder, **options):
        if folder.name in ("0.removed", "1", "1.removed") and files.exists(folder):
            raise OSError(39, "Directory not empty", str(folder))  # as on NFS, where a reader has it open
        remove(folder, **options)

    with monkeypatch.context() as patch:
        patch.setattr(files, "remove", fail_for_0_and_1)
        leftover, step = inventory.apply_retention(run_dir, keep=2)
        assert leftover.startswith("0.removed could not be removed ([Errno 39]")
        assert step.startswith("step 1 could not be removed ([Errno 39]")
        assert inventory.remove_unfinished(run_dir)[0] == leftover
        assert list(disk_space.remove_one_by_one(run_dir)) == ["step 3: checkpoint"]
    assert inventory.apply_retention(run_dir, keep=1) == []
    assert files.list_names(directory) == ["4"]


def test_a_removal_that_is_killed_leaves_no_step_on_a_disk(tmp_path, monkeypatch):
    run_dir = str(tmp_path)
    write_steps(run_dir, 1, 2)

    def be_killed(folder, ignore_errors):
        if folder.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", be_killed)
        inventory.remove_step(run_dir, 2)
    assert inventory.find_resume_point(run_dir) == ResumePoint(1, {})
    assert inventory.remove_unfinished(run_dir) == []
    assert files.list_names(inventory.checkpoints_dir(run_dir)) == ["1"]


@pytest.mark.parametrize("files_gone", [1, 2, 3])
def test_a_removal_that_is_cut_off_in_a_bucket_leaves_no_damaged_step(bucket, files_gone):
    write_steps(BUCKET_RUN, 1, 2)
    refusal = bucket.fail("DELETE .*/run/checkpoints/1", status=403, skip=files_gone, times=99)
    with pytest.raises(UserError, match="may not be removed"):
        inventory.remove_step(BUCKET_RUN, 1)
    bucket.faults.remove(refusal)
    assert check_all(BUCKET_RUN) == ({1: UNSEALED, 2: None} if files_gone == 1 else {2: None})
    assert inventory.apply_retention(BUCKET_RUN, keep=1) + inventory.remove_unfinished(BUCKET_RUN) == []
    assert files.list_names(inventory.checkpoints_dir(BUCKET_RUN)) == ["2"]


def test_quarantine_moves_every_file_of_a_step_and_says_where(run_dir):
    write_steps(run_dir, 1, 2)
    before = read_all(run_dir, "2")
    (message,) = inventory.quarantine(run_dir, {2: "it is damaged"})
    (name,) = inventory.list_quarantine(run_dir)
    assert "it is damaged" in message and name.startswith("2-") and message.endswith(name)
    assert read_all(run_dir, f"quarantine/{name}") == before
    assert inventory.step_numbers(run_dir) == [1]


def test_quarantine_keeps_two_steps_or_all_of_the_last_call_and_says_what_it_removes(run_dir):
    write_steps(run_dir, 1, 2, 3)
    inventory.quarantine(run_dir, dict.fromkeys([1, 2, 3], "a test"))
    assert [name.split("-")[0] for name in inventory.list_quarantine(run_dir)] == ["1", "2", "3"]
    for _ in range(3):  # within a second, which is the unit of time in their names
        write_steps(run_dir, 7)
        before = inventory.list_quarantine(run_dir)
        messages = inventory.quarantine(run_dir, {7: "a test"})
    after = inventory.list_quarantine(run_dir)
    assert len(before) == len(after) == 2 and after[0] == before[1]
    assert len(messages) == 2 and f"{before[0]} removed" in messages[1]


@pytest.mark.parametrize("files_moved", range(4))
def test_a_move_to_quarantine_that_is_cut_off_in_a_bucket_is_finished_by_the_next(bucket, files_moved):
    write_steps(BUCKET_RUN, 1, 2)
    damage(BUCKET_RUN, 2)
    before = read_all(BUCKET_RUN, "2")
    refusal = bucket.fail("rewriteTo|copyTo|moveTo", status=403, skip=files_moved, times=99)
    with pytest.raises(UserError, match="may not be moved"):
        inventory.quarantine(BUCKET_RUN, {2: "a test"})
    bucket.faults.remove(refusal)
    point = inventory.find_resume_point(BUCKET_RUN)
    assert point.step == 1 and list(point.rejected) == [2]
    inventory.quarantine(BUCKET_RUN, {2: "a test"})
    moved = {name.split("/", 1)[1]: data for name, data in read_all(BUCKET_RUN, "quarantine").items()}
    assert moved == before
    assert inventory.find_resume_point(BUCKET_RUN) == ResumePoint(1, {})


def test_what_interrupted_saves_and_removals_left_is_removed_and_nothing_else(run_dir):
    write_steps(run_dir, 2, 3)
    write_steps(run_dir, 4, is_sealed=False)
    inventory.quarantine(run_dir, {3: "a test"})
    directory = inventory.checkpoints_dir(run_dir)
    for name in ("5" if files.is_url(run_dir) else "5.orbax-checkpoint-tmp-1", "1.removed"):
        files.write(directory / name / "params/weights", b"")
    assert inventory.step_numbers(run_dir) == [2, 4]
    assert inventory.remove_unfinished(run_dir) == []
    assert files.list_names(directory) == ["2", "4", "quarantine"]


def test_a_full_disk_costs_quarantine_first_and_then_the_oldest_steps_one_by_one(run_dir):
    write_steps(run_dir, 10, 20, 30, 40)
    inventory.quarantine(run_dir, {40: "a test"})
    removals = disk_space.remove_one_by_one(run_dir)
    assert len(inventory.list_quarantine(run_dir)) == 1  # nothing is removed before it must be
    assert next(removals).startswith("quarantine/40-") and not inventory.list_quarantine(run_dir)
    assert inventory.step_numbers(run_dir) == [10, 20, 30]
    assert "step 10" in next(removals) and inventory.step_numbers(run_dir) == [20, 30]
    assert "step 20" in next(removals) and inventory.step_numbers(run_dir) == [30]
    assert list(removals) == []


def test_a_rewind_goes_to_the_newest_intact_step_before_or_else_to_the_oldest_after(run_dir):
    assert inventory.find_intact_before(run_dir, 6) is None
    write_steps(run_dir, 2, 4, 6, 8)
    for expected in (4, 2, 6, 8):
        assert inventory.find_intact_before(run_dir, 6) == expected
        damage(run_dir, expected)
    with pytest.raises(UserError, match="no checkpoint here is intact"):
        inventory.find_intact_before(run_dir, 6)
