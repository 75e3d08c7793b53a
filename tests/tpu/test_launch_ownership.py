"""Who launches leaves others' slices and trainings alone, however it ends, and nothing of its own behind."""

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
from tests.tpu.test_launch import end, hear
from tests.tpu.test_slice_lifecycle import FOREIGN, NODE, OURS, ZONE, Here, alive, meanwhile

pytest.importorskip("google.cloud.tpu_v2", reason="needs google-cloud-tpu: pip install -e '.[cloud]'")


@pytest.fixture
def here(tmp_path, monkeypatch):
    found = Here(tmp_path / "story")
    found.quick(monkeypatch)
    yield found
    found.close()


@pytest.fixture(autouse=True)
def late():
    """An interruption that comes when the launcher has ended ends no test."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(times: int = 1) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)


def test_repeated_ctrl_c_does_not_end_a_training_that_cannot_be_asked(here, capsys, monkeypatch):
    pids = here.trains_alone()
    here.google.block()
    monkeypatch.setattr("headrace.tpu.timeouts.CONNECT_TIMEOUT", 60.0)
    asked, begun = here.questions(), []

    def hurry() -> None:
        here.until(lambda: here.questions() > asked)
        begun.append(time.monotonic())
        interrupt(3)

    with meanwhile(hurry):
        assert here.run() == 75
    assert time.monotonic() - begun[0] < 10  # it does not go on trying
    said = capsys.readouterr().out
    assert "left alone" in said and "tpu delete job --project project --zone us-central2-b" in said
    assert alive(pids) == [True, True] and len(here.google.queued) == 1


def test_nothing_is_rented_without_an_ssh_program(here, capsys, monkeypatch):
    monkeypatch.setenv("HEADRACE_SSH", "no-such-ssh -v")
    assert here.run() == 2 and not here.created()
    assert "ssh: found no program no-such-ssh on this machine" in capsys.readouterr().err
    monkeypatch.setenv("HEADRACE_SSH", "ssh 'x")
    assert here.run() == 2 and not here.created()
    assert "HEADRACE_SSH: found ssh 'x, expected a command" in capsys.readouterr().err


def test_an_ssh_program_that_disappears_leaves_no_slice(here, capsys, monkeypatch):
    monkeypatch.setattr("headrace.tpu.workers.check_ssh", lambda: None)
    monkeypatch.setenv("HEADRACE_SSH", "no-such-ssh")
    assert here.run() == 1 and here.created() and here.nothing_left()
    assert "No such file or directory: no-such-ssh" in capsys.readouterr().out


@pytest.mark.parametrize("found", [False, True])
def test_errors_at_the_end_still_delete_a_new_slice_and_report_a_found_one(here, capsys, monkeypatch, found):
    from headrace.tpu import job

    pids = here.trains_alone() if found else []

    def wrong(*args, **kwargs) -> None:
        raise ZeroDivisionError("of which nobody thought")

    monkeypatch.setattr(job, "try_query_workers", wrong)
    monkeypatch.setattr(job, "query_workers", wrong)
    with pytest.raises(ZeroDivisionError):
        here.run()
    if found:
        assert "left alone, and costs money" in capsys.readouterr().out
        assert alive(pids) == [True, True] and here.google.queued
    else:
        assert here.created() and here.nothing_left()


def test_a_slice_of_another_user_needs_adopt_and_must_have_no_training(here, capsys):
    labels = OURS["labels"] | {"headrace-owner": "somebody", "headrace-seconds": "86400"}
    here.google.make_node(NODE, OURS | {"labels": labels})
    before = json.dumps(here.google.nodes[NODE])
    assert here.run() == 2 and here.run("--keep") == 2
    said = capsys.readouterr().err
    refusal = "found a slice of this name in us-central2-b that somebody made; choose another --name"
    assert said.count(refusal) == 2
    # Two cannot train there, though the folders of the other one may not be read by us.
    recipe = here.root / "machines/127.0.1.2/home/somebody/.headrace/jobs/job/recipe.yaml"
    with subprocess.Popen(["bash", "-c", "sleep 60; :", "train", str(recipe)]) as trainer:
        try:
            assert here.run("--adopt") == 2
        finally:
            trainer.kill()
    said = capsys.readouterr().err
    assert f"found another recipe in training there ({recipe})" in said
    assert here.run("--adopt") == 0 and "training on 2 workers" in capsys.readouterr().out
    assert before == json.dumps(here.google.nodes[NODE]) and not here.created()


def ask_for(here: Here, **labels: str) -> None:
    """A request that stands in the queue."""
    here.google.stockout = {"us-central2-b"}
    node = OURS | {"labels": OURS["labels"] | {f"headrace-{name}": value for name, value in labels.items()}}
    body = {"tpu": {"nodeSpec": [{"parent": ZONE, "nodeId": "job", "node": node}]}, "spot": {}}
    here.google.answer("POST", f"/v2/{ZONE}/queuedResources", {"queuedResourceId": "job"}, body)


def test_a_request_of_another_user_that_waits_is_not_deleted(here, capsys):
    ask_for(here, owner="somebody")
    assert here.run() == 2 and here.run("--zone", "us-east1-d", "--wait", "0.001") == 2
    assert main([*CREATE, *here.key]) == 2
    assert capsys.readouterr().err.count("that somebody made") == 3
    assert len(here.google.queued) == len(here.created()) == 1


def test_a_faulty_machine_of_a_found_slice_is_reported_and_the_slice_stays(here, capsys):
    here.trainer("77")
    here.google.make_node(NODE, OURS)
    assert here.run() == 77
    said = capsys.readouterr().out
    assert "a worker is faulty" in said and "job existed before this command: delete it to rent" in said
    assert NODE in here.google.nodes and not here.created()


CREATE = ["tpu", "create", "--slice", "v4-16", "--name", "job", "--spot", "--zone", "us-central2-b"]


def hangup() -> None:
    os.kill(os.getpid(), signal.SIGHUP)


@pytest.mark.parametrize("more", [["--keep"], []])
@pytest.mark.parametrize("end", [interrupt, hangup])
def test_a_new_request_does_not_stay_in_the_queue_when_the_launcher_ends(here, more, end):
    here.google.stockout = {"us-central2-b"}

    def stop() -> None:
        here.until(lambda: here.google.queued)
        end()

    with meanwhile(stop):
        assert here.run(*more) == 75
    assert here.created() and here.nothing_left()


def test_closing_the_terminal_leaves_the_training_running(here):
    here.trainer("wait")
    process = here.launch()
    here.until(here.training)
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == -signal.SIGHUP
    assert alive(here.google.trainers()) == [True, True] and len(here.google.queued) == 1


def test_a_kept_slice_is_reported_with_its_price(here, capsys):
    costs = "job is kept and costs $7.36 per hour until you run `headrace tpu delete job --project project "
    costs += "--zone us-central2-b`"
    here.trainer("0 2")
    assert here.run("--keep") == 0 and costs in capsys.readouterr().out
    assert here.run("--keep") == 2 and costs in capsys.readouterr().out


def test_an_earlier_request_is_kept_and_reported(here, capsys):
    ask_for(here)

    def stop() -> None:
        here.until(lambda: len(here.google.calls) > 10)
        interrupt()

    with meanwhile(stop):
        assert here.run("--keep") == 75
    assert "costs $7.36 per hour as soon as it is ready, until you run" in capsys.readouterr().out
    assert len(here.google.queued) == 1


def test_a_slice_of_tpu_create_is_kept_without_the_option_keep(here, capsys):
    assert main([*CREATE, *here.key]) == 0
    here.trainer("2")
    assert here.run() == 2
    said = capsys.readouterr().out
    assert "job was made with `tpu create` or --keep, so it is kept at the end" in said
    assert "job is kept and costs $7.36 per hour" in said and len(here.google.queued) == 1


@pytest.mark.thin(3)
@pytest.mark.parametrize("zones", [[], ["--zone", "us-west4-a", "--wait", "0.001"]])
@pytest.mark.parametrize("zone", ["us-east1-d", "us-central2-b"])
def test_a_slice_that_is_being_repaired_is_waited_for_and_not_deleted(here, capsys, zone, zones):
    name = f"projects/project/locations/{zone}/nodes/job"
    here.google.make_node(name, OURS)
    here.google.nodes[name]["state"] = "REPAIRING"

    def stop() -> None:
        here.until(lambda: len(here.google.calls) > 30)
        interrupt()

    with meanwhile(stop):
        assert here.run(*zones) == 75
    assert name in here.google.nodes and not here.created()
    command = f"headrace tpu delete job --project project --zone {zone}"
    assert f"job is kept and costs $7.36 per hour until you run `{command}`" in capsys.readouterr().out


def test_machines_that_somebody_stopped_are_not_deleted(here, capsys):
    here.trainer("wait")
    here.google.make_node(NODE, OURS)

    def stop() -> None:
        here.until(here.training)
        here.google.switch_off(NODE)
        here.google.nodes[NODE]["state"] = "STOPPED"

    with meanwhile(stop):
        assert here.run() == 75
    told = "STOPPED in us-central2-b, with its disks; start it with `gcloud compute tpus tpu-vm start job "
    told += "--project=project --zone=us-central2-b`"
    assert f"somebody else stopped the machines: it is {told}" in capsys.readouterr().out
    assert here.run() == 2 and told in capsys.readouterr().err
    assert NODE in here.google.nodes and not here.created()


def test_hours_of_a_foreign_slice_count_from_the_first_use(here, capsys):
    here.google.make_node(NODE, FOREIGN)
    here.google.nodes[NODE]["createTime"] = "2026-01-01T00:00:00Z"
    here.trainer("0 2 2")
    assert here.run("--keep") == 0
    said = capsys.readouterr().out
    assert "used 0 min of slice time in 1 attempt, about $0.0" in said and "the limit of hours" not in said
    for lives in (1, 2):  # nor do those between two of ours
        assert here.run("--keep") == 2
        assert f"used 0 min of slice time in {lives} attempt" in capsys.readouterr().out


def test_a_new_slice_of_the_same_name_is_not_taken_for_the_old_one(here, capsys):
    from headrace.tpu.delete import delete_until_gone
    from headrace.tpu.gcp import Gcp

    here.trainer("wait")
    here.google.make_node(NODE, OURS)
    cloud = Gcp("project", ("us-central2-b",))
    known = cloud.find("job")

    def change() -> None:
        here.until(here.training)
        here.google.switch_off(NODE)
        time.sleep(1.0)  # births are told in seconds here
        here.google.make_node(NODE, OURS)

    with meanwhile(change):
        assert here.run() == 75
    assert "somebody else deleted the slice, and another one has its name now" in capsys.readouterr().out
    assert NODE in here.google.nodes and not here.created()
    assert cloud.find("job").replaces(known) and not cloud.find("job").replaces(cloud.find("job"))
    assert delete_until_gone(cloud, "job", print, "us-central2-b", known) and NODE in here.google.nodes
    assert delete_until_gone(cloud, "job", print, "us-central2-b", cloud.find("job"))
    assert not here.google.nodes


def test_a_broken_connection_is_reported_and_follows_a_machine_to_its_new_address(here, capsys, monkeypatch):
    monkeypatch.setattr("headrace.tpu.timeouts.LINK_TIMEOUT", 0.5)
    here.trainer("wait")
    here.google.make_node(NODE, OURS)
    machine = here.root / "machines" / "first"
    address = machine.with_name("127.0.1.1").rename(machine).with_name("127.0.1.1")
    address.symlink_to(machine)

    def cut() -> None:
        here.until(lambda: here.training(3))  # one is seen by both its names
        here.until(lambda: "training on 2 workers" in heard())  # and is no longer set up
        ends = here.google.nodes[NODE]["networkEndpoints"]
        address.unlink()
        address.with_name("127.0.99.1").symlink_to(machine)
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes()
                if str(here.root / "ssh").encode() in words and b"@127.0.1.1" in words:
                    os.kill(int(process.name), signal.SIGKILL)
        here.until(lambda: "lost the connection to w0, reconnecting" in heard())
        with here.google.lock:
            ends[0]["accessConfig"]["externalIp"] = "127.0.99.1"
        here.until(lambda: "connected to all workers again" in heard())
        assert "job has new addresses" in heard()
        interrupt()

    def heard() -> str:
        said.append(capsys.readouterr().out)
        return "".join(said)

    said: list[str] = []

    with meanwhile(cut):
        assert here.run() == 75


def test_a_new_attempt_resets_the_idle_time_of_a_slice(here):
    from headrace.tpu import timer

    here.trainer("2 2")
    here.google.make_node(NODE, OURS)
    here.run("--keep")
    long = time.time() - 3000
    for job in here.root.glob("machines/*/home/user/.headrace/jobs/job"):
        os.utime(job / "exit", (long, long))
        assert timer.last_alive_at(job) < time.time() - 2000
    (here.root / "install").write_text("exit 1\n")
    for env in here.root.glob("machines/*/home/user/.headrace/envs/*/ready"):
        env.unlink()
    assert here.run("--keep") == 1  # it was installing
    for job in here.root.glob("machines/*/home/user/.headrace/jobs/job"):
        assert timer.last_alive_at(job) > time.time() - 60


def test_workers_that_hang_do_not_keep_a_slice_alive(here, capsys, monkeypatch):
    monkeypatch.setattr("headrace.tpu.timeouts.COMMAND_TIMEOUT", 1.0)
    here.trainer("wait")
    begun = []

    def stop() -> None:
        here.until((here.root / "launcher/tpu/project/job/w0.log").exists)
        here.google.block("hung")
        begun.append(time.monotonic())
        interrupt()

    with meanwhile(stop):
        assert here.run() == 75
    assert time.monotonic() - begun[0] < 30 and here.created() and here.nothing_left()
    assert "waiting for the trainer to save" in capsys.readouterr().out


def test_a_full_disk_on_the_launching_machine_ends_no_training(here, capsys):
    folder = here.root / "launcher/tpu/project/job"
    folder.mkdir(parents=True)
    for name in ("w0.log", "lives.new"):
        (folder / name).symlink_to("/dev/full")
    here.trainer("75 0")
    assert here.run() == 0 and here.nothing_left()
    said = capsys.readouterr()
    assert "[w0] life 1 of worker 0 does 0" in said.out and "done" in said.out
    assert said.out.count(f"warning: {folder}/w0.log: No space left on device") == 2  # in each life
    assert said.err.count(f"warning: {folder}/lives.json: No space left on device") == 1
    assert "life 1" in (folder / "w1.log").read_text()


def test_a_full_output_file_is_not_taken_for_a_closed_pipe(monkeypatch):
    voice = Console()
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # which cannot be closed in peace
        monkeypatch.setattr("sys.stdout", full)
        voice.log("training on 2 workers")
        assert not voice.stop_requests


def test_closing_the_terminal_during_the_save_leaves_no_slice(here):
    here.trainer("wait")
    text = (here.root / "python").read_text()
    here.google.python(text.partition("\n")[2].replace("echo saved;", "sleep 2; echo saved;"))
    process = here.launch()
    hear(process, "[w1] step 1\n")
    process.send_signal(signal.SIGINT)
    hear(process, "waiting for the trainer to save")
    process.send_signal(signal.SIGHUP)
    code, said = end(process)
    assert code == 75 and said.count("saved") == 2 and here.nothing_left()


def break_install(here: Here, script: str = "exit 1") -> None:
    """What is installed does for a trainer that runs, and nothing can be installed any more."""
    (here.root / "install").write_text(f"{script}\n")
    for env in here.root.glob("machines/*/home/user/.headrace/envs/*/ready"):
        env.unlink()


def logs(here: Here) -> list[str]:
    """Of the workers, in their order."""
    found = sorted(here.root.glob("machines/*/home/user/.headrace/jobs/job/log"))
    return [log.read_text() for log in found]


@pytest.mark.fault(32)
def test_adopting_a_training_changes_nothing_on_its_machines(here):
    pids = here.trains_alone()
    break_install(here)
    (here.root / "machine/sudo").write_text("#!/bin/sh\nexit 32\n")
    here.google.disks["more"] = {"name": "more", "zone": "zones/us-central2-b"}
    envs = [os.readlink(link) for link in here.root.glob("machines/*/home/user/.headrace/env")]
    second = here.launch("--disk", "more")
    hear(second, "found it training on 2 workers")
    assert here.google.trainers() == pids and alive(pids) == [True, True]
    assert envs == [os.readlink(link) for link in here.root.glob("machines/*/home/user/.headrace/env")]
    second.send_signal(signal.SIGINT)
    code, said = end(second)
    assert code == 75 and [text.endswith("saved\n") for text in logs(here)] == [True, True], said


def half_trains(here: Here) -> int:
    """The process number of a trainer whose launcher was killed, and whose other half is gone."""
    first, second = here.trains_alone()
    os.kill(second, signal.SIGKILL)
    here.until(lambda: here.google.trainers() == [first])
    return first


@pytest.mark.fault(32)
def test_a_found_slice_that_cannot_be_set_up_is_left_alone(here, capsys):
    pid = half_trains(here)
    break_install(here)
    assert here.run() == 1
    said = capsys.readouterr().out
    assert "setup failed while installing" in said and "giving up with the same error as before" in said
    assert (
        "left alone, and costs money until" in said
        and "headrace tpu delete job --project project --zone us-central2-b" in said
    )
    assert alive([pid]) == [True] and len(here.google.queued) == 1


@pytest.mark.fault(32)
def test_a_launcher_stopped_between_two_setups_lets_the_trainer_save(here, capsys):
    half_trains(here)
    tried = here.root / "tried"
    break_install(here, f"touch {tried}; sleep 0.5; exit 1")

    def stop() -> None:
        here.until(tried.exists)
        here.google.fault("GET", "", 403, "what is this", count=1000)
        said = ""
        while "restarting it" not in said:
            time.sleep(0.05)
            said += capsys.readouterr().out
            assert "giving up" not in said
        interrupt()
        here.google.faults.clear()

    with meanwhile(stop):
        assert here.run() == 75
    assert logs(here)[0].endswith("saved\n") and here.nothing_left()


def processes(*words: str) -> list[int]:
    """The numbers of those that have all that in their command lines and variables."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            said = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            if all(word.encode() in said for word in words):
                found.append(int(process.name))
    return found


