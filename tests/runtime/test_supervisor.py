"""What is started again, what is not, and what a signal to the supervisor does."""

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

# A supervisor whose worker does, in each life, what its next argument says; each makes a checkpoint if told.
TRIAL = """
import os, signal, sys, time
from pathlib import Path
from etils import epath
from headrace.checkpoint import manifest
from headrace.checkpoint import inventory
from headrace.runtime import supervisor
run, lives = Path(sys.argv[1]), sys.argv[2].split(",")
if "--once" not in sys.argv:
    supervisor.MAX_DELAY = 0.02
    supervisor.PROGRESS_SECONDS = float(os.environ.get("PROGRESS_SECONDS", supervisor.PROGRESS_SECONDS))
    sys.exit(supervisor.Supervisor(str(run), inventory.newest_sealed_step).watch())
with open(run / "lives", "a") as file:
    file.write("x")
what = (lives[(run / "lives").stat().st_size - 1 :] or lives[-1:])[0]
if what.endswith("+"):
    step = (run / "lives").stat().st_size
    (run / "checkpoints" / str(step)).mkdir(parents=True)
    if what.endswith("++"):  # to its end
        manifest.seal(epath.Path(run / "checkpoints" / str(step)), step=step, tier="temporary")
    what = what.rstrip("+")
if "@" in what:  # a checkpoint of this step alone is there
    import shutil
    what, _, step = what.partition("@")
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    (run / "checkpoints" / step).mkdir(parents=True)
    manifest.seal(epath.Path(run / "checkpoints" / step), step=int(step), tier="temporary")
if what == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    (run / "ready").touch()
    time.sleep(60)
if what == "count":  # how often Ctrl-C is heard within a second
    signal.signal(signal.SIGINT, lambda *_: open(run / "heard", "a").write("x"))
    (run / "ready").touch()
    while not (run / "heard").exists():
        time.sleep(0.01)
    time.sleep(1)
    sys.exit(75)
if what == "hang":  # in a call that keeps Python's lock
    import ctypes
    from headrace.runtime import watchdog
    watchdog.GRACE_SECONDS = 0.2
    with watchdog.Watchdog(0.1, str(run)) as dog:
        dog.step_done(1)
        time.sleep(0.05)
        ctypes.PyDLL(None).sleep(60)
if what.startswith("-"):
    os.kill(os.getpid(), int(what[1:]))
    time.sleep(60)
sys.exit(int(what))
"""

# Takes a terminal for its own and becomes a command on it.
ON_TERMINAL = """
import fcntl, os, sys, termios
terminal = os.open(sys.argv[1], os.O_RDWR)
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
os.dup2(terminal, 0)
os.execv(sys.argv[2], sys.argv[2:])
"""


