"""Shuffling: every row as often as its weight requires, at a uniformly random position, with the same bytes
for every strategy; and measures of its quality."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.data import shuffle
from headrace.data.shards import Rows, Shard, pack_bits, read_rows, unpack_bits, write_rows
from headrace.data.shuffle import ShuffleInput, gather_bucket, plan_shuffle, scatter_input

LENGTH = 12  # tokens in a row, all of them the number of the row
ROW = LENGTH * 4


def write_inputs(
    folder: Path, sizes: list[int], *, weights: list[float] | None = None, loss: str = ""
) -> list[ShuffleInput]:
    """Write a packed file per source, with rows numbered over all sources. Sources whose digit is in `loss`
    have loss bits."""
    (folder / "packed").mkdir()
    inputs, first = [], 0
    for number, size in enumerate(sizes):
        numbers = np.arange(first, first + size, dtype=np.uint32)
        tokens = np.repeat(numbers[:, None], LENGTH, axis=1)
        rows = Rows(
            tokens,
            pack_bits(np.arange(LENGTH) == numbers[:, None] % LENGTH),
            pack_bits(np.arange(LENGTH) < numbers[:, None] % LENGTH) if str(number) in loss else None,
            np.full(size, number, np.uint16),
        )
        name = f"{number:05d}-train"
        write_rows(folder / "packed", name, rows)
        weight = 1.0 if weights is None else weights[number]
        inputs.append(ShuffleInput(f"packed/{name}", size, number, weight, str(number) in loss))
        first += size
    return inputs


def run_shuffle(inputs: list[ShuffleInput], folder: Path, **settings: Any) -> list[list[dict[str, Any]]]:
    """Run all passes, and return the results of the shards of each epoch."""
    options: dict[str, Any] = {"split": "train", "seed": 0, "row_bytes": ROW} | settings
    passes = plan_shuffle(inputs, folder=str(folder), **options)
    epochs: dict[int, list[dict[str, Any]]] = {}
    for pass_ in passes:
        for job in pass_.scatter:
            scatter_input(job)
        for job in pass_.gather:
            result = gather_bucket(job)
            if job.round.last:
                epochs.setdefault(job.round.epoch, []).append(result)
    return list(epochs.values())


def row_numbers(folder: Path, results: list[dict[str, Any]]) -> np.ndarray:
    """Row numbers of an epoch in order, after a check of the other contents of the rows."""
    numbers = []
    for result in results:
        rows = read_rows(folder, result["shard"]["name"])
        assert (rows.tokens == rows.tokens[:, :1]).all()
        assert (unpack_bits(rows.starts, LENGTH) == (np.arange(LENGTH) == rows.tokens[:, :1] % LENGTH)).all()
        numbers.append(rows.tokens[:, 0])
    return np.concatenate(numbers)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("train-*"))}


STRATEGIES = {
    "one bucket": {},
    "direct": {"bucket_bytes": 130 * ROW},
    "by runs": {"bucket_bytes": 130 * ROW, "direct_bytes": 0},
    "two rounds": {"bucket_bytes": 130 * ROW, "rounds": 2},
    "three rounds by runs": {"bucket_bytes": 130 * ROW, "direct_bytes": 0, "rounds": 3},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_epoch_has_every_row_exactly_once_in_a_different_order(tmp_path: Path, strategy: str) -> None:
    inputs = write_inputs(tmp_path, [100, 1, 250, 33])
    epochs = [
        row_numbers(tmp_path, epoch)
        for epoch in run_shuffle(inputs, tmp_path, epochs=2, **STRATEGIES[strategy])
    ]
    for numbers in epochs:
        assert sorted(numbers.tolist()) == list(range(384))
    orders = [numbers.tolist() for numbers in [np.arange(384), *epochs]]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_runs_and_random_reads_give_the_same_bytes(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path, [100, 250, 33], weights=[1.5, 1.0, 3.0], loss="1")
    run_shuffle(inputs, tmp_path, **STRATEGIES["direct"])
    direct = contents(tmp_path)
    for file in tmp_path.glob("train-*"):
        file.unlink()
    run_shuffle(inputs, tmp_path, **STRATEGIES["by runs"])
    assert len(direct) > 8 and contents(tmp_path) == direct


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_set_how_often_a_row_is_repeated(tmp_path: Path, strategy: str) -> None:
    inputs = write_inputs(tmp_path, [100, 60, 80, 40], weights=[1.0, 2.0, 0.5, 1.25])
    epochs = [
        row_numbers(tmp_path, epoch)
        for epoch in run_shuffle(inputs, tmp_path, epochs=4, **STRATEGIES[strategy])
    ]
    totals: Counter[int] = Counter()
    for numbers in epochs:
        counts = np.bincount(numbers, minlength=280)
        assert (counts[:100] == 1).all() and (counts[100:160] == 2).all()
        assert sorted(counts[160:240]) == [0] * 40 + [1] * 40
        assert sorted(counts[240:]) == [1] * 30 + [2] * 10
        totals.update(numbers.tolist())
    assert {totals[n] for n in range(160, 240)} == {2}  # four epochs of half the rows
    assert {totals[n] for n in range(240, 280)} == {5}


def test_a_fraction_of_a_row_is_rounded_equally_in_all_epochs_and_without_bias_over_seeds(
    tmp_path: Path,
) -> None:
    inputs = write_inputs(tmp_path, [10], weights=[0.25])
    epochs = run_shuffle(inputs, tmp_path, epochs=5)
    assert len({len(row_numbers(tmp_path, epoch)) for epoch in epochs}) == 1
    settings: dict[str, Any] = {"folder": "", "split": "train", "row_bytes": ROW}
    plans = [plan_shuffle(inputs, seed=seed, **settings)[0].gather[0].round.sizes[0] for seed in range(1000)]
    assert set(plans) == {2, 3} and abs(np.mean(plans) - 2.5) < 0.08  # five times the standard error


def test_the_position_of_a_row_is_uniformly_distributed(tmp_path: Path) -> None:
    """Pearson's test on the counts of each of 9 rows at each of 9 positions: 64 degrees of freedom."""
    inputs = write_inputs(tmp_path, [4, 3, 2])
    table, trials = np.zeros((9, 9)), 90
    for epoch in run_shuffle(inputs, tmp_path, epochs=trials, bucket_bytes=5 * ROW):
        numbers = row_numbers(tmp_path, epoch)
        table[numbers, np.arange(9)] += 1
    assert ((table - trials / 9) ** 2 / (trials / 9)).sum() < 64 + 4 * np.sqrt(2 * 64)


