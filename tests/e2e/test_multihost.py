"""Runs of several hosts, as real processes that communicate over loopback."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.open_run import open_run
from headrace.config import reader, recipe, sections
from headrace.errors import ExitCode, UserError
from headrace.nn.module import named_leaves
from headrace.runtime import multihost
from headrace.runtime.stragglers import HostTime, StragglerMonitor
from headrace.storage.lock import lock
from tests.support import xla_flags

# Trains, and records which rows of each batch this host reads.
COUNTED = """
import json, sys
from headrace.cli import main as cli_main
from headrace.data.dataset import Dataset
batch, read = Dataset.batch, []
def counted(self, order, step, slots=slice(None)):
    packed = batch(self, order, step, slots)
    read.append([order.split, step, slots.start, slots.stop, len(packed.tokens)])
    return packed
Dataset.batch = counted
code = cli_main.main(["train", *sys.argv[2:]])
open(sys.argv[1], "w").write(json.dumps(read))
sys.exit(code)
"""

# Trains until the second host stops reading.
STUCK = """
import os, sys, time
from headrace.cli import main as cli_main
from headrace.data.dataset import Dataset
batch = Dataset.batch
def stuck(self, order, step, *slots):
    if step == 6 and os.environ["HEADRACE_PROCESS"] == "1":
        time.sleep(600)
    return batch(self, order, step, *slots)
Dataset.batch = stuck
sys.exit(cli_main.main(["train", *sys.argv[2:]]))
"""


# Trains with a second host that reads slowly.
SLOW = """
import os, sys, time
from headrace.cli import main as cli_main
from headrace.data.dataset import Dataset
batch = Dataset.batch
def slow(self, order, step, *slots):
    time.sleep(2.0 * (os.environ["HEADRACE_PROCESS"] == "1"))
    return batch(self, order, step, *slots)
Dataset.batch = slow
sys.exit(cli_main.main(["train", *sys.argv[2:]]))
"""


def save_recipe(cfg: sections.TrainRecipe, path: Path) -> Path:
    path.write_text(reader.to_yaml(cfg))
    return path


def start(path: Path, *overrides: str, count: int = 2, devices: int = 4, script: str = "") -> list:
    """Start one process for each host. Its output goes to a file next to the recipe."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"XLA_FLAGS": xla_flags.flags(devices), "HEADRACE_HEARTBEAT": "10"}
    processes = []
    for host in range(count):
        if count > 1:
            env |= dict(zip(multihost.NAMES, (f"127.0.0.1:{port}", str(count), str(host)), strict=True))
        command = [sys.executable, "-m", "headrace", "train"]
        if script:
            command = [sys.executable, "-c", script, str(path.parent / f"{host}.json")]
        with open(path.parent / f"{path.stem}-{host}.txt", "a") as output:
            processes.append(
                subprocess.Popen(
                    [*command, str(path), *overrides], env=env, stdout=output, stderr=subprocess.STDOUT
                )
            )
    return processes


def finish(processes: list, path: Path) -> tuple[list[int], str]:
    try:
        codes = [process.wait(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    texts = [file.read_text() for file in sorted(path.parent.glob(f"{path.stem}-*.txt"))]
    return codes, "\n".join(texts)


def wait_for_step(run: str, step: int, processes: list) -> None:
    log, end = Path(run) / "metrics.jsonl", time.monotonic() + 180
    while not (log.exists() and f'"step": {step},' in log.read_text()):
        assert time.monotonic() < end and all(process.poll() is None for process in processes)
        time.sleep(0.01)


def weights(run: str) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(open_run(recipe.load_run(run)).params)}


def rows(run: str, key: str = "loss") -> dict[int, float]:
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row[key] for row in map(json.loads, lines) if key in row}


def test_two_hosts_train_like_one_and_each_reads_only_its_rows(tiny, tmp_path):
    short = ("schedule.steps=4", "eval.batches=1", "mesh.fsdp=2")
    both = save_recipe(tiny(f"run_dir={tmp_path}/both", *short), tmp_path / "both.yaml")
    single = save_recipe(tiny(f"run_dir={tmp_path}/single", *short), tmp_path / "single.yaml")
    processes = start(both, script=COUNTED)
    codes, output = finish(processes, both)
    assert codes == [0, 0], output
    assert "8 cpu of 2 hosts" in output and output.count("parameters on") == 1  # one host logs
    for host in range(2):
        read = json.loads((tmp_path / f"{host}.json").read_text())
        share = [4 * host, 4 * host + 4, 4]
        assert read == [*(["train", step, *share] for step in range(4)), ["evaluation", 0, *share]]
    codes, output = finish(start(single, count=1, devices=8), single)
    assert codes == [0], output
    run, expected = f"{tmp_path}/both", f"{tmp_path}/single"
    for name, value in weights(expected).items():
        np.testing.assert_allclose(weights(run)[name], value, atol=1e-6, err_msg=name)
    for key in ("loss", "evaluate/loss"):
        losses, expected_losses = (list(rows(folder, key).values()) for folder in (run, expected))
        np.testing.assert_allclose(losses, expected_losses, atol=1e-6)


