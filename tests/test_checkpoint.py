"""Checkpoints that can be trusted: damage is found, nothing is lost, nothing begins anew unasked."""

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

from headrace.checkpoint import inventory, manifest
from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.state import State
from headrace.config import sections
from headrace.errors import UserError
from headrace.runtime import multihost
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


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def damage(path: Path, random: np.random.Generator) -> str:
    """Flips one byte or cuts the file short."""
    before = bytearray(path.read_bytes())
    place = int(random.integers(len(before)))
    if random.random() < 0.5:
        path.write_bytes(before[:place])
        return f"{path} cut at {place}"
    before[place] ^= int(random.integers(1, 256))
    path.write_bytes(before)
    return f"{path} flipped at {place}"


@pytest.mark.parametrize("trials", [60, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.fault(9)
def test_every_flipped_byte_and_every_cut_is_found_and_the_step_before_is_restored(tmp_path, trials):
    save(tmp_path, 1, 2)
    random, checkpoints, before = np.random.default_rng(), Checkpoints(str(tmp_path)), state(1).params["w"]
    found = files(tmp_path / "checkpoints" / "2")
    sizes = np.array([path.stat().st_size for path in found])
    assert (sizes > 0).all() and any(path.name == manifest.NAME for path in found)
    for trial in range(trials):
        # By turns any file and any byte: small files are as important as large ones.
        shares = None if trial % 2 else sizes / sizes.sum()
        path = found[random.choice(len(found), p=shares)]
        whole = path.read_bytes()
        what = damage(path, random)
        chosen = checkpoints.find_resume_step()
        assert chosen == 1 and list(checkpoints.resume_point.rejected) == [2], what
        restored = checkpoints.restore(chosen, state(0))
        np.testing.assert_array_equal(restored.params["w"], before, err_msg=what)
        path.write_bytes(whole)
    assert checkpoints.find_resume_step() == 2
    np.testing.assert_array_equal(checkpoints.restore(2, state(0)).params["w"], state(2).params["w"])
    checkpoints.close()


@pytest.mark.fault(11)
def test_a_run_of_which_no_checkpoint_is_whole_is_refused_again_and_again(tmp_path):
    save(tmp_path, 1, 2)
    random = np.random.default_rng(0)
    for number in (1, 2):
        damage(tmp_path / "checkpoints" / str(number) / "meta" / "metadata", random)
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"no checkpoint in it can be trusted.*step 2: .*step 1: meta/meta"
        ):
            Checkpoints(str(tmp_path), keep=1).find_resume_step()
        assert inventory.step_numbers(str(tmp_path)) == [1, 2]  # nothing is moved
    inventory.quarantine(str(tmp_path), {1: "", 2: ""})
    with pytest.raises(UserError, match=r"does not begin anew by itself.*quarantine holds 1-\S+, 2-"):
        Checkpoints(str(tmp_path), keep=1).find_resume_step()


def test_a_step_without_a_manifest_is_used_only_where_no_other_is_whole(tmp_path, capsys):
    save(tmp_path, 1, 2)
    (tmp_path / "checkpoints" / "2" / manifest.NAME).unlink()
    assert inventory.find_resume_point(str(tmp_path)).step == 1
    (tmp_path / "checkpoints" / "1" / manifest.NAME).unlink()
    checkpoints = Checkpoints(str(tmp_path), keep=1)
    assert checkpoints.find_resume_step() == 2
    checkpoints.quarantine_damaged()
    assert "no manifest" in checkpoints.drain_problems()[0]
    assert Checkpoints(str(tmp_path)).latest_step() == 2
    assert "checkpoints/2 is used since no other is whole: it has no manifest" in capsys.readouterr().err


def test_old_checkpoints_go_and_permanent_ones_stay(tmp_path):
    save(tmp_path, *range(1, 9), keep=2, permanent=3)
    assert inventory.step_numbers(str(tmp_path)) == [3, 6, 7, 8]


def test_what_was_saved_half_way_goes_when_a_newer_step_is_whole(tmp_path):
    run, checkpoints = str(tmp_path), Checkpoints(str(tmp_path), keep=2)
    there = {}
    for number in range(1, 15):
        tier = inventory.tier_due(sections.CheckpointKeys(every=4, keep_every=10), number)
        if tier is not None:
            assert checkpoints.save(number, state(number), about(number), tier=tier) and checkpoints.wait()
            there[number] = inventory.step_numbers(run)
    checkpoints.close()
    assert there.pop(14) == [8, 10, 12, 14] and there.pop(12) == [8, 10, 12]
    assert there == {2: [2], 4: [4], 6: [4, 6], 8: [4, 8], 10: [4, 8, 10]}
    # Who only reads takes one that stays, and one from half-way where no other is whole.
    assert inventory.find_resume_point(run).step == 14 and Checkpoints(run).latest_step() == 12
    for number in (8, 10, 12):
        damage(tmp_path / "checkpoints" / str(number) / "meta" / "metadata", np.random.default_rng(1))
    assert Checkpoints(run).latest_step() == 14


def test_what_a_kill_kept_from_being_removed_goes_when_the_run_goes_on(tmp_path):
    run, checkpoints = str(tmp_path), Checkpoints(str(tmp_path))
    for number in (4, 8, 10, 12, 14):
        tier = inventory.tier_due(sections.CheckpointKeys(every=4), number)
        assert checkpoints.save(number, state(number), about(number), tier=tier)
    checkpoints.close()
    assert [step.step for step in inventory.find_removable(run, 2)] == [4, 10]
    assert [step.step for step in inventory.find_removable(run, 0)] == [4, 8, 10, 12]
    again = Checkpoints(run, keep=2)
    assert again.find_resume_step() == 14
    again.quarantine_damaged()
    assert inventory.step_numbers(run) == [4, 8, 10, 12, 14]
    again.remove_old()
    again.close()
    assert inventory.step_numbers(run) == [8, 12, 14]


def test_what_has_nothing_to_do_removes_nothing(tiny):
    """Nor does what is refused."""
    assert training_run.run(tiny("checkpoint.every=4")) == 0
    there = inventory.step_numbers(tiny().run_dir)
    assert there == [4, 8, 12]
    assert training_run.run(tiny("checkpoint.keep=1")) == 0  # done already
    with pytest.raises(UserError, match="holds a run with seed"):
        training_run.run(tiny("checkpoint.keep=1", "seed=1", "schedule.steps=16"))
    assert inventory.step_numbers(tiny().run_dir) == there


def test_the_last_step_is_one_that_stays_also_where_it_lies_half_way(tiny):
    assert training_run.run(tiny("schedule.steps=9")) == 0  # checkpoint.every=6
    last = inventory.list_steps(tiny().run_dir)[-1]
    assert (last.step, last.tier) == (9, "temporary")
    assert Checkpoints(tiny().run_dir).latest_step() == 9


def test_a_finished_run_tells_what_is_wrong_with_its_checkpoints(tiny, capsys):
    assert training_run.run(tiny()) == 0
    (Path(tiny().run_dir) / "checkpoints" / "12" / manifest.NAME).unlink()
    shutil.rmtree(Path(tiny().run_dir) / "checkpoints" / "6")
    assert training_run.run(tiny()) == 0
    said = capsys.readouterr().out
    assert "step 12: it has no manifest" in said and "all 12 steps are done" in said


@pytest.mark.thin(2)
@pytest.mark.parametrize("every", [1, 2, 5, 6])
def test_a_kill_at_any_step_loses_no_more_than_checkpoint_every(tiny, every, monkeypatch):
    """What lies on the disk after each step of a run, if saves take longer than an interval to be whole."""
    cfg = tiny(f"checkpoint.every={every}", "schedule.steps=15", "eval.every=0")
    seal, after, lost = manifest.seal, multihost.Stopper.should_stop, []

    def slow_seal(*args, **kwargs):
        time.sleep(0.3)
        return seal(*args, **kwargs)

    def looking_after(self, number):
        whole = [
            one
            for one in inventory.step_numbers(cfg.run_dir)
            if manifest.read(inventory.checkpoints_dir(cfg.run_dir) / str(one))
        ]
        lost.append(number - max(whole, default=0))
        return after(self, number)

    monkeypatch.setattr(manifest, "seal", slow_seal)
    monkeypatch.setattr(multihost.Stopper, "should_stop", looking_after)
    assert training_run.run(cfg) == 0
    assert len(lost) == 15 and max(lost) == every


@pytest.mark.fault(11)
def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew_by_itself(tiny, tmp_path):
    cfg = tiny(f"run_dir={tmp_path}/run", "schedule.steps=4", "checkpoint.every=2", "eval.batches=1")
    assert training_run.run(cfg) == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"found no checkpoint, and step 4 was saved .*put the folder back"):
        training_run.run(cfg)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    (tmp_path / "elsewhere").rename(tmp_path / "run" / "checkpoints")
    assert training_run.run(cfg) == 0


