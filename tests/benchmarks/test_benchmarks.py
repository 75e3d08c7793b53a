"""The benchmarks run: the data pipeline's parts that need no peers, on little data; and those of whole steps
set the same work before torch and Headrace, at small sizes."""

import argparse
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import (
    cpu,
    data,
    data_corpus,
    data_rows,
    encoder_gpu,
    llama_gpu,
    long_gpu,
    loss_gpu,
    scaling,
    steps,
)
from benchmarks.data_measure import Cost, Rate, compare, measured, spent

SMALL = ["model.layers=1", "model.embed=32", "model.heads=4", "model.kv_heads=2", "model.mlp=64"]
SMALL += ["model.vocab=300", "compute.dtype=float32", "data.sequence_length=32", "batch.sequences=8"]


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


@pytest.mark.thin(2)
@pytest.mark.parametrize("name, attention", [("eurobert-210m", steps.UNMASKED), ("modernbert-base", "sdpa")])
def test_the_peers_first_masked_step_has_the_loss_of_ours(tmp_path: Path, name: str, attention: str) -> None:
    small = [*SMALL[1:3], *SMALL[4:], "model.layers=2"] if name == "modernbert-base" else SMALL
    cfg = steps.load(
        f"recipes/{name}.yaml",
        {"objective.mask_token_share": 1.0, "objective.random_token_share": 0.0},
        small,
    )
    ours = steps.headrace_steps(cfg, 2, mask=299, folder=tmp_path)
    model = steps.transformers_model(cfg, attention)
    steps.load_weights(model, tmp_path)
    examples = steps.load_examples(tmp_path)
    share = (examples["labels"] >= 0).float().mean().item()
    assert share == pytest.approx(cfg.objective.mask_rate, abs=0.1)
    assert (examples["input_ids"] == 299).sum() == (examples["labels"] >= 0).sum()
    assert model(**examples).loss.item() == pytest.approx(ours["first_loss"], abs=1e-5)
    assert ours["loss"] != ours["first_loss"]


@pytest.mark.thin(2)
@pytest.mark.parametrize("peer", llama_gpu.PEERS)
def test_the_peers_first_causal_step_has_the_loss_of_ours(monkeypatch, tmp_path: Path, peer: str) -> None:
    import torch

    monkeypatch.setattr(torch, "compile", lambda function: function)
    both = dict(parts=["1b"], steps=2, folder=tmp_path, set=[*SMALL, "model.head_dim=8"])
    rows = {row: llama_gpu.run(argparse.Namespace(**both, only=row)) for row in ("headrace", "fp8", peer)}
    assert rows[peer]["first_loss"] == pytest.approx(rows["headrace"]["first_loss"], abs=1e-5)
    assert 0 < abs(rows["fp8"]["first_loss"] - rows["headrace"]["first_loss"]) < llama_gpu.APART
    assert rows[peer]["loss"] != rows[peer]["first_loss"]


def test_speed_counts_at_equal_loss_alone(capsys) -> None:
    rows = {row: ROW for row in (*llama_gpu.FORMATS, *llama_gpu.PEERS)}
    assert llama_gpu.at_equal_loss(rows)
    far = ROW | {"first_loss": ROW["first_loss"] + 1.1 * llama_gpu.APART}
    assert not llama_gpu.at_equal_loss(rows | {"fp8": far})
    assert not llama_gpu.at_equal_loss(rows | {key: {"failed": "out of memory"} for key in llama_gpu.PEERS})
    told = capsys.readouterr().out
    assert "agree, at most 0.0e+00 apart" in told and "DIFFER (fp8), at most 2.2e-02" in told


def test_the_peer_masks_by_itself_where_ours_failed() -> None:
    import torch

    cfg = steps.load("recipes/eurobert-210m.yaml", {}, SMALL)
    tokens = torch.randint(0, 299, (8, 320))
    batch = encoder_gpu.masked(tokens, cfg)
    chosen = batch["labels"] >= 0
    assert chosen.float().mean().item() == pytest.approx(cfg.objective.mask_rate, abs=0.05)
    assert torch.equal(batch["input_ids"] == 299, chosen)
    assert torch.equal(torch.where(chosen, batch["labels"], batch["input_ids"]), tokens)


@pytest.mark.thin(2)
@pytest.mark.parametrize("isolate", ["true", "false"])
def test_the_peers_first_step_on_packed_rows_has_the_loss_of_ours(isolate, tiny, tmp_path: Path) -> None:
    cfg = tiny(f"data.isolate_documents={isolate}", "model.rope_theta=500.0")
    take, ours = cpu.headrace_step(cfg, tmp_path)
    peer, theirs = cpu.torch_step(cfg, tmp_path, compiled=False)
    assert theirs == pytest.approx(ours, abs=1e-5)
    assert (take(1), peer(1)) != (ours, theirs)


