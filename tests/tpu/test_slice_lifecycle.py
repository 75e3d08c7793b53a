"""Slices that Headrace did not create or that may be in use are not touched, and slices it created are never
forgotten: the launcher in this process, against a fake of Google's API over HTTP."""

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
from tests.tpu.test_launch import RECIPE, LaunchScenario

pytest.importorskip("google.cloud.tpu_v2", reason="needs google-cloud-tpu: pip install -e '.[cloud]'")

ZONE = "projects/project/locations/us-central2-b"
NODE = f"{ZONE}/nodes/job"
SPOT = {"acceleratorType": "v4-16", "metadata": {}, "schedulingConfig": {"spot": True}}
FOREIGN = SPOT | {"labels": {}}
HEADRACE = SPOT | {"labels": {"headrace": "yes"}}
TIMES = {
    "POLL": 0.1,
    "MAX_BACKOFF": 1.0,
    "CONNECT_TIMEOUT": 5.0,
    "AUTH_RETRY": 2.0,
    "SHUTDOWN_GRACE": 1.5,
    "DELETE_TIMEOUT": 20.0,
}


class InProcessScenario(LaunchScenario):
    """A scenario whose launcher is this process."""

    def patch_environment(self, monkeypatch) -> None:
        fast_clock.install(monkeypatch)
        monkeypatch.setattr("headrace.tpu.bundle.find_repository", lambda: self.tree)
        for name, seconds in TIMES.items():
            monkeypatch.setattr(timeouts, name, seconds)
        for name, value in self.google.env().items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(self.root)

    def run(self, *argv: str) -> int:
        slice_options = ["--slice", "v4-16", "--name", "job", "--spot", "--zone", "us-central2-b", *self.key]
        return main(["tpu", "run", *slice_options, *argv, "recipe.yaml"])

    @property
    def key(self) -> list[str]:
        return ["--ssh-key", str(self.root / "key")]

    def start_unattended_training(self) -> list[int]:
        """Start a training, kill its launcher, and return the process ids of the trainers."""
        self.set_trainer("wait wait")
        first = self.launch()
        self.wait_until(self.is_training)
        first.kill()
        first.communicate()
        return self.google.trainers()

    def count_state_queries(self) -> int:
        """Number of queries for the state of a worker's job. Log followers do not count: the ssh process of a
        killed launcher may start one later."""
        return (self.root / "ssh.log").read_text().count(" state job")


@pytest.fixture
def scenario(tmp_path, monkeypatch):
    scenario = InProcessScenario(tmp_path / "story")
    scenario.patch_environment(monkeypatch)
    yield scenario
    scenario.close()


@contextlib.contextmanager
def run_concurrently(action):
    """Run `action` in a thread during the `with` block, and wait for its end."""
    errors = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()
    assert not errors, errors


def are_alive(pids: list[int]) -> list[bool]:
    return [Path(f"/proc/{pid}/cmdline").read_text() != "" for pid in pids]


@pytest.mark.fault(30)
def test_slices_lost_before_training_are_counted_and_given_up(scenario, capsys, monkeypatch):
    monkeypatch.setattr("headrace.tpu.provision.MAX_LOSSES", 3)
    scenario.google.next_machine_states = ["gone"]
    assert scenario.run() == 2
    captured = capsys.readouterr()
    assert "3 slices in a row were lost before training started" in captured.err, captured
    assert "ACTIVE, but 1 of 1 nodes are gone: deleting it and requesting another" in captured.out
    assert scenario.is_nothing_left() and len(scenario.requested_zones()) == 3
    attempts = json.loads((scenario.root / "launcher/tpu/project/job/lives.json").read_text())["lives"]
    assert len(attempts) == 3 and not any(attempt["open"] for attempt in attempts)
    assert sum(attempt["seen"] - attempt["created"] for attempt in attempts) > 0


@pytest.mark.parametrize("machine_state", ["blocked", "denied"])
def test_a_foreign_slice_that_cannot_be_reached_is_not_touched(scenario, capsys, machine_state):
    scenario.google.next_machine_states = [machine_state, machine_state]
    scenario.google.make_node(NODE, FOREIGN)
    assert scenario.run("--keep") == 1
    output = capsys.readouterr().out
    message = {"blocked": "Connection refused", "denied": "Permission denied (publickey)"}[machine_state]
    assert (
        message in output
        and "left alone" in output
        and "tpu delete job --project project --zone us-central2-b" in output
    )
    assert NODE in scenario.google.nodes and not scenario.requested_zones()


