"""The timer on the machines outlives what may happen to it, and who is told that a slice ends itself can rely
on it."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.tpu import timer_health as alarm, timer
from tests.fake_google import Google
from tests.test_bill import Here
from tests.test_launch import ROOT, end

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


def test_what_goes_wrong_with_one_look_does_not_end_the_looking(monkeypatch, capfd):
    answers = iter([MemoryError("no room"), RuntimeError("no thread"), True])

    def over(*told) -> bool:
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    def broken() -> None:
        raise OSError("no such process")

    given = []
    for name, value in dict(over=over, stop=broken, give_back=lambda: given.append(1), PACE=0.01).items():
        monkeypatch.setattr(timer, name, value)
    timer.watch(time.time())
    assert given and "look: MemoryError: no room" in capfd.readouterr().err


def test_a_timer_that_is_killed_is_started_again_by_systemd_and_counts_on(google):
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


def test_systemd_takes_the_unit(tmp_path):
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


def test_where_systemd_does_not_take_it_the_timer_runs_all_the_same(google):
    (machine(google) / "systemd/units").mkdir(parents=True)
    (google.root / "machine/systemctl").write_text("#!/bin/sh\nexit 1\n")
    google.start_timer(NODE, "127.0.1.1")
    until(lambda: deleted(google))


def test_a_job_in_the_home_of_root_is_a_job(tmp_path, monkeypatch):
    assert (timer.HOMES, timer.ROOT) == ("/home", "/root")
    monkeypatch.setattr(timer, "HOMES", str(tmp_path / "home"))
    monkeypatch.setattr(timer, "ROOT", str(tmp_path / "root"))
    (tmp_path / "root/.headrace/jobs/job").mkdir(parents=True)
    assert not timer.forgotten(time.time() - 3700, 1800)


def test_a_slice_that_may_not_end_itself_is_told_when_it_is_made_and_asked_after(timed, capsys):
    timed.google.allowed = []
    assert main([*CREATE, *timed.key]) == 0
    words = (
        "warning: mine may not end itself, and cost money until you delete it: the account of the machines"
    )
    assert capsys.readouterr().out.count(words) == 1
    assert main(["tpu", "status", "mine", *timed.key]) == 0
    assert capsys.readouterr().out.count(words) == 1
    timed.google.allowed = ["tpu.nodes.delete"]  # somebody gives it the role
    verdict = timed.root / "machines/127.0.1.1/may-delete"
    until(lambda: verdict.read_text() == timer.YES)
    assert main(["tpu", "status", "mine", *timed.key]) == 0
    assert "warning" not in capsys.readouterr().out


def test_what_is_not_known_of_the_timer_is_a_warning_too(timed, capsys, monkeypatch):
    monkeypatch.setattr("headrace.cli.tpu.DENIED", 0.5)
    timed.google.fault("POST", ":testIamPermissions", 403, "API has not been used", count=10**6)
    assert main([*CREATE, *timed.key]) == 0
    said = capsys.readouterr().out
    assert "warning: mine may not end itself" in said and "cloudresourcemanager" in said
    timed.google.block()
    assert main(["tpu", "status", "mine", *timed.key]) == 0
    assert "[w0] cannot be asked after its timer: ssh: connect" in capsys.readouterr().out


def test_who_ends_the_asking_after_the_timer_knows_what_stays(timed):
    timed.google.fault("POST", ":testIamPermissions", 403, "API has not been used", count=10**6)
    process = timed.start(*CREATE[1:], *timed.key, HEADRACE_PATIENCE="300")
    log = timed.root / "ssh.log"
    timed.until(lambda: log.exists() and log.read_text().count("may-delete") > 2)
    process.send_signal(signal.SIGINT)
    code, said = end(process)
    assert code == 130 and "mine is ready in us-central2-b" in said and timed.google.nodes
    assert "  headrace tpu delete mine --zone us-central2-b\n" in said


def test_a_timer_is_taken_for_alive_by_what_it_wrote_last():
    well = f"may-delete: {timer.YES}\nsilent: 12\n"
    assert alarm.read(well) == alarm.WELL
    assert alarm.read(well.replace("12", "86400")) == "its timer does not run since 24.0 h"
    assert alarm.read("may-delete: \nsilent: 3\n") == alarm.UNKNOWN
    assert alarm.read(f"may-delete: {timer.NO}\nsilent: 3\n") == alarm.REFUSED
    assert alarm.read(f"may-delete: {timer.YES}\n") == alarm.read("") == alarm.NEVER
