"""Rent a TPU slice, wait until it is ready, and delete it at the end. This is where money is spent:

1. Only a slice that this user requested through Headrace is ever deleted (`SliceOwnership`).
2. A slice costs money from the creation of its machines until it is deleted. `JobLedger` adds these hours up
   over all attempts of a job, and no slice is requested once they reach the budget
   (`require_seconds_left`).
3. If this process or its computer dies, training continues, and the same command finds the slice again. If
   the command is never repeated, the slice deletes itself: a timer on it (timer.py) does so when its hours
   are used up, or `IDLE_LIMIT` after its job has ended (`request_slice`, `set_timer`).
4. When the command ends, for whatever reason, `delete_or_keep` deletes the slice and waits until it is gone,
   or logs what it costs from then on and the command that deletes it."""

import dataclasses
from collections.abc import Callable

from headrace.errors import UserError
from headrace.tpu import clock, cost, timeouts
from headrace.tpu.cloud import (
    Cloud,
    CloudRefused,
    CloudUnreachable,
    CredentialsExpired,
    Slice,
    SliceState,
    delete_command,
)
from headrace.tpu.console import Console
from headrace.tpu.delete import delete_until_gone
from headrace.tpu.job_ledger import JobLedger
from headrace.tpu.ownership import SliceOwnership, check_usable
from headrace.tpu.request import Request

IDLE_LIMIT = 1800.0  # seconds after the end of its job at which a slice deletes itself
MAX_FAILURES = 5  # slices that the cloud failed to create
MAX_LOSSES = 10  # slices in a row that were lost before training started on them
MAX_QUOTA_ROUNDS = 3  # rounds through all zones in which the quota was used up