@pytest.mark.fault(31)
def test_a_launcher_that_cannot_reach_a_running_job_never_ends_it(scenario, capsys):
    pids = scenario.start_unattended_training()
    scenario.google.block()
    assert scenario.run() == 1
    assert "the workers cannot be reached from here" in capsys.readouterr().out
    queries = scenario.count_state_queries()

    def interrupt() -> None:
        scenario.wait_until(lambda: scenario.count_state_queries() > queries)
        os.kill(os.getpid(), signal.SIGINT)

    with run_concurrently(interrupt):  # Ctrl-C does not end it either
        assert scenario.run() == 75
    assert "left alone" in capsys.readouterr().out
    assert (
        are_alive(pids) == [True, True]
        and len(scenario.requested_zones()) == 1
        and len(scenario.google.queued) == 1
    )


def test_a_new_slice_that_was_never_reached_is_deleted(scenario, capsys):
    scenario.google.next_machine_states = ["denied", "denied"]
    assert scenario.run() == 1 and scenario.is_nothing_left() and len(scenario.requested_zones()) == 1
    output = capsys.readouterr().out
    assert output.index("does not answer yet: user@127") < output.index("cannot be reached from here")


@pytest.mark.fault(30)
def test_a_new_slice_with_an_unreachable_machine_is_replaced(scenario, capsys):
    scenario.google.next_machine_states = ["blocked"]
    assert scenario.run() == 0 and scenario.is_nothing_left() and len(scenario.requested_zones()) == 2
    assert "a worker is faulty" in capsys.readouterr().out


def test_a_faulty_machine_of_a_kept_slice_is_reported_and_the_slice_stays(scenario, capsys):
    scenario.set_trainer("77")
    scenario.google.make_node(NODE, HEADRACE)
    assert scenario.run("--keep") == 77
    assert "job is kept: delete it to rent another" in capsys.readouterr().out
    assert NODE in scenario.google.nodes and not scenario.requested_zones()


def test_a_foreign_slice_that_is_lost_or_waits_is_not_deleted(scenario, capsys):
    scenario.google.make_node(NODE, FOREIGN)
    scenario.google.nodes[NODE]["state"] = "PREEMPTED"
    assert scenario.run("--keep") == 2
    reason = "found it PREEMPTED in us-central2-b, and it is not replaced, since Headrace did not make it"
    assert reason in capsys.readouterr().err
    assert NODE in scenario.google.nodes
    scenario.google.nodes[NODE]["state"] = "CREATING"
    argv = ["tpu", "create", "--slice", "v4-16", "--name", "job", "--spot", "--zone", "us-central2-b"]
    with run_concurrently(lambda: (time.sleep(0.7), os.kill(os.getpid(), signal.SIGINT))):
        assert main([*argv, *scenario.key]) == 130
    assert NODE in scenario.google.nodes and not [
        call for call in scenario.google.calls if call[0] == "DELETE"
    ]


def test_a_refused_launcher_changes_nothing_of_the_running_job(scenario, capsys):
    pids = scenario.start_unattended_training()
    ledger = scenario.root / "launcher/tpu/project/job/lives.json"
    before = ledger.read_text(), dict(scenario.google.nodes[NODE]["metadata"])
    (scenario.root / "recipe.yaml").write_text(RECIPE.format(run=str(scenario.root / "other")))
    pushes = (scenario.root / "ssh.log").read_text().count("test -d")
    assert scenario.run("--max-hours", "0.001") == 2
    assert "found another recipe in training there" in capsys.readouterr().err
    assert before == (ledger.read_text(), scenario.google.nodes[NODE]["metadata"])
    assert (scenario.root / "ssh.log").read_text().count("test -d") == pushes and are_alive(pids) == [
        True,
        True,
    ]


@pytest.mark.fault(30)
def test_a_worker_that_ends_early_does_not_leave_the_others_running(scenario, capsys):
    script = f'count="{scenario.root}/count"; echo >> "$count"; [ "$(wc -l < "$count")" -gt 2 ] && exit 0; '
    script += "[ $HEADRACE_PROCESS = 0 ] && exit 0; exec sleep 1000"
    scenario.google.set_trainer_script(
        f'case "$*" in *"-m headrace train"*) {script};; *) exec "{sys.executable}" "$@";; esac'
    )
    assert scenario.run() == 0 and scenario.is_nothing_left()
    assert "training stopped and can be restarted (w1: 137)" in capsys.readouterr().out


@pytest.mark.fault(30)
def test_exit_code_1_on_a_preempted_slice_counts_as_a_preemption(scenario, capsys):
    scenario.set_trainer("1 0")
    preempt = f'curl -s -o /dev/null "{scenario.google.url}/vm/take"; exit 1'
    # Preempts once; the other worker may be killed before it gets here.
    preempt_once = f"if mkdir '{scenario.root}/preempted-once'; then {preempt}; fi; exit 0"
    text = (
        (scenario.root / "python").read_text().replace("    *) exit", f"    1) {preempt_once};;\n    *) exit")
    )
    scenario.google.set_trainer_script(text.partition("\n")[2])
    scenario.google.slice_to_preempt = "job"
    assert scenario.run() == 0 and scenario.is_nothing_left() and len(scenario.requested_zones()) == 2
    assert "the cloud took the slice away (SUSPENDED): renting another slice" in capsys.readouterr().out


