"""Faults that need a run of their own: kills by the hundred, hosts that stop, disks that are really full."""

import contextlib
import http.server
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.checkpoint.manager import Checkpoints
from headrace.config import recipe
from headrace.runtime import multihost, signals
from tests.e2e.test_multihost import finish as finish_all
from tests.e2e.test_multihost import rows as losses
from tests.e2e.test_multihost import start as start_all
from tests.e2e.test_multihost import wait_for_step
from tests.e2e.test_train import finish, rows, save_recipe, start, weights
from tests.runtime.test_supervisor import worker_of
from tests.support.faults import FAULTS

TESTS = Path(__file__).parents[1]
KILLS = 100

# Trains while the clock goes wrong: a day back in the middle, then two days on.
CLOCK = """
import sys, time
from headrace.cli import main as cli_main
from headrace.data.dataset import Dataset
now, batch, shift = time.time, Dataset.batch, [0.0]
time.time = lambda: now() + shift[0]
def jumping(self, order, step, *slots):
    shift[0] = {4: -86_400.0, 8: 172_800.0}.get(step, shift[0])
    return batch(self, order, step, *slots)
Dataset.batch = jumping
sys.exit(cli_main.main(["train", *sys.argv[1:], "--once"]))
"""


def test_every_fault_has_a_test():
    texts = [path.read_text() for path in sorted(TESTS.rglob("test_*.py"))]
    marked = {int(number) for text in texts for number in re.findall(r"mark\.fault\((\d+)\)", text)}
    assert marked == set(FAULTS)


@pytest.mark.slow
@pytest.mark.fault(2)
def test_a_hundred_kills_change_nothing(tiny, tmp_path, record_property):
    """A third of them come while the run starts: while it imports, compiles or restores."""
    # Such a small model is unsteady at times, and no run of this test is to go back by itself.
    settings = ["schedule.steps=9000", "checkpoint.every=20", "eval.every=0", "log.every=1"]
    settings += ["optimizer.spike_threshold=0"]
    whole = save_recipe(tiny(f"run_dir={tmp_path}/whole", *settings), tmp_path / "whole.yaml")
    broken = save_recipe(tiny(f"run_dir={tmp_path}/broken", *settings), tmp_path / "broken.yaml")
    code, said = finish(start(whole))
    assert code == 0, said

    random, log, run = np.random.default_rng(), tmp_path / "broken" / "metrics.jsonl", f"{tmp_path}/broken"
    committed, lost = 0, []
    for number in range(KILLS):
        process, begun = start(broken, "--once"), time.monotonic()
        if number % 3 == 0:
            time.sleep(random.uniform(0, 6))
        else:
            size = log.stat().st_size if log.exists() else 0
            while process.poll() is None and (not log.exists() or log.stat().st_size <= size):
                assert time.monotonic() < begun + 240
                time.sleep(0.005)
            time.sleep(random.uniform(0, 0.6))
        process.kill()
        code, said = finish(process)
        assert code == -signal.SIGKILL, said
        last = Checkpoints(run).find_resume_step() or 0
        assert last >= committed
        if number % 3 and log.exists():
            lost.append(rows(recipe.load(broken))[-1]["step"] - last)
        committed = last
    assert committed < 9000, "too few steps for as many kills"
    assert max(lost) <= 20
    record_property("seen", f"lost steps: median {np.median(lost):.0f}, most {max(lost)}; saved every 20")
    code, said = finish(start(broken))
    assert code == 0, said
    assert losses(run) == losses(f"{tmp_path}/whole")
    other = weights(recipe.load(broken))
    for name, value in weights(recipe.load(whole)).items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "sent"),
    [
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.fault(4)),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.fault(5)),
    ],
    ids=["first killed", "stopped"],
)
def test_a_host_that_is_gone_is_noticed_and_all_end_the_same(tiny, tmp_path, host, sent):
    settings = ("schedule.steps=150", "checkpoint.every=10", "eval.batches=1", "mesh.fsdp=2")
    whole = save_recipe(tiny(f"run_dir={tmp_path}/whole", *settings), tmp_path / "whole.yaml")
    broken = save_recipe(tiny(f"run_dir={tmp_path}/broken", *settings), tmp_path / "broken.yaml")
    codes, said = finish_all(start_all(whole), whole)
    assert codes == [0, 0], said
    processes = start_all(broken)
    wait_for_step(f"{tmp_path}/broken", 25, processes)
    stopped = worker_of(processes[host].pid)
    os.kill(stopped, sent)
    if sent == signal.SIGSTOP:  # a machine that stands still is, in the end, one that is gone
        while processes[1 - host].poll() is None and "starts again" not in said_by(broken):
            time.sleep(0.1)
        os.kill(stopped, signal.SIGKILL)
    codes, said = finish_all(processes, broken)
    assert codes == [0, 0], said
    assert losses(f"{tmp_path}/broken") == losses(f"{tmp_path}/whole")