def test_too_little_memory_is_told_in_one_line() -> None:
    theirs = "CUDA out of memory. Tried to allocate 62.63 GiB. GPU 0 has a total capacity of 139.80 GiB"
    ours = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 118.25GiB.\nmore"
    assert steps.describe_error(RuntimeError(theirs)) == "out of memory, requested 62.63 GiB more"
    assert steps.describe_error(RuntimeError(ours)) == "out of memory, requested 118.25GiB more"
    assert steps.describe_error(ValueError("no\nmore")) == "ValueError: no"


def test_a_process_that_fails_has_a_row_all_the_same() -> None:
    assert steps.run_script("llama_gpu", "--only", "nobody") == {"failed": "exit code 2"}
    assert steps.run_script("llama_gpu", limit=0.01) == {"failed": "not finished after 0 s"}


ROW = steps.measure_steps([9.0, 1.0, 2.0], 100, [6.0, 5.0, 4.0], memory=2**30)


def test_a_table_is_printed_when_the_peer_fails(capsys, monkeypatch) -> None:
    def alone(script: str, *command: str, **options: Any) -> steps.Row:
        peers = ("torch", "tuned", steps.UNMASKED, "sdpa", "flex_attention", "eager")
        peer = any(word.startswith(peers) for word in command)
        return {"failed": "out of memory"} if peer else ROW

    monkeypatch.setattr(steps, "run_script", alone)
    monkeypatch.setattr(sys, "argv", ["benchmark"])
    assert long_gpu.main() == 0
    assert encoder_gpu.main() == 1
    assert llama_gpu.main() == 1
    shown = capsys.readouterr().out
    assert shown.count("out of memory") == 3 * 2 + 2 * 4 + 2 * 2
    assert shown.count("no ratio") == 3 * 2 + 2 * 3 + 2 * 4
    # 100 tokens in the median of 1 s and 2 s, the first left out
    assert shown.count("67 tokens/s") == 5 + 2 * 3 + 2 * 5


def test_a_head_that_this_chip_does_not_have_is_told_in_its_row(capsys, monkeypatch) -> None:
    monkeypatch.setattr(loss_gpu, "REPEATS", 1)
    rows = loss_gpu.jax_rows(**loss_gpu.SMALL, unembed_dtype="bfloat16")
    failed = {row["name"]: row["failed"] for row in rows if "failed" in row}
    assert list(failed) == ["by kernel, auto", "by kernel, filter 2.4e-04"]
    assert all("they are for Hopper GPUs" in why for why in failed.values())
    whole, *ours = [row for row in rows if "failed" not in row]
    assert len(ours) == 7
    for row in ours:
        assert row["loss"] == pytest.approx(whole["loss"], rel=1e-4)
        assert all(1e-4 < off < 4e-3 for off in row["off"])  # of bf16, by roundings of 1/256 at most
    loss_gpu.report([dict(name="torch eager", ms=1.0, loss=whole["loss"], off=[0.012, 0.5]), *rows])
    told = capsys.readouterr().out.splitlines()
    assert sum("for Hopper GPUs" in line for line in told) == 2 and "1.00" in told[4]
    assert told[2].split()[-2:] == ["1.2e-02", "5.0e-01"]


def test_both_sides_of_the_head_are_held_against_one_truth(monkeypatch) -> None:
    import jax.numpy as jnp
    import torch

    hidden, unembed, targets = loss_gpu.drawn(**loss_gpu.SMALL)
    x, matrix = hidden.astype(np.float64), unembed.astype(np.float64)
    d = np.exp(x @ matrix.T)
    d = (d / d.sum(1, keepdims=True) - np.eye(len(matrix))[targets]) / len(x)
    right = d @ matrix, d.T @ x
    monkeypatch.setattr(loss_gpu, "PART", 100)  # of 256 tokens: the last part is a shorter one
    torch.set_float32_matmul_precision("high")
    theirs = loss_gpu.torch_truth(
        *(torch.from_numpy(array.astype(np.float32)) for array in (hidden, unembed)),
        torch.from_numpy(targets),
    )
    assert torch.get_float32_matmul_precision() == "highest"
    ours = loss_gpu.jax_truth(*(jnp.asarray(array) for array in (hidden, unembed, targets)))
    for truth in (theirs, ours):
        for one, other in zip(truth, right, strict=True):
            assert np.linalg.norm(np.asarray(one) - other) < 1e-6 * np.linalg.norm(other)