@pytest.mark.fault(8)
def test_a_full_disk_costs_old_checkpoints_then_a_save_and_never_the_run(tmp_path, monkeypatch):
    run, room = str(tmp_path), [1 << 40]
    monkeypatch.setattr(inventory, "available_bytes", lambda run: room[0])
    checkpoints = Checkpoints(run, keep=3)
    for number in (1, 2):
        assert checkpoints.save(number, state(number), about(number))
    checkpoints.wait()
    room[0] = 1000
    assert not checkpoints.save(3, state(3), about(3)) and not checkpoints.wait()
    told = " ".join(checkpoints.drain_problems())
    assert (
        "step 1: checkpoint removed" in told and "the disk of" in told and inventory.step_numbers(run) == [2]
    )
    with pytest.raises(
        UserError, match=r"run_dir: a checkpoint takes 0\.00 GB, and the disk of .* 0\.00 GB free"
    ):
        checkpoints.check_room(state(4))
    room[0] = 1 << 40
    assert checkpoints.save(4, state(4), about(4)) and checkpoints.wait() and not checkpoints.drain_problems()
    checkpoints.check_room(state(4))
    checkpoints.close()


@pytest.mark.fault(8)
def test_a_save_that_fails_is_told_and_the_next_one_is_tried(tmp_path, monkeypatch):
    checkpoints = Checkpoints(str(tmp_path), keep=2)
    assert checkpoints.save(1, state(1), about(1)) and checkpoints.wait()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "seal", full)
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
from test_checkpoint import *
checkpoints = Checkpoints(sys.argv[2], keep=2)
print("first", flush=True)
for number in range(1, 10_000):
    checkpoints.save(number, state(number, 1024), about(number))
    print(number, flush=True)
