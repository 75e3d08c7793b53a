"""The timer on the machines outlives what may happen to it, and who is told that a slice ends itself can rely
on it."""

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
from tests.tpu.test_launch import ROOT, end
from tests.tpu.test_slice_lifecycle import Here

pytest.importorskip("google.cloud.tpu_v2", reason="needs google-cloud-tpu: pip install -e '.[cloud]'")

NODE = "projects/project/locations/us-central2-b/nodes/job"
RESOURCE = "projects/project/locations/us-central2-b/queuedResources/job"
CREATE = ["tpu", "create", "--slice", "v4-8", "--name", "mine", "--zone", "us-central2-b", "--max-hours", "3"]


@pytest.fixture
def google(tmp_path):
    found = Google(tmp_path / "google")
    metadata = {"startup-script": (ROOT / "headrace/tpu/timer.py").read_text(), "headrace-seconds": "0"}
    metadata["headrace-resource"] = RESOURCE
    found.make_node(NODE, {"acceleratorType": "v4-8", "metadata": metadata})
    found.make_queued(RESOURCE, NODE)
    yield found
    for unit in found.root.glob("machines/*/systemd/units/*"):
        unit.unlink()  # which ends who keeps it alive
    found.close()
    for pid in timers(found):  # with its machine, as it would
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def timed(tmp_path, monkeypatch):
    found = Here(tmp_path / "story", timers=True)
    found.quick(monkeypatch)
    yield found
    found.close()


def machine(google: Google) -> Path:
    return google.root / "machines" / "127.0.1.1"


def until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def deleted(google: Google) -> bool:
    google.answer("GET", "/", {}, None)
    return not google.nodes


def timers(google: Google) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[-2:-1] == [b"watch"] and str(machine(google)).encode() in words[1]:
            found.append(int(process.name))
    return found


@pytest.mark.parametrize("broken", ["full", "no born", "no place"])
def test_a_full_disk_does_not_keep_a_slice_alive(google, broken):
    place = machine(google)
    if broken == "full":  # every word fails that is written there
        (place / "timer.log").symlink_to("/dev/full")
        (place / "may-delete").unlink()
        (place / "may-delete").symlink_to("/dev/full")
    elif broken == "no born":
        (place / "born").mkdir()
        (place / "timer.log").mkdir()
    google.start_timer(
        NODE, "127.0.1.1", HEADRACE_TIMER_PLACE="/proc/no" if broken == "no place" else str(place)
    )
    until(lambda: deleted(google))


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
        until(alive.exists)
        (pid,) = timers(google)
        os.kill(pid, signal.SIGKILL)
        until(lambda before=pid: timers(google) not in ([], [before]))
    os.utime(machine(google) / "born", (time.time() - 90000,) * 2)
    os.kill(timers(google)[0], signal.SIGKILL)
    until(lambda: deleted(google))  # its first start counts, and not the last


def test_systemd_accepts_the_unit(tmp_path):
    file = tmp_path / "headrace-timer.service"
    file.write_text(timer.UNIT.format(python="/usr/bin/python3", script="/run/systemd/headrace-timer.py"))
    try:
        ask = ["systemd-analyze", "verify", "--man=no", str(file)]
        done = subprocess.run(ask, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs systemd-analyze")
    ours = [line for line in done.stderr.splitlines() if "headrace-timer" in line and "python3" not in line]
    assert not ours, done.stderr
    for line in ("Restart=always", "StartLimitIntervalSec=0", "OOMScoreAdjust=-1000"):
        assert line in timer.UNIT.splitlines()


def test_the_timer_runs_even_if_systemd_refuses_the_unit(google):
    (machine(google) / "systemd/units").mkdir(parents=True)
    (google.root / "machine/systemctl").write_text("#!/bin/sh\nexit 1\n")
    google.start_timer(NODE, "127.0.1.1")
    until(lambda: deleted(google))


def test_a_job_of_root_counts(tmp_path, monkeypatch):
    assert (timer.HOMES, timer.ROOT_HOME) == ("/home", "/root")
    monkeypatch.setattr(timer, "HOMES", str(tmp_path / "home"))
    monkeypatch.setattr(timer, "ROOT_HOME", str(tmp_path / "root"))
    (tmp_path / "root/.headrace/jobs/job").mkdir(parents=True)
    assert not timer.is_idle(time.time() - 3700, 1800)


def test_a_slice_that_may_not_delete_itself_gets_a_warning_from_create_and_status(timed, capsys):
    timed.google.allowed = []
    assert main([*CREATE, *timed.key]) == 0
    words = "warning: mine may fail to delete itself, and then costs money until you delete it: "
    words += "the account of the machines"
    assert capsys.readouterr().out.count(words) == 1
    assert main(["tpu", "status", "mine", *timed.key]) == 0
    assert capsys.readouterr().out.count(words) == 1
    timed.google.allowed = ["tpu.nodes.delete"]  # somebody gives it the role
    verdict = timed.root / "machines/127.0.1.1/may-delete"
    until(lambda: verdict.read_text() == timer.YES)
    assert main(["tpu", "status", "mine", *timed.key]) == 0
    assert "warning" not in capsys.readouterr().out


def test_an_unknown_state_of_the_timer_is_a_warning(timed, capsys, monkeypatch):
    monkeypatch.setattr("headrace.tpu.timeouts.AUTH_RETRY", 0.5)
    timed.google.fault("POST", ":testIamPermissions", 403, "API has not been used", count=10**6)
    assert main([*CREATE, *timed.key]) == 0
    said = capsys.readouterr().out
    assert "warning: mine may fail to delete itself" in said and "cloudresourcemanager" in said
    timed.google.block()
    assert main(["tpu", "status", "mine", *timed.key]) == 0
    assert "[w0] its timer cannot be checked: ssh: connect" in capsys.readouterr().out


def test_interrupting_the_check_of_the_timer_leaves_the_slice_reported(timed):
    timed.google.fault("POST", ":testIamPermissions", 403, "API has not been used", count=10**6)
    process = timed.start(*CREATE[1:], *timed.key, HEADRACE_PATIENCE="300")
    log = timed.root / "ssh.log"
    timed.until(lambda: log.exists() and log.read_text().count("may-delete") > 2)
    process.send_signal(signal.SIGINT)
    code, said = end(process)
    assert code == 130 and "mine is ready in us-central2-b" in said and timed.google.nodes
    assert "  headrace tpu delete mine --zone us-central2-b\n" in said


def test_the_health_of_a_timer_follows_from_its_last_sign_of_life():
    well = f"may-delete: {timer.YES}\nsilent: 12\n"
    assert parse_timer_status(well) == timer_health.HEALTHY
    assert parse_timer_status(well.replace("12", "86400")) == "its timer does not run since 24.0 h"
    assert parse_timer_status("may-delete: \nsilent: 3\n") == timer_health.PERMISSION_UNKNOWN
    assert parse_timer_status(f"may-delete: {timer.NO}\nsilent: 3\n") == timer_health.NOT_PERMITTED
    assert (
        parse_timer_status(f"may-delete: {timer.YES}\n") == parse_timer_status("") == timer_health.NOT_STARTED
    )