@pytest.mark.slow
@pytest.mark.fault(1)
def test_sigterm_to_one_host_stops_both_at_a_step_from_which_they_resume_bit_for_bit(tiny, tmp_path):
    """With a save in progress nearly all the time."""
    settings = ("schedule.steps=60", "checkpoint.every=4", "eval.batches=1", "mesh.fsdp=2")
    full = save_recipe(tiny(f"run_dir={tmp_path}/full", *settings), tmp_path / "full.yaml")
    stopped = save_recipe(tiny(f"run_dir={tmp_path}/stopped", *settings), tmp_path / "stopped.yaml")
    codes, output = finish(start(full), full)
    assert codes == [0, 0], output
    processes = start(stopped)
    wait_for_step(f"{tmp_path}/stopped", 5, processes)
    processes[1].send_signal(signal.SIGTERM)
    codes, output = finish(processes, stopped)
    assert codes == [75, 75], output
    step = Checkpoints(f"{tmp_path}/stopped").latest_step()
    assert step is not None and 5 <= step < 60
    assert f"resumes from step {step}" in output
    codes, output = finish(start(stopped), stopped)
    assert codes == [0, 0], output
    for name, value in weights(f"{tmp_path}/full").items():
        np.testing.assert_array_equal(weights(f"{tmp_path}/stopped")[name], value, err_msg=name)
    assert rows(f"{tmp_path}/stopped") == rows(f"{tmp_path}/full")


ADDRESS = {"HEADRACE_COORDINATOR": "10.0.0.1:8476", "HEADRACE_PROCESSES": "4", "HEADRACE_PROCESS": "3"}
NO_CHIP = {"TPU_SKIP_MDS_QUERY": "1"}
SLURM = {"SLURM_STEP_NODELIST": "a,b", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "2"} | NO_CHIP


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (NO_CHIP, None),
        (NO_CHIP | {"SLURM_NTASKS": "8"}, None),  # a batch script itself, which srun has not started
        (NO_CHIP | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a single pod
        (ADDRESS | {"HEADRACE_PROCESSES": "1"}, None),
        (SLURM, {"local_device_ids": []}),
        (SLURM | {"SLURM_NTASKS": "16"}, {}),
        (NO_CHIP | {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}, {}),
        (NO_CHIP | {"TPU_WORKER_HOSTNAMES": "a,b"}, {}),
        ({}, {}),  # there is a chip
        ({"JAX_PLATFORMS": "cpu"}, None),
    ],
)
def test_the_environment_shows_whether_there_are_other_hosts(env, expected):
    assert multihost.find_settings(env) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"HEADRACE_COORDINATOR": "10.0.0.1"}, "expected the address of the first host"),
        ({"HEADRACE_PROCESSES": "four"}, "HEADRACE_PROCESSES: found four, expected a number"),
        ({"HEADRACE_PROCESS": "4"}, "HEADRACE_PROCESS: found 4, expected this host's number, 0 to 3"),
    ],
)
def test_a_wrong_address_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        multihost.find_settings(ADDRESS | change)
    assert multihost.find_settings(ADDRESS)["process_id"] == 3


@pytest.mark.slow
@pytest.mark.fault(15)
def test_a_run_resumes_with_fewer_hosts_and_other_meshes(tiny, tmp_path):
    """Two hosts with eight devices, one with four, one with two, two with eight: as if always with eight."""
    constant = ("schedule.use=constant", "schedule.warmup=0", "eval.batches=1")
    path = save_recipe(tiny(f"run_dir={tmp_path}/resumed", *constant), tmp_path / "resumed.yaml")
    attempts = [
        (2, 4, "mesh.fsdp=2"),
        (1, 4, "mesh.tensor=2"),
        (1, 2, "mesh.context=2"),
        (2, 4, "mesh.fsdp=4"),
    ]
    for number, (count, devices, mesh) in enumerate(attempts, 1):
        processes = start(path, f"schedule.steps={2 * number}", mesh, count=count, devices=devices)
        codes, output = finish(processes, path)
        assert codes == [0] * count, output
    full = save_recipe(
        tiny(f"run_dir={tmp_path}/full", *constant, "schedule.steps=8"), tmp_path / "full.yaml"
    )
    codes, output = finish(start(full, count=1, devices=8), full)
    assert codes == [0], output
    losses, expected = (list(rows(f"{tmp_path}/{run}").values()) for run in ("resumed", "full"))
    assert len(losses) == 8
    np.testing.assert_allclose(losses, expected, atol=5e-5)


