"""The timer on the machines survives faults, so a slice that is reported to delete itself does."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.tpu import timer, timer_health
from headrace.tpu.timer_health import parse_timer_status
from tests.support.fake_google import Google
from tests.tpu.test_launch import ROOT, wait_for_exit
from tests.tpu.test_slice_lifecycle import InProcessScenario

pytest.importorskip("google.cloud.tpu_v2", reason="needs google-cloud-tpu: pip install -e '.[cloud]'")

NODE = "projects/project/locations/us-central2-b/nodes/job"
RESOURCE = "projects/project/locations/us-central2-b/queuedResources/job"
CREATE = ["tpu", "create", "--slice", "v4-8", "--name", "pod", "--zone", "us-central2-b", "--max-hours", "3"]


@pytest.fixture
def google(tmp_path):
    cloud = Google(tmp_path / "google")
    metadata = {"startup-script": (ROOT / "headrace/tpu/timer.py").read_text(), "headrace-seconds": "0"}
    metadata["headrace-resource"] = RESOURCE
    cloud.make_node(NODE, {"acceleratorType": "v4-8", "metadata": metadata})
    cloud.make_queued(RESOURCE, NODE)
    yield cloud
    for unit in cloud.root.glob("machines/*/systemd/units/*"):
        unit.unlink()  # ends the loop that restarts the timer
    cloud.close()
    for pid in find_timers(cloud):  # the timer ends with its machine
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def scenario(tmp_path, monkeypatch):
    scenario = InProcessScenario(tmp_path / "story", timers=True)
    scenario.patch_environment(monkeypatch)
    yield scenario
    scenario.close()


def machine(google: Google) -> Path:
    return google.root / "machines" / "127.0.1.1"


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_deleted(google: Google) -> bool:
    google.handle_request("GET", "/", {}, None)
    return not google.nodes


def find_timers(google: Google) -> list[int]:
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if arguments[-2:-1] == [b"watch"] and str(machine(google)).encode() in arguments[1]:
            pids.append(int(process.name))
    return pids


@pytest.mark.parametrize("fault", ["full", "no born", "no place"])
def test_a_full_disk_does_not_keep_a_slice_alive(google, fault):
    folder = machine(google)
    if fault == "full":  # every write fails
        (folder / "timer.log").symlink_to("/dev/full")
        (folder / "may-delete").unlink()
        (folder / "may-delete").symlink_to("/dev/full")
    elif fault == "no born":
        (folder / "born").mkdir()
        (folder / "timer.log").mkdir()
    google.start_timer(
        NODE, "127.0.1.1", HEADRACE_TIMER_PLACE="/proc/no" if fault == "no place" else str(folder)
    )
    wait_until(lambda: is_deleted(google))


def test_an_error_in_one_poll_does_not_end_the_timer(monkeypatch, capfd):
    answers = iter([MemoryError("no room"), RuntimeError("no thread"), True])

    def is_expired(*limits) -> bool:
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    def stop_jobs() -> None:
        raise OSError("no such process")

    deletions = []
    fakes = dict(
        is_expired=is_expired, stop_jobs=stop_jobs, delete_slice=lambda: deletions.append(1), POLL=0.01
    )
    for name, value in fakes.items():
        monkeypatch.setattr(timer, name, value)
    timer.watch(time.time())
    assert deletions and "poll: MemoryError: no room" in capfd.readouterr().err


def test_a_killed_timer_is_restarted_by_systemd_and_keeps_its_start_time(google):
    (machine(google) / "systemd/units").mkdir(parents=True)
    google.nodes[NODE]["metadata"]["headrace-seconds"] = "86400"
    google.start_timer(NODE, "127.0.1.1")
    alive = machine(google) / "alive"
    for _ in range(2):
        alive.unlink(missing_ok=True)
        wait_until(alive.exists)
        (pid,) = find_timers(google)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda before=pid: find_timers(google) not in ([], [before]))
    os.utime(machine(google) / "born", (time.time() - 90000,) * 2)
    os.kill(find_timers(google)[0], signal.SIGKILL)
    wait_until(lambda: is_deleted(google))  # the first start counts, not the last


def test_systemd_accepts_the_unit(tmp_path):
    file = tmp_path / "headrace-timer.service"
    file.write_text(timer.UNIT.format(python="/usr/bin/python3", script="/run/systemd/headrace-timer.py"))
    try:
        command = ["systemd-analyze", "verify", "--man=no", str(file)]
        result = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs systemd-analyze")
    unit_errors = [
        line for line in result.stderr.splitlines() if "headrace-timer" in line and "python3" not in line
    ]
    assert not unit_errors, result.stderr
    for line in ("Restart=always", "StartLimitIntervalSec=0", "OOMScoreAdjust=-1000"):
        assert line in timer.UNIT.splitlines()


def test_the_timer_runs_even_if_systemd_refuses_the_unit(google):
    (machine(google) / "systemd/units").mkdir(parents=True)
    (google.root / "machine/systemctl").write_text("#!/bin/sh\nexit 1\n")
    google.start_timer(NODE, "127.0.1.1")
    wait_until(lambda: is_deleted(google))


def test_a_job_of_root_counts(tmp_path, monkeypatch):
    assert (timer.HOMES, timer.ROOT_HOME) == ("/home", "/root")
    monkeypatch.setattr(timer, "HOMES", str(tmp_path / "home"))
    monkeypatch.setattr(timer, "ROOT_HOME", str(tmp_path / "root"))
    (tmp_path / "root/.headrace/jobs/job").mkdir(parents=True)
    assert not timer.is_idle(time.time() - 3700, 1800)


def test_a_slice_that_may_not_delete_itself_gets_a_warning_from_create_and_status(scenario, capsys):
    scenario.google.allowed_permissions = []
    assert main([*CREATE, *scenario.key]) == 0
    warning = "warning: pod may fail to delete itself, and then costs money until you delete it: "
    warning += "the account of the machines"
    assert capsys.readouterr().out.count(warning) == 1
    assert main(["tpu", "status", "pod", *scenario.key]) == 0
    assert capsys.readouterr().out.count(warning) == 1
    scenario.google.allowed_permissions = ["tpu.nodes.delete"]  # the role is granted
    verdict = scenario.root / "machines/127.0.1.1/may-delete"
    wait_until(lambda: verdict.read_text() == timer.YES)
    assert main(["tpu", "status", "pod", *scenario.key]) == 0
    assert "warning" not in capsys.readouterr().out


def test_an_unknown_state_of_the_timer_is_a_warning(scenario, capsys, monkeypatch):
    monkeypatch.setattr("headrace.tpu.timeouts.AUTH_RETRY", 0.5)
    scenario.google.fault("POST", ":testIamPermissions", 403, "API has not been used", count=10**6)
    assert main([*CREATE, *scenario.key]) == 0
    output = capsys.readouterr().out
    assert "warning: pod may fail to delete itself" in output and "cloudresourcemanager" in output
    scenario.google.block()
    assert main(["tpu", "status", "pod", *scenario.key]) == 0
    assert "[w0] its timer cannot be checked: ssh: connect" in capsys.readouterr().out


def test_interrupting_the_check_of_the_timer_leaves_the_slice_reported(scenario):
    scenario.google.fault("POST", ":testIamPermissions", 403, "API has not been used", count=10**6)
    process = scenario.start(*CREATE[1:], *scenario.key, HEADRACE_PATIENCE="300")
    log = scenario.root / "ssh.log"
    scenario.wait_until(lambda: log.exists() and log.read_text().count("may-delete") > 2)
    process.send_signal(signal.SIGINT)
    code, output = wait_for_exit(process)
    assert code == 130 and "pod is ready in us-central2-b" in output and scenario.google.nodes
    assert "  headrace tpu delete pod --zone us-central2-b\n" in output


def test_the_health_of_a_timer_follows_from_its_last_sign_of_life():
    healthy_status = f"may-delete: {timer.YES}\nsilent: 12\n"
    assert parse_timer_status(healthy_status) == timer_health.HEALTHY
    assert parse_timer_status(healthy_status.replace("12", "86400")) == "its timer does not run since 24.0 h"
    assert parse_timer_status("may-delete: \nsilent: 3\n") == timer_health.PERMISSION_UNKNOWN
    assert parse_timer_status(f"may-delete: {timer.NO}\nsilent: 3\n") == timer_health.NOT_PERMITTED
    assert (
        parse_timer_status(f"may-delete: {timer.YES}\n") == parse_timer_status("") == timer_health.NOT_STARTED
    )