def test_what_the_peers_of_the_head_have_for_gradients_is_told(monkeypatch) -> None:
    import torch

    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(loss_gpu, "REPEATS", 1)

    def rows() -> dict[str, loss_gpu.Row]:
        return {row["name"]: row for row in loss_gpu.torch_rows(**loss_gpu.SMALL)}

    monkeypatch.setitem(sys.modules, "cut_cross_entropy", None)
    missing = rows()
    for name in ("torch eager", "torch.compile"):
        assert all(1e-4 < off < 4e-3 for off in missing[name]["off"])
    for name in loss_gpu.APPLE:
        assert missing[name]["failed"].startswith("ModuleNotFoundError: import of cut_cross_entropy")

    def theirs(hidden: Any, unembed: Any, targets: Any, filter_eps: Any = "auto", impl: str = "cce") -> Any:
        if impl != "cce":
            raise NotImplementedError(f"{impl} is not implemented.")
        loss = torch.nn.functional.cross_entropy((hidden @ unembed.T).float(), targets)
        return loss if filter_eps is None else 1.1 * loss

    monkeypatch.setitem(sys.modules, "cut_cross_entropy", SimpleNamespace(linear_cross_entropy=theirs))
    found = rows()
    assert found["Apple's cut"]["off"] == pytest.approx([0.1, 0.1], abs=0.005)
    assert found["Apple's, no filter"]["off"] == found["torch eager"]["off"]
    assert found["Apple's, exact"]["failed"] == "NotImplementedError: cce_exact is not implemented."
    assert found["Apple's, for pre-training"]["failed"].endswith("cce_kahan_full_c is not implemented.")


def test_ratios_of_steps_say_whether_they_are_what_is_wanted() -> None:
    twice = ROW | {"tokens_per_second": 2 * ROW["tokens_per_second"]}
    assert steps.format_ratio(twice, ROW, 1.2) == "2.000 (goal 1.2: met)"
    assert steps.format_ratio(ROW, twice, 1.2) == "0.500 (goal 1.2: MISSED)"
    assert steps.format_ratio(ROW, {"failed": "out of memory"}, 1.2) == "no ratio"


def test_the_program_of_scanned_layers_has_one_size() -> None:
    from headrace.model_wrappers import load_family
    from headrace.nn import module
    from headrace.objectives import SpecialTokens
    from headrace.training import setup, step
    from headrace.training.task import make_task

    def lines(settings: dict[str, Any]) -> int:
        cfg = steps.load(scaling.RECIPE, scaling.SMALL.settings | settings | {"batch.sequences": 8})
        devices, task = setup.make_mesh(cfg), make_task(cfg, SpecialTokens(cfg.model.vocab, *[None] * 4))
        update = setup.make_update(cfg, task)
        axes = module.axes(load_family(task.model).Model, task.model)
        abstract, _ = setup.make_state(cfg, task, update, devices)
        one = step.make_train_step(task, update, axes)
        return len(setup.lower_step(cfg, one, abstract, devices).as_text().splitlines())

    sizes: dict[str, list[int]] = {}
    for curve, layers, settings in scaling.sweeps(scaling.SMALL, ["layers"]):
        if layers in (4, 8):
            sizes.setdefault(curve, []).append(lines(settings))
    assert sizes["scanned"][0] == sizes["scanned"][1]
    assert sizes["unrolled"][1] > sizes["unrolled"][0] > sizes["scanned"][0]


def test_a_sweep_goes_on_after_a_shape_that_fails(monkeypatch) -> None:
    def fail(cfg: Any, count: int) -> steps.Row:
        if cfg.data.sequence_length == 1024:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return ROW | {"tracing": 1.0, "compiling": 2.0, "making_cpu": 3.0, "program_lines": 4}

    monkeypatch.setattr(steps, "headrace_steps", fail)
    monkeypatch.setattr(sys, "argv", ["scaling", "--small"])
    points = list(scaling.measured(scaling.SMALL, scaling.parse()))
    assert len(points) == 2 * 5 + 5 + 5
    assert [point["x"] for point in points if "failed" in point] == [1024]
    assert "out of memory" in scaling.line(next(point for point in points if "failed" in point))
    assert "1.00 times" in scaling.verdict(points)


def test_what_was_measured_becomes_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    points = [
        {"curve": curve, "x": x, "step_seconds": 0.1, "tracing": 1.0, "compiling": 2.0}
        for curve in ("scanned", "unrolled", "length", "vocabulary")
        for x in (1024, 2048)
    ]
    scaling.plot({"device": "cpu", "jax": "0", "points": points}, tmp_path / "docs" / "scaling.png")
    assert (tmp_path / "docs" / "scaling.png").read_bytes().startswith(b"\x89PNG")
