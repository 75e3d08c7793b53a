"""Runs from start to end: stops and resumes, other numbers of devices, and messages about mistakes."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.open_run import open_run
from headrace.config import reader, recipe, sections
from headrace.data.dataset import Dataset
from headrace.errors import ExitCode, UserError
from headrace.nn import sharding
from headrace.nn.module import named_leaves
from headrace.nn.stack import Execution
from headrace.training import profiler, rollback
from headrace.training import run as training_run
from headrace.training.evaluate import evaluate_run
from tests.support import xla_flags


def rows(cfg: sections.TrainRecipe) -> list[dict]:
    lines = (Path(cfg.run_dir) / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def weights(cfg: sections.TrainRecipe) -> dict[str, np.ndarray]:
    return {
        name: np.asarray(leaf) for name, leaf in named_leaves(open_run(recipe.load_run(cfg.run_dir)).params)
    }


def start(path: Path, *overrides: str, devices: int = 1) -> subprocess.Popen:
    command = [sys.executable, "-m", "headrace", "train", str(path), *overrides]
    env = os.environ | {"XLA_FLAGS": xla_flags.flags(devices)}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> tuple[int, str]:
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def save_recipe(cfg: sections.TrainRecipe, path: Path) -> Path:
    path.write_text(reader.to_yaml(cfg))
    return path


def test_a_run_stopped_by_sigterm_resumes_as_if_it_had_not_been_stopped(tiny, tmp_path):
    slow = ("schedule.steps=40", "eval.every=0", "checkpoint.every=1000")
    full = save_recipe(tiny(f"run_dir={tmp_path}/full", *slow), tmp_path / "full.yaml")
    stopped = save_recipe(tiny(f"run_dir={tmp_path}/stopped", *slow), tmp_path / "stopped.yaml")
    code, output = finish(start(full))
    assert code == 0, output

    process = start(stopped)
    log = tmp_path / "stopped" / "metrics.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= 3):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == ExitCode.PREEMPTED, output
    assert "SIGTERM" in output
    step = Checkpoints(f"{tmp_path}/stopped").latest_step()
    assert step is not None and 3 <= step < 40
    code, output = finish(start(stopped))
    assert code == 0, output

    expected, resumed = recipe.load(full), recipe.load(stopped)
    for name, value in weights(expected).items():
        np.testing.assert_array_equal(value, weights(resumed)[name], err_msg=name)
    losses, expected_losses = ({row["step"]: row["loss"] for row in rows(cfg)} for cfg in (resumed, expected))
    assert losses == expected_losses


def test_the_layout_on_disk_does_not_depend_on_mesh_or_unrolling(tiny, tmp_path):
    def layout(cfg: sections.TrainRecipe) -> dict[str, tuple]:
        checkpoints = Checkpoints(cfg.run_dir)
        return {
            path: tuple(leaf.shape)
            for item in ("params", "rest")
            for path, leaf in checkpoints.array_metadata(2, item).items()
        }

    short = ("schedule.steps=2", "schedule.warmup=0")
    looped = tiny(f"run_dir={tmp_path}/looped", *short, "mesh.data=8")
    unrolled = tiny(
        f"run_dir={tmp_path}/unrolled", *short, "mesh.fsdp=2", "mesh.tensor=2", "compute.unroll=2"
    )
    assert training_run.run(looped) == training_run.run(unrolled) == 0
    assert layout(looped) == layout(unrolled)


@pytest.mark.fault(15)
def test_a_run_resumes_on_another_number_of_devices(tiny, tmp_path):
    """Three steps on one device and three on eight, split in two ways, equal six on eight."""
    constant = ("schedule.use=constant", "schedule.warmup=0")
    expected = tiny(f"run_dir={tmp_path}/expected", *constant, "schedule.steps=6")
    assert training_run.run(expected) == 0
    first = save_recipe(
        tiny(f"run_dir={tmp_path}/resumed", *constant, "schedule.steps=3"), tmp_path / "first.yaml"
    )
    code, output = finish(start(first, devices=1))
    assert code == 0, output
    resumed = tiny(
        f"run_dir={tmp_path}/resumed", *constant, "schedule.steps=6", "mesh.tensor=2", "mesh.context=2"
    )
    assert training_run.run(resumed) == 0
    losses, expected_losses = ([row["loss"] for row in rows(cfg)] for cfg in (resumed, expected))
    assert len(losses) == 6
    np.testing.assert_allclose(losses, expected_losses, atol=5e-5)


def test_the_run_folder_has_the_documented_files(tiny, tmp_path):
    cfg = tiny("log.tensorboard=true", "eval.every=6", "schedule.steps=12")
    assert training_run.run(cfg) == 0
    folder = Path(cfg.run_dir)
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "recipe.yaml",
        "metrics.jsonl",
        "log.txt",
        "checkpoints",
        "tensorboard",
        "tokenizer.json",
    }
    keys = {"step", "loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second", "mfu", "goodput"}
    assert all(keys <= set(row) for row in rows(cfg))
    assert rows(cfg)[-1]["loss"] < rows(cfg)[0]["loss"]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    evaluated = [row for row in map(json.loads, lines) if "evaluate/loss" in row]
    assert [row["step"] for row in evaluated] == [6, 12]
    assert recipe.load(folder / "recipe.yaml").model.vocab == 300
    meta = Checkpoints(cfg.run_dir).read_meta(12)
    assert meta["step"] == 12 and meta["data"]["next_row"] == 12 * 8 and meta["seed"] == 0
    assert meta["recipe"]["optimizer"]["use"] == "adamw" and len(meta["tokenizer_sha256"]) == 64


def test_a_complete_run_is_reported_and_not_changed(tiny, capfd):
    cfg = tiny("schedule.steps=3")
    assert training_run.run(cfg) == 0
    before = weights(cfg)
    capfd.readouterr()
    assert training_run.run(cfg) == 0
    assert "all 3 steps are done" in capfd.readouterr().out
    for name, value in weights(cfg).items():
        np.testing.assert_array_equal(value, before[name])


def test_a_run_beyond_its_last_step_is_reported(tiny, capfd):
    assert training_run.run(tiny("schedule.steps=3")) == 0
    capfd.readouterr()
    assert training_run.run(tiny("schedule.steps=2")) == 0
    output = capfd.readouterr().out
    assert "the run is at step 3, beyond schedule.steps, which is 2" in output and "from step" not in output


HOLDER = """
import sys, time
from headrace.storage.lock import lock
with lock(sys.argv[1]):
    print("locked", flush=True)
    time.sleep(600)
