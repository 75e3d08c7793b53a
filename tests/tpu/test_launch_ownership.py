"""However a launcher ends, it touches no foreign slices or jobs, and leaves no slice of its own behind."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.tpu.console import Console
from tests.tpu.test_launch import read_until, wait_for_exit
from tests.tpu.test_slice_lifecycle import (
    FOREIGN,
    HEADRACE,
    NODE,
    ZONE,
    InProcessScenario,
    are_alive,
    run_concurrently,
)

pytest.importorskip("google.cloud.tpu_v2", reason="needs google-cloud-tpu: pip install -e '.[cloud]'")


@pytest.fixture
def scenario(tmp_path, monkeypatch):
    scenario = InProcessScenario(tmp_path / "story")
    scenario.patch_environment(monkeypatch)
    yield scenario
    scenario.close()


@pytest.fixture(autouse=True)
def ignore_late_interrupts():
    """Ignore interrupts that arrive after the launcher has ended."""
    previous_handler = signal.signal(signal.SIGINT, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, previous_handler)


def interrupt(times: int = 1) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)


def test_repeated_ctrl_c_does_not_end_a_job_that_cannot_be_reached(scenario, capsys, monkeypatch):
    pids = scenario.start_unattended_training()
    scenario.google.block()
    monkeypatch.setattr("headrace.tpu.timeouts.CONNECT_TIMEOUT", 60.0)
    queries, interrupted_at = scenario.count_state_queries(), []

    def interrupt_after_query() -> None:
        scenario.wait_until(lambda: scenario.count_state_queries() > queries)
        interrupted_at.append(time.monotonic())
        interrupt(3)

    with run_concurrently(interrupt_after_query):
        assert scenario.run() == 75
    assert time.monotonic() - interrupted_at[0] < 10  # it does not keep retrying
    output = capsys.readouterr().out
    assert "left alone" in output and "tpu delete job --project project --zone us-central2-b" in output
    assert are_alive(pids) == [True, True] and len(scenario.google.queued) == 1


def test_nothing_is_requested_without_an_ssh_program(scenario, capsys, monkeypatch):
    monkeypatch.setenv("HEADRACE_SSH", "no-such-ssh -v")
    assert scenario.run() == 2 and not scenario.requested_zones()
    assert "ssh: found no program no-such-ssh on this machine" in capsys.readouterr().err
    monkeypatch.setenv("HEADRACE_SSH", "ssh 'x")
    assert scenario.run() == 2 and not scenario.requested_zones()
    assert "HEADRACE_SSH: found ssh 'x, expected a command" in capsys.readouterr().err


def test_an_ssh_program_that_disappears_leaves_no_slice(scenario, capsys, monkeypatch):
    monkeypatch.setattr("headrace.tpu.workers.check_ssh", lambda: None)
    monkeypatch.setenv("HEADRACE_SSH", "no-such-ssh")
    assert scenario.run() == 1 and scenario.requested_zones() and scenario.is_nothing_left()
    assert "No such file or directory: no-such-ssh" in capsys.readouterr().out


@pytest.mark.parametrize("slice_exists", [False, True])
def test_errors_at_the_end_still_delete_a_new_slice_and_report_a_found_one(
    scenario, capsys, monkeypatch, slice_exists
):
    from headrace.tpu import job

    pids = scenario.start_unattended_training() if slice_exists else []

    def raise_unexpected(*args, **kwargs) -> None:
        raise ZeroDivisionError("an unexpected error")

    monkeypatch.setattr(job, "try_query_workers", raise_unexpected)
    monkeypatch.setattr(job, "query_workers", raise_unexpected)
    with pytest.raises(ZeroDivisionError):
        scenario.run()
    if slice_exists:
        assert "left alone, and costs money" in capsys.readouterr().out
        assert are_alive(pids) == [True, True] and scenario.google.queued
    else:
        assert scenario.requested_zones() and scenario.is_nothing_left()


def test_a_slice_of_another_user_needs_adopt_and_must_not_be_training(scenario, capsys):
    labels = HEADRACE["labels"] | {"headrace-owner": "somebody", "headrace-seconds": "86400"}
    scenario.google.make_node(NODE, HEADRACE | {"labels": labels})
    before = json.dumps(scenario.google.nodes[NODE])
    assert scenario.run() == 2 and scenario.run("--keep") == 2
    output = capsys.readouterr().err
    refusal = "found a slice of this name in us-central2-b that somebody made; choose another --name"
    assert output.count(refusal) == 2
    # Two jobs cannot train there, even if the folders of the other user are not readable.
    recipe = scenario.root / "machines/127.0.1.2/home/somebody/.headrace/jobs/job/recipe.yaml"
    with subprocess.Popen(["bash", "-c", "sleep 60; :", "train", str(recipe)]) as trainer:
        try:
            assert scenario.run("--adopt") == 2
        finally:
            trainer.kill()
    output = capsys.readouterr().err
    assert f"found another recipe in training there ({recipe})" in output
    assert scenario.run("--adopt") == 0 and "training on 2 workers" in capsys.readouterr().out
    assert before == json.dumps(scenario.google.nodes[NODE]) and not scenario.requested_zones()


def queue_request(scenario: InProcessScenario, **labels: str) -> None:
    """Add a request that stays in the queue."""
    scenario.google.stockout = {"us-central2-b"}
    node = HEADRACE | {
        "labels": HEADRACE["labels"] | {f"headrace-{name}": value for name, value in labels.items()}
    }
    body = {"tpu": {"nodeSpec": [{"parent": ZONE, "nodeId": "job", "node": node}]}, "spot": {}}
    scenario.google.handle_request("POST", f"/v2/{ZONE}/queuedResources", {"queuedResourceId": "job"}, body)


def test_a_request_of_another_user_that_waits_is_not_deleted(scenario, capsys):
    queue_request(scenario, owner="somebody")
    assert scenario.run() == 2 and scenario.run("--zone", "us-east1-d", "--wait", "0.001") == 2
    assert main([*CREATE, *scenario.key]) == 2
    assert capsys.readouterr().err.count("that somebody made") == 3
    assert len(scenario.google.queued) == len(scenario.requested_zones()) == 1


def test_a_faulty_machine_of_a_found_slice_is_reported_and_the_slice_stays(scenario, capsys):
    scenario.set_trainer("77")
    scenario.google.make_node(NODE, HEADRACE)
    assert scenario.run() == 77
    output = capsys.readouterr().out
    assert "a worker is faulty" in output and "job existed before this command: delete it to rent" in output
    assert NODE in scenario.google.nodes and not scenario.requested_zones()


CREATE = ["tpu", "create", "--slice", "v4-16", "--name", "job", "--spot", "--zone", "us-central2-b"]


def hangup() -> None:
    os.kill(os.getpid(), signal.SIGHUP)


@pytest.mark.parametrize("options", [["--keep"], []])
@pytest.mark.parametrize("send_stop", [interrupt, hangup])
def test_a_new_request_does_not_stay_in_the_queue_when_the_launcher_ends(scenario, options, send_stop):
    scenario.google.stockout = {"us-central2-b"}

    def stop() -> None:
        scenario.wait_until(lambda: scenario.google.queued)
        send_stop()

    with run_concurrently(stop):
        assert scenario.run(*options) == 75
    assert scenario.requested_zones() and scenario.is_nothing_left()


def test_closing_the_terminal_leaves_the_training_running(scenario):
    scenario.set_trainer("wait")
    process = scenario.launch()
    scenario.wait_until(scenario.is_training)
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == -signal.SIGHUP
    assert are_alive(scenario.google.trainers()) == [True, True] and len(scenario.google.queued) == 1


def test_a_retained_slice_is_reported_with_the_price(scenario, capsys):
    costs = "job is kept and costs $7.36 per hour until you run `headrace tpu delete job --project project "
    costs += "--zone us-central2-b`"
    scenario.set_trainer("0 2")
    assert scenario.run("--keep") == 0 and costs in capsys.readouterr().out
    assert scenario.run("--keep") == 2 and costs in capsys.readouterr().out


def test_an_earlier_request_is_retained_and_reported(scenario, capsys):
    queue_request(scenario)

    def stop() -> None:
        scenario.wait_until(lambda: len(scenario.google.calls) > 10)
        interrupt()

    with run_concurrently(stop):
        assert scenario.run("--keep") == 75
    assert "costs $7.36 per hour as soon as it is ready, until you run" in capsys.readouterr().out
    assert len(scenario.google.queued) == 1


def test_a_slice_of_tpu_create_is_retained_without_the_option_keep(scenario, capsys):
    assert main([*CREATE, *scenario.key]) == 0
    scenario.set_trainer("2")
    assert scenario.run() == 2
    output = capsys.readouterr().out
    assert "job was made with `tpu create` or --keep, so it is kept at the end" in output
    assert "job is kept and costs $7.36 per hour" in output and len(scenario.google.queued) == 1


@pytest.mark.thin(3)
@pytest.mark.parametrize("zones", [[], ["--zone", "us-west4-a", "--wait", "0.001"]])
@pytest.mark.parametrize("zone", ["us-east1-d", "us-central2-b"])
def test_a_slice_under_repair_is_waited_for_and_not_deleted(scenario, capsys, zone, zones):
    name = f"projects/project/locations/{zone}/nodes/job"
    scenario.google.make_node(name, HEADRACE)
    scenario.google.nodes[name]["state"] = "REPAIRING"

    def stop() -> None:
        scenario.wait_until(lambda: len(scenario.google.calls) > 30)
        interrupt()

    with run_concurrently(stop):
        assert scenario.run(*zones) == 75
    assert name in scenario.google.nodes and not scenario.requested_zones()
    command = f"headrace tpu delete job --project project --zone {zone}"
    assert f"job is kept and costs $7.36 per hour until you run `{command}`" in capsys.readouterr().out


def test_machines_that_another_user_stopped_are_not_deleted(scenario, capsys):
    scenario.set_trainer("wait")
    scenario.google.make_node(NODE, HEADRACE)

    def stop() -> None:
        scenario.wait_until(scenario.is_training)
        scenario.google.switch_off(NODE)
        scenario.google.nodes[NODE]["state"] = "STOPPED"

    with run_concurrently(stop):
        assert scenario.run() == 75
    message = "STOPPED in us-central2-b, with its disks; start it with `gcloud compute tpus tpu-vm start job "
    message += "--project=project --zone=us-central2-b`"
    assert f"somebody else stopped the machines: it is {message}" in capsys.readouterr().out
    assert scenario.run() == 2 and message in capsys.readouterr().err
    assert NODE in scenario.google.nodes and not scenario.requested_zones()


def test_hours_of_a_foreign_slice_count_from_the_first_use(scenario, capsys):
    scenario.google.make_node(NODE, FOREIGN)
    scenario.google.nodes[NODE]["createTime"] = "2026-01-01T00:00:00Z"
    scenario.set_trainer("0 2 2")
    assert scenario.run("--keep") == 0
    output = capsys.readouterr().out
    assert (
        "used 0 min of slice time in 1 attempt, about $0.0" in output and "the limit of hours" not in output
    )
    for attempts in (1, 2):  # hours between two attempts do not count either
        assert scenario.run("--keep") == 2
        assert f"used 0 min of slice time in {attempts} attempt" in capsys.readouterr().out


def test_a_new_slice_of_the_same_name_is_not_mistaken_for_the_old_slice(scenario, capsys):
    from headrace.tpu.delete import delete_until_gone
    from headrace.tpu.gcp import Gcp

    scenario.set_trainer("wait")
    scenario.google.make_node(NODE, HEADRACE)
    cloud = Gcp("project", ("us-central2-b",))
    old_slice = cloud.find("job")

    def replace_slice() -> None:
        scenario.wait_until(scenario.is_training)
        scenario.google.switch_off(NODE)
        time.sleep(1.0)  # creation times are in seconds
        scenario.google.make_node(NODE, HEADRACE)

    with run_concurrently(replace_slice):
        assert scenario.run() == 75
    assert "somebody else deleted the slice, and another one has its name now" in capsys.readouterr().out
    assert NODE in scenario.google.nodes and not scenario.requested_zones()
    assert cloud.find("job").replaces(old_slice) and not cloud.find("job").replaces(cloud.find("job"))
    assert (
        delete_until_gone(cloud, "job", print, "us-central2-b", old_slice) and NODE in scenario.google.nodes
    )
    assert delete_until_gone(cloud, "job", print, "us-central2-b", cloud.find("job"))
    assert not scenario.google.nodes


def test_a_broken_connection_is_reported_and_follows_a_machine_to_its_new_address(
    scenario, capsys, monkeypatch
):
    monkeypatch.setattr("headrace.tpu.timeouts.LINK_TIMEOUT", 0.5)
    scenario.set_trainer("wait")
    scenario.google.make_node(NODE, HEADRACE)
    machine = scenario.root / "machines" / "first"
    address = machine.with_name("127.0.1.1").rename(machine).with_name("127.0.1.1")
    address.symlink_to(machine)

    def break_connection() -> None:
        scenario.wait_until(lambda: scenario.is_training(3))  # one machine is visible under two names
        scenario.wait_until(lambda: "training on 2 workers" in read_output())  # the setup is finished
        endpoints = scenario.google.nodes[NODE]["networkEndpoints"]
        address.unlink()
        address.with_name("127.0.99.1").symlink_to(machine)
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command_line = (process / "cmdline").read_bytes()
                if str(scenario.root / "ssh").encode() in command_line and b"@127.0.1.1" in command_line:
                    os.kill(int(process.name), signal.SIGKILL)
        scenario.wait_until(lambda: "lost the connection to w0, reconnecting" in read_output())
        with scenario.google.lock:
            endpoints[0]["accessConfig"]["externalIp"] = "127.0.99.1"
        scenario.wait_until(lambda: "connected to all workers again" in read_output())
        assert "job has new addresses" in read_output()
        interrupt()

    def read_output() -> str:
        outputs.append(capsys.readouterr().out)
        return "".join(outputs)

    outputs: list[str] = []

    with run_concurrently(break_connection):
        assert scenario.run() == 75


def test_a_new_attempt_resets_the_idle_time_of_a_slice(scenario):
    from headrace.tpu import timer

    scenario.set_trainer("2 2")
    scenario.google.make_node(NODE, HEADRACE)
    scenario.run("--keep")
    long_ago = time.time() - 3000
    for job in scenario.root.glob("machines/*/home/user/.headrace/jobs/job"):
        os.utime(job / "exit", (long_ago, long_ago))
        assert timer.last_alive_at(job) < time.time() - 2000
    (scenario.root / "install").write_text("exit 1\n")
    for env in scenario.root.glob("machines/*/home/user/.headrace/envs/*/ready"):
        env.unlink()
    assert scenario.run("--keep") == 1  # it fails while installing
    for job in scenario.root.glob("machines/*/home/user/.headrace/jobs/job"):
        assert timer.last_alive_at(job) > time.time() - 60


def test_workers_that_hang_do_not_keep_a_slice_alive(scenario, capsys, monkeypatch):
    monkeypatch.setattr("headrace.tpu.timeouts.COMMAND_TIMEOUT", 1.0)
    scenario.set_trainer("wait")
    interrupted_at = []

    def stop() -> None:
        scenario.wait_until((scenario.root / "launcher/tpu/project/job/w0.log").exists)
        scenario.google.block("hung")
        interrupted_at.append(time.monotonic())
        interrupt()

    with run_concurrently(stop):
        assert scenario.run() == 75
    assert (
        time.monotonic() - interrupted_at[0] < 30
        and scenario.requested_zones()
        and scenario.is_nothing_left()
    )
    assert "waiting for the trainer to save" in capsys.readouterr().out


def test_a_full_disk_on_the_launching_machine_does_not_end_the_job(scenario, capsys):
    folder = scenario.root / "launcher/tpu/project/job"
    folder.mkdir(parents=True)
    for name in ("w0.log", "lives.new"):
        (folder / name).symlink_to("/dev/full")
    scenario.set_trainer("75 0")
    assert scenario.run() == 0 and scenario.is_nothing_left()
    captured = capsys.readouterr()
    assert "[w0] attempt 1 of worker 0 does 0" in captured.out and "done" in captured.out
    assert captured.out.count(f"warning: {folder}/w0.log: No space left on device") == 2  # in each attempt
    assert captured.err.count(f"warning: {folder}/lives.json: No space left on device") == 1
    assert "attempt 1" in (folder / "w1.log").read_text()


def test_a_full_output_file_is_not_mistaken_for_a_closed_pipe(monkeypatch):
    console = Console()
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # closing it raises
        monkeypatch.setattr("sys.stdout", full)
        console.log("training on 2 workers")
        assert not console.stop_requests


def test_closing_the_terminal_during_the_save_leaves_no_slice(scenario):
    scenario.set_trainer("wait")
    text = (scenario.root / "python").read_text()
    scenario.google.set_trainer_script(text.partition("\n")[2].replace("echo saved;", "sleep 2; echo saved;"))
    process = scenario.launch()
    read_until(process, "[w1] step 1\n")
    process.send_signal(signal.SIGINT)
    read_until(process, "waiting for the trainer to save")
    process.send_signal(signal.SIGHUP)
    code, output = wait_for_exit(process)
    assert code == 75 and output.count("saved") == 2 and scenario.is_nothing_left()


def break_install(scenario: InProcessScenario, script: str = "exit 1") -> None:
    """Make every later installation run `script`, which fails; running trainers are not affected."""
    (scenario.root / "install").write_text(f"{script}\n")
    for env in scenario.root.glob("machines/*/home/user/.headrace/envs/*/ready"):
        env.unlink()


def job_logs(scenario: InProcessScenario) -> list[str]:
    """Texts of the job's logs, in the order of the workers."""
    paths = sorted(scenario.root.glob("machines/*/home/user/.headrace/jobs/job/log"))
    return [log.read_text() for log in paths]