"""


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.fault(3)
def test_a_process_killed_while_it_saves_leaves_a_whole_step(tmp_path, kills):
    random = np.random.default_rng()
    for kill in range(kills):
        run = tmp_path / str(kill)
        command = [sys.executable, "-c", SAVER, str(Path(__file__).parent), str(run)]
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
        left = {path.name for path in (run / "checkpoints").iterdir()}
        assert left <= {"quarantine", *map(str, range(step + 1))}
        restored = checkpoints.restore(step, state(0, 1024))
        np.testing.assert_array_equal(restored.params["w"], state(step, 1024).params["w"])
        checkpoints.close()


MEMORY = """
import sys
sys.path.insert(0, sys.argv[1])
from test_checkpoint import *
import psutil
checkpoints, seen = Checkpoints(sys.argv[2], keep=2), []
one = state(1, 2048)
for number in range(1, 121):
    checkpoints.save(number, one, about(number))
    checkpoints.wait()
    seen.append(psutil.Process().memory_info().rss)
print((max(seen[-20:]) - max(seen[:20])) / 2**20)
"""


@pytest.mark.slow
@pytest.mark.fault(35)
def test_a_hundred_saves_take_no_more_memory_than_twenty(tmp_path, record_property):
    command = [sys.executable, "-c", MEMORY, str(Path(__file__).parent), str(tmp_path)]
    grown = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    assert grown < 32  # MiB, one state; a leak would be a hundred
    record_property("seen", f"{grown:.1f} MiB more after 120 than after 20, of a state of 32")


@pytest.mark.fault(16)
def test_other_data_is_refused_with_all_that_differs(tiny, tmp_path, packed):
    assert training_run.run(tiny("schedule.steps=1", "schedule.warmup=0")) == 0
    shutil.copytree(packed, tmp_path / "data")
    index = json.loads((tmp_path / "data" / "index.json").read_text())
    index["splits"]["train"]["epochs"][0][0]["checksums"][""] = "00000000"
    (tmp_path / "data" / "index.json").write_text(json.dumps(index))
    changes = (f"data.path={tmp_path}/data", "model.mlp=128", "seed=3", "log.every=2")
    said = r"seed = 0.*model\.mlp = 64.*says 128.*data of fingerprint \w+ .*may be: .*log\.every 1 -> 2"
    with pytest.raises(UserError, match=said):
        training_run.run(tiny(*changes))


@pytest.mark.fault(16)
def test_another_tokenizer_is_refused_when_a_run_goes_on(tiny, tmp_path, packed):
    assert training_run.run(tiny("schedule.steps=1", "schedule.warmup=0")) == 0
    shutil.copytree(packed, tmp_path / "data")
    index = json.loads((tmp_path / "data" / "index.json").read_text())
    was, index["tokenizer_sha256"] = index["tokenizer_sha256"], "f00d" * 16
    (tmp_path / "data" / "index.json").write_text(json.dumps(index))
    with pytest.raises(
        UserError, match=rf"a run with tokenizer {was}, and {tmp_path}/data was made with f00d"
    ):
        training_run.run(tiny(f"data.path={tmp_path}/data"))
