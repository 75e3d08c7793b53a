"""The supervisor: after which failures it restarts the trainer, and how it forwards signals."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from headrace.checkpoint import inventory
from headrace.runtime import supervisor
from tests.e2e.test_multihost import finish, rows, save_recipe, start, wait_for_step, weights

# A supervisor whose worker does in each attempt what the next part of its argument says. A number is an exit
# code or a signal; `+` saves an unfinished checkpoint first, `++` a complete one, `@STEP` one of this step.
TRIAL = """
import os, signal, sys, time
from pathlib import Path
from etils import epath
from headrace.checkpoint import manifest
from headrace.checkpoint import inventory
from headrace.runtime import supervisor
run, actions = Path(sys.argv[1]), sys.argv[2].split(",")
if "--once" not in sys.argv:
    supervisor.MAX_DELAY = 0.02
    supervisor.PROGRESS_SECONDS = float(os.environ.get("PROGRESS_SECONDS", supervisor.PROGRESS_SECONDS))
    sys.exit(supervisor.Supervisor(str(run), inventory.newest_sealed_step).watch())
with open(run / "attempts", "a") as file:
    file.write("x")
action = (actions[(run / "attempts").stat().st_size - 1 :] or actions[-1:])[0]
if action.endswith("+"):
    step = (run / "attempts").stat().st_size
    (run / "checkpoints" / str(step)).mkdir(parents=True)
    if action.endswith("++"):
        manifest.seal(epath.Path(run / "checkpoints" / str(step)), step=step, tier="temporary")
    action = action.rstrip("+")
if "@" in action:  # the only checkpoint is of this step
    import shutil
    action, _, step = action.partition("@")
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    (run / "checkpoints" / step).mkdir(parents=True)
    manifest.seal(epath.Path(run / "checkpoints" / step), step=int(step), tier="temporary")
if action == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    (run / "ready").touch()
    time.sleep(60)
if action == "count":  # the Ctrl-C within a second
    signal.signal(signal.SIGINT, lambda *_: open(run / "received", "a").write("x"))
    (run / "ready").touch()
    while not (run / "received").exists():
        time.sleep(0.01)
    time.sleep(1)
    sys.exit(75)
if action == "hang":  # in a call that does not release Python's lock
    import ctypes
    from headrace.runtime import watchdog
    watchdog.GRACE_SECONDS = 0.2
    with watchdog.Watchdog(0.1, str(run)) as dog:
        dog.step_done(1)
        time.sleep(0.05)
        ctypes.PyDLL(None).sleep(60)
if action.startswith("-"):
    os.kill(os.getpid(), int(action[1:]))
    time.sleep(60)
