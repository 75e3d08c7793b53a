"""Missing information from Google does not count as absence: zones that do not answer, incomplete lists, and
changes that were accepted but not applied."""

import os
import signal
import time

import pytest

from headrace.cli.main import main
from headrace.tpu import disk, gcp
from headrace.tpu.cloud import CloudUnreachable
from headrace.tpu.delete import delete_until_gone
from tests.tpu.test_slice_lifecycle import HEADRACE, NODE, ZONE, run_concurrently, scenario

pytest.importorskip("google.cloud.tpu_v2", reason="needs google-cloud-tpu: pip install -e '.[cloud]'")

__all__ = ["scenario"]


@pytest.mark.fault(30)
@pytest.mark.parametrize("event", ["preempted", "stopped"])
def test_an_outage_of_another_zone_prevents_neither_deletion_nor_a_new_request(
    scenario, capsys, monkeypatch, event
):
    monkeypatch.setattr("headrace.tpu.google_auth.RETRY_SECONDS", 0.3)
    monkeypatch.setattr(gcp.Gcp.__init__, "__defaults__", ((), 0.1))
    scenario.set_trainer("wait 0")

    slices, exit_code = (2, 0) if event == "preempted" else (1, 75)

    def cause_outage() -> None:
        scenario.wait_until(scenario.is_training)
        scenario.google.fault("GET", "us-east1-d", 503, "zone is down", count=10**5)
        if event == "preempted":
            scenario.google.preempt("job")
        else:
            os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and (
            len(scenario.requested_zones()),
            scenario.is_nothing_left(),
        ) != (slices, True):
            time.sleep(0.05)
        scenario.google.faults.clear()  # a launcher that waited for the zone continues too late
        assert time.monotonic() < deadline

    with run_concurrently(cause_outage):
        assert scenario.run("--zone", "us-east1-d") == exit_code
    assert "COULD NOT" not in capsys.readouterr().err
    assert scenario.requested_zones() == ["us-central2-b"] * slices


def test_a_zone_that_never_answered_may_have_the_slice(scenario, monkeypatch):
    monkeypatch.setattr("headrace.tpu.timeouts.DELETE_TIMEOUT", 3.0)
    cloud = gcp.Gcp("project", ("us-central2-b", "us-east1-d"), retry_seconds=0.1)
    scenario.google.fault("GET", "us-east1-d", 503, "zone is down", count=10**5)
    with pytest.raises(CloudUnreachable, match="zone is down"):
        cloud.find("job")
    scenario.google.make_node(NODE, HEADRACE)
    assert cloud.find("job").zone == "us-central2-b"
    assert delete_until_gone(cloud, "job", print, "us-central2-b") and not scenario.google.nodes
    scenario.google.faults.clear()
    assert cloud.find("job") is None
    scenario.google.fault("GET", "us-east1-d", 503, "zone is down", count=10**5)
    assert cloud.find("job") is None and cloud.find("job", "us-central2-b") is None
    with pytest.raises(CloudUnreachable, match="zone is down"):
        cloud.find("job", "us-east1-d")  # this zone is requested
    scenario.google.fault("GET", "us-central2-b", 503, "so is this", count=10**5)
    with pytest.raises(CloudUnreachable, match="no answer"):
        cloud.find("job")


def test_a_list_without_a_zone_is_reported_as_incomplete(scenario, capsys, monkeypatch):
    monkeypatch.setattr("headrace.tpu.timeouts.DELETE_TIMEOUT", 0.5)
    other = f"{ZONE.replace('us-central2-b', 'us-east1-d')}/nodes/other"
    scenario.google.make_node(NODE, HEADRACE)
    scenario.google.make_node(other, HEADRACE)
    scenario.google.unreachable = {"us-central2-b"}
    warning = "warning: us-central2-b does not answer, so its slices are not listed"
    for argv in (["ls"], ["ls", "--zone", "us-central2-b"], ["ls", "--orphans"]):
        assert main(["tpu", *argv]) == 1
        output = capsys.readouterr().out
        assert (
            warning in output and "no slices" not in output and ("other" in output) == ("--zone" not in argv)
        )
    for zone in ([], ["--zone", "us-central2-b"]):
        assert main(["tpu", "delete", "job", "--force", *zone]) == 1
        output = capsys.readouterr()
        assert "does not reach us-central2-b: its slices are unknown" in output.err, output
        assert "deleted" not in output.out and "found no slice" not in output.err
    assert main(["tpu", "delete", "other", "--force"]) == 0
    assert "other deleted" in capsys.readouterr().out and list(scenario.google.nodes) == [NODE]
    cloud = gcp.Gcp("project", ("us-central2-b",))
    scenario.google.unreachable = set()
    slice_ = cloud.find("job")
    scenario.google.unreachable = {"us-central2-b"}
    with pytest.raises(CloudUnreachable):
        cloud.set_timer(slice_, 1.0, None)