@pytest.mark.fault(32)
def test_adopting_a_training_changes_nothing_on_its_machines(scenario):
    pids = scenario.start_unattended_training()
    break_install(scenario)
    (scenario.root / "machine/sudo").write_text("#!/bin/sh\nexit 32\n")
    scenario.google.disks["more"] = {"name": "more", "zone": "zones/us-central2-b"}
    envs = [os.readlink(link) for link in scenario.root.glob("machines/*/home/user/.headrace/env")]
    second = scenario.launch("--disk", "more")
    read_until(second, "found it training on 2 workers")
    assert scenario.google.trainers() == pids and are_alive(pids) == [True, True]
    assert envs == [os.readlink(link) for link in scenario.root.glob("machines/*/home/user/.headrace/env")]
    second.send_signal(signal.SIGINT)
    code, output = wait_for_exit(second)
    assert code == 75 and [text.endswith("saved\n") for text in job_logs(scenario)] == [True, True], output


def start_half_trained_job(scenario: InProcessScenario) -> int:
    """Start a job on two workers, kill the launcher and one trainer, and return the other trainer's pid."""
    first, second = scenario.start_unattended_training()
    os.kill(second, signal.SIGKILL)
    scenario.wait_until(lambda: scenario.google.trainers() == [first])
    return first


