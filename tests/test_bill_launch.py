"""Who launches leaves others' slices and trainings alone, however it ends, and nothing of its own behind."""

import json
import os
import signal
import subprocess
import time

import pytest

from millrace.cli import main
from tests.test_bill import NODE, OURS, ZONE, Here, alive, meanwhile

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


def test_no_number_of_interruptions_ends_a_training_that_cannot_be_asked(here, capsys, monkeypatch):
    pids = here.trains_alone()
    here.google.block()
    monkeypatch.setattr("millrace.tpu.launch.REACH", 60.0)
    asked, begun = (here.root / "ssh.log").stat().st_size, []

    def hurry() -> None:
        here.until(lambda: (here.root / "ssh.log").stat().st_size > asked)
        begun.append(time.monotonic())
        interrupt(3)

    with meanwhile(hurry):
        assert here.run() == 75
    assert time.monotonic() - begun[0] < 10  # it does not go on trying
    said = capsys.readouterr().out
    assert "left alone" in said and "tpu delete job --zone us-central2-b" in said
    assert alive(pids) == [True, True] and len(here.google.queued) == 1


def test_without_a_program_for_ssh_nothing_is_rented(here, capsys, monkeypatch):
    monkeypatch.setenv("MILLRACE_SSH", "no-such-ssh -v")
    assert here.run() == 2 and not here.created()
    assert "ssh: found no program no-such-ssh here" in capsys.readouterr().err
    monkeypatch.setenv("MILLRACE_SSH", "ssh 'x")
    assert here.run() == 2 and not here.created()
    assert "MILLRACE_SSH: found ssh 'x, expected a command" in capsys.readouterr().err


def test_a_program_for_ssh_that_goes_away_leaves_no_slice(here, capsys, monkeypatch):
    monkeypatch.setattr("millrace.tpu.workers.check_ssh", lambda: None)
    monkeypatch.setenv("MILLRACE_SSH", "no-such-ssh")
    assert here.run() == 1 and here.created() and here.nothing_left()
    assert "No such file or directory: no-such-ssh" in capsys.readouterr().out


@pytest.mark.parametrize("found", [False, True])
def test_whatever_goes_wrong_at_the_end_a_slice_of_ours_is_deleted_and_one_that_was_found_is_told(
    here, capsys, monkeypatch, found
):
    from millrace.tpu import job

    pids = here.trains_alone() if found else []

    def wrong(*args) -> None:
        raise ZeroDivisionError("of which nobody thought")

    monkeypatch.setattr(job, "states", wrong)
    monkeypatch.setattr(job, "ask", wrong)
    with pytest.raises(ZeroDivisionError):
        here.run()
    if found:
        assert "left alone, and costs money" in capsys.readouterr().out
        assert alive(pids) == [True, True] and here.google.queued
    else:
        assert here.created() and here.nothing_left()


def test_a_slice_of_another_user_is_refused_and_one_with_a_training_in_any_case(here, capsys):
    labels = OURS["labels"] | {"millrace-owner": "somebody", "millrace-seconds": "86400"}
    here.google.make_node(NODE, OURS | {"labels": labels})
    before = json.dumps(here.google.nodes[NODE])
    assert here.run() == 2 and here.run("--keep") == 2
    said = capsys.readouterr().err
    assert (
        said.count("found a slice of that name in us-central2-b that somebody made; give another --name") == 2
    )
    # Two cannot train there, though the folders of the other one may not be read by us.
    recipe = here.root / "machines/127.0.1.2/home/somebody/.millrace/jobs/job/recipe.yaml"
    with subprocess.Popen(["bash", "-c", "sleep 60; :", "train", str(recipe)]) as trainer:
        try:
            assert here.run("--adopt") == 2
        finally:
            trainer.kill()
    said = capsys.readouterr().err
    assert f"found another recipe in training there ({recipe})" in said
    assert here.run("--adopt") == 0 and "trains on 2 workers" in capsys.readouterr().out
    assert before == json.dumps(here.google.nodes[NODE]) and not here.created()


def ask_for(here: Here, **labels: str) -> None:
    """A request that stands in the queue."""
    here.google.stockout = {"us-central2-b"}
    node = OURS | {"labels": OURS["labels"] | {f"millrace-{name}": value for name, value in labels.items()}}
    body = {"tpu": {"nodeSpec": [{"parent": ZONE, "nodeId": "job", "node": node}]}, "spot": {}}
    here.google.answer("POST", f"/v2/{ZONE}/queuedResources", {"queuedResourceId": "job"}, body)


def test_a_request_of_another_user_that_waits_is_not_deleted(here, capsys):
    ask_for(here, owner="somebody")
    assert here.run() == 2 and here.run("--zone", "us-east1-d", "--wait", "0.001") == 2
    create = ["tpu", "create", "--slice", "v4-16", "--name", "job", "--spot", "--zone", "us-central2-b"]
    assert main([*create, *here.key]) == 2
    assert capsys.readouterr().err.count("that somebody made") == 3
    assert len(here.google.queued) == len(here.created()) == 1


def test_a_faulty_machine_of_a_slice_that_was_found_is_told_and_the_slice_stays(here, capsys):
    here.trainer("77")
    here.google.make_node(NODE, OURS)
    assert here.run() == 77
    said = capsys.readouterr().out
    assert "a machine of the slice is faulty" in said and "job was there before: delete it to take" in said
    assert NODE in here.google.nodes and not here.created()
