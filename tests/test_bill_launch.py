"""Who launches leaves others' slices and trainings alone, however it ends, and nothing of its own behind."""

import os
import signal
import time

import pytest

from tests.test_bill import alive, here, meanwhile  # noqa: F401

pytest.importorskip("google.cloud.tpu_v2", reason="needs google-cloud-tpu: pip install -e '.[cloud]'")


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