def trial(run: Path, lives: str) -> subprocess.Popen:
    run.mkdir(exist_ok=True)
    command = [sys.executable, "-c", TRIAL, str(run), lives]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize(
    ("lives", "code", "count"),
    [
        ("2", 2, 1),  # a mistake
        ("3", 3, 1),
        ("1", 1, 1),  # diverged, or a fault of ours
        ("75", 75, 1),
        ("-9,76,0", 0, 3),  # killed, then hung, then done
        ("-6,78,77,2", 2, 4),
        ("77", 77, supervisor.MAX_RESTARTS + 1),
        # Back from step 90 to 20, and further from there in every life.
        pytest.param(
            ",".join(["-9@90", *(f"-9@{n}" for n in range(20, 34)), "0"]), 0, 16, marks=pytest.mark.slow
        ),
        pytest.param(  # the budget begins anew
            ",".join(["-9"] * 6 + ["-9++"] + ["-9"] * 6 + ["0"]), 0, 14, marks=pytest.mark.slow
        ),
        pytest.param(  # by nothing but a checkpoint that is whole
            ",".join(["-9"] * 6 + ["-9+"] + ["-9"] * 6),
            137,
            supervisor.MAX_RESTARTS + 1,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_worker_is_started_again_only_where_that_can_help(tmp_path, lives, code, count):
    process = trial(tmp_path, lives)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert len((tmp_path / "lives").read_text()) == count
    assert said.count("it restarts") == count - 1 and said.count("headrace:") <= count
    if count > 1:
        assert (tmp_path / "log.txt").read_text().count("it restarts") == count - 1


@pytest.mark.parametrize(
    ("seen", "code", "count"),
    [(True, 77, supervisor.MAX_RESTARTS + 1), (False, 0, supervisor.MAX_RESTARTS + 3)],
    ids=["and it is seen", "as far as is known"],
)
def test_a_long_life_without_a_checkpoint_is_no_progress(tmp_path, monkeypatch, seen, code, count):
    """Where they cannot be looked at, as in a bucket that does not answer, it has to do."""
    if not seen:
        (tmp_path / "checkpoints").symlink_to(tmp_path / "checkpoints")  # nobody can list that
    monkeypatch.setenv("PROGRESS_SECONDS", "0")
    process = trial(tmp_path, ",".join(["77"] * (supervisor.MAX_RESTARTS + 2) + ["0"]))
    _, said = process.communicate(timeout=60)
    assert (process.returncode, len((tmp_path / "lives").read_text())) == (code, count), said
    assert ("from the beginning" in said) == seen


@pytest.mark.fault(6)
def test_a_worker_that_hangs_and_cannot_say_so_is_started_again_and_its_stacks_are_kept(tmp_path):
    process = trial(tmp_path, "hang,0")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0 and len((tmp_path / "lives").read_text()) == 2, said
    assert "took too long for a step; it restarts" in said
    (stacks,) = (tmp_path / "stacks").iterdir()
    assert 'File "<string>", line' in stacks.read_text()


def test_a_signal_that_comes_while_the_worker_is_started_reaches_it(tmp_path, monkeypatch):
    one, real = supervisor.Supervisor(str(tmp_path), inventory.newest_sealed_step), subprocess.Popen
    one.command = [sys.executable, "-c", "import time; time.sleep(60)"]

    def started(*args, **kwargs):
        worker = real(*args, **kwargs)
        one.forward(signal.SIGTERM, None)
        return worker

    monkeypatch.setattr(subprocess, "Popen", started)
    assert one.run_once().code == 128 + signal.SIGTERM


def test_a_signal_to_the_supervisor_reaches_the_worker_and_ends_both(tmp_path):
    process = trial(tmp_path, "wait")
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 75
    assert len((tmp_path / "lives").read_text()) == 1


@pytest.mark.parametrize("how", ["terminal", "kill"])
@pytest.mark.fault(29)
def test_one_ctrl_c_is_heard_once(tmp_path, how):
    """A terminal sends it to the supervisor and the worker, `kill` to the supervisor alone."""
    if how == "terminal":
        ours, theirs = pty.openpty()
        command = [sys.executable, "-c", ON_TERMINAL, os.ttyname(theirs)]
        command += [sys.executable, "-c", TRIAL, str(tmp_path), "count"]
        process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    else:
        process = trial(tmp_path, "count")
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    if how == "terminal":
        os.write(ours, b"\x03")
    else:
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 75 and (tmp_path / "heard").read_text() == "x"


def test_a_mistake_is_told_by_the_supervisor_itself_and_once(tmp_path):
    (tmp_path / "recipe.yaml").write_text("run_dir: x\nmodel: {use: lama}\n")
    command = [sys.executable, "-X", "importtime", "-m", "headrace", "train", str(tmp_path / "recipe.yaml")]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 2 and said.stderr.count("\nheadrace: ") == 1
    assert "did you mean llama" in said.stderr and " jax\n" not in said.stderr


def test_errors_of_machines_are_known_by_what_runtimes_say():
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
def test_two_hosts_of_which_one_is_killed_go_on_by_themselves_and_end_the_same(tiny, tmp_path):
    settings = ("schedule.steps=150", "checkpoint.every=10", "eval.batches=1", "mesh.fsdp=2")
    whole = save_recipe(tiny(f"run_dir={tmp_path}/whole", *settings), tmp_path / "whole.yaml")
    broken = save_recipe(tiny(f"run_dir={tmp_path}/broken", *settings), tmp_path / "broken.yaml")
    codes, said = finish(start(whole), whole)
    assert codes == [0, 0], said
    processes = start(broken)
    wait_for_step(f"{tmp_path}/broken", 25, processes)
    os.kill(worker_of(processes[1].pid), signal.SIGKILL)
    codes, said = finish(processes, broken)
    assert codes == [0, 0], said
    assert "was ended by SIGKILL" in said
    for name, value in weights(f"{tmp_path}/whole").items():
        np.testing.assert_array_equal(weights(f"{tmp_path}/broken")[name], value, err_msg=name)
    assert rows(f"{tmp_path}/broken") == rows(f"{tmp_path}/whole")