sys.exit(int(action))
"""

# Makes a terminal the controlling one and becomes a command on it.
ON_TERMINAL = """
import fcntl, os, sys, termios
terminal = os.open(sys.argv[1], os.O_RDWR)
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
os.dup2(terminal, 0)
os.execv(sys.argv[2], sys.argv[2:])
"""


def trial(run: Path, actions: str) -> subprocess.Popen:
    run.mkdir(exist_ok=True)
    command = [sys.executable, "-c", TRIAL, str(run), actions]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize(
    ("actions", "code", "count"),
    [
        ("2", 2, 1),  # a mistake
        ("3", 3, 1),
        ("1", 1, 1),  # diverged, or a bug
        ("75", 75, 1),
        ("-9,76,0", 0, 3),  # killed, then hung, then done
        ("-6,78,77,2", 2, 4),
        ("77", 77, supervisor.MAX_RESTARTS + 1),
        # Rolled back from step 90 to 20, with progress from there in every attempt.
        pytest.param(
            ",".join(["-9@90", *(f"-9@{n}" for n in range(20, 34)), "0"]), 0, 16, marks=pytest.mark.slow
        ),
        pytest.param(  # a checkpoint resets the number of restarts
            ",".join(["-9"] * 6 + ["-9++"] + ["-9"] * 6 + ["0"]), 0, 14, marks=pytest.mark.slow
        ),
        pytest.param(  # but only a complete one
            ",".join(["-9"] * 6 + ["-9+"] + ["-9"] * 6),
            137,
            supervisor.MAX_RESTARTS + 1,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_worker_is_restarted_only_if_that_can_help(tmp_path, actions, code, count):
    process = trial(tmp_path, actions)
    _, output = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert len((tmp_path / "attempts").read_text()) == count
    assert output.count("it restarts") == count - 1 and output.count("headrace:") <= count
    if count > 1:
        assert (tmp_path / "log.txt").read_text().count("it restarts") == count - 1


@pytest.mark.parametrize(
    ("can_list", "code", "count"),
    [(True, 77, supervisor.MAX_RESTARTS + 1), (False, 0, supervisor.MAX_RESTARTS + 3)],
    ids=["checkpoints are listed", "checkpoints cannot be listed"],
)
def test_a_long_attempt_without_a_checkpoint_is_no_progress(tmp_path, monkeypatch, can_list, code, count):
    """Unless checkpoints cannot be listed, as in a bucket that does not respond."""
    if not can_list:
        (tmp_path / "checkpoints").symlink_to(tmp_path / "checkpoints")  # a loop
    monkeypatch.setenv("PROGRESS_SECONDS", "0")
    process = trial(tmp_path, ",".join(["77"] * (supervisor.MAX_RESTARTS + 2) + ["0"]))
    _, output = process.communicate(timeout=60)
    assert (process.returncode, len((tmp_path / "attempts").read_text())) == (code, count), output
    assert ("from the beginning" in output) == can_list


@pytest.mark.fault(6)
def test_a_worker_that_hangs_with_pythons_lock_is_restarted_and_its_stacks_are_stored(tmp_path):
    process = trial(tmp_path, "hang,0")
    _, output = process.communicate(timeout=60)
    assert process.returncode == 0 and len((tmp_path / "attempts").read_text()) == 2, output
    assert "took too long for a step; it restarts" in output
    (stacks,) = (tmp_path / "stacks").iterdir()
    assert 'File "<string>", line' in stacks.read_text()


def test_a_signal_during_the_start_of_the_worker_reaches_it(tmp_path, monkeypatch):
    parent, popen = supervisor.Supervisor(str(tmp_path), inventory.newest_sealed_step), subprocess.Popen
    parent.command = [sys.executable, "-c", "import time; time.sleep(60)"]

    def start_and_signal(*args, **kwargs):
        worker = popen(*args, **kwargs)
        parent.forward(signal.SIGTERM, None)
        return worker

    monkeypatch.setattr(subprocess, "Popen", start_and_signal)
    assert parent.run_once().code == 128 + signal.SIGTERM


def test_a_signal_to_the_supervisor_reaches_the_worker_and_ends_both(tmp_path):
    process = trial(tmp_path, "wait")
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 75
    assert len((tmp_path / "attempts").read_text()) == 1


@pytest.mark.parametrize("sender", ["terminal", "kill"])
@pytest.mark.fault(29)
def test_one_ctrl_c_reaches_the_worker_once(tmp_path, sender):
    """A terminal sends it to the supervisor and the worker, `kill` only to the supervisor."""
    if sender == "terminal":
        controller, terminal = pty.openpty()
        command = [sys.executable, "-c", ON_TERMINAL, os.ttyname(terminal)]
        command += [sys.executable, "-c", TRIAL, str(tmp_path), "count"]
        process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    else:
        process = trial(tmp_path, "count")
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    if sender == "terminal":
        os.write(controller, b"\x03")
    else:
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 75 and (tmp_path / "received").read_text() == "x"


def test_a_mistake_in_the_recipe_is_reported_once_and_without_jax(tmp_path):
    (tmp_path / "recipe.yaml").write_text("run_dir: x\nmodel: {use: lama}\n")
    command = [sys.executable, "-X", "importtime", "-m", "headrace", "train", str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\nheadrace: ") == 1
    assert "did you mean llama" in done.stderr and " jax\n" not in done.stderr


def test_errors_of_machines_are_recognized_by_their_messages():
    exit_code_of = supervisor.exit_code_of
    assert exit_code_of(RuntimeError("INTERNAL: Failed to initialize TPU system"), multi_host=False) == 77
    assert exit_code_of(RuntimeError("UNAVAILABLE: Connection reset by peer"), multi_host=True) == 78
    assert exit_code_of(RuntimeError("UNAVAILABLE: Connection reset by peer"), multi_host=False) == 1
    assert exit_code_of(KeyError("loss"), multi_host=True) == 1


def worker_of(supervisor: int) -> int:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == supervisor:
                return int(entry.name)
    raise AssertionError("no worker")


@pytest.mark.slow
def test_two_hosts_recover_when_one_is_killed_and_end_the_same(tiny, tmp_path):
    settings = ("schedule.steps=150", "checkpoint.every=10", "eval.batches=1", "mesh.fsdp=2")
    undisturbed = save_recipe(
        tiny(f"run_dir={tmp_path}/undisturbed", *settings), tmp_path / "undisturbed.yaml"
    )
    killed = save_recipe(tiny(f"run_dir={tmp_path}/killed", *settings), tmp_path / "killed.yaml")
    codes, output = finish(start(undisturbed), undisturbed)
    assert codes == [0, 0], output
    processes = start(killed)
    wait_for_step(f"{tmp_path}/killed", 25, processes)
    os.kill(worker_of(processes[1].pid), signal.SIGKILL)
    codes, output = finish(processes, killed)
    assert codes == [0, 0], output
    assert "was ended by SIGKILL" in output
    for name, value in weights(f"{tmp_path}/undisturbed").items():
        np.testing.assert_array_equal(weights(f"{tmp_path}/killed")[name], value, err_msg=name)
    assert rows(f"{tmp_path}/killed") == rows(f"{tmp_path}/undisturbed")