@pytest.mark.fault(32)
def test_a_found_slice_that_cannot_be_set_up_is_not_touched(scenario, capsys):
    pid = start_half_trained_job(scenario)
    break_install(scenario)
    assert scenario.run() == 1
    output = capsys.readouterr().out
    assert "setup failed while installing" in output and "giving up with the same error as before" in output
    assert (
        "left alone, and costs money until" in output
        and "headrace tpu delete job --project project --zone us-central2-b" in output
    )
    assert are_alive([pid]) == [True] and len(scenario.google.queued) == 1


@pytest.mark.fault(32)
def test_a_launcher_stopped_between_two_setups_lets_the_trainer_save(scenario, capsys):
    start_half_trained_job(scenario)
    marker = scenario.root / "tried"
    break_install(scenario, f"touch {marker}; sleep 0.5; exit 1")

    def stop() -> None:
        scenario.wait_until(marker.exists)
        scenario.google.fault("GET", "", 403, "what is this", count=1000)
        output = ""
        while "restarting it" not in output:
            time.sleep(0.05)
            output += capsys.readouterr().out
            assert "giving up" not in output
        interrupt()
        scenario.google.faults.clear()

    with run_concurrently(stop):
        assert scenario.run() == 75
    assert job_logs(scenario)[0].endswith("saved\n") and scenario.is_nothing_left()