"""


@pytest.mark.fault(23)
def test_a_run_folder_is_refused_while_another_process_trains_in_it(tiny):
    cfg = tiny("schedule.steps=1", "schedule.warmup=0")
    other = subprocess.Popen([sys.executable, "-c", HOLDER, cfg.run_dir], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match=rf"{cfg.run_dir}: another process .* \(pid {other.pid}\)"):
            training_run.run(cfg)
        assert not (Path(cfg.run_dir) / "checkpoints").exists()  # nothing was touched
    finally:
        other.kill()
        other.communicate()
    assert training_run.run(cfg) == 0
    assert training_run.run(cfg) == 0  # the lock was released at the end


DAMAGES = ["meta/metadata", "meta", "params/_METADATA", "params/manifest.ocdbt", "params", "rest"]


@pytest.mark.fault(10)
def test_a_damaged_checkpoint_is_quarantined_and_the_run_resumes_from_the_one_before(tiny, tmp_path, capfd):
    cfg = tiny("schedule.use=constant", "schedule.warmup=0", "schedule.steps=2", "checkpoint.every=1")
    assert training_run.run(cfg) == 0
    expected = {name: value.tobytes() for name, value in weights(cfg).items()}
    for number, damage in enumerate(DAMAGES):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(cfg.run_dir, copy)
        damaged = copy / "checkpoints" / "2" / damage
        shutil.rmtree(damaged) if damaged.is_dir() else damaged.unlink()
        capfd.readouterr()
        assert Checkpoints(str(copy)).latest_step() == 1  # a reader skips it and moves nothing
        assert f"{copy}/checkpoints/2 is not used: {damage}" in capfd.readouterr().err
        assert (copy / "checkpoints" / "2").is_dir()
    resumed = tiny(f"run_dir={copy}", "schedule.use=constant", "schedule.warmup=0", "schedule.steps=2")
    assert training_run.run(resumed) == 0
    output = capfd.readouterr().out
    assert re.search(r"step 2: checkpoint not used: rest/\S+ is missing", output)
    assert "from step 1 to 2" in output
    (quarantined,) = (copy / "checkpoints" / "quarantine").iterdir()
    assert quarantined.name.startswith("2-") and (quarantined / "params").is_dir()
    assert {name: value.tobytes() for name, value in weights(resumed).items()} == expected


@pytest.mark.slow
@pytest.mark.fault(3)
def test_a_run_killed_at_any_moment_resumes_to_the_same_end(tiny, tmp_path):
    """Five kills around saves: each comes at random within the time that a step and its save take."""
    settings = ("schedule.steps=60", "checkpoint.every=5", "checkpoint.keep=2", "eval.every=0")
    full = save_recipe(tiny(f"run_dir={tmp_path}/full", *settings), tmp_path / "full.yaml")
    killed = save_recipe(tiny(f"run_dir={tmp_path}/killed", *settings), tmp_path / "killed.yaml")
    code, output = finish(start(full))
    assert code == 0, output
    expected, resumed = recipe.load(full), recipe.load(killed)

    random, log = np.random.default_rng(), tmp_path / "killed" / "metrics.jsonl"
    kills = 0
    for number in range(1, 6):
        process = start(killed, "--once")
        aim = 10 * number  # a step that is saved, a later one in each attempt
        while process.poll() is None and not (log.exists() and f'"step": {aim - 1},' in log.read_text()):
            time.sleep(0.002)
        time.sleep(random.uniform(0.03, 0.2))
        process.kill()
        code, output = finish(process)
        assert code in (0, -signal.SIGKILL), output
        kills += code == -signal.SIGKILL
    assert kills >= 4
    code, output = finish(start(killed))
    assert code == 0, output
    assert rows(resumed)[-1]["step"] == 60
    losses, expected_losses = ({row["step"]: row["loss"] for row in rows(cfg)} for cfg in (resumed, expected))
    assert losses == expected_losses
    for name, value in weights(expected).items():
        np.testing.assert_array_equal(value, weights(resumed)[name], err_msg=name)


@pytest.mark.fault(12)
def test_losses_that_remain_infinite_stop_the_run_with_a_report(tiny, capfd, monkeypatch):
    monkeypatch.setattr(rollback, "MAX_ROLLBACKS", 0)
    # A decay of 1e30 per step makes every matrix infinite in one update.
    cfg = tiny(
        "optimizer.weight_decay=1e38",
        "optimizer.learning_rate=1e3",
        "optimizer.max_skipped=3",
        "log.every=10",
    )
    assert training_run.run(cfg) == 1
    output = capfd.readouterr().out
    assert output.count("update skipped: loss and gradient norm not finite (rows ") == 3
    assert "stopped at step 4: 3 of the updates from step 2 to 4 were skipped" in output
    assert "learning_rate" in output
    assert (
        "step 2:" in output and "step 5:" not in output
    )  # at once, although only every tenth step is logged


def test_a_diverged_run_does_not_replace_its_last_good_checkpoint(tiny):
    steady = ("checkpoint.keep=1", "schedule.use=constant", "schedule.warmup=0")
    assert training_run.run(tiny(*steady, "schedule.steps=2")) == 0
    wild = (
        "optimizer.learning_rate=1e30",
        "optimizer.max_skipped=2",
        "schedule.steps=9",
        "checkpoint.every=100",
    )
    assert training_run.run(tiny(*steady, *wild)) == 1
    assert Checkpoints(tiny().run_dir).latest_step() == 2
    assert training_run.run(tiny(*steady, "schedule.steps=3")) == 0


@pytest.mark.fault(16)
def test_another_model_in_the_same_folder_is_refused(tiny):
    assert training_run.run(tiny("schedule.steps=2", "schedule.warmup=0")) == 0
    with pytest.raises(UserError, match=r"model\.mlp: found 128, expected 64"):
        training_run.run(tiny("model.mlp=128"))


def test_another_optimizer_in_the_same_folder_is_refused(tiny):
    assert training_run.run(tiny("schedule.steps=2", "schedule.warmup=0")) == 0
    with pytest.raises(UserError, match=r"optimizer\.use: found lion, expected adamw"):
        training_run.run(tiny("optimizer.use=lion", "optimizer.learning_rate=1e-3"))
    assert recipe.load_run(tiny().run_dir).optimizer.use == "adamw"  # the recipe was not replaced


@pytest.mark.parametrize("change", ["seed=7", "batch.sequences=16", "data.sequence_length=32"])
def test_a_change_that_would_change_the_order_of_the_data_is_refused(tiny, change):
    assert training_run.run(tiny("schedule.steps=1", "schedule.warmup=0")) == 0
    with pytest.raises(UserError, match=change.partition("=")[0]):
        training_run.run(tiny(change))


def test_rows_that_cannot_be_split_over_the_devices_are_refused(tiny):
    with pytest.raises(UserError, match="12 rows at a time cannot be split over the 8 devices"):
        training_run.run(tiny("batch.sequences=12"))


def test_a_mesh_too_large_for_the_machine_is_refused(tiny):
    with pytest.raises(UserError, match="cannot be laid over 8 devices"):
        training_run.run(tiny("mesh.data=3", "mesh.fsdp=1", "batch.sequences=9"))


def test_evaluation_of_a_run_is_the_mean_over_every_held_out_token(tiny):
    """Compared with the definition: one row at a time, log-softmax over full logits."""
    cfg = tiny("schedule.steps=3", "schedule.warmup=0", "batch.sequences=16")
    assert training_run.run(cfg) == 0
    run = open_run(recipe.load_run(cfg.run_dir))
    data = Dataset.open(cfg.data.path)
    total = count = 0.0
    exec_opts = Execution(reader.part_class("attention", "xla")(), "float32")
    for number in range(data.rows_per_epoch("evaluation")):
        packed = data.batch(data.eval_order(1), number)
        tokens, segments = packed.tokens, packed.segments
        masks = dict(segments=jnp.asarray(segments), positions=jnp.asarray(packed.positions))
        hidden = run.params(run.recipe.model, jnp.asarray(tokens), exec_opts=exec_opts, **masks)
        logits = np.asarray(hidden[0] @ run.params.unembed.T, np.float64)
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        has_target = (segments[0, 1:] == segments[0, :-1]) & (segments[0, 1:] > 0)
        total -= logs[:-1][np.arange(63), tokens[0, 1:]][has_target].sum()
        count += has_target.sum()
    result = evaluate_run(run)
    assert result["loss"] == pytest.approx(total / count, abs=1e-5)
    assert result["perplexity"] == pytest.approx(np.exp(total / count), rel=1e-4)
    split = data.index.splits["evaluation"]
    exact = total / np.log(2) / split.bytes * (split.tokens - split.documents) / count
    assert result["bits_per_byte"] == pytest.approx(exact, rel=1e-4)


def test_masked_evaluation_is_the_same_for_any_batch_size_and_device_count(tiny):
    encoder = "model={use: eurobert, layers: 2, embed: 32, heads: 4, kv_heads: 2, mlp: 64}"
    assert (
        training_run.run(tiny("objective.use=masked", encoder, "schedule.steps=1", "schedule.warmup=0")) == 0
    )

    def loss(sequences: int, devices: int) -> float:
        run = open_run(recipe.load_run(tiny().run_dir, [f"batch.sequences={sequences}"]))
        mesh = sharding.make_mesh(
            dict.fromkeys(sharding.AXES, 1) | {"fsdp": devices}, jax.devices()[:devices]
        )
        run = dataclasses.replace(run, params=jax.device_get(run.params), mesh=mesh)
        return evaluate_run(run)["loss"]

    expected = loss(8, 8)
    assert [loss(2, 1), loss(2, 2), loss(8, 1)] == pytest.approx([expected] * 3, abs=2e-6)


def test_training_starts_from_imported_weights(tiny, tmp_path):
    """Export, import into a new folder, one step at a learning rate of 0: the weights do not change."""
    from headrace.convert import from_huggingface, to_huggingface

    first = tiny("schedule.steps=2", "schedule.warmup=0")
    assert training_run.run(first) == 0
    to_huggingface.export(open_run(recipe.load_run(first.run_dir)), f"{tmp_path}/exported", "float32")
    from_huggingface.import_model(f"{tmp_path}/exported", f"{tmp_path}/imported")
    overrides = [
        "schedule.steps=1",
        "schedule.warmup=0",
        "optimizer.learning_rate=0.0",
        "optimizer.ema_decay=0.5",
    ]
    overrides += [f"data.path={first.data.path}", "data.sequence_length=64", "batch.sequences=8"]
    cfg = recipe.load(f"{tmp_path}/imported/recipe.yaml", [*overrides, "log.tensorboard=false"])
    assert training_run.run(cfg) == 0
    average = open_run(recipe.load_run(cfg.run_dir), item="ema").params
    for name, value in weights(first).items():
        np.testing.assert_array_equal(value, weights(cfg)[name], err_msg=name)
        np.testing.assert_array_equal(value, dict(named_leaves(average))[name], err_msg=name)


def test_a_run_folder_that_was_moved_resumes_in_place(tiny, tmp_path):
    assert training_run.run(tiny("schedule.steps=1", "schedule.warmup=0")) == 0
    Path(tiny().run_dir).rename(tmp_path / "elsewhere")
    moved = tmp_path / "elsewhere" / "recipe.yaml"
    assert recipe.load_train(moved).run_dir == f"{tmp_path}/elsewhere"
    assert recipe.load_train(moved, ["run_dir=other"]).run_dir == "other"
    assert training_run.run(recipe.load_train(moved, ["schedule.steps=2"])) == 0
    assert Checkpoints(f"{tmp_path}/elsewhere").latest_step() == 2


def test_an_average_of_the_weights_can_start_later_in_a_run(tiny):
    assert training_run.run(tiny("schedule.steps=2", "schedule.warmup=0")) == 0
    with pytest.raises(UserError, match=r"optimizer\.ema_decay above 0"):
        open_run(recipe.load_run(tiny().run_dir), item="ema")
    assert training_run.run(tiny("schedule.steps=3", "schedule.warmup=0", "optimizer.ema_decay=0.9")) == 0
    assert open_run(recipe.load_run(tiny().run_dir), item="ema").step == 3


def test_data_without_held_out_rows_trains_to_the_end(tiny, tmp_path, packed, capfd):
    index = json.loads((Path(packed) / "index.json").read_text())
    index["splits"]["evaluation"] |= {"rows": 0, "documents": 0, "tokens": 0, "bytes": 0, "epochs": []}
    shutil.copytree(packed, tmp_path / "data")
    (tmp_path / "data" / "index.json").write_text(json.dumps(index))
    cfg = tiny(f"data.path={tmp_path}/data", "schedule.steps=2", "schedule.warmup=0", "eval.every=1")
    assert training_run.run(cfg) == 0
    assert "no data is held out" in capfd.readouterr().out
    assert Checkpoints(cfg.run_dir).latest_step() == 2


def test_only_the_newest_checkpoints_remain(tiny):
    cfg = tiny("checkpoint.every=2", "checkpoint.keep=2", "schedule.steps=7")
    assert training_run.run(cfg) == 0
    steps = sorted(
        int(path.name) for path in (Path(cfg.run_dir) / "checkpoints").iterdir() if path.name.isdigit()
    )
    assert steps == [6, 7]


@pytest.mark.parametrize("steps", ["2:3", "2:99"])
def test_a_trace_of_some_steps_is_written_and_its_longest_operations_listed(tiny, capfd, steps):
    cfg = tiny(
        f"profile_steps={steps}", "schedule.steps=4", "schedule.warmup=0", "mesh.data=1", "mesh.fsdp=8"
    )
    assert training_run.run(cfg) == 0
    (file,) = (Path(cfg.run_dir) / "profile").rglob("*.xplane.pb")
    output = capfd.readouterr().out
    assert f"steps 2 to {3 if steps == '2:3' else 4} are traced" in output
    assert re.search(r"^all threads of the CPU spent [\d,.]+ ms per step, most of them on", output, re.M)
    operations = re.findall(r"^ +([\d,.]+) ms +([\d.]+)%  \S", output, re.M)
    assert len(operations) == profiler.MAX_LISTED
    seconds = profiler.read_operations(file.parent)
    assert {"while", "call"}.isdisjoint(seconds) and sum(float(share) for _, share in operations) <= 100.1


@pytest.mark.parametrize("steps", ["10", "3:2", "0:4", "a:b"])
def test_a_trace_needs_a_first_and_a_last_step(tiny, steps):
    with pytest.raises(UserError, match=r"profile_steps: found .*expected the first and the last step"):
        tiny(f"profile_steps={steps}")


def test_a_trace_that_would_never_start_is_refused(tiny):
    schedule = "schedule.steps=2048 tokens"  # 4 steps of 8 rows
    tiny(schedule, "profile_steps=4:9")
    with pytest.raises(
        UserError, match=r"profile_steps: found 5:9, expected a first step of at most .* is 4"
    ):
        tiny(schedule, "profile_steps=5:9")


def test_ineffective_settings_are_reported(tiny, capfd):
    assert training_run.run(tiny("schedule.steps=3", "schedule.warmup=0")) == 0
    capfd.readouterr()
    assert (
        training_run.run(
            tiny("schedule.steps=4", "schedule.warmup=0", "profile_steps=3:4", "loss.filter_eps=2e-4")
        )
        == 0
    )
    output = capfd.readouterr().out
    assert "warning: profile_steps: 3:4 has no effect: the run resumes from step 3" in output
    assert "profile_steps=4:5 traces" in output and "are traced" not in output
    warning = (
        "warning: loss.filter_eps: 0.0002 has no effect here: the kernels that skip gradients cannot be used"
    )
    assert output.count(f"{warning}, since they are for Hopper GPUs") == 1