@pytest.mark.fault(31)
def test_a_killed_ssh_process_is_not_taken_for_the_end_of_the_trainer(here, capsys):
    here.trainer("wait")

    def kill() -> None:
        here.until(lambda: here.training() and len(processes(f"{here.root}/ssh\0", " follow job ")) == 2)
        os.killpg(processes(f"{here.root}/ssh\0", " follow job ")[0], signal.SIGKILL)
        pids = here.google.trainers()
        time.sleep(2.5)  # the others have less to end in
        assert here.google.trainers() == pids
        interrupt()

    with meanwhile(kill):
        assert here.run() == 75
    assert [text.endswith("saved\n") for text in logs(here)] == [True, True]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for worker in range(2):
        steps = [int(words[2]) for words in lines if words[:2] == [f"[w{worker}]", "step"]]
        assert steps == list(range(1, len(steps) + 1)) and len(steps) > 20


@pytest.mark.fault(31)
def test_a_follower_that_is_killed_does_not_report_the_end_of_the_trainer(here, capsys):
    here.trainer("wait 0")

    def cut() -> None:
        here.until(lambda: here.training() and len(processes("follow\0job\0", f"{here.root}/machines")) == 2)
        for link in here.root.glob("machines/*/home/user/.headrace/tree"):
            link.unlink()
            link.symlink_to("/nowhere")
        for pid in processes("follow\0job\0", f"{here.root}/machines"):
            os.kill(pid, signal.SIGKILL)
        pids = here.google.trainers()
        time.sleep(2.5)
        assert here.google.trainers() == pids
        for pid in pids:
            os.kill(pid, signal.SIGTERM)

    with meanwhile(cut):
        assert here.run() == 0
    said = capsys.readouterr().out
    assert "training stopped and can be restarted (w0: 75, w1: 75)" in said
    assert len(here.created()) == 1 and here.nothing_left()


