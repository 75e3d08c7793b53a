"""How slices are requested, replaced and deleted, with a cloud in memory and a virtual clock."""

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import UserError
from headrace.tpu import clock, cost, timeouts
from headrace.tpu.cloud import CloudRefused, Slice, SliceState, current_user_label
from headrace.tpu.console import Console
from headrace.tpu.job_ledger import JobLedger
from headrace.tpu.ownership import SliceOwnership
from headrace.tpu.provision import MAX_LOSSES, MAX_QUOTA_ROUNDS, Provisioner
from headrace.tpu.request import Request, parse_tpu_slice


class MemoryCloud:
    """A cloud with at most one slice. Each request takes the next of `answers`: an error to raise, or the
    states that later lookups find, the last of which persists."""

    name, scope = "gcp", "project"

    def __init__(self, *answers: Exception | list[SliceState]) -> None:
        self.answers, self.states = list(answers), list[SliceState]()
        self.zones: list[str] = []  # of all requests
        self.deletions = 0
        self.has_broken_delete = False
        self.is_own = True

    def find(self, name: str, zone: str = "") -> Slice | None:
        if not self.states:
            return None
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        labels = {"headrace": "yes", "headrace-owner": current_user_label() if self.is_own else "somebody"}
        ready = dict(created_at=clock.now(), node_creation_times=frozenset([float(len(self.zones))]))
        slice_zone = self.zones[-1] if self.zones else "us-central2-b"
        times = ready if state is SliceState.READY else {}
        return Slice(name, slice_zone, "v4-16", "on-demand", state, state.name, labels=labels, **times)

    def list_slices(self) -> tuple[list[Slice], dict[str, str]]:
        raise NotImplementedError

    def create(self, request: Request, zone: str, time_limit: float, idle_limit: float | None) -> None:
        self.zones.append(zone)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        self.states = list(answer)

    def set_timer(self, slice_: Slice, time_limit: float, idle_limit: float | None) -> None:
        raise NotImplementedError

    def delete(self, slice_: Slice) -> None:
        self.deletions += 1
        if not self.has_broken_delete:
            self.states = []


class VirtualClock:
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.time = 1e9
        self.on_sleep: Callable[[], None] = lambda: None

    def read(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += max(0.0, seconds)
        self.on_sleep()


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> VirtualClock:
    time = VirtualClock()
    for name, function in (("now", time.read), ("monotonic", time.read), ("sleep", time.sleep)):
        monkeypatch.setattr(clock, name, function)
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    return time


def make_provisioner(cloud: MemoryCloud, *zones: str, keep: bool = False, adopt: bool = False) -> Provisioner:
    shape = parse_tpu_slice("v4-16", "")
    request = Request("job", shape, zones or ("us-central2-b",))
    ledger = JobLedger("project/job", "run")
    return Provisioner(
        cloud, request, cost.Budget(24, 10.0), ledger, console=Console(), keep=keep, adopt=adopt
    )


def test_a_slice_that_becomes_ready_is_used_and_deleted_at_the_end(virtual):
    cloud = MemoryCloud([SliceState.WAITING, SliceState.WAITING, SliceState.READY])
    provisioner = make_provisioner(cloud)
    assert provisioner.ensure_ready().state is SliceState.READY
    assert provisioner.ownership is SliceOwnership.CREATED and not cloud.deletions
    assert provisioner.delete_or_keep() and cloud.deletions == 1 and not cloud.states


def test_zones_are_tried_in_order_and_a_request_that_waits_too_long_is_deleted(virtual):
    refusal = CloudRefused("no capacity", is_quota=False)
    cloud = MemoryCloud([SliceState.WAITING], refusal, [SliceState.READY])
    zones = ("us-central2-b", "us-east1-d", "us-west4-a")
    started_at = virtual.time
    assert make_provisioner(cloud, *zones).ensure_ready().zone == "us-west4-a"
    assert cloud.zones == list(zones) and cloud.deletions == 1
    assert 600 < virtual.time - started_at < 700  # --wait is 10 minutes


def test_a_quota_that_is_used_up_in_every_round_ends_the_command(virtual):
    quota = CloudRefused("Quota limit", is_quota=True)
    cloud = MemoryCloud(*[quota] * 9)
    with pytest.raises(UserError, match="requested 6 times"):
        make_provisioner(cloud, "us-central2-b", "us-east1-d").ensure_ready()
    assert len(cloud.zones) == 2 * MAX_QUOTA_ROUNDS


def test_repeatedly_lost_slices_end_the_command(virtual):
    cloud = MemoryCloud(*[[SliceState.LOST]] * MAX_LOSSES)
    with pytest.raises(UserError, match=f"{MAX_LOSSES} slices in a row were lost"):
        make_provisioner(cloud).ensure_ready()
    assert cloud.deletions == MAX_LOSSES - 1


def test_an_invalid_request_after_a_failed_deletion_does_not_hide_the_slice_from_the_final_deletion(
    virtual, monkeypatch
):
    monkeypatch.setattr(timeouts, "DELETE_TIMEOUT", 60.0)
    cloud = MemoryCloud([SliceState.READY], UserError("quota project is unknown"))
    provisioner = make_provisioner(cloud, keep=True)
    provisioner.ensure_ready()
    cloud.has_broken_delete = True
    assert not provisioner.delete()
    states, cloud.states = cloud.states, []  # the cloud does not list it for a while
    with pytest.raises(UserError, match="quota project"):
        provisioner.ensure_ready()
    assert provisioner.ownership is SliceOwnership.REQUESTED
    cloud.states, cloud.has_broken_delete = states, False
    assert provisioner.delete_or_keep() and not cloud.states  # despite --keep


def test_a_foreign_slice_that_comes_and_goes_while_a_request_is_refused_does_not_end_the_waiting(virtual):
    cloud = MemoryCloud(CloudRefused("no capacity", is_quota=False), [SliceState.READY])
    cloud.is_own, appeared = False, []

    def come_and_go() -> None:
        if len(cloud.zones) == 1 and not appeared:
            appeared.append(True)
            cloud.states = [SliceState.WAITING]
        elif appeared and len(cloud.zones) == 1:
            cloud.states, cloud.is_own = [], True

    virtual.on_sleep = come_and_go
    provisioner = make_provisioner(cloud, adopt=True)
    assert provisioner.ensure_ready().state is SliceState.READY
    assert len(cloud.zones) == 2 and provisioner.ownership is SliceOwnership.CREATED


def test_a_slice_in_use_that_somebody_deletes_is_not_replaced(virtual):
    cloud = MemoryCloud([SliceState.READY])
    provisioner = make_provisioner(cloud)
    provisioner.ensure_ready()
    cloud.states = []
    assert provisioner.ensure_ready().state is SliceState.DELETING
    assert len(cloud.zones) == 1 and provisioner.current is None
