"""What Google does not tell is not taken for nothing: zones that do not answer, lists that are not whole,
changes that were accepted alone."""

import os
import signal
import time

import pytest

from headrace.cli.main import main
from headrace.tpu import disk, gcp
from headrace.tpu.cloud import CloudUnreachable
from headrace.tpu.delete import delete_until_gone
from tests.tpu.test_slice_lifecycle import NODE, OURS, ZONE, here, meanwhile

pytest.importorskip("google.cloud.tpu_v2", reason="needs google-cloud-tpu: pip install -e '.[cloud]'")

__all__ = ["here"]


@pytest.mark.fault(30)
@pytest.mark.parametrize("how", ["preempted", "stopped"])
def test_an_outage_of_another_zone_prevents_neither_deletion_nor_renting(here, capsys, monkeypatch, how):
    monkeypatch.setattr("headrace.tpu.google_auth.RETRY_SECONDS", 0.3)
    monkeypatch.setattr(gcp.Gcp.__init__, "__defaults__", ((), 0.1))
    here.trainer("wait 0")

    slices, meant = (2, 0) if how == "preempted" else (1, 75)

    def act() -> None:
        here.until(here.training)
        here.google.fault("GET", "us-east1-d", 503, "zone is down", count=10**5)
        if how == "preempted":
            here.google.preempt("job")
        else:
            os.kill(os.getpid(), signal.SIGINT)
        end = time.monotonic() + 30
        while time.monotonic() < end and (len(here.created()), here.nothing_left()) != (slices, True):
            time.sleep(0.05)
        here.google.faults.clear()  # who waited for it goes on, and is too late
        assert time.monotonic() < end

    with meanwhile(act):
        assert here.run("--zone", "us-east1-d") == meant
    assert "COULD NOT" not in capsys.readouterr().err
    assert here.created() == ["us-central2-b"] * slices


def test_a_zone_that_never_answered_may_have_the_slice(here, monkeypatch):
    monkeypatch.setattr("headrace.tpu.timeouts.DELETE_TIMEOUT", 3.0)
    cloud = gcp.Gcp("project", ("us-central2-b", "us-east1-d"), retry_seconds=0.1)
    here.google.fault("GET", "us-east1-d", 503, "zone is down", count=10**5)
    with pytest.raises(CloudUnreachable, match="zone is down"):
        cloud.find("job")
    here.google.make_node(NODE, OURS)
    assert cloud.find("job").zone == "us-central2-b"
    assert delete_until_gone(cloud, "job", print, "us-central2-b") and not here.google.nodes
    here.google.faults.clear()
    assert cloud.find("job") is None
    here.google.fault("GET", "us-east1-d", 503, "zone is down", count=10**5)
    assert cloud.find("job") is None and cloud.find("job", "us-central2-b") is None
    with pytest.raises(CloudUnreachable, match="zone is down"):
        cloud.find("job", "us-east1-d")  # that one is meant
    here.google.fault("GET", "us-central2-b", 503, "so is this", count=10**5)
    with pytest.raises(CloudUnreachable, match="no answer"):
        cloud.find("job")


def test_a_list_that_lacks_a_zone_is_not_taken_for_complete(here, capsys, monkeypatch):
    monkeypatch.setattr("headrace.tpu.timeouts.DELETE_TIMEOUT", 0.5)
    other = f"{ZONE.replace('us-central2-b', 'us-east1-d')}/nodes/other"
    here.google.make_node(NODE, OURS)
    here.google.make_node(other, OURS)
    here.google.unreachable = {"us-central2-b"}
    words = "warning: us-central2-b does not answer, so its slices are not listed"
    for argv in (["ls"], ["ls", "--zone", "us-central2-b"], ["ls", "--orphans"]):
        assert main(["tpu", *argv]) == 1
        said = capsys.readouterr().out
        assert words in said and "no slices" not in said and ("other" in said) == ("--zone" not in argv)
    for zone in ([], ["--zone", "us-central2-b"]):
        assert main(["tpu", "delete", "job", "--force", *zone]) == 1
        said = capsys.readouterr()
        assert "does not reach us-central2-b: its slices are unknown" in said.err, said
        assert "deleted" not in said.out and "found no slice" not in said.err
    assert main(["tpu", "delete", "other", "--force"]) == 0
    assert "other deleted" in capsys.readouterr().out and list(here.google.nodes) == [NODE]
    cloud = gcp.Gcp("project", ("us-central2-b",))
    here.google.unreachable = set()
    found = cloud.find("job")
    here.google.unreachable = {"us-central2-b"}
    with pytest.raises(CloudUnreachable):
        cloud.set_timer(found, 1.0, None)


@pytest.mark.parametrize("where", [[], ["--zone", "us-central2-b"]])
def test_disks_of_all_pages_are_listed(here, capsys, monkeypatch, where):
    here.google.page = 1
    for number in range(3):
        disk.Disks("project", "us-central2-b").create(f"disk-{number}", 10, "pd-balanced")
    assert main(["tpu", "disk", "ls", *where]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        f"disk-{number}" for number in range(3)
    ]


def test_a_timer_change_that_fails_after_being_accepted_is_reported(here, capsys):
    told = OURS | {"labels": {"headrace": "yes", "headrace-seconds": "864000", "headrace-idle": "0"}}
    told["metadata"] = {"headrace-idle": "0", "headrace-seconds": "864000"}
    here.google.make_node(NODE, told)
    here.google.unchanged = 1
    assert here.run("--max-hours", "1", "--keep") == 0
    assert "could not change the timer of job, which stays as it is: " in capsys.readouterr().out
    assert here.google.nodes[NODE]["metadata"]["headrace-seconds"] == "864000"


@pytest.mark.fault(30)
def test_zones_are_tried_in_turn_when_one_has_none_or_no_quota(here, capsys):
    here.google.stockout, here.google.step = {"us-central2-b"}, 1e-6  # the others have some at once
    here.google.fault("POST", "us-east1-d", 429, "Quota limit 'TPUV4' has been exceeded.")
    zones = ["--zone", "us-east1-d,us-west4-a", "--wait", "0.05"]  # 3 s
    assert here.run(*zones) == 0
    said = capsys.readouterr().out
    assert here.created() == ["us-central2-b", "us-east1-d", "us-west4-a"] and here.nothing_left()
    assert "WAITING_FOR_RESOURCES" in said and "trying the next zone" in said and "Quota limit" in said


@pytest.mark.fault(30)
def test_a_quota_that_stays_used_up_ends_the_command(here, capsys):
    here.google.fault("POST", "", 429, "Quota limit 'TPUV4' has been exceeded.", count=9)
    assert here.run() == 2
    assert "Quota limit 'TPUV4' has been exceeded. (requested 3 times)" in capsys.readouterr().err
    assert here.nothing_left()


@pytest.mark.fault(30)
def test_a_request_that_failed_or_was_suspended_is_deleted_and_made_again(here, capsys):
    here.google.stockout = {"us-central2-b"}

    def spoil() -> None:
        here.until(lambda: len(here.created()) == 1 and here.google.queued)
        here.google.fail("job", "no capacity")
        here.until(lambda: len(here.created()) == 2 and here.google.queued)
        here.google.preempt("job")
        here.until(lambda: len(here.created()) == 3)
        here.google.stockout = set()

    with meanwhile(spoil):
        assert here.run() == 0
    said = capsys.readouterr().out
    assert "FAILED: no capacity: deleting it and requesting another" in said and "is SUSPENDED" in said
    assert here.nothing_left()