@pytest.mark.slow
def test_a_mistake_that_one_host_finds_ends_all(tiny, tmp_path):
    """The first host cannot lock the folder, which the second does not check."""
    path = save_recipe(tiny(), tmp_path / "recipe2.yaml")
    with lock(tiny().run_dir):
        codes, output = finish(start(path, "--once"), path)
    assert codes == [2, 2], output
    assert "host 0: " in output and output.count("another process trains in this folder") == 2


@pytest.mark.slow
@pytest.mark.fault(6)
def test_if_one_host_hangs_both_write_their_stacks_and_end(tiny, tmp_path):
    path = save_recipe(tiny("step_timeout=3", "schedule.steps=20", "mesh.fsdp=2"), tmp_path / "stuck.yaml")
    codes, output = finish(start(path, script=STUCK), path)
    assert codes == [ExitCode.HUNG] * 2, output
    files = sorted((Path(tiny().run_dir) / "stacks").iterdir())
    assert [file.name[0] for file in files] == ["0", "1"]
    waiting, stuck = (file.read_text() for file in files)
    assert "in stuck" in stuck and "in stuck" not in waiting and "in run_steps" in waiting


@pytest.mark.slow
@pytest.mark.fault(7)
def test_a_host_that_delays_the_other_is_named(tiny, tmp_path):
    # Without saves, which make a step long for another reason than a host.
    usual = tiny("schedule.steps=8", "checkpoint.every=40", "mesh.fsdp=2", "eval.batches=1")
    path = save_recipe(usual, tmp_path / "slow.yaml")
    codes, output = finish(start(path, script=SLOW), path)
    assert codes == [0, 0], output
    assert output.count("delays the others") == 1
    assert f"host 1 ({socket.gethostname()}) delays the others: it waits " in output


def test_only_a_host_that_is_late_repeatedly_is_named():
    monitor, usual = StragglerMonitor(), {host: HostTime(f"w{host}", 0.01) for host in range(4)}
    late = usual | {2: HostTime("w2", 0.8)}
    logged = (late, late, usual, late, late, late, late)
    assert [len(monitor.find_stragglers(times, 1.0)) for times in logged] == [0, 0, 0, 0, 0, 1, 0]
    assert monitor.find_stragglers(usual, 0.01) == []  # all are equally slow, however short a step is
    all_late = {host: HostTime(f"w{host}", 0.8) for host in range(4)}
    assert [monitor.find_stragglers(all_late, 1.0) for _ in range(5)] == [[]] * 5


@pytest.mark.slow
def test_two_hosts_roll_back_together_and_skip_the_same_data(tiny, tmp_path):
    """The weights are not finite from one step on, as after an update with a far too high learning rate."""
    short = ("schedule.use=constant", "schedule.warmup=0", "optimizer.max_skipped=2", "mesh.fsdp=2")
    usual = tiny(*short, "schedule.steps=3", "checkpoint.every=3", "eval.batches=1")
    codes, output = finish(start(path := save_recipe(usual, tmp_path / "usual.yaml")), path)
    assert codes == [0, 0], output
    wild = tiny(*short, "schedule.steps=9", "optimizer.learning_rate=1e30")
    codes, output = finish(start(path := save_recipe(wild, tmp_path / "wild.yaml")), path)
    assert codes == [1, 1], output
    assert "rolled back to step 3, and the data" in output and "stopped at step 6" in output
    mended = tiny(*short, "schedule.steps=6", "eval.batches=1")
    codes, output = finish(start(path := save_recipe(mended, tmp_path / "mended.yaml")), path)
    assert codes == [0, 0], output
    lines = (Path(usual.run_dir) / "bad-steps" / "rollbacks.jsonl").read_text().splitlines()
    assert [json.loads(line)["rows"] for line in lines] == [2 * 8, 2 * 8, -1]
    assert Checkpoints(usual.run_dir).read_meta(6)["data"]["next_row"] == (6 + 4) * 8
