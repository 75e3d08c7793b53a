"""What others made or may be using is left alone, and what we made is never forgotten: the launcher in this
process, against Google's API over HTTP."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.tpu import clock, job_ledger, timeouts
from tests.support import fast_clock
from tests.tpu.test_launch import RECIPE, Story

pytest.importorskip("google.cloud.tpu_v2", reason="needs google-cloud-tpu: pip install -e '.[cloud]'")

ZONE = "projects/project/locations/us-central2-b"
NODE = f"{ZONE}/nodes/job"
SPOT = {"acceleratorType": "v4-16", "metadata": {}, "schedulingConfig": {"spot": True}}
FOREIGN = SPOT | {"labels": {}}
OURS = SPOT | {"labels": {"headrace": "yes"}}
TIMES = {
    "POLL": 0.1,
    "MAX_BACKOFF": 1.0,
    "CONNECT_TIMEOUT": 5.0,
    "AUTH_RETRY": 2.0,
    "SHUTDOWN_GRACE": 1.5,
    "DELETE_TIMEOUT": 20.0,
}


class Here(Story):
    """A story whose launcher is this process."""

    def quick(self, monkeypatch) -> None:
        fast_clock.install(monkeypatch)
        monkeypatch.setattr("headrace.tpu.bundle.find_repository", lambda: self.tree)
        for name, seconds in TIMES.items():
            monkeypatch.setattr(timeouts, name, seconds)
        for name, value in self.google.env().items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(self.root)

    def run(self, *argv: str) -> int:
        rent = ["--slice", "v4-16", "--name", "job", "--spot", "--zone", "us-central2-b", *self.key]
        return main(["tpu", "run", *rent, *argv, "recipe.yaml"])

    @property
    def key(self) -> list[str]:
        return ["--ssh-key", str(self.root / "key")]

    def trains_alone(self) -> list[int]:
        """Process numbers of a training whose launcher was killed."""
        self.trainer("wait wait")
        first = self.launch()
        self.until(self.training)
        first.kill()
        first.communicate()
        return self.google.trainers()

    def questions(self) -> int:
        """How often workers were asked what runs there. Those who follow a trainer do not count: the ssh of a
        launcher that was killed may come to it later."""
        return (self.root / "ssh.log").read_text().count(" state job")


@pytest.fixture
def here(tmp_path, monkeypatch):
    found = Here(tmp_path / "story")
    found.quick(monkeypatch)
    yield found
    found.close()


@contextlib.contextmanager
def meanwhile(act):
    """Does that in a thread, which is over in the end."""
    failed = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()
    assert not failed, failed


def alive(pids: list[int]) -> list[bool]:
    return [Path(f"/proc/{pid}/cmdline").read_text() != "" for pid in pids]


@pytest.mark.fault(30)
def test_slices_lost_before_training_are_counted_and_given_up(here, capsys, monkeypatch):
    monkeypatch.setattr("headrace.tpu.provision.MAX_LOSSES", 3)
    here.google.born = ["gone"]
    assert here.run() == 2
    said = capsys.readouterr()
    assert "3 slices in a row were lost before training started" in said.err, said
    assert "ACTIVE, but 1 of 1 nodes are gone: deleting it and requesting another" in said.out
    assert here.nothing_left() and len(here.created()) == 3
    lives = json.loads((here.root / "launcher/tpu/project/job/lives.json").read_text())["lives"]
    assert len(lives) == 3 and not any(life["open"] for life in lives)
    assert sum(life["seen"] - life["created"] for life in lives) > 0


@pytest.mark.parametrize("why", ["blocked", "denied"])
def test_a_foreign_slice_that_cannot_be_reached_is_left_alone(here, capsys, why):
    here.google.born = [why, why]
    here.google.make_node(NODE, FOREIGN)
    assert here.run("--keep") == 1
    said = capsys.readouterr().out
    words = {"blocked": "Connection refused", "denied": "Permission denied (publickey)"}[why]
    assert (
        words in said
        and "left alone" in said
        and "tpu delete job --project project --zone us-central2-b" in said
    )
    assert NODE in here.google.nodes and not here.created()


@pytest.mark.fault(31)
def test_a_launcher_that_cannot_reach_a_running_training_never_ends_it(here, capsys):
    pids = here.trains_alone()
    here.google.block()
    assert here.run() == 1
    assert "the workers cannot be reached from here" in capsys.readouterr().out
    asked = here.questions()

    def interrupt() -> None:
        here.until(lambda: here.questions() > asked)
        os.kill(os.getpid(), signal.SIGINT)

    with meanwhile(interrupt):  # nor by Ctrl-C
        assert here.run() == 75
    assert "left alone" in capsys.readouterr().out
    assert alive(pids) == [True, True] and len(here.created()) == 1 and len(here.google.queued) == 1


def test_a_new_slice_that_was_never_reached_is_deleted(here, capsys):
    here.google.born = ["denied", "denied"]
    assert here.run() == 1 and here.nothing_left() and len(here.created()) == 1
    said = capsys.readouterr().out
    assert said.index("does not answer yet: user@127") < said.index("cannot be reached from here")


@pytest.mark.fault(30)
def test_a_new_slice_with_an_unreachable_machine_is_replaced(here, capsys):
    here.google.born = ["blocked"]
    assert here.run() == 0 and here.nothing_left() and len(here.created()) == 2
    assert "a worker is faulty" in capsys.readouterr().out


def test_a_faulty_machine_of_a_kept_slice_is_reported_and_the_slice_stays(here, capsys):
    here.trainer("77")
    here.google.make_node(NODE, OURS)
    assert here.run("--keep") == 77
    assert "job is kept: delete it to rent another" in capsys.readouterr().out
    assert NODE in here.google.nodes and not here.created()


def test_a_foreign_slice_that_is_lost_or_waits_is_not_deleted(here, capsys):
    here.google.make_node(NODE, FOREIGN)
    here.google.nodes[NODE]["state"] = "PREEMPTED"
    assert here.run("--keep") == 2
    reason = "found it PREEMPTED in us-central2-b, and it is not replaced, since Headrace did not make it"
    assert reason in capsys.readouterr().err
    assert NODE in here.google.nodes
    here.google.nodes[NODE]["state"] = "CREATING"
    argv = ["tpu", "create", "--slice", "v4-16", "--name", "job", "--spot", "--zone", "us-central2-b"]
    with meanwhile(lambda: (time.sleep(0.7), os.kill(os.getpid(), signal.SIGINT))):
        assert main([*argv, *here.key]) == 130
    assert NODE in here.google.nodes and not [call for call in here.google.calls if call[0] == "DELETE"]


def test_a_refused_launcher_changes_nothing_of_the_running_job(here, capsys):
    pids = here.trains_alone()
    ledger = here.root / "launcher/tpu/project/job/lives.json"
    before = ledger.read_text(), dict(here.google.nodes[NODE]["metadata"])
    (here.root / "recipe.yaml").write_text(RECIPE.format(run=str(here.root / "other")))
    pushes = (here.root / "ssh.log").read_text().count("test -d")
    assert here.run("--max-hours", "0.001") == 2
    assert "found another recipe in training there" in capsys.readouterr().err
    assert before == (ledger.read_text(), here.google.nodes[NODE]["metadata"])
    assert (here.root / "ssh.log").read_text().count("test -d") == pushes and alive(pids) == [True, True]


@pytest.mark.fault(30)
def test_a_worker_that_ends_early_does_not_leave_the_others_running(here, capsys):
    half = f'count="{here.root}/count"; echo >> "$count"; [ "$(wc -l < "$count")" -gt 2 ] && exit 0; '
    half += "[ $HEADRACE_PROCESS = 0 ] && exit 0; exec sleep 1000"
    here.google.python(f'case "$*" in *"-m headrace train"*) {half};; *) exec "{sys.executable}" "$@";; esac')
    assert here.run() == 0 and here.nothing_left()
    assert "training stopped and can be restarted (w1: 137)" in capsys.readouterr().out


@pytest.mark.fault(30)
def test_exit_code_1_on_a_slice_that_was_taken_away_counts_as_a_preemption(here, capsys):
    here.trainer("1 0")
    taken = f'curl -s -o /dev/null "{here.google.url}/vm/take"; exit 1'
    once = f"if mkdir '{here.root}/once'; then {taken}; fi; exit 0"  # its other worker may not live to see it
    text = (here.root / "python").read_text().replace("    *) exit", f"    1) {once};;\n    *) exit")
    here.google.python(text.partition("\n")[2])
    here.google.taken = "job"
    assert here.run() == 0 and here.nothing_left() and len(here.created()) == 2
    assert "the cloud took the slice away (SUSPENDED): renting another slice" in capsys.readouterr().out


def test_exit_code_255_of_a_trainer_is_not_taken_for_a_broken_connection(here, capsys):
    here.trainer("255 0")
    assert here.run() == 0 and here.nothing_left()
    assert "training stopped and can be restarted (w0: 254, w1: 254)" in capsys.readouterr().out


def test_joined_slices_of_which_one_is_missing_are_lost(here):
    from headrace.tpu.cloud import SliceState
    from headrace.tpu.gcp import Gcp

    argv = ["tpu", "create", "--slice", "2xv4-16", "--name", "job", "--zone", "us-central2-b"]
    assert main([*argv, *here.key]) == 0
    cloud = Gcp("project", ("us-central2-b",))
    assert cloud.find("job").state is SliceState.READY and len(cloud.find("job").workers) == 4
    assert len(cloud.nodes_of(cloud.find("job"))) == 2
    here.google.switch_off(f"{NODE}-1")
    del here.google.nodes[f"{NODE}-1"]
    assert cloud.find("job").state is SliceState.LOST
    assert cloud.find("job").status_text == "ACTIVE, but 1 of 2 nodes are gone"


def test_a_slice_found_far_from_its_bucket_is_refused_and_left_alone(here, capsys):
    far = "projects/project/locations/us-east1-d/nodes/job"
    here.google.make_node(far, OURS)
    (here.root / "recipe.yaml").write_text(RECIPE.format(run="gs://near/run"))
    assert here.run() == 2
    assert "gs://near is in us-central2, the slice in us-east1" in capsys.readouterr().err
    assert far in here.google.nodes and not here.created()
    assert here.run("--far-bucket") == 0


def test_a_slice_that_somebody_deletes_is_not_replaced(here, capsys):
    here.trainer("wait " * 9)  # the launcher starts it again, until the slice is gone

    def delete() -> None:
        here.until(here.training)
        code, said = here.call("delete", "job", *here.key, HEADRACE_HOME=str(here.root / "elsewhere"))
        assert code == 0, said

    with meanwhile(delete):
        assert here.run() == 75
    assert "somebody else deleted the slice; the same command resumes" in capsys.readouterr().out
    assert here.nothing_left() and len(here.created()) == 1


def after_the_first_life(monkeypatch, act) -> None:
    """Does that when a life has ended and nobody looks."""
    from headrace.tpu.launch import Launcher

    ended = Launcher.exit_code_for

    def acted(launcher, how):
        monkeypatch.setattr(Launcher, "exit_code_for", ended)
        act()
        return ended(launcher, how)

    monkeypatch.setattr(Launcher, "exit_code_for", acted)


@pytest.mark.thin(2)
@pytest.mark.parametrize("there", ["DELETING", "nothing", "another"])
@pytest.mark.parametrize("keep", [[], ["--keep"]], ids=str)
def test_a_slice_that_is_deleted_between_two_attempts_is_not_replaced(here, capsys, monkeypatch, there, keep):
    def delete() -> None:
        time.sleep(1.1 if there == "another" else 0.0)  # births are told in seconds
        with here.google.lock:
            for queued in here.google.queued.values():
                queued["ends"] = clock.monotonic() + (1.0 if there == "DELETING" else -1.0)
            here.google.bury()
            if there == "another":
                here.google.make_node(NODE, OURS)

    here.trainer("75 wait")
    after_the_first_life(monkeypatch, delete)
    assert here.run(*keep) == 75
    said = capsys.readouterr().out
    assert "somebody else deleted the slice; the same command resumes" in said
    assert "is kept" not in said and len(here.created()) == 1
    here.google.bury()
    assert keep or len(here.google.nodes) == (there == "another")


def test_a_slice_that_is_preempted_between_two_attempts_is_replaced(here, monkeypatch):
    """Its node may be DELETING before its request is SUSPENDED."""
    from headrace.tpu.provision import Provisioner

    look = Provisioner.find_slice

    def looked(renter):
        monkeypatch.setattr(Provisioner, "find_slice", look)
        found = look(renter)
        here.google.preempt("job")
        return found

    def begin() -> None:
        with here.google.lock:
            here.google.nodes[NODE]["state"] = "DELETING"
        monkeypatch.setattr(Provisioner, "find_slice", looked)

    here.trainer("75 0")
    after_the_first_life(monkeypatch, begin)
    assert here.run() == 0 and len(here.created()) == 2


def test_a_request_that_somebody_deletes_is_not_repeated(here, capsys):
    here.google.stockout.add("us-central2-b")

    def delete() -> None:
        here.until(lambda: here.google.queued)
        time.sleep(1.0)  # it was seen
        with here.google.lock:
            for queued in here.google.queued.values():
                queued["ends"] = clock.monotonic() + 0.5

    with meanwhile(delete):
        assert here.run() == 75
    assert "somebody else deleted the slice; the same command resumes" in capsys.readouterr().out
    assert here.nothing_left() and len(here.created()) == 1


def test_keeping_a_slice_removes_its_idle_limit(here):
    told = OURS | {"labels": {"headrace": "yes", "headrace-seconds": "86400", "headrace-idle": "1800"}}
    told["metadata"] = {"headrace-idle": "1800"}
    here.google.make_node(NODE, told)
    assert here.run("--keep") == 0
    node = here.google.nodes[NODE]
    assert node["metadata"]["headrace-idle"] == node["labels"]["headrace-idle"] == "0"


def test_logs_end_with_the_slice_and_distinguish_no_job_from_no_connection(here, capsys):
    here.trains_alone()
    with meanwhile(lambda: (time.sleep(5), here.google.preempt("job"))):
        assert main(["tpu", "logs", "job", *here.key]) == 1
    said = capsys.readouterr().out
    assert "[w0] step" in said and said.endswith("job: it is SUSPENDED\n")
    here.google.make_node(f"{ZONE}/nodes/idle", OURS)
    assert main(["tpu", "logs", "idle", *here.key]) == 2
    assert "idle: found no job on it" in capsys.readouterr().err
    here.google.block()
    assert main(["tpu", "logs", "idle", *here.key]) == 2
    assert "idle: its workers do not respond: [w0] ssh: connect to host" in capsys.readouterr().err


@pytest.mark.parametrize("known", [True, False])
def test_a_missing_permission_of_the_machines_is_reported_at_the_start(here, capsys, known):
    here.google.timers, here.google.allowed = True, []
    if not known:  # the API that tells is off
        here.google.fault("POST", ":testIamPermissions", 403, "has not been used", count=10**6)
    file = "may-delete" if known else "alive"
    (here.root / "install").write_text(f'until [ -e "$HEADRACE_TIMER_PLACE/{file}" ]; do sleep 0.05; done\n')
    assert here.run() == 0
    words = (
        "the account of the machines may not delete TPUs: give it the role" if known else "it is not known"
    )
    assert f"warning: job may fail to delete itself, and then costs money until you delete it: {words}" in (
        capsys.readouterr().out
    )


def test_hours_still_count_after_a_failed_delete(here, monkeypatch, capsys):
    monkeypatch.setattr("headrace.tpu.timeouts.DELETE_TIMEOUT", 0.5)
    here.google.make_node(NODE, OURS)
    job_ledger.JobLedger("project/job", "gs://b/run").record("us-central2-b", 1000.0, 4600.0)
    here.google.fault("DELETE", "", 403, "not now", count=99)
    assert main(["tpu", "delete", "job", *here.key]) == 1
    assert job_ledger.JobLedger("project/job").attempts and "COULD NOT BE DELETED" in capsys.readouterr().err
    here.google.faults.clear()
    assert main(["tpu", "delete", "job", *here.key]) == 0 and not job_ledger.JobLedger("project/job").attempts


def test_asking_whether_a_job_is_watched_does_not_block_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    assert not job_ledger.is_watched("never") and not list(tmp_path.iterdir())
    with job_ledger.watch_lock("job"):
        assert job_ledger.is_watched("job")
    code = "import fcntl, sys, time; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_SH)"
    code += "; print(flush=True); time.sleep(0.5)"
    look = [sys.executable, "-c", code, str(tmp_path / "tpu/job/lock")]
    with subprocess.Popen(look, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        with job_ledger.watch_lock("job"):
            pass
