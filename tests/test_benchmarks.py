"""The benchmark of the data pipeline runs: the parts that need no peers, on little data."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks import data, data_corpus, data_rows
from benchmarks.data_measure import Cost, Rate, compare, measured, spent


def test_packing_fills_rows_of_all_documents(tmp_path: Path) -> None:
    lines = data_rows.packing(50_000, None, tmp_path)
    assert [line.what for line in lines] == ["50,000 documents", "fill"]
    assert lines[1].met


def test_shuffles_are_told_apart_by_what_they_leave_uneven(tmp_path: Path) -> None:
    lines = {line.what: line for line in data_rows.shuffling(4_000_000, tmp_path, simulated=200_000)}
    assert lines["ours, one pass"].met and lines["ours, two passes"].met
    unevenness = {what: float(line.ours.split()[-1]) for what, line in lines.items() if "rank" in line.ours}
    assert unevenness["uniform permutation"] < 1.2
    assert unevenness["recursive, rounds: 1"] > unevenness["recursive, rounds: 2"]
    assert unevenness["files in random order, buffer of 10,000"] > 2


def test_recursive_and_buffered_orders_have_every_row_once() -> None:
    random = np.random.default_rng(0)
    for order in (data_rows.recursive(50_000, 2, random), data_rows.buffered(50_000, 10_000, random)):
        assert np.array_equal(np.sort(order), np.arange(50_000))


def test_streaming_runs_without_peers(tmp_path: Path) -> None:
    lines = data_rows.streaming(1_000_000, None, tmp_path / "stream")
    assert any(line.what.startswith("batch") for line in lines)


def test_a_corpus_of_a_given_size_has_documents_with_hostile_lines(tmp_path: Path) -> None:
    files = data_corpus.write(tmp_path / "corpus", 1)
    content = b"".join(file.read_bytes() for file in files)
    assert 1_000_000 <= len(content) < 1_000_000 + 2 * data_corpus.LARGEST + 100_000
    assert "각".encode() in content


def test_ratios_are_judged_by_cpu_time() -> None:
    ours, peer = Rate("MB/s"), Rate("MB/s")
    ours.add(100, Cost(wall=4, cpu=1))
    peer.add(10, Cost(wall=1, cpu=1))
    line = compare("item", "vs peer", ours, peer, least=10)
    assert (line.ratio, line.ratio_wall, line.met) == (10, 2.5, True)


def test_the_table_says_what_was_met_and_missed(capsys) -> None:
    ours, peer = Rate("MB/s"), Rate("MB/s")
    ours.add(30, Cost(1, 1))
    peer.add(1, Cost(1, 1))
    wanted = [compare("item", "one", ours, peer, least=20), compare("item", "other", ours, peer, least=40)]
    data.show("item", wanted)
    shown = capsys.readouterr().out.splitlines()
    assert shown[-2].endswith("met") and shown[-1].endswith("MISSED")


def test_cpu_time_of_ended_and_running_processes_is_counted() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\n"
    before = spent()
    process = subprocess.Popen([sys.executable, "-c", burn + "input()"], stdin=-1, stdout=-1)
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    running = spent() - before
    process.communicate(b"\n")
    _, cost = measured(lambda: subprocess.run([sys.executable, "-c", burn], stdout=subprocess.DEVNULL))
    assert running >= 0.25 and cost.cpu >= 0.25