def find_processes(*patterns: str) -> list[int]:
    """Ids of the processes whose command line and environment contain all `patterns`."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command_and_env = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            if all(pattern.encode() in command_and_env for pattern in patterns):
                pids.append(int(process.name))
    return pids


@pytest.mark.fault(31)
def test_a_killed_ssh_process_is_not_mistaken_for_the_end_of_the_trainer(scenario, capsys):
    scenario.set_trainer("wait")

    def kill_ssh() -> None:
        scenario.wait_until(
            lambda: (
                scenario.is_training() and len(find_processes(f"{scenario.root}/ssh\0", " follow job ")) == 2
            )
        )
        os.killpg(find_processes(f"{scenario.root}/ssh\0", " follow job ")[0], signal.SIGKILL)
        pids = scenario.google.trainers()
        time.sleep(2.5)  # longer than the others get to end
        assert scenario.google.trainers() == pids
        interrupt()

    with run_concurrently(kill_ssh):
        assert scenario.run() == 75
    assert [text.endswith("saved\n") for text in job_logs(scenario)] == [True, True]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for worker in range(2):
        steps = [int(fields[2]) for fields in lines if fields[:2] == [f"[w{worker}]", "step"]]
        assert steps == list(range(1, len(steps) + 1)) and len(steps) > 20


@pytest.mark.fault(31)
def test_a_follower_that_is_killed_does_not_report_the_end_of_the_trainer(scenario, capsys):
    scenario.set_trainer("wait 0")

    def kill_followers() -> None:
        scenario.wait_until(
            lambda: (
                scenario.is_training()
                and len(find_processes("follow\0job\0", f"{scenario.root}/machines")) == 2
            )
        )
        for link in scenario.root.glob("machines/*/home/user/.headrace/tree"):
            link.unlink()
            link.symlink_to("/nowhere")
        for pid in find_processes("follow\0job\0", f"{scenario.root}/machines"):
            os.kill(pid, signal.SIGKILL)
        pids = scenario.google.trainers()
        time.sleep(2.5)
        assert scenario.google.trainers() == pids
        for pid in pids:
            os.kill(pid, signal.SIGTERM)

    with run_concurrently(kill_followers):
        assert scenario.run() == 0
    output = capsys.readouterr().out
    assert "training stopped and can be restarted (w0: 75, w1: 75)" in output
    assert len(scenario.requested_zones()) == 1 and scenario.is_nothing_left()


@pytest.mark.fault(30)
def test_a_single_lookup_without_nodes_does_not_end_a_slice(scenario, capsys, monkeypatch):
    scenario.set_trainer("wait")
    list_reachable, incomplete = scenario.google.list_reachable, ["nodes"]

    def omit_once(parent, kind, resources):
        if kind in incomplete:
            incomplete.remove(kind)
            resources = []
        return list_reachable(parent, kind, resources)

    def omit_nodes() -> None:
        scenario.wait_until(scenario.is_training)
        pids = scenario.google.trainers()
        monkeypatch.setattr(scenario.google, "list_reachable", omit_once)
        scenario.wait_until(lambda: not incomplete)
        time.sleep(1.0)
        assert scenario.google.trainers() == pids
        interrupt()

    with run_concurrently(omit_nodes):
        assert scenario.run() == 75
    assert "took the slice away" not in capsys.readouterr().out and len(scenario.requested_zones()) == 1


def test_an_exhausted_limit_is_refused_for_a_slice_to_keep(scenario, capsys):
    assert main([*CREATE, *scenario.key]) == 0
    node = scenario.google.nodes[NODE]
    node["createTime"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 7200))
    before = json.dumps(node)
    hours = ["--max-hours", "1"]
    assert (
        scenario.run("--keep", *hours) == scenario.run(*hours) == main([*CREATE, *scenario.key, *hours]) == 2
    )
    output = capsys.readouterr().err
    assert output.count("job: found a slice that is 2") == 3
    assert output.count("--max-hours or --max-cost (1 h) would delete it") == 3
    assert before == json.dumps(scenario.google.nodes[NODE])
    assert scenario.run("--keep", "--max-hours", "3") == 0  # and its timer now has this limit
    assert scenario.google.nodes[NODE]["labels"]["headrace-seconds"] == "10800"
