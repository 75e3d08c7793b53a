"""Batches that grow: which rows each step reads, what it makes of them, and where a run goes on."""

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


@given(first=st.integers(1, 5), more=st.integers(0, 5), each=st.integers(1, 4), step=st.integers(0, 40))
def test_what_was_read_before_a_step_is_the_sum_of_the_steps(first, more, each, step):
    ramp = Ramp(first, first + more, each)
    sizes = [ramp.microbatches_at(n) for n in range(step)]
    assert ramp.microbatches_before(step) == sum(sizes) and ramp.microbatches_at(
        step + 1
    ) - ramp.microbatches_at(step) in (0, 1)
    assert ramp.steps(Fraction(sum(sizes))) == step
    assert not sizes or ramp.steps(sum(sizes) - Fraction(1, 2)) == step


def test_every_size_has_as_many_steps_and_the_ramp_its_tokens():
    cfg = recipe.load(ROOT / "recipes/modernbert-base.yaml")
    ramp = run_length.ramp(cfg)
    assert (ramp.first * 256, ramp.last * 256) == (768, 4608)
    whole = ramp.microbatches_before(15 * ramp.each) * 256 * 1024
    assert 50e9 <= whole < 50e9 * 1.001
    steps = run_length.durations(cfg)
    for name, tokens in (("steps", 1.7e12), ("warmup", 3e9)):
        assert tokens <= run_length.tokens_until(cfg, steps[name]) < tokens + 4608 * 1024
    later = recipe.load(ROOT / "recipes/modernbert-base.yaml", ["schedule.decay=50B tokens"])
    assert run_length.durations(later)["decay"] == duration("50B tokens", 4608 * 1024)


def test_steps_read_the_rows_in_order_and_none_twice(tiny):
    cfg = tiny(*GROWING)
    dataset = Dataset.open(cfg.data.path, sequence_length=64)
    order = dataset.train_order(8, seed=0, ramp=run_length.ramp(cfg))
    flat = [dataset.batch(dataset.train_order(1, seed=0), n).tokens[0] for n in range(80)]
    for sizes in ({}, {"data": 2}):
        devices = sharding.make_mesh(sizes, jax.devices()[: 2 if sizes else 1])
        read = []
        for number in range(12):
            got = device_batch(dataset, order, devices, number)
            groups = np.asarray(got.tokens).reshape(2, 4, 64)
            now = min(1 + number // 2, 4)
            assert (groups[:, now:] == 0).all() and (
                np.asarray(got.segments).reshape(2, 4, 64)[:, now:] == 0
            ).all()
            read += list(groups[:, :now].reshape(-1, 64))
        np.testing.assert_array_equal(read, flat[: len(read)])
        assert len(read) == run_length.tokens_until(cfg, 12) // 64 == 2 * (1 + 1 + 2 + 2 + 3 + 3 + 4 * 6)


def test_a_step_of_a_growing_batch_is_that_of_a_batch_of_its_size(tiny):
    sgd = ("optimizer.use=sgd", "optimizer.learning_rate=0.5")
    grown = Bench(tiny(*sgd, *GROWING))
    plain = Bench(tiny(*sgd, "batch.sequences=4", "batch.microbatches=2"))
    whole = run_length.ramp(grown.cfg)
    state, other = (
        dataclasses.replace(b.state(), step=jax.numpy.asarray(2, "int32")) for b in (grown, plain)
    )
    with jax.set_mesh(grown.devices):
        rows = device_batch(grown.dataset, grown.dataset.train_order(8, seed=0, ramp=whole), grown.devices, 2)
        state, values = grown.step(state, rows)
    with jax.set_mesh(plain.devices):
        same = device_batch(plain.dataset, plain.dataset.train_order(4, seed=0), plain.devices, 1)
        np.testing.assert_array_equal(
            np.asarray(rows.tokens).reshape(2, 4, 64)[:, :2].reshape(4, 64), np.asarray(same.tokens)
        )
        other, wanted = plain.step(other, same)
    assert float(values["loss"]) == pytest.approx(float(wanted["loss"]), abs=1e-6)
    assert_close(state, other, 1e-6)


@pytest.mark.slow
def test_a_run_goes_on_in_the_midst_of_its_ramp(tiny, tmp_path):
    # A part has a row for each of the eight devices.
    settings = ("batch.sequences=32", "batch.microbatches=4", "batch.ramp_from=8", "batch.ramp=6")
    settings += ("schedule.steps=8", "checkpoint.every=3", "schedule.warmup=2")
    whole, again = (tiny(*settings, f"run_dir={tmp_path}/{name}") for name in ("whole", "again"))
    assert training_run.run(whole) == 0
    shutil.copytree(whole.run_dir, again.run_dir)
    for step in (6, 8):
        shutil.rmtree(f"{again.run_dir}/checkpoints/{step}")
    saved = Checkpoints(again.run_dir)
    assert saved.latest_step() == 3 and saved.read_meta(3)["data"]["next_row"] == 8 * (1 + 1 + 2)
    assert training_run.run(again) == 0
    first, second = (open_run(recipe.load_run(cfg.run_dir)).params for cfg in (whole, again))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    lines = [json.loads(line) for line in (Path(whole.run_dir) / "metrics.jsonl").read_text().splitlines()]
    assert [row["tokens"] for row in lines if "tokens" in row][:4] == [512, 1024, 2048, 3072]
    with pytest.raises(UserError, match=r"batch.microbatches: found 2, expected 4"):
        training_run.run(
            tiny(
                *settings[:1],
                "batch.microbatches=2",
                "batch.ramp_from=16",
                *settings[3:],
                f"run_dir={again.run_dir}",
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
def test_a_ramp_that_cannot_be_is_refused(tiny, settings, message):
    with pytest.raises(UserError, match=message):
        tiny("batch.sequences=8", "batch.microbatches=4", *settings)