def test_exit_code_255_of_a_trainer_is_not_mistaken_for_a_broken_connection(scenario, capsys):
    scenario.set_trainer("255 0")
    assert scenario.run() == 0 and scenario.is_nothing_left()
    assert "training stopped and can be restarted (w0: 254, w1: 254)" in capsys.readouterr().out


def test_a_multislice_with_a_missing_slice_is_lost(scenario):
    from headrace.tpu.cloud import SliceState
    from headrace.tpu.gcp import Gcp

    argv = ["tpu", "create", "--slice", "2xv4-16", "--name", "job", "--zone", "us-central2-b"]
    assert main([*argv, *scenario.key]) == 0
    cloud = Gcp("project", ("us-central2-b",))
    assert cloud.find("job").state is SliceState.READY and len(cloud.find("job").workers) == 4
    assert len(cloud.nodes_of(cloud.find("job"))) == 2
    scenario.google.switch_off(f"{NODE}-1")
    del scenario.google.nodes[f"{NODE}-1"]
    assert cloud.find("job").state is SliceState.LOST
    assert cloud.find("job").status_text == "ACTIVE, but 1 of 2 nodes are gone"


def test_a_slice_found_far_from_its_bucket_is_refused_and_not_touched(scenario, capsys):
    far_node = "projects/project/locations/us-east1-d/nodes/job"
    scenario.google.make_node(far_node, HEADRACE)
    (scenario.root / "recipe.yaml").write_text(RECIPE.format(run="gs://near/run"))
    assert scenario.run() == 2
    assert "gs://near is in us-central2, the slice in us-east1" in capsys.readouterr().err
    assert far_node in scenario.google.nodes and not scenario.requested_zones()
    assert scenario.run("--far-bucket") == 0


def test_a_slice_that_somebody_deletes_is_not_replaced(scenario, capsys):
    scenario.set_trainer("wait " * 9)  # the launcher restarts it until the slice is gone

    def delete() -> None:
        scenario.wait_until(scenario.is_training)
        code, output = scenario.run_command(
            "delete", "job", *scenario.key, HEADRACE_HOME=str(scenario.root / "elsewhere")
        )
        assert code == 0, output

    with run_concurrently(delete):
        assert scenario.run() == 75
    assert "somebody else deleted the slice; the same command resumes" in capsys.readouterr().out
    assert scenario.is_nothing_left() and len(scenario.requested_zones()) == 1


def run_after_first_attempt(monkeypatch, action) -> None:
    """Run `action` when the first attempt has ended, before the launcher looks at the slice."""
    from headrace.tpu.launch import Launcher

    exit_code_for = Launcher.exit_code_for

    def run_action_first(launcher, outcome):
        monkeypatch.setattr(Launcher, "exit_code_for", exit_code_for)
        action()
        return exit_code_for(launcher, outcome)

    monkeypatch.setattr(Launcher, "exit_code_for", run_action_first)


@pytest.mark.thin(2)
@pytest.mark.parametrize("replacement", ["DELETING", "nothing", "another"])
@pytest.mark.parametrize("keep", [[], ["--keep"]], ids=str)
def test_a_slice_that_is_deleted_between_two_attempts_is_not_replaced(
    scenario, capsys, monkeypatch, replacement, keep
):
    def delete() -> None:
        time.sleep(1.1 if replacement == "another" else 0.0)  # creation times are in seconds
        with scenario.google.lock:
            for queued in scenario.google.queued.values():
                queued["deleted_at"] = clock.monotonic() + (1.0 if replacement == "DELETING" else -1.0)
            scenario.google.remove_deleted()
            if replacement == "another":
                scenario.google.make_node(NODE, HEADRACE)

    scenario.set_trainer("75 wait")
    run_after_first_attempt(monkeypatch, delete)
    assert scenario.run(*keep) == 75
    output = capsys.readouterr().out
    assert "somebody else deleted the slice; the same command resumes" in output
    assert "is kept" not in output and len(scenario.requested_zones()) == 1
    scenario.google.remove_deleted()
    assert keep or len(scenario.google.nodes) == (replacement == "another")