class Provisioner:
    """Rents slices for one job, one at a time, and deletes them.

    The life of a slice: `request_slice`, `check_and_claim`, `wait_or_change_zone`, `start_using`,
    `set_timer`, `delete_or_keep`. A slice that the cloud takes away before it is ready goes through
    `delete_to_replace`."""

    def __init__(
        self,
        cloud: Cloud,
        request: Request,
        budget: cost.Budget,
        ledger: JobLedger,
        *,
        console: Console,
        keep: bool = False,
        adopt: bool = False,
        region_guard: Callable[[str], None] = lambda zone: None,
    ) -> None:
        """`keep` leaves the slice running at the end, and `adopt` allows a slice that another user made.
        `region_guard` raises UserError for a zone that is too far from the data."""
        self.cloud, self.request, self.budget, self.ledger = cloud, request, budget, ledger
        self.console, self.log = console, console.log
        self.keep, self.adopt, self.region_guard = keep, adopt, region_guard
        self.ownership = SliceOwnership.NONE
        self.current: Slice | None = None  # what the last lookup found
        self.accepted: Slice | None = None  # the last slice that passed `check_and_claim`
        self.is_deleting = False  # this process deletes the slice, so it is expected to disappear
        self.billing_start = 0.0  # when the hours of this slice began to count, in seconds since 1970
        self.refusals, self.failures, self.losses = 0, 0, 0  # refusals and losses in a row
        self.zone_index = 0  # of the zone for the next request; counts on after the last zone
        self.last_zone = request.zones[0]  # of the last request or lookup
        self.requested_at = -60.0  # on the monotonic clock; -60: long ago
        self.last_waited_at = clock.now()  # when the slice was last seen without machines

    def ensure_ready(self) -> Slice:
        """Return a slice that is ready for training: the one that exists, or a new one.

        If somebody deletes the slice that this process uses or requested, it is returned in state DELETING
        and is not replaced: whoever deleted it wants no other."""
        self.console.detach_on_hangup = False
        self.refusals, waiting_since = 0, clock.monotonic()
        while True:
            self.current = self.find_slice()
            if self.accepted is not None and self.was_deleted_by_others(self.accepted):
                self.current = None
                return dataclasses.replace(self.accepted, state=SliceState.DELETING)
            slice_ = self.current
            if slice_ is None:
                self.ledger.close(clock.now())
                self.request_slice(self.require_seconds_left())
                waiting_since = clock.monotonic()
                continue
            self.check_and_claim(slice_)
            if slice_.state is SliceState.READY:
                self.start_using(slice_)
                return slice_
            if slice_.state in (SliceState.LOST, SliceState.FAILED):
                self.delete_to_replace(slice_)
            else:
                self.wait_or_change_zone(slice_, waiting_since)

    def find_slice(self) -> Slice | None:
        """Look the slice up by name, and repeat that until the cloud answers.

        An outage is waited out. Any other error is raised at once as long as nothing is rented; after that,
        expired credentials are waited out too, and what remains is raised after `CONNECT_TIMEOUT`."""
        deadline = clock.monotonic() + timeouts.CONNECT_TIMEOUT
        while True:
            try:
                return self.cloud.find(self.request.name)
            except UserError as error:
                is_login = isinstance(error, CredentialsExpired)
                is_outage = isinstance(error, CloudUnreachable | CloudRefused) and not is_login
                if not is_outage and not self.ownership.may_delete:
                    raise
                if not is_outage and not is_login and clock.monotonic() > deadline:
                    raise
                self.console.show_status(f"the cloud does not answer: {error}")
                clock.sleep(timeouts.POLL)

    def was_deleted_by_others(self, expected: Slice) -> bool:
        """Whether somebody else deleted the slice that this process uses or requested.

        Two lookups must agree: the cloud lists requests and nodes separately, and a slice that the cloud
        itself takes away may be DELETING for a moment. A slice of another user that was only waited for was
        not taken: its place is free for a request."""
        is_expected = self.ownership.is_new or self.ownership.may_use
        if self.is_deleting or not is_expected or not has_disappeared(expected, self.current):
            return False
        clock.sleep(min(timeouts.POLL, 5.0))
        self.current = self.find_slice()
        return has_disappeared(expected, self.current)

    def request_slice(self, time_limit: float) -> None:
        """Request a slice in the next zone, without waiting for it. It costs money once it has machines.

        With it comes the timer that deletes it `time_limit` seconds after its creation, or `IDLE_LIMIT` after
        its job has ended. The machines start the timer by themselves, whatever becomes of this process."""
        zone = self.request.zones[self.zone_index % len(self.request.zones)]
        previous_ownership = self.ownership
        try:
            # Set before the call: if that is interrupted or not answered, there may be a slice to delete.
            self.ownership = SliceOwnership.REQUESTED
            self.current = self.accepted = None
            self.requested_at, self.last_waited_at, self.last_zone = clock.monotonic(), clock.now(), zone
            self.cloud.create(self.request, zone, time_limit, self.idle_limit())
            self.log(f"requested {self.request.accelerator} {self.request.terms} in {zone}")
            clock.sleep(min(timeouts.POLL, 2.0))  # the cloud does not list it at once
            self.refusals = 0
        except CloudRefused as refusal:
            self.wait_after_refusal(zone, refusal)
        except CloudUnreachable as error:
            self.console.show_status(f"the cloud does not answer: {error}")
            clock.sleep(timeouts.POLL)
        except UserError:  # an invalid request, from which nothing was made
            # A slice that could not be deleted may still be there: it is deleted at the end, even with
            # `keep`.
            self.ownership = previous_ownership.to_unready()
            raise

    def wait_after_refusal(self, zone: str, refusal: CloudRefused) -> None:
        """Choose the next zone and wait: not at all in the first round through the zones, then longer each
        time. Raises UserError if the quota was used up in `MAX_QUOTA_ROUNDS` rounds."""
        self.refusals += 1
        rounds = self.refusals / len(self.request.zones)
        self.log(f"{zone}: {refusal}")
        if refusal.is_quota and rounds >= MAX_QUOTA_ROUNDS:
            raise UserError(f"{zone}: {refusal} (requested {self.refusals} times)") from None
        self.zone_index += 1
        if rounds >= 1:
            clock.sleep(min(timeouts.POLL * 2**rounds, timeouts.MAX_BACKOFF))

    def check_and_claim(self, slice_: Slice) -> None:
        """Check that the slice is what was requested and may be used, and find out whose it is.

        Raises UserError for a slice that may not be used."""
        previous = self.ownership
        self.ownership = previous.to_protected()  # if a check fails, the slice is not deleted at the end
        check_usable(slice_, self.cloud, self.request, keep=self.keep, adopt=self.adopt)
        if slice_.zone not in self.request.zones and slice_.state is SliceState.READY:
            self.region_guard(slice_.zone)
        is_earlier = slice_.is_own and not previous.is_new
        if is_earlier and slice_.state is SliceState.READY and not self.billing_start:
            self.check_hours_left(slice_)
        self.ownership = SliceOwnership.of(
            is_own=slice_.is_own, is_new=previous.is_new, may_use=previous.may_use
        )
        self.accepted, self.last_zone = slice_, slice_.zone
        if is_earlier and slice_.outlives_job and not self.keep:
            self.keep = True
            self.log(f"{slice_.name} was made with `tpu create` or --keep, so it is kept at the end")

    def start_using(self, slice_: Slice) -> None:
        """Take a slice that is ready into use. From here on, training continues if the terminal is closed."""
        self.console.show_status("")
        self.is_deleting = False
        self.billing_start = self.find_billing_start(slice_)
        self.ownership = SliceOwnership.of(
            is_own=self.ownership.may_delete, is_new=self.ownership.is_new, may_use=True
        )
        self.console.detach_on_hangup = True

    def wait_or_change_zone(self, slice_: Slice, waiting_since: float) -> None:
        """Wait for a slice that is not ready. A request that is in the wrong zone, or has been queued in its
        zone for longer than --wait, is deleted instead."""
        minutes = (clock.monotonic() - waiting_since) / 60
        # PROVISIONING: its TPUs are found, and the machines are being created.
        is_queued = slice_.state is SliceState.WAITING and slice_.status_text != "PROVISIONING"
        if not is_queued or not self.ownership.may_delete:
            self.wait_for_poll(slice_, minutes)
        elif slice_.created_at:  # being repaired or started again, with everything on its disks
            if not self.ownership.is_new:
                self.ownership = SliceOwnership.PROTECTED
            self.wait_for_poll(slice_, minutes)
        elif slice_.zone not in self.request.zones:
            status = f"{slice_.name} is {slice_.status_text} in {slice_.zone}"
            self.log(f"{status}, which --zone does not name: deleting it")
            self.delete()
        elif len(self.request.zones) > 1 and minutes > self.request.wait:
            self.log(f"no TPUs in {slice_.zone} within {self.request.wait:g} min: trying the next zone")
            self.delete()
            self.zone_index += 1
        else:
            self.wait_for_poll(slice_, minutes)

    def wait_for_poll(self, slice_: Slice, minutes_waited: float) -> None:
        """Show for how long the slice has not been ready, and sleep until the next lookup."""
        status = f"{slice_.name} in {slice_.zone}: {slice_.status_text}"
        self.console.show_status(status, f" for {minutes_waited:.0f} min")
        self.last_waited_at = clock.now()
        clock.sleep(timeouts.POLL)

    def delete_to_replace(self, slice_: Slice) -> None:
        """Delete a slice that was lost or failed: nothing else can be requested under its name until then."""
        if slice_.state is SliceState.LOST:
            # It may have had machines between two lookups, which cost money.
            self.ledger.record(slice_.zone, slice_.created_at or self.last_waited_at, clock.now())
            if slice_.status_text.startswith("ACTIVE") and not self.is_confirmed(slice_):
                return
            self.count_loss(slice_.status_text)
        else:
            self.failures += 1
            self.zone_index += 1
            if self.failures >= MAX_FAILURES:
                count = f"{self.failures} failures"
                raise UserError(f"{slice_.name}: {slice_.status_text}; giving up after {count}")
        self.log(f"{slice_.name} is {slice_.status_text}: deleting it and requesting another")
        self.delete()
        if self.losses > 1:
            clock.sleep(min(timeouts.POLL * 2**self.losses, timeouts.MAX_BACKOFF))

    def is_confirmed(self, slice_: Slice) -> bool:
        """Whether a second lookup finds the slice in the same state. The cloud lists requests and nodes
        separately, and the two may disagree for a moment."""
        clock.sleep(min(timeouts.POLL, 5.0))
        again = self.find_slice()
        return again is not None and (again.state, again.status_text) == (slice_.state, slice_.status_text)

    def count_loss(self, status_text: str) -> None:
        """Count a slice that was lost before training started on it; raise UserError after too many in a row.
        The launcher sets `losses` back to 0 when training starts."""
        self.losses += 1
        if self.losses >= MAX_LOSSES:
            raise UserError(
                f"{self.request.name}: {self.losses} slices in a row were lost before training started, the "
                f"last one {status_text}; {self.usage_text()}; another zone or other terms may help"
            )

    def delete(self) -> bool:
        """Delete the slice and wait until it is gone and costs nothing. Return False if it is still there."""
        self.is_deleting = True
        # The cloud may not list a new request yet: it would look as if it were gone already.
        clock.sleep(max(0.0, min(timeouts.POLL, 5.0) - (clock.monotonic() - self.requested_at)))
        is_gone = delete_until_gone(self.cloud, self.request.name, self.log, self.last_zone, self.accepted)
        if is_gone:
            self.ownership, self.is_deleting, self.current = SliceOwnership.DELETED, False, None
            self.ledger.close(clock.now())
        return is_gone

    def delete_or_keep(self) -> bool:
        """Delete the slice at the end of the command, or log what it costs from then on.

        A new request that has no machines yet is deleted even with `keep`, or it would begin to cost money
        when no process watches it. Return False if a slice is left that should be gone."""
        if self.ownership.may_delete and (not self.keep or self.ownership is SliceOwnership.REQUESTED):
            return self.delete()
        if self.ownership is SliceOwnership.FOREIGN:
            self.ledger.close(clock.now())  # its later hours are not this user's
        if self.current is not None and (self.ownership.may_use or self.ownership.may_delete):
            self.log(self.kept_message(self.current))
        return True

    def abandon(self) -> None:
        """Give up all rights to the slice, since somebody else may be using it. `delete_or_keep` does not
        even mention it then."""
        self.ownership, self.is_deleting, self.current = SliceOwnership.NONE, False, None

    def protect(self) -> None:
        """Give up the right to delete the slice, but not to use it."""
        self.ownership = self.ownership.to_protected()

    def kept_message(self, slice_: Slice) -> str:
        """Message that the slice stays, what it costs, and how to delete it."""
        command = delete_command(self.cloud, slice_)
        if self.cloud.name == "local":
            return f"{slice_.name} is kept until you run `{command}`"
        rate = self.budget.dollars_per_hour
        price = "money" if rate is None else f"${rate:,.2f} per hour"
        start = "" if slice_.created_at else " as soon as it is ready,"
        return f"{slice_.name} is kept and costs {price}{start} until you run `{command}`"

    def require_seconds_left(self) -> float:
        """Seconds of the budget that are left for a new slice. Raises UserError if they are too few."""
        hours = self.hours_left()
        if self.is_out_of_budget(hours):
            raise UserError(
                f"{self.usage_text()}: --max-hours or --max-cost is reached; run the same command with a "
                "higher limit to continue"
            )
        return hours * 3600

    def hours_left(self) -> float:
        """Hours of the budget that are left; negative if it is overdrawn."""
        return self.budget.hours - self.ledger.hours_spent(clock.now())

    def is_out_of_budget(self, hours_left: float) -> bool:
        """Whether so few hours are left that renting a slice is not worth it."""
        return hours_left <= min(cost.MIN_HOURS, self.budget.hours / 5)

    def usage_text(self) -> str:
        """Hours and, where the price is known, dollars that the job has used so far."""
        hours, attempts = self.ledger.hours_spent(clock.now()), len(self.ledger.attempts)
        text = f"used {cost.format_hours(hours)} of slice time in {attempts} attempt{'s' * (attempts != 1)}"
        rate = self.budget.dollars_per_hour
        return text if rate is None else f"{text}, about ${hours * rate:,.2f}"

    def check_hours_left(self, slice_: Slice) -> None:
        """Raise UserError if a slice that is to be kept is so old that its timer would delete it at once."""
        age = (clock.now() - slice_.created_at) / 3600
        hours_before = self.ledger.hours_spent(clock.now(), excluding=slice_.created_at)
        is_kept = self.keep or slice_.outlives_job
        is_over = self.is_out_of_budget(self.budget.hours - hours_before - age)
        if self.budget.set_by_user and is_kept and is_over:
            limit = cost.format_hours(self.budget.hours)
            raise UserError(
                f"{slice_.name}: found a slice that is {cost.format_hours(age)} old, and these hours count: "
                f"--max-hours or --max-cost ({limit}) would delete it at once; raise the limit, or choose "
                "another --name"
            )

    def find_billing_start(self, slice_: Slice) -> float:
        """The time from which the hours of a slice count. If this user pays for it, that is its creation.
        Otherwise it is when this job began to use it, which an earlier process may have recorded."""
        if self.ownership.may_delete:
            return slice_.created_at
        attempt = self.ledger.attempts[-1] if self.ledger.attempts else {}
        is_open = attempt.get("open") and attempt["zone"] == slice_.zone
        return attempt["created"] if is_open and attempt["created"] >= slice_.created_at else clock.now()

    def record(self, slice_: Slice, time_limit: float | None = None) -> None:
        """Record in the ledger that the slice exists now, and after how many seconds its timer ends it."""
        self.ledger.record(slice_.zone, self.billing_start, clock.now(), time_limit)

    def set_timer(self, slice_: Slice) -> None:
        """Set the timer on the slice to what is left of the budget.

        If the user gave no limit, a timer that the slice already has stays, and is the limit of the job."""
        timer = slice_.time_limit
        if timer is not None:
            timer -= self.billing_start - slice_.created_at  # counts from the creation, the budget does not
        self.record(slice_, timer)
        hours_before = self.ledger.hours_spent(clock.now(), excluding=self.billing_start)
        if timer and not self.budget.set_by_user:
            self.budget = dataclasses.replace(self.budget, hours=hours_before + timer / 3600)
        time_limit = (self.budget.hours - hours_before) * 3600
        is_set = abs((slice_.time_limit or 0.0) - time_limit) <= 60 and slice_.idle_limit == self.idle_limit()
        if is_set or not self.ownership.may_delete:
            return
        try:
            self.cloud.set_timer(slice_, max(time_limit, 1.0), self.idle_limit())
            self.record(slice_, time_limit)
        except UserError as error:
            # Training continues: the old timer still deletes the slice, at its old time.
            self.log(f"could not change the timer of {slice_.name}, which stays as it is: {error}")

    def idle_limit(self) -> float | None:
        """Seconds after the end of its job at which the slice deletes itself; None if it is kept."""
        return None if self.keep else IDLE_LIMIT


def has_disappeared(expected: Slice, current: Slice | None) -> bool:
    """Whether a slice is gone, about to go, or replaced by another of the same name."""
    return current is None or current.state is SliceState.DELETING or current.replaces(expected)
