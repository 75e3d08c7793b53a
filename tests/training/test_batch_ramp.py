"""Batch-size ramps: which rows each step reads, its update, and resuming within the ramp."""

import dataclasses
import json
import shutil
from fractions import Fraction
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.open_run import open_run
from headrace.config import recipe, run_length
from headrace.config.durations import Ramp, duration
from headrace.data.dataset import Dataset
from headrace.errors import UserError
from headrace.nn import sharding
from headrace.training import run as training_run
from headrace.training.batch import device_batch
from tests.training.test_step import Bench, assert_close

ROOT = Path(__file__).parents[2]
GROWING = ("batch.sequences=8", "batch.microbatches=4", "batch.ramp_from=2", "batch.ramp=6")


@given(first=st.integers(1, 5), growth=st.integers(0, 5), each=st.integers(1, 4), step=st.integers(0, 40))
def test_microbatches_before_a_step_are_the_sum_over_the_steps(first, growth, each, step):
    ramp = Ramp(first, first + growth, each)
    sizes = [ramp.microbatches_at(n) for n in range(step)]
    assert ramp.microbatches_before(step) == sum(sizes) and ramp.microbatches_at(
        step + 1
    ) - ramp.microbatches_at(step) in (0, 1)
    assert ramp.steps(Fraction(sum(sizes))) == step
    assert not sizes or ramp.steps(sum(sizes) - Fraction(1, 2)) == step


def test_each_batch_size_of_a_ramp_has_as_many_steps_and_the_ramp_its_tokens():
    cfg = recipe.load(ROOT / "recipes/modernbert-base.yaml")
    ramp = run_length.ramp(cfg)
    assert (ramp.first * 256, ramp.last * 256) == (768, 4608)
    ramp_tokens = ramp.microbatches_before(15 * ramp.each) * 256 * 1024
    assert 50e9 <= ramp_tokens < 50e9 * 1.001
    steps = run_length.durations(cfg)
    for name, tokens in (("steps", 1.7e12), ("warmup", 3e9)):
        assert tokens <= run_length.tokens_until(cfg, steps[name]) < tokens + 4608 * 1024
    later = recipe.load(ROOT / "recipes/modernbert-base.yaml", ["schedule.decay=50B tokens"])
    assert run_length.durations(later)["decay"] == duration("50B tokens", 4608 * 1024)


def test_steps_of_a_ramp_read_each_row_once_and_in_order(tiny):
    cfg = tiny(*GROWING)
    dataset = Dataset.open(cfg.data.path, sequence_length=64)
    order = dataset.train_order(8, seed=0, ramp=run_length.ramp(cfg))
    all_rows = [dataset.batch(dataset.train_order(1, seed=0), n).tokens[0] for n in range(80)]
    for sizes in ({}, {"data": 2}):
        mesh = sharding.make_mesh(sizes, jax.devices()[: 2 if sizes else 1])
        read = []
        for number in range(12):
            batch = device_batch(dataset, order, mesh, number)
            tokens, segments = (np.asarray(x).reshape(2, 4, 64) for x in (batch.tokens, batch.segments))
            active = min(1 + number // 2, 4)
            assert (tokens[:, active:] == 0).all() and (segments[:, active:] == 0).all()
            read += list(tokens[:, :active].reshape(-1, 64))
        np.testing.assert_array_equal(read, all_rows[: len(read)])
        assert len(read) == run_length.tokens_until(cfg, 12) // 64 == 2 * (1 + 1 + 2 + 2 + 3 + 3 + 4 * 6)


def test_a_step_of_a_ramp_equals_a_step_with_a_constant_batch_of_that_size(tiny):
    sgd = ("optimizer.use=sgd", "optimizer.learning_rate=0.5")
    ramped = Bench(tiny(*sgd, *GROWING))
    constant = Bench(tiny(*sgd, "batch.sequences=4", "batch.microbatches=2"))
    ramped_state, constant_state = (
        dataclasses.replace(bench.state(), step=jax.numpy.asarray(2, "int32")) for bench in (ramped, constant)
    )
    with jax.set_mesh(ramped.devices):
        order = ramped.dataset.train_order(8, seed=0, ramp=run_length.ramp(ramped.cfg))
        padded = device_batch(ramped.dataset, order, ramped.devices, 2)
        ramped_state, metrics = ramped.step(ramped_state, padded)
    with jax.set_mesh(constant.devices):
        batch = device_batch(constant.dataset, constant.dataset.train_order(4, seed=0), constant.devices, 1)
        np.testing.assert_array_equal(
            np.asarray(padded.tokens).reshape(2, 4, 64)[:, :2].reshape(4, 64), np.asarray(batch.tokens)
        )
        constant_state, expected = constant.step(constant_state, batch)
    assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), abs=1e-6)
    assert_close(ramped_state, constant_state, 1e-6)


@pytest.mark.slow
def test_a_run_resumes_within_its_ramp(tiny, tmp_path):
    # A microbatch has a row for each of the eight devices.
    settings = ("batch.sequences=32", "batch.microbatches=4", "batch.ramp_from=8", "batch.ramp=6")
    settings += ("schedule.steps=8", "checkpoint.every=3", "schedule.warmup=2")
    full, resumed = (tiny(*settings, f"run_dir={tmp_path}/{name}") for name in ("full", "resumed"))
    assert training_run.run(full) == 0
    shutil.copytree(full.run_dir, resumed.run_dir)
    for step in (6, 8):
        shutil.rmtree(f"{resumed.run_dir}/checkpoints/{step}")
    checkpoints = Checkpoints(resumed.run_dir)
    assert checkpoints.latest_step() == 3 and checkpoints.read_meta(3)["data"]["next_row"] == 8 * (1 + 1 + 2)
    assert training_run.run(resumed) == 0
    first, second = (open_run(recipe.load_run(cfg.run_dir)).params for cfg in (full, resumed))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    lines = [json.loads(line) for line in (Path(full.run_dir) / "metrics.jsonl").read_text().splitlines()]
    assert [row["tokens"] for row in lines if "tokens" in row][:4] == [512, 1024, 2048, 3072]
    with pytest.raises(UserError, match=r"batch.microbatches: found 2, expected 4"):
        training_run.run(
            tiny(
                *settings[:1],
                "batch.microbatches=2",
                "batch.ramp_from=16",
                *settings[3:],
                f"run_dir={resumed.run_dir}",
            )
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["batch.ramp=4"], "ramp_from: .*expected it to be set"),
        (["batch.ramp_from=2"], "ramp: .*expected it to be set"),
        (
            ["batch.ramp=4", "batch.ramp_from=3"],
            "ramp_from: .*expected less than 8 sequences, and a multiple of the 2",
        ),
        (["batch.ramp=4", "batch.ramp_from=8"], "ramp_from: .*expected less than 8"),
        (["batch.ramp=soon", "batch.ramp_from=2"], "batch.ramp: .*steps or '3B tokens'"),
    ],
    ids=str,
)
def test_an_impossible_ramp_is_refused(tiny, settings, message):
    with pytest.raises(UserError, match=message):
        tiny("batch.sequences=8", "batch.microbatches=4", *settings)