def test_a_slice_that_is_preempted_between_two_attempts_is_replaced(scenario, monkeypatch):
    """Its node may be DELETING before its request is SUSPENDED."""
    from headrace.tpu.provision import Provisioner

    find_slice = Provisioner.find_slice

    def find_then_preempt(provisioner):
        monkeypatch.setattr(Provisioner, "find_slice", find_slice)
        slice_ = find_slice(provisioner)
        scenario.google.preempt("job")
        return slice_

    def start_preemption() -> None:
        with scenario.google.lock:
            scenario.google.nodes[NODE]["state"] = "DELETING"
        monkeypatch.setattr(Provisioner, "find_slice", find_then_preempt)

    scenario.set_trainer("75 0")
    run_after_first_attempt(monkeypatch, start_preemption)
    assert scenario.run() == 0 and len(scenario.requested_zones()) == 2


def test_a_request_that_somebody_deletes_is_not_repeated(scenario, capsys):
    scenario.google.stockout.add("us-central2-b")

    def delete() -> None:
        scenario.wait_until(lambda: scenario.google.queued)
        time.sleep(1.0)  # the launcher has seen it
        with scenario.google.lock:
            for queued in scenario.google.queued.values():
                queued["deleted_at"] = clock.monotonic() + 0.5

    with run_concurrently(delete):
        assert scenario.run() == 75
    assert "somebody else deleted the slice; the same command resumes" in capsys.readouterr().out
    assert scenario.is_nothing_left() and len(scenario.requested_zones()) == 1


def test_keeping_a_slice_removes_its_idle_limit(scenario):
    config = HEADRACE | {"labels": {"headrace": "yes", "headrace-seconds": "86400", "headrace-idle": "1800"}}
    config["metadata"] = {"headrace-idle": "1800"}
    scenario.google.make_node(NODE, config)
    assert scenario.run("--keep") == 0
    node = scenario.google.nodes[NODE]
    assert node["metadata"]["headrace-idle"] == node["labels"]["headrace-idle"] == "0"


def test_logs_end_with_the_slice_and_distinguish_no_job_from_no_connection(scenario, capsys):
    scenario.start_unattended_training()
    with run_concurrently(lambda: (time.sleep(5), scenario.google.preempt("job"))):
        assert main(["tpu", "logs", "job", *scenario.key]) == 1
    output = capsys.readouterr().out
    assert "[w0] step" in output and output.endswith("job: it is SUSPENDED\n")
    scenario.google.make_node(f"{ZONE}/nodes/idle", HEADRACE)
    assert main(["tpu", "logs", "idle", *scenario.key]) == 2
    assert "idle: found no job on it" in capsys.readouterr().err
    scenario.google.block()
    assert main(["tpu", "logs", "idle", *scenario.key]) == 2
    assert "idle: its workers do not respond: [w0] ssh: connect to host" in capsys.readouterr().err


@pytest.mark.parametrize("api_enabled", [True, False])
def test_a_missing_permission_of_the_machines_is_reported_at_the_start(scenario, capsys, api_enabled):
    scenario.google.timers, scenario.google.allowed_permissions = True, []
    if not api_enabled:  # the API that knows the permissions is disabled
        scenario.google.fault("POST", ":testIamPermissions", 403, "has not been used", count=10**6)
    file = "may-delete" if api_enabled else "alive"
    (scenario.root / "install").write_text(
        f'until [ -e "$HEADRACE_TIMER_PLACE/{file}" ]; do sleep 0.05; done\n'
    )
    assert scenario.run() == 0
    reason = (
        "the account of the machines may not delete TPUs: give it the role"
        if api_enabled
        else "it is not known"
    )
    assert f"warning: job may fail to delete itself, and then costs money until you delete it: {reason}" in (
        capsys.readouterr().out
    )


def test_hours_still_count_after_a_failed_delete(scenario, monkeypatch, capsys):
    monkeypatch.setattr("headrace.tpu.timeouts.DELETE_TIMEOUT", 0.5)
    scenario.google.make_node(NODE, HEADRACE)
    job_ledger.JobLedger("project/job", "gs://b/run").record("us-central2-b", 1000.0, 4600.0)
    scenario.google.fault("DELETE", "", 403, "not now", count=99)
    assert main(["tpu", "delete", "job", *scenario.key]) == 1
    assert job_ledger.JobLedger("project/job").attempts and "COULD NOT BE DELETED" in capsys.readouterr().err
    scenario.google.faults.clear()
    assert (
        main(["tpu", "delete", "job", *scenario.key]) == 0
        and not job_ledger.JobLedger("project/job").attempts
    )


def test_checking_whether_a_job_is_watched_does_not_block_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    assert not job_ledger.is_watched("never") and not list(tmp_path.iterdir())
    with job_ledger.watch_lock("job"):
        assert job_ledger.is_watched("job")
    code = "import fcntl, sys, time; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_SH)"
    code += "; print(flush=True); time.sleep(0.5)"
    command = [sys.executable, "-c", code, str(tmp_path / "tpu/job/lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        with job_ledger.watch_lock("job"):
            pass