def said_by(path: Path) -> str:
    return "\n".join(file.read_text() for file in path.parent.glob(f"{path.stem}-*.txt"))


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A disk of 24 MiB, where one may mount it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True
    )
    if made.returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.fault(8)
def test_a_disk_that_is_really_full_does_not_end_a_run(tiny, small_disk):
    room = os.statvfs(small_disk)
    cfg = save_recipe(
        tiny(f"run_dir={small_disk}/run", "schedule.steps=40", "checkpoint.every=4", "checkpoint.keep=3"),
        small_disk.parent / "full.yaml",
    )
    said = []
    with start(cfg, "--once") as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if re.match(r" +5 ", line):
                fill(small_disk / "filler", room.f_bsize)
            if re.match(r" +30 ", line):
                (small_disk / "filler").unlink()
    assert process.returncode == 0, "".join(said)
    assert any("checkpoint skipped" in line for line in said)
    assert Checkpoints(f"{small_disk}/run").latest_step() == 40
    assert [row["step"] for row in rows(recipe.load(cfg))] == list(range(1, 41))


def fill(path: Path, size: int) -> None:
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while file.write(bytes(size)):
            pass


class Down(http.server.BaseHTTPRequestHandler):
    """A server that is busy whatever it is asked."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_error(503)

    do_GET = do_POST

    def log_message(self, *args: object) -> None:
        self.server.asked += 1


@pytest.mark.slow
@pytest.mark.fault(21)
def test_a_run_goes_on_without_weights_and_biases_if_that_is_down(tiny, tmp_path):
    """The real client, before a server that answers 503."""
    packages = Path(__file__).parents[2] / ".venv" / "wandb"
    if not packages.is_dir():
        pytest.skip("needs wandb: make .venv/wandb")
    path = save_recipe(tiny("log.wandb=true"), tmp_path / "tracked.yaml")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Down) as server:
        server.asked = 0
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = os.environ | {
            "PYTHONPATH": str(packages),
            "WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}",
            "WANDB_API_KEY": "0" * 40,
        }
        command = [sys.executable, "-m", "headrace", "train", str(path), "--once"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
        server.shutdown()
    assert done.returncode == 0 and server.asked > 0, done.stdout + done.stderr
    assert done.stdout.count("wandb is off: ") == 1 and "503" in done.stdout
    assert [row["step"] for row in rows(tiny())] == list(range(1, 13))


@pytest.mark.slow
@pytest.mark.fault(22)
def test_a_clock_that_jumps_harms_nothing(tiny, tmp_path):
    path = save_recipe(tiny(), tmp_path / "clock.yaml")
    done = subprocess.run(
        [sys.executable, "-c", CLOCK, str(path)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for row in rows(tiny()):
        assert row["tokens_per_second"] > 0 and 0 <= row["goodput"] <= 1
    assert Checkpoints(tiny().run_dir).latest_step() == 12


@pytest.mark.fault(24)
def test_a_port_that_is_taken_is_told(tiny, tmp_path):
    path = save_recipe(tiny("step_timeout=20"), tmp_path / "port.yaml")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        env = os.environ | dict(zip(multihost.NAMES, (address, "2", "0"), strict=True))
        command = [sys.executable, "-m", "headrace", "train", str(path)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stdout + done.stderr
    assert address in done.stderr and "Traceback" not in done.stderr


@pytest.mark.thin(4)
@pytest.mark.fault(27)
@pytest.mark.parametrize("moment", [0.2, 1.5, 3.0, 4.5])
def test_a_run_stopped_before_its_first_step_begins_again(tiny, tmp_path, moment):
    path = save_recipe(tiny(), tmp_path / "early.yaml")
    process = start(path)
    time.sleep(moment)
    process.send_signal(signal.SIGTERM)
    code, said = finish(process)
    finished = (
        code == 0 and Checkpoints(tiny().run_dir).latest_step() == 12
    )  # 4.5 s can be enough for all of it
    unheard = code == -signal.SIGTERM and moment < 1  # before Python itself runs
    assert code == 75 or finished or unheard, said
    assert "Traceback" not in said
    code, said = finish(start(path))
    assert code == 0, said
    assert Checkpoints(tiny().run_dir).latest_step() == 12


@pytest.mark.slow
@pytest.mark.fault(28)
def test_a_damaged_compilation_cache_is_compiled_again(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    path = save_recipe(tiny(), tmp_path / "cache.yaml")
    code, said = finish(start(path))
    assert code == 0, said
    kept = [file for file in (tmp_path / "compiled").rglob("*-cache")]
    assert kept
    for file in kept:
        file.write_bytes(b"damage" + file.read_bytes()[20:])
    code, said = finish(start(path, "schedule.steps=16"))
    assert code == 0, said
    assert Checkpoints(tiny().run_dir).latest_step() == 16


@pytest.mark.fault(29)
def test_ctrl_c_saves_and_a_second_one_ends_at_once(tiny, tmp_path):
    path = save_recipe(tiny("schedule.steps=4000", "checkpoint.every=100000"), tmp_path / "twice.yaml")
    process = start(path)
    wait_for_step(tiny().run_dir, 5, [process])
    process.send_signal(signal.SIGINT)
    code, said = finish(process)
    saved = Checkpoints(tiny().run_dir).latest_step() or 0
    assert code == 75 and saved >= 5, said
    process = start(path)
    wait_for_step(tiny().run_dir, saved + 5, [process])
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    code, said = finish(process)
    assert code == 75 and "Traceback" not in said, said  # two at once are one, sent to a group of processes


# Trains with saves that take their time.
SLOW_SAVES = """
import runpy, sys, time
from headrace.checkpoint import manifest
def slow(*args, **more):
    print("saving", flush=True)
    time.sleep(600)
manifest.seal = slow
sys.argv = ["headrace", "train", sys.argv[1], "--once"]
runpy.run_module("headrace", run_name="__main__")
"""


@pytest.mark.fault(29)
def test_a_second_ctrl_c_waits_for_no_save(tiny, tmp_path):
    path = save_recipe(tiny("schedule.steps=4000", "checkpoint.every=100000"), tmp_path / "slow.yaml")
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_SAVES, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for_step(tiny().run_dir, 5, [process])
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    said = next(line for line in process.stdout if "saving" in line)
    time.sleep(1.5 * signals.REPEAT_SECONDS)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in rest and "interrupted" in rest, said + rest
    assert Checkpoints(tiny().run_dir).latest_step() is not None  # it is there, and does not count as whole


@pytest.mark.fault(29)
def test_a_second_ctrl_c_stops_at_once_if_it_is_not_the_first_heard_twice(monkeypatch):
    with signals.Stopper() as stopper:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert stopper.should_stop(1)
        monkeypatch.setattr(signals, "REPEAT_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