@pytest.mark.parametrize("zone", [[], ["--zone", "us-central2-b"]])
def test_disks_of_all_pages_are_listed(scenario, capsys, monkeypatch, zone):
    scenario.google.page_size = 1
    for number in range(3):
        disk.Disks("project", "us-central2-b").create(f"disk-{number}", 10, "pd-balanced")
    assert main(["tpu", "disk", "ls", *zone]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        f"disk-{number}" for number in range(3)
    ]


def test_a_timer_change_that_fails_after_being_accepted_is_reported(scenario, capsys):
    config = HEADRACE | {"labels": {"headrace": "yes", "headrace-seconds": "864000", "headrace-idle": "0"}}
    config["metadata"] = {"headrace-idle": "0", "headrace-seconds": "864000"}
    scenario.google.make_node(NODE, config)
    scenario.google.failing_updates = 1
    assert scenario.run("--max-hours", "1", "--keep") == 0
    assert "could not change the timer of job, which stays as it is: " in capsys.readouterr().out
    assert scenario.google.nodes[NODE]["metadata"]["headrace-seconds"] == "864000"


@pytest.mark.fault(30)
def test_zones_are_tried_in_order_when_capacity_or_quota_is_missing(scenario, capsys):
    scenario.google.stockout, scenario.google.seconds_per_state = (
        {"us-central2-b"},
        1e-6,
    )  # the other zones have capacity at once
    scenario.google.fault("POST", "us-east1-d", 429, "Quota limit 'TPUV4' has been exceeded.")
    zones = ["--zone", "us-east1-d,us-west4-a", "--wait", "0.05"]  # 3 s
    assert scenario.run(*zones) == 0
    output = capsys.readouterr().out
    assert (
        scenario.requested_zones() == ["us-central2-b", "us-east1-d", "us-west4-a"]
        and scenario.is_nothing_left()
    )
    assert "WAITING_FOR_RESOURCES" in output and "trying the next zone" in output and "Quota limit" in output


@pytest.mark.fault(30)
def test_a_quota_that_remains_exhausted_ends_the_command(scenario, capsys):
    scenario.google.fault("POST", "", 429, "Quota limit 'TPUV4' has been exceeded.", count=9)
    assert scenario.run() == 2
    assert "Quota limit 'TPUV4' has been exceeded. (requested 3 times)" in capsys.readouterr().err
    assert scenario.is_nothing_left()


@pytest.mark.fault(30)
def test_a_failed_or_suspended_request_is_deleted_and_repeated(scenario, capsys):
    scenario.google.stockout = {"us-central2-b"}

    def fail_requests() -> None:
        scenario.wait_until(lambda: len(scenario.requested_zones()) == 1 and scenario.google.queued)
        scenario.google.fail("job", "no capacity")
        scenario.wait_until(lambda: len(scenario.requested_zones()) == 2 and scenario.google.queued)
        scenario.google.preempt("job")
        scenario.wait_until(lambda: len(scenario.requested_zones()) == 3)
        scenario.google.stockout = set()

    with run_concurrently(fail_requests):
        assert scenario.run() == 0
    output = capsys.readouterr().out
    assert "FAILED: no capacity: deleting it and requesting another" in output and "is SUSPENDED" in output
    assert scenario.is_nothing_left()