def test_all_orders_are_equally_likely() -> None:
    """All 24 orders of 4 rows in 2 files and 2 buckets, from the permutations only: 23 degrees of freedom."""
    inputs = [ShuffleInput("a", 3), ShuffleInput("b", 1)]
    order_counts: Counter[tuple[int, ...]] = Counter()
    for pass_ in plan_shuffle(
        inputs, folder="", split="train", seed=5, epochs=1200, row_bytes=1, bucket_bytes=2
    ):
        round_ = pass_.gather[0].round
        order: list[int] = []
        for bucket, size in enumerate(round_.sizes):
            bounds = [shuffle.bucket_bounds(round_, number) for number in (0, 1)]
            parts = [
                shuffle.original_positions(round_, number)[
                    shuffle.draw_run(round_, number)[1][bound[bucket] : bound[bucket + 1]]
                ]
                for number, bound in enumerate(bounds)
            ]
            order += np.concatenate(parts)[
                shuffle.make_generator(round_, "bucket", bucket).permutation(size)
            ].tolist()
        order_counts[tuple(order)] += 1
    counts = np.array(list(order_counts.values()))
    assert len(counts) == 24 and ((counts - 50) ** 2 / 50).sum() < 23 + 4 * np.sqrt(2 * 23)


@pytest.mark.parametrize("strategy", ["one bucket", "direct", "by runs", "two rounds"])
def test_ten_consecutive_sources_are_mixed(tmp_path: Path, strategy: str) -> None:
    inputs = write_inputs(tmp_path, [2000] * 10)
    settings = STRATEGIES[strategy] | (
        {"bucket_bytes": 6000 * ROW} if "bucket_bytes" in STRATEGIES[strategy] else {}
    )
    (epoch,) = run_shuffle(inputs, tmp_path, **settings)
    quality = shuffle.combine_measures(result["quality"] for result in epoch)
    assert quality.mixing > 0.99
    assert abs(quality.rank_correlation) < 4 / np.sqrt(20_000)
    assert quality.displacement == pytest.approx(1.0, abs=0.02)
    # The same values, computed from the rows by plain formulas.
    numbers = row_numbers(tmp_path, epoch)
    assert quality.rank_correlation == pytest.approx(np.corrcoef(numbers, np.arange(20_000))[0, 1])
    assert quality.displacement == pytest.approx(
        np.abs(numbers - np.arange(20_000.0)).mean() / 20_000 * 3, rel=1e-6
    )


def quality_of(order: np.ndarray, counts: list[int]) -> shuffle.ShuffleQuality:
    """Quality of an order of rows of consecutive sources, stored in two shards."""
    sources = np.repeat(np.arange(len(counts)), counts)[order]
    half = len(order) // 2
    parts = [(order[:half], sources[:half], 0), (order[half:], sources[half:], half)]
    return shuffle.combine_measures(shuffle.measure_shard(*part, counts) for part in parts)


