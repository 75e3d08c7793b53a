"""Saving and restoring through Orbax: damage is noticed, a kill or a full disk loses no sealed step, and no
run restarts from scratch by itself."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.checkpoint import disk_space, inventory, manifest
from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.state import State
from headrace.cli import main as cli_main
from headrace.config import sections
from headrace.errors import UserError
from headrace.runtime.signals import Stopper
from headrace.storage import files
from headrace.training import loss_spikes
from headrace.training import run as training_run


def state(number: int, width: int = 64) -> State:
    params = {"w": jax.random.normal(jax.random.key(number), (width, width)), "b": jnp.full(3, number, "f4")}
    zero = jnp.zeros((), jnp.int32)
    key = jax.random.key_data(jax.random.key(0))
    return State(
        zero + number,
        params,
        {"mu": jax.tree.map(jnp.copy, params)},
        None,
        key,
        zero + 0,
        loss_spikes.empty_history(2),
    )


def about(number: int) -> dict:
    return {"step": number, "recipe": {"seed": number, "model": {"use": "none"}}, "tokenizer_sha256": None}


def save(run: Path, *numbers: int, keep: int | None = 9, permanent: int = 0) -> None:
    checkpoints = Checkpoints(str(run), keep=keep)
    for number in numbers:
        tier = "permanent" if permanent > 0 and number % permanent == 0 else "temporary"
        assert checkpoints.save(number, state(number), about(number), tier=tier)
    assert checkpoints.wait() and not checkpoints.drain_problems()
    checkpoints.close()


def list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def damage(path: Path, random: np.random.Generator) -> str:
    """Flip one byte or cut the file short."""
    content = bytearray(path.read_bytes())
    position = int(random.integers(len(content)))
    if random.random() < 0.5:
        path.write_bytes(content[:position])
        return f"{path} cut at {position}"
    content[position] ^= int(random.integers(1, 256))
    path.write_bytes(content)
    return f"{path} flipped at {position}"


@pytest.mark.parametrize("trials", [60, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.fault(9)
def test_a_flipped_or_missing_byte_is_noticed_and_the_step_before_is_restored(tmp_path, trials):
    save(tmp_path, 1, 2)
    random, checkpoints, expected = np.random.default_rng(), Checkpoints(str(tmp_path)), state(1).params["w"]
    paths = list_files(tmp_path / "checkpoints" / "2")
    sizes = np.array([path.stat().st_size for path in paths])
    assert (sizes > 0).all() and any(path.name == manifest.NAME for path in paths)
    for trial in range(trials):
        # Alternates between a random file and a random byte: small files are as important as large ones.
        shares = None if trial % 2 else sizes / sizes.sum()
        path = paths[random.choice(len(paths), p=shares)]
        content = path.read_bytes()
        change = damage(path, random)
        step = checkpoints.find_resume_step()
        assert step == 1 and list(checkpoints.resume_point.rejected) == [2], change
        restored = checkpoints.restore(step, state(0))
        np.testing.assert_array_equal(restored.params["w"], expected, err_msg=change)
        path.write_bytes(content)
    assert checkpoints.find_resume_step() == 2
    np.testing.assert_array_equal(checkpoints.restore(2, state(0)).params["w"], state(2).params["w"])
    checkpoints.close()


@pytest.mark.fault(11)
def test_a_run_without_an_intact_checkpoint_is_refused_every_time(tmp_path):
    save(tmp_path, 1, 2)
    random = np.random.default_rng(0)
    for number in (1, 2):
        damage(tmp_path / "checkpoints" / str(number) / "meta" / "metadata", random)
    for _ in range(2):
        with pytest.raises(UserError, match=r"no checkpoint here is intact.*step 2: .*step 1: meta/meta"):
            Checkpoints(str(tmp_path), keep=1).find_resume_step()
        assert inventory.step_numbers(str(tmp_path)) == [1, 2]  # nothing is moved
    inventory.quarantine(str(tmp_path), {1: "", 2: ""})
    with pytest.raises(
        UserError, match=r"does not restart from scratch by itself.*quarantine holds 1-\S+, 2-"
    ):
        Checkpoints(str(tmp_path), keep=1).find_resume_step()


def test_a_step_without_a_manifest_is_used_only_if_no_other_is_intact(tmp_path, capsys):
    save(tmp_path, 1, 2)
    (tmp_path / "checkpoints" / "2" / manifest.NAME).unlink()
    assert inventory.find_resume_point(str(tmp_path)).step == 1
    (tmp_path / "checkpoints" / "1" / manifest.NAME).unlink()
    checkpoints = Checkpoints(str(tmp_path), keep=1)
    assert checkpoints.find_resume_step() == 2
    checkpoints.quarantine_damaged()
    assert "no manifest" in checkpoints.drain_problems()[0]
    assert Checkpoints(str(tmp_path)).latest_step() == 2
    assert (
        "checkpoints/2 is used because no other step is intact, but it has no manifest"
        in capsys.readouterr().err
    )


def test_old_checkpoints_are_removed_and_permanent_ones_stay(tmp_path):
    save(tmp_path, *range(1, 9), keep=2, permanent=3)
    assert inventory.step_numbers(str(tmp_path)) == [3, 6, 7, 8]


def test_an_interim_checkpoint_is_removed_when_a_newer_one_is_sealed(tmp_path):
    run, checkpoints = str(tmp_path), Checkpoints(str(tmp_path), keep=2)
    remaining = {}
    for number in range(1, 15):
        tier = inventory.tier_due(sections.CheckpointKeys(every=4, keep_every=10), number)
        if tier is not None:
            assert checkpoints.save(number, state(number), about(number), tier=tier) and checkpoints.wait()
            remaining[number] = inventory.step_numbers(run)
    checkpoints.close()
    assert remaining.pop(14) == [8, 10, 12, 14] and remaining.pop(12) == [8, 10, 12]
    assert remaining == {2: [2], 4: [4], 6: [4, 6], 8: [4, 8], 10: [4, 8, 10]}
    # A reader prefers a step that stays, and uses an interim one only if no other is intact.
    assert inventory.find_resume_point(run).step == 14 and Checkpoints(run).latest_step() == 12
    for number in (8, 10, 12):
        damage(tmp_path / "checkpoints" / str(number) / "meta" / "metadata", np.random.default_rng(1))
    assert Checkpoints(run).latest_step() == 14


def test_steps_that_a_kill_left_unremoved_are_removed_when_the_run_resumes(tmp_path):
    run, checkpoints = str(tmp_path), Checkpoints(str(tmp_path))
    for number in (4, 8, 10, 12, 14):
        tier = inventory.tier_due(sections.CheckpointKeys(every=4), number)
        assert checkpoints.save(number, state(number), about(number), tier=tier)
    checkpoints.close()
    assert [step.step for step in inventory.find_removable(run, 2)] == [4, 10]
    assert [step.step for step in inventory.find_removable(run, 0)] == [4, 8, 10, 12]
    resumed = Checkpoints(run, keep=2)
    assert resumed.find_resume_step() == 14
    resumed.quarantine_damaged()
    assert inventory.step_numbers(run) == [4, 8, 10, 12, 14]
    resumed.remove_old()
    resumed.close()
    assert inventory.step_numbers(run) == [8, 12, 14]


def test_a_run_that_is_complete_or_refused_removes_nothing(tiny):
    assert training_run.run(tiny("checkpoint.every=4")) == 0
    steps = inventory.step_numbers(tiny().run_dir)
    assert steps == [4, 8, 12]
    assert training_run.run(tiny("checkpoint.keep=1")) == 0  # complete already
    with pytest.raises(UserError, match="cannot resume the run in this folder: seed: found 1, expected 0"):
        training_run.run(tiny("checkpoint.keep=1", "seed=1", "schedule.steps=16"))
    assert inventory.step_numbers(tiny().run_dir) == steps


def test_the_last_step_is_temporary_even_if_an_interim_one_is_due(tiny):
    assert training_run.run(tiny("schedule.steps=9")) == 0  # checkpoint.every=6
    last = inventory.list_steps(tiny().run_dir)[-1]
    assert (last.step, last.tier) == (9, "temporary")
    assert Checkpoints(tiny().run_dir).latest_step() == 9


def test_a_complete_run_warns_of_unsealed_checkpoints(tiny, capsys):
    assert training_run.run(tiny()) == 0
    (Path(tiny().run_dir) / "checkpoints" / "12" / manifest.NAME).unlink()
    shutil.rmtree(Path(tiny().run_dir) / "checkpoints" / "6")
    assert training_run.run(tiny()) == 0
    output = capsys.readouterr().out
    assert "step 12: this checkpoint is used because" in output and "all 12 steps are done" in output


@pytest.mark.thin(2)
@pytest.mark.parametrize("every", [1, 2, 5, 6])
def test_a_kill_at_any_step_loses_no_more_than_checkpoint_every(tiny, every, monkeypatch):
    """Even if a save takes longer than the interval between two."""
    cfg = tiny(f"checkpoint.every={every}", "schedule.steps=15", "eval.every=0")
    seal, should_stop, lost = manifest.seal, Stopper.should_stop, []

    def slow_seal(*args, **kwargs):
        time.sleep(0.3)
        return seal(*args, **kwargs)

    def record_loss(self, step):
        steps = inventory.step_numbers(cfg.run_dir)
        sealed = [sealed for sealed in steps if manifest.read(inventory.step_dir(cfg.run_dir, sealed))]
        lost.append(step - max(sealed, default=0))
        return should_stop(self, step)

    monkeypatch.setattr(manifest, "seal", slow_seal)
    monkeypatch.setattr(Stopper, "should_stop", record_loss)
    assert training_run.run(cfg) == 0
    assert len(lost) == 15 and max(lost) == every


@pytest.mark.fault(11)
def test_a_run_whose_checkpoints_vanished_does_not_restart_from_scratch(tiny, tmp_path):
    cfg = tiny(f"run_dir={tmp_path}/run", "schedule.steps=4", "checkpoint.every=2", "eval.batches=1")
    assert training_run.run(cfg) == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"found no checkpoint, but step 4 was saved .*put the folder back"):
        training_run.run(cfg)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    (tmp_path / "elsewhere").rename(tmp_path / "run" / "checkpoints")
    assert training_run.run(cfg) == 0


@pytest.mark.fault(8)
def test_a_full_disk_costs_old_checkpoints_then_a_save_but_not_the_run(tmp_path, monkeypatch):
    run, room = str(tmp_path), [1 << 40]
    monkeypatch.setattr(disk_space, "available_bytes", lambda run: room[0])
    checkpoints = Checkpoints(run, keep=3)
    for number in (1, 2):
        assert checkpoints.save(number, state(number), about(number))
    checkpoints.wait()
    room[0] = 1000
    assert not checkpoints.save(3, state(3), about(3)) and not checkpoints.wait()
    problems = " ".join(checkpoints.drain_problems())
    assert "step 1: checkpoint removed" in problems and "step 3: checkpoint skipped" in problems
    assert inventory.step_numbers(run) == [2]
    with pytest.raises(
        UserError, match=r"run_dir: a checkpoint takes 0\.00 GB, and the disk of .* 0\.00 GB free"
    ):
        checkpoints.check_room(state(4))
    room[0] = 1 << 40
    assert checkpoints.save(4, state(4), about(4)) and checkpoints.wait() and not checkpoints.drain_problems()
    checkpoints.check_room(state(4))
    checkpoints.close()


@pytest.mark.fault(8)
def test_a_save_that_fails_is_reported_and_the_next_one_is_tried(tmp_path, monkeypatch):
    checkpoints = Checkpoints(str(tmp_path), keep=2)
    assert checkpoints.save(1, state(1), about(1)) and checkpoints.wait()

    def disk_is_full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "seal", disk_is_full)
        assert checkpoints.save(2, state(2), about(2))
        assert not checkpoints.wait()
    assert re.search(r"step 2: .*could not be written.*No space left", checkpoints.drain_problems()[0])
    assert inventory.find_resume_point(str(tmp_path)).step == 1
    assert checkpoints.save(3, state(3), about(3)) and checkpoints.wait()
    checkpoints.close()
    assert inventory.find_resume_point(str(tmp_path)).step == 3


SAVER = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.checkpoint.test_manager import *
checkpoints = Checkpoints(sys.argv[2], keep=2)
print("first", flush=True)
for number in range(1, 10_000):
    checkpoints.save(number, state(number, 1024), about(number))
    print(number, flush=True)
"""


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.fault(3)
def test_a_process_killed_while_it_saves_leaves_an_intact_step(tmp_path, kills):
    random = np.random.default_rng()
    for kill in range(kills):
        run = tmp_path / str(kill)
        command = [sys.executable, "-c", SAVER, str(Path(__file__).parents[2]), str(run)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            while process.stdout.readline() != "3\n":
                pass
            time.sleep(random.uniform(0, 0.3))
            process.kill()
        checkpoints = Checkpoints(str(run), keep=2)
        step = checkpoints.find_resume_step()
        assert step is not None and step >= 2
        checkpoints.quarantine_damaged()
        names = {path.name for path in (run / "checkpoints").iterdir()}
        assert names <= {"quarantine", *map(str, range(step + 1))}
        restored = checkpoints.restore(step, state(0, 1024))
        np.testing.assert_array_equal(restored.params["w"], state(step, 1024).params["w"])
        checkpoints.close()


MEMORY = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.checkpoint.test_manager import *
import psutil
checkpoints, memory = Checkpoints(sys.argv[2], keep=2), []
large = state(1, 2048)
for number in range(1, 121):
    checkpoints.save(number, large, about(number))
    checkpoints.wait()
    memory.append(psutil.Process().memory_info().rss)
print((max(memory[-20:]) - max(memory[:20])) / 2**20)
"""


@pytest.mark.slow
@pytest.mark.fault(35)
def test_a_hundred_saves_need_no_more_memory_than_twenty(tmp_path, record_property):
    command = [sys.executable, "-c", MEMORY, str(Path(__file__).parents[2]), str(tmp_path)]
    growth = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    assert growth < 32  # MiB, one state; a leak would be a hundred
    record_property("seen", f"{growth:.1f} MiB more after 120 than after 20, of a state of 32")


@pytest.mark.fault(16)
def test_other_data_is_refused_with_all_differences(tiny, tmp_path, packed):
    assert training_run.run(tiny("schedule.steps=1", "schedule.warmup=0")) == 0
    shutil.copytree(packed, tmp_path / "data")
    index = json.loads((tmp_path / "data" / "index.json").read_text())
    index["splits"]["train"]["epochs"][0][0]["checksums"][""] = "00000000"
    (tmp_path / "data" / "index.json").write_text(json.dumps(index))
    changes = (f"data.path={tmp_path}/data", "model.mlp=128", "seed=3", "log.every=2")
    said = (
        r"seed: found 3, expected 0.*model\.mlp: found 128, expected 64.*data.path: found fingerprint \w+ .*"
        r"which is allowed: .*log\.every 1 -> 2"
    )
    with pytest.raises(UserError, match=said):
        training_run.run(tiny(*changes))


@pytest.mark.fault(16)
def test_another_tokenizer_is_refused_when_a_run_resumes(tiny, tmp_path, packed):
    assert training_run.run(tiny("schedule.steps=1", "schedule.warmup=0")) == 0
    shutil.copytree(packed, tmp_path / "data")
    index = json.loads((tmp_path / "data" / "index.json").read_text())
    was, index["tokenizer_sha256"] = index["tokenizer_sha256"], "f00d" * 16
    (tmp_path / "data" / "index.json").write_text(json.dumps(index))
    with pytest.raises(
        UserError, match=rf"tokenizer: found {'f00d' * 16} \({tmp_path}/data\), expected {was}"
    ):
        training_run.run(tiny(f"data.path={tmp_path}/data"))


def test_a_removal_that_fails_is_reported_and_repeated_and_the_save_counts(tmp_path, monkeypatch):
    checkpoints = Checkpoints(str(tmp_path), keep=1)
    assert checkpoints.save(1, state(1), about(1)) and checkpoints.wait()
    with monkeypatch.context() as patch:
        refuse_removal(patch, "1.removed")
        assert checkpoints.save(2, state(2), about(2)) and checkpoints.wait()
    (problem,) = checkpoints.drain_problems()
    assert problem.startswith("step 1 could not be removed ([Errno 39]")
    assert checkpoints.last_durable_step == 2
    assert (tmp_path / "checkpoints" / "1.removed").exists()
    assert checkpoints.save(3, state(3), about(3)) and checkpoints.wait() and not checkpoints.drain_problems()
    checkpoints.close()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"3"}


def test_a_folder_that_cannot_be_removed_does_not_prevent_other_removals(tmp_path, monkeypatch):
    save(tmp_path, 1, 2, 3)
    (tmp_path / "checkpoints" / "0.removed").mkdir()
    monkeypatch.setattr(
        disk_space, "available_bytes", lambda run: (3 - len(inventory.step_numbers(run))) * (2 << 20)
    )
    refuse_removal(monkeypatch, "0.removed")
    checkpoints = Checkpoints(str(tmp_path), keep=3)
    assert checkpoints.find_resume_step() == 3
    checkpoints.quarantine_damaged()
    assert "0.removed could not be removed" in checkpoints.drain_problems()[0]
    assert checkpoints.save(4, state(4), about(4)) and checkpoints.wait()
    assert "step 1: checkpoint removed, since the disk is full" in checkpoints.drain_problems()
    assert inventory.step_numbers(str(tmp_path)) == [2, 3, 4]
    checkpoints.close()


def refuse_removal(patch: pytest.MonkeyPatch, name: str) -> None:
    """Let the removal of folders of this name fail, as on NFS while a reader has a file of it open."""
    remove = files.remove

    def fail_for_name(folder, **options):
        if folder.name == name and folder.exists():
            raise OSError(39, "Directory not empty", str(folder))
        remove(folder, **options)

    patch.setattr(files, "remove", fail_for_name)


@pytest.mark.fault(8)
def test_a_full_disk_costs_quarantine_first_and_no_more_than_necessary(tmp_path, monkeypatch):
    run, size = str(tmp_path), 2 << 20
    save(tmp_path, 10, 20, 30, 40)
    inventory.quarantine(run, {40: "a test"})
    num_folders = lambda run: len(inventory.step_numbers(run)) + len(inventory.list_quarantine(run))
    monkeypatch.setattr(disk_space, "available_bytes", lambda run: (4 - num_folders(run)) * size)
    checkpoints = Checkpoints(run, keep=3)
    assert checkpoints.save(35, state(35), about(35), tier="interim") and checkpoints.wait()
    (problem,) = checkpoints.drain_problems()
    assert problem.startswith("quarantine/40-") and inventory.step_numbers(run) == [10, 20, 30, 35]
    assert checkpoints.save(40, state(40), about(40)) and checkpoints.wait()
    assert checkpoints.drain_problems() == ["step 10: checkpoint removed, since the disk is full"]
    assert inventory.step_numbers(run) == [20, 30, 40]
    checkpoints.close()


WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.checkpoint.test_manager import *
checkpoints = Checkpoints(sys.argv[2], keep=1)
number = 0
while True:
    number += 1
    checkpoints.save(number, state(number, 8), about(number), tier="interim" if number % 2 else "temporary")
    if number == 2:
        checkpoints.wait()
        print("saved", flush=True)
"""


@pytest.mark.parametrize("seconds", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_readers_and_commands_find_no_damage_while_another_process_saves(tmp_path, seconds, capsys):
    run = str(tmp_path)
    command = [sys.executable, "-c", WRITER, str(Path(__file__).parents[2]), run]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "saved\n"
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline:
                assert inventory.find_readable_step(run)[0] > 1
                assert cli_main.main(["checkpoint", "ls", run]) == 0
                cli_main.main(["checkpoint", "verify", run])  # 1 while one is being written
                assert cli_main.main(["checkpoint", "prune", run, "--keep", "1", "--dry-run"]) == 0
                assert inventory.find_resume_point(run).step is not None
        finally:
            process.kill()
    output = capsys.readouterr()
    assert "damaged" not in output.out and not output.err
