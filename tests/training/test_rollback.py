"""Bad steps: which updates are skipped, which data a run skips after a rollback, and when it stops."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.open_run import open_run
from headrace.config import recipe, sections
from headrace.data.batch_order import merge_ranges, skip_ranges
from headrace.data.dataset import Dataset
from headrace.data.shards import Index, crc32_hex
from headrace.nn.module import named_leaves
from headrace.training import loss_spikes, rollback
from headrace.training import run as training_run

ROWS = 8  # of a batch


def is_spike(history: np.ndarray, latest: np.ndarray, threshold: float) -> bool:
    """Decide by a plain implementation of the same rule."""
    for past, value in zip(history.astype(np.float64), latest, strict=True):
        past = past[np.isfinite(past)]
        if len(past) >= loss_spikes.MIN_VALUES:
            median = np.median(past)
            deviation = max(1.4826 * np.median(np.abs(past - median)), 0.05 * median)
            if value > median + threshold * deviation:
                return True
    return False


@pytest.mark.parametrize("count", [0, 63, 64, 100, 128])
def test_spikes_are_values_far_above_the_median(count):
    random, results = np.random.default_rng(count), []
    for trial in range(40):
        history = np.full((2, 128), np.nan, np.float32)
        history[:, :count] = random.lognormal(0, 0.01 * (trial % 40), (2, count))
        history[:, : count // 20] *= 1000  # earlier spikes do not move the limit
        history[0, :1] = np.inf
        latest = np.float32([random.uniform(1.2, 4), random.uniform(0.5, 6)])
        recent = loss_spikes.LossHistory(jnp.asarray(history), jnp.zeros(128, bool))
        results.append(
            bool(jax.jit(loss_spikes.exceeds_running_median, static_argnums=2)(recent, latest, 10.0))
        )
        assert results[-1] == is_spike(history, latest, 10.0)
        assert not loss_spikes.exceeds_running_median(recent, np.float32([np.nan, np.nan]), 10.0)
    assert any(results) == (count >= 64) and not all(results)


def test_skipped_updates_are_counted_within_the_window():
    recent, bad = loss_spikes.empty_history(2), {3, 9, 100, 140, 141}
    for step in range(200):
        recent = loss_spikes.record(recent, jnp.int32(step), jnp.float32([step, 1]), jnp.bool_(step in bad))
        counts = {
            name: int(value) for name, value in loss_spikes.skip_counts(recent, jnp.int32(step)).items()
        }
        inside = [s for s in bad if step - 128 < s <= step] if step in bad else []
        assert counts == {"left_out": len(inside), "since": step - min(inside, default=step)}
    assert loss_spikes.skipped_updates(jax.device_get(recent), first=93, last=142) == [
        (101, [100.0, 1.0]),
        (141, [140.0, 1.0]),
        (142, [141.0, 1.0]),
    ]


STRETCHES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=5)


@given(stretches=STRETCHES, first=st.integers(0, 50), count=st.integers(1, 30))
def test_skipped_rows_are_skipped_and_no_others(stretches, first, count):
    skipped = [range(start, start + length) for start, length in stretches]
    remaining = [row for row in range(300) if not any(row in rows for rows in skipped)]
    ranges = list(skip_ranges(range(first, first + count), merge_ranges(skipped)))
    assert [row for rows in ranges for row in rows] == remaining[first : first + count]
    assert all(len(rows) > 0 for rows in ranges)


def rewrite(folder: Path, change) -> None:
    """Change the arrays of a dataset's training rows, and its index with them."""
    index = json.loads((folder / "index.json").read_text())
    train = index["splits"]["train"]
    (shard,) = train["epochs"][0]
    arrays = {suffix: np.load(folder / f"{shard['name']}{suffix}.npy") for suffix in shard["checksums"]}
    for suffix, array in change(arrays).items():
        array = np.ascontiguousarray(array)
        np.save(folder / f"{shard['name']}{suffix}.npy", array)
        shard["checksums"][suffix] = crc32_hex(array.data)
        train["rows"] = shard["rows"] = len(array)
    (folder / "index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """Data for 50 steps that a model learns within few of them."""
    from headrace.data.pipeline.prepare import prepare

    root = tmp_path_factory.mktemp("sound")
    (root / "texts").mkdir()
    for number in range(460):
        words = " ".join(f"{['the', 'a', 'one'][n % 3]} {n % 17} of {n}" for n in range(14))
        (root / "texts" / f"{number:03}.txt").write_text(f"Text {number % 7}: {words}.\n")
    (root / "data.yaml").write_text(
        f"path: {root}/data\nsources: {{test: {{path: {root}/texts}}}}\ntokenizer: {{use: bpe, vocab: 300}}\n"
        "pack: {sequence_length: 64, eval_fraction: 0.02, mode: concat}\n"
    )
    prepare(recipe.load_data(root / "data.yaml"), lambda line: None)
    return root / "data"


def spoil(folder: Path, first: int, last: int) -> None:
    """Replace the rows of these steps by noise."""

    def change(arrays):
        rows = slice((first - 1) * ROWS, last * ROWS)
        noise = np.random.default_rng(0).integers(8, 280, arrays[""][rows].shape)
        arrays[""][rows] = noise
        return {"": arrays[""]}

    rewrite(folder, change)


def cut(folder: Path, first: int, last: int) -> None:
    """Remove the rows of these steps."""
    rows = slice((first - 1) * ROWS, last * ROWS)
    rewrite(folder, lambda arrays: {suffix: np.delete(a, rows, axis=0) for suffix, a in arrays.items()})


@pytest.fixture
def small(sound, tiny, tmp_path, monkeypatch):
    """Make a recipe for a copy of the data. 24 steps are enough to judge a loss."""
    monkeypatch.setattr(loss_spikes, "WINDOW", 32)
    monkeypatch.setattr(loss_spikes, "MIN_VALUES", 24)

    def make(name: str, *overrides: str) -> sections.TrainRecipe:
        data = tmp_path / f"{name}-data"
        if not data.exists():
            shutil.copytree(sound, data)
        usual = {"optimizer.max_skipped": "3", "checkpoint.every": "10", "schedule.use": "constant"}
        usual |= {"run_dir": f"{tmp_path}/{name}", "data.path": str(data)}
        usual |= {"schedule.steps": "42", "schedule.warmup": "0"}
        both = usual | dict(override.split("=") for override in overrides)
        return tiny(*(f"{key}={value}" for key, value in both.items()))

    return make


def weights(cfg: sections.TrainRecipe) -> dict[str, bytes]:
    return {
        name: np.asarray(leaf).tobytes()
        for name, leaf in named_leaves(open_run(recipe.load_run(cfg.run_dir)).params)
    }


def losses(cfg: sections.TrainRecipe) -> dict[int, float]:
    lines = (Path(cfg.run_dir) / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


@pytest.mark.slow
@pytest.mark.fault(13)
def test_a_rollback_skips_bad_data_as_if_it_had_not_been_there(small, capfd):
    other = small("other")
    spoil(Path(other.data.path), 33, 37)
    cut(Path(other.data.path), 33, 35)
    assert training_run.run(other) == 0
    assert "rolled back to step" not in capfd.readouterr().out

    bad = small("bad")
    spoil(Path(bad.data.path), 33, 37)
    assert training_run.run(bad) == 0
    output = capfd.readouterr().out
    assert "step 35: 3 of the updates from step 33 to 35 were skipped; rolled back to step 30" in output
    assert "step 33: update skipped: loss " in output and "(rows 256 to 263)" in output
    # The remaining bad rows make two bad steps, which are too few for a rollback.
    assert weights(bad) == weights(other) and losses(bad) == losses(other)
    checkpoints = Checkpoints(bad.run_dir)
    assert checkpoints.read_meta(42)["data"]["next_row"] == (42 + 3) * ROWS

    report = (Path(bad.run_dir) / "bad-steps" / "001-step-35.txt").read_text()
    assert report.startswith("step 35: 3 of the updates")
    assert "\nstep 34: loss " in report and "gradient norm" in report
    assert re.search(r"\n  row 264 of the training data, from source test\n    \d+ tokens: .", report)

    # A run that is killed before its next save skips the same rows.
    for number in (40, 42):
        shutil.rmtree(Path(bad.run_dir) / "checkpoints" / str(number))
    assert training_run.run(bad) == 0
    assert "rolled back to step" not in capfd.readouterr().out
    assert weights(bad) == weights(other) and losses(bad) == losses(other)


@pytest.mark.fault(13)
def test_a_run_with_too_much_bad_data_stops_and_can_be_tried_again(small, capfd, monkeypatch):
    monkeypatch.setattr(rollback, "MAX_ROLLBACKS", 1)
    bad = small("bad", "optimizer.max_skipped=2")
    spoil(Path(bad.data.path), 29, 40)
    assert training_run.run(bad) == 1
    output = capfd.readouterr().out
    assert "step 30: 2 of the updates from step 29 to 30 were skipped; rolled back to step 25" in output
    assert "error: stopped at step 30" in output and "002-step-30.txt names their documents" in output
    assert Checkpoints(bad.run_dir).find_resume_step() == 25
    again = dataclasses.replace(bad, optimizer=dataclasses.replace(bad.optimizer, spike_threshold=0.0))
    assert training_run.run(again) == 0
    assert "update skipped" not in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.fault(12)
def test_weights_that_are_not_finite_roll_the_run_back_before_the_step_that_caused_them(small, capfd):
    # After one update at such a rate no gradient is finite.
    cfg = small("wild", "schedule.steps=12", "checkpoint.every=5")
    assert (
        training_run.run(dataclasses.replace(cfg, schedule=dataclasses.replace(cfg.schedule, steps=7))) == 0
    )
    wild = dataclasses.replace(cfg, optimizer=dataclasses.replace(cfg.optimizer, learning_rate=1e30))
    assert training_run.run(wild) == 1
    output = capfd.readouterr().out
    assert output.count("rolled back to step 7, and the data") == 2 and "stopped at step 11" in output
    assert (Path(cfg.run_dir) / "bad-steps" / "003-step-11.txt").is_file()
    assert training_run.run(cfg) == 0


def test_a_trace_ends_at_a_rollback_and_starts_again(tiny, capfd):
    # After one update at such a rate no gradient is finite.
    wild = ("optimizer.learning_rate=1e30", "optimizer.max_skipped=2", "schedule.warmup=0")
    assert training_run.run(tiny(*wild, "profile_steps=2:9")) == 1
    output = capfd.readouterr().out
    assert output.count("rolled back to step 0, and the data") == rollback.MAX_ROLLBACKS
    assert len(re.findall("steps 2 to [34] are traced", output)) == rollback.MAX_ROLLBACKS + 1


@pytest.mark.slow
def test_a_checkpoint_from_the_bad_steps_is_quarantined(small, capfd):
    bad = small("bad", "checkpoint.every=34", "checkpoint.keep=2")
    spoil(Path(bad.data.path), 33, 35)
    assert training_run.run(bad) == 0
    output = capfd.readouterr().out
    assert (
        "rolled back to step 0" not in output and "rolled back to step 34" in output
    )  # there is none from before
    early = small("early", "checkpoint.every=17", "optimizer.max_skipped=3")
    spoil(Path(early.data.path), 33, 35)
    assert training_run.run(early) == 0
    output = capfd.readouterr().out
    assert "step 34: checkpoint not used: the run went back to step 17" in output
    assert "rolled back to step 17, and the data" in output


def test_the_fingerprint_of_the_data_does_not_depend_on_skipped_rows(sound):
    dataset = Dataset.open(sound)
    order = dataset.train_order(8, seed=0)
    assert order.skip([range(8, 16)]).skipped == (range(8, 16),) and not order.skipped
    fingerprint = dataset.fingerprint
    dataset.batch(order.skip([range(8, 16)]), 0)
    assert dataset.fingerprint == fingerprint
    assert Index.parse((sound / "index.json").read_bytes(), "").sources == ("test",)