@pytest.mark.parametrize("counts", [[5120] * 10, [512, 5120, 25600]])
def test_the_measures_distinguish_order_from_disorder(counts: list[int]) -> None:
    random, total = np.random.default_rng(0), sum(counts)
    unshuffled = quality_of(np.arange(total), counts)
    assert unshuffled.rank_correlation == pytest.approx(1.0) and unshuffled.displacement == 0.0
    assert unshuffled.mixing == pytest.approx(0.0, abs=1e-9)  # every batch has a single source here
    qualities = [quality_of(random.permutation(total), counts) for _ in range(10)]
    assert np.mean([quality.mixing for quality in qualities]) > 0.999
    # A shuffle buffer of 1,000 rows, as in streaming loaders, hardly mixes.
    buffered = np.argsort(np.arange(total) + random.uniform(0, 1000, total))
    assert quality_of(buffered, counts).mixing < 0.35


def test_an_order_is_measured_even_if_shards_are_smaller_than_a_batch() -> None:
    order, shards = np.arange(9500), range(0, 9500, 95)
    parts = [shuffle.measure_shard(order[i : i + 95], np.zeros(95, int), i, [9500]) for i in shards]
    quality = shuffle.combine_measures(parts)
    assert (
        quality.rank_correlation == pytest.approx(1.0)
        and quality.displacement == 0
        and quality.mixing is None
    )


def test_the_mixing_of_a_single_source_is_measured_over_tenths() -> None:
    order = np.random.default_rng(0).permutation(51200)
    assert quality_of(order, [51200]).mixing > 0.999
    assert quality_of(np.arange(51200), [51200]).mixing == pytest.approx(0.0, abs=1e-9)


def test_a_shuffle_of_very_few_rows_is_measured_without_error(tmp_path: Path) -> None:
    for total in range(1, 20):
        quality = quality_of(np.random.default_rng(0).permutation(total), [total])
        assert (quality.mixing is None or 0 <= quality.mixing <= 1) and -1 <= quality.rank_correlation <= 1


def test_an_empty_split_has_no_passes() -> None:
    assert plan_shuffle([], folder="", split="evaluation", seed=0, row_bytes=1) == ()
    assert (
        plan_shuffle([ShuffleInput("a", 5, weight=0.0)], folder="", split="train", seed=0, row_bytes=1) == ()
    )


def test_splits_and_seeds_have_different_orders(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path, [300])
    orders = []
    for split, seed in (("train", 0), ("train", 1), ("evaluation", 0)):
        (epoch,) = run_shuffle(inputs, tmp_path, split=split, seed=seed)
        orders.append(row_numbers(tmp_path, epoch).tolist())
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_rows_without_loss_bits_among_others_are_fully_trained_on(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path, [50, 50, 50], loss="1")
    for strategy in ("one bucket", "by runs", "two rounds"):
        (epoch,) = run_shuffle(inputs, tmp_path, filler=9_999, **STRATEGIES[strategy])
        row_numbers(tmp_path, epoch)
        for result in epoch:
            rows = read_rows(tmp_path, result["shard"]["name"])
            assert rows.loss_bits is not None
            numbers = rows.tokens[:, :1]
            expected = (np.arange(LENGTH) < numbers % LENGTH) | (rows.sources[:, None] != 1)
            assert (unpack_bits(rows.loss_bits, LENGTH) == expected).all()
            assert (numbers[:, 0] // 50 == rows.sources).all()


def test_a_shard_equals_the_output_of_write_rows(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path, [50, 50], loss="0")
    ((result,),) = run_shuffle(inputs, tmp_path)
    shuffled = contents(tmp_path)
    rows = read_rows(tmp_path, "train-0-00000", mmap=False)
    assert (
        asdict(write_rows(tmp_path, "train-0-00000", rows))
        == result["shard"]
        == asdict(Shard(**result["shard"]))
    )
    assert contents(tmp_path) == shuffled and len(shuffled) == 4


WORKER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.data.test_shuffle import run_shuffle
from headrace.data.shuffle import ShuffleInput
print("started", flush=True)
inputs = [ShuffleInput(f"packed/{n:05d}-train", 2000, n) for n in range(6)]
run_shuffle(inputs, Path(sys.argv[2]), bucket_bytes=3000 * 48, direct_bytes=0, rounds=2)
"""


def test_a_killed_and_repeated_shuffle_writes_the_same_bytes(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path, [2000] * 6)
    settings: dict[str, Any] = {"bucket_bytes": 3000 * ROW, "direct_bytes": 0, "rounds": 2}
    started_at = time.perf_counter()
    run_shuffle(inputs, tmp_path, **settings)
    duration = time.perf_counter() - started_at
    expected = contents(tmp_path)
    for file in (*tmp_path.glob("train-*"), *tmp_path.glob("scatter/*/*")):
        file.unlink()

    root = Path(__file__).parents[2]
    for share in (0.2, 0.5, 0.8):
        command = [sys.executable, "-c", WORKER, str(root), str(tmp_path)]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root)
        assert worker.stdout is not None and worker.stdout.readline() == b"started\n"
        time.sleep(share * duration)
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
        for name, data in contents(tmp_path).items():
            assert data == expected[name]  # files under their final name are complete
    run_shuffle(inputs, tmp_path, **settings)
    assert contents(tmp_path) == expected