@pytest.mark.fault(30)
def test_one_lookup_without_nodes_does_not_end_a_slice(here, capsys, monkeypatch):
    here.trainer("wait")
    whole, lacking = here.google.reached, ["nodes"]

    def reached(parent, kind, found):
        if kind in lacking:
            lacking.remove(kind)
            found = []
        return whole(parent, kind, found)

    def lack() -> None:
        here.until(here.training)
        pids = here.google.trainers()
        monkeypatch.setattr(here.google, "reached", reached)
        here.until(lambda: not lacking)
        time.sleep(1.0)
        assert here.google.trainers() == pids
        interrupt()

    with meanwhile(lack):
        assert here.run() == 75
    assert "took the slice away" not in capsys.readouterr().out and len(here.created()) == 1


def test_a_limit_that_is_used_up_is_refused_for_a_slice_that_is_kept(here, capsys):
    assert main([*CREATE, *here.key]) == 0
    node = here.google.nodes[NODE]
    node["createTime"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 7200))
    before = json.dumps(node)
    hours = ["--max-hours", "1"]
    assert here.run("--keep", *hours) == here.run(*hours) == main([*CREATE, *here.key, *hours]) == 2
    said = capsys.readouterr().err
    assert said.count("job: found a slice that is 2") == 3
    assert said.count("--max-hours or --max-cost (1 h) would delete it") == 3
    assert before == json.dumps(here.google.nodes[NODE])
    assert here.run("--keep", "--max-hours", "3") == 0  # and these are its timer's from now on
    assert here.google.nodes[NODE]["labels"]["headrace-seconds"] == "10800"
