"""A slice that is ready, by whatever way that takes: found or asked for, waited for, asked for elsewhere; and
given back. What Headrace did not make is never deleted from here."""

import dataclasses
import time
from collections.abc import Callable

from headrace.errors import UserError
from headrace.tpu import cost, job_ledger as place
from headrace.tpu.cloud import Cloud, LoggedOut, Refused, Rented, Silent, State, by_hand
from headrace.tpu.outcome import give_back
from headrace.tpu.request import Request
from headrace.tpu.timeouts import PATIENCE, POLL, REACH
from headrace.tpu.console import Voice

FAILURES = 5  # requests that failed, before that is told
LOSSES = 10  # slices in a row that were lost before anything trained on them
QUOTA = 3  # rounds through all zones that all say the quota is used up
IDLE = 1800.0  # seconds after which a slice whose job has ended gives itself back


class Renter:
    def __init__(
        self,
        cloud: Cloud,
        request: Request,
        budget: cost.Budget,
        ledger: place.Ledger,
        *,
        voice: Voice,
        keep: bool = False,
        adopt: bool = False,
        near: Callable[[str], None] = lambda zone: None,
    ) -> None:
        """`adopt` allows a slice that another user made; `near` refuses a zone that is too far from the
        data."""
        self.cloud, self.request, self.budget, self.ledger = cloud, request, budget, ledger
        self.voice, self.keep, self.adopt, self.near = voice, keep, adopt, near
        self.mine = False  # Headrace made it, and at the end it may be deleted
        self.made = False  # asked for here, so that nobody trained on it before
        self.held = False  # there are machines that we may use
        self.foreign = False  # and we did not make them
        self.ending = False  # we delete it
        self.found: Rented | None = None  # what is there, as far as is known
        self.known: Rented | None = None  # what was there when it was looked at last
        self.begun = 0.0  # when its hours began
        self.lost, self.failed, self.zone = 0, 0, 0
        self.asked, self.waiting, self.where = -60.0, time.time(), request.zones[0]

    def ensure(self) -> Rented:
        """One that is ready; or the one that we held or waited for, where somebody else deletes it: who did
        so wants no other."""
        refusals, since, self.voice.alone = 0, time.monotonic(), False
        while True:
            found = self.found = self.look()
            if (self.held or self.made) and self.known is not None and self.taken(self.known, found):
                self.found = None
                return dataclasses.replace(self.known, state=State.DELETING)
            if (found := self.found) is None:
                refusals = self.create(refusals, self.affordable())
                since = time.monotonic()
                continue
            self.check(found)
            self.known = found
            if found.state is State.READY:
                self.voice.show("")
                self.ending = False
                self.held, self.foreign, self.begun = True, not self.mine, self.since(found)
                self.voice.alone = True
                return found
            if found.state in (State.LOST, State.FAILED):
                self.replace(found)
            elif found.state is State.DELETING or not self.mine or found.said == "PROVISIONING":
                self.wait(found, since)
            elif found.created:  # being repaired or started, with what is on it
                self.held, self.mine = self.held or not self.made, self.made
                self.wait(found, since)
            elif found.zone not in self.request.zones:
                self.say(f"{found.name} is {found.said} in {found.zone}, which is no --zone now: deletes it")
                self.delete()
            elif len(self.request.zones) > 1 and time.monotonic() - since > 60 * self.request.wait:
                self.say(f"nothing in {found.zone} within {self.request.wait:g} min: tries the next zone")
                self.delete()
                self.zone += 1
            else:
                self.wait(found, since)

    def taken(self, known: Rented, found: Rented | None) -> bool:
        """By somebody else, which is believed when it is said twice: nodes and requests are two lists, and
        what is taken away by the cloud may be DELETING for a moment."""
        if self.ending or not lacks(known, found):
            return False
        time.sleep(min(POLL, 5.0))
        self.found = self.look()
        return lacks(known, self.found)

    def wait(self, found: Rented, since: float) -> None:
        minutes = (time.monotonic() - since) / 60
        self.voice.show(f"{found.name} in {found.zone}: {found.said}", f" for {minutes:.0f} min")
        self.waiting = time.time()
        time.sleep(POLL)

    def affordable(self) -> float:
        """Seconds that a new slice may have."""
        self.ledger.close(time.time())
        hours = self.left()
        if self.scarce(hours):
            raise UserError(f"{self.spent()}: nothing is left of --max-hours or --max-cost; more goes on")
        return hours * 3600

    def scarce(self, hours: float) -> bool:
        return hours <= min(cost.SOON, self.budget.hours / 5)

    def create(self, refusals: int, seconds: float) -> int:
        """Returns how many zones in a row have refused."""
        zone = self.request.zones[self.zone % len(self.request.zones)]
        before = self.mine, self.made
        try:
            self.mine = self.made = True
            self.held, self.found, self.known = False, None, None
            self.asked, self.waiting, self.where = time.monotonic(), time.time(), zone
            self.cloud.create(self.request, zone, seconds, None if self.keep else IDLE)
            self.say(f"asked for {self.request.accelerator} {self.request.terms} in {zone}")
            time.sleep(min(POLL, 2.0))  # before it is looked for
            return 0
        except Refused as why:
            refusals += 1
            rounds = refusals / len(self.request.zones)
            self.say(f"{zone}: {why}")
            if why.quota and rounds >= QUOTA:
                raise UserError(f"{zone}: {why} (asked {refusals} times)") from None
            self.zone += 1
            if rounds >= 1:
                time.sleep(min(POLL * 2**rounds, PATIENCE))
            return refusals
        except Silent as why:
            self.voice.show(f"the cloud does not answer: {why}")
            time.sleep(POLL)
            return refusals
        except UserError:  # what was asked for cannot be had: nothing was made
            self.mine, self.made = before
            raise

    def check(self, found: Rented) -> None:
        """That it is what was asked for, and may be used. Until that is known it is not ours to delete."""
        self.mine = False
        own = found.ours and not found.theirs
        if found.theirs and not self.adopt:
            raise UserError(
                f"{found.name}: found a slice of that name in {found.zone} that {found.theirs} made; give "
                "another --name, or `headrace tpu run --adopt`, which uses it and leaves it"
            )
        if not found.ours and not self.keep:
            raise UserError(
                f"{found.name}: found a slice that Headrace did not make, and would delete at the end; "
                "--keep uses it and leaves it"
            )
        if not own and found.state in (State.LOST, State.FAILED):
            who = f"{found.theirs} made it" if found.theirs else "Headrace did not make it"
            raise UserError(
                f"{found.name}: found it {found.said} in {found.zone}, and {who}; "
                f"give another --name, or `{by_hand(self.cloud, found)}`"
            )
        if found.state is State.STOPPED:
            raise UserError(f"{found.name}: found it {stopped(self.cloud, found)}")
        there = (found.slices, found.accelerator, found.terms)
        asked = (self.request.slice.slices, self.request.accelerator, self.request.terms)
        if there != asked:
            raise UserError(
                f"{found.name}: found a {sold(*there)} of that name in {found.zone}, asked for a "
                f"{sold(*asked)}; ask for what is there, give another --name, or delete it"
            )
        if found.zone not in self.request.zones and found.state is State.READY:
            self.near(found.zone)
        if own and found.state is State.READY and not self.made and not self.begun:
            self.enough(found)
        self.mine, self.where = own, found.zone
        if own and found.stays and not self.keep and not self.made:
            self.keep = True
            self.say(f"{found.name} was made to stay (by `tpu create` or --keep): it is kept at the end")

    def enough(self, found: Rented) -> None:
        """Refuses hours that are over by now for one that is to stay: its timer would end it at once."""
        hours = (time.time() - found.created) / 3600
        left = self.budget.hours - self.ledger.spent(time.time(), but=found.created) - hours
        if self.budget.asked and (self.keep or found.stays) and self.scarce(left):
            raise UserError(
                f"{found.name}: found it {cost.hours(hours)} old, and that counts: --max-hours or --max-cost "
                f"({cost.hours(self.budget.hours)}) would delete it; give more, or another --name"
            )

    def since(self, found: Rented) -> float:
        """From when its hours count: all of them if it is ours. On what is not, from when we began, though
        the launcher was killed meanwhile."""
        if self.mine:
            return found.created
        last = self.ledger.lives[-1] if self.ledger.lives else {}
        same = last.get("open") and last["zone"] == found.zone and last["created"] >= found.created
        return last["created"] if same else time.time()

    def replace(self, found: Rented) -> None:
        """One that is lost or failed holds its name until it is deleted."""
        if found.state is State.LOST:
            # Machines may have been there between two looks, and cost.
            self.ledger.seen(found.zone, found.created or self.waiting, time.time())
            if found.said.startswith("ACTIVE") and not self.still(found):
                return
            self.count_loss(found.said)
        else:
            self.failed += 1
            self.zone += 1
            if self.failed >= FAILURES:
                raise UserError(f"{found.name}: {found.said}; given up after {self.failed} times")
        self.say(f"{found.name} is {found.said}: deletes it and asks again")
        self.delete()
        if self.lost > 1:
            time.sleep(min(POLL * 2**self.lost, PATIENCE))

    def still(self, found: Rented) -> bool:
        """Whether the cloud says the same once more: lists of requests and of nodes are two answers."""
        time.sleep(min(POLL, 5.0))
        again = self.look()
        return again is not None and (again.state, again.said) == (found.state, found.said)

    def count_loss(self, said: str) -> None:
        """Of a slice on which nothing trained. Whoever trains sets this back."""
        self.lost += 1
        if self.lost >= LOSSES:
            raise UserError(
                f"{self.request.name}: {self.lost} slices in a row were lost before anything trained on "
                f"them, the last one {said}; {self.spent()}; another zone or other terms may do"
            )

    def timed(self, found: Rented) -> None:
        """The timer on the slice ends it when what is left now is over; one that it has already stays if
        nothing else is asked for."""
        timer = None if found.seconds is None else found.seconds - (self.begun - found.created)
        self.seen(found, timer)
        before = self.ledger.spent(time.time(), but=self.begun)
        if not self.budget.asked and timer:
            self.budget = dataclasses.replace(self.budget, hours=before + timer / 3600)
        seconds = (self.budget.hours - before) * 3600
        idle = None if self.keep else IDLE
        if self.mine and (abs((found.seconds or 0.0) - seconds) > 60 or found.idle != idle):
            try:
                self.cloud.extend(found, max(seconds, 1.0), idle)
                self.seen(found, seconds)
            except UserError as why:  # it trains all the same, and its timer ends it when it would have
                self.say(f"the timer of {found.name} stays as it is: {why}")

    def seen(self, found: Rented, seconds: float | None = None) -> None:
        self.ledger.seen(found.zone, self.begun, time.time(), seconds)

    def look(self) -> Rented | None:
        """What cannot be put right by waiting is told at once, unless something was rented by then."""
        until = time.monotonic() + REACH
        while True:
            try:
                return self.cloud.find(self.request.name)
            except UserError as why:
                passing = isinstance(why, Silent | Refused) and not isinstance(why, LoggedOut)
                lasts = not isinstance(why, Silent | Refused) and time.monotonic() > until
                if lasts or not passing and not self.mine:
                    raise
                self.voice.show(f"the cloud does not answer: {why}")
                time.sleep(POLL)

    def delete(self) -> bool:
        self.ending = True  # it is we who delete it
        # What was asked for a moment ago may not be seen yet.
        time.sleep(max(0.0, min(POLL, 5.0) - (time.monotonic() - self.asked)))
        gone = give_back(self.cloud, self.request.name, self.say, self.where, self.known)
        if gone:
            self.let_go()
            self.ledger.close(time.time())
        return gone

    def let_go(self) -> None:
        """It is there no more, or nothing of ours."""
        self.made = self.held = self.ending = False
        self.found = None

    def give_up(self) -> bool:
        """At the end of all: deletes what should not stay, and tells of what does; returns whether nothing is
        left that should be gone. A request that was made here and came to nothing yet is not kept: nobody
        would be there when it does."""
        if self.mine and (not self.keep or self.made and not self.held):
            return self.delete()
        if self.held and self.foreign:  # what follows is not ours to count
            self.ledger.close(time.time())
        if self.found is not None and (self.held or self.mine):
            self.say(self.kept(self.found))
        return True

    def kept(self, found: Rented) -> str:
        local = self.cloud.name == "local"
        rate = "money" if self.budget.rate is None else f"${self.budget.rate:,.2f} an hour"
        costs = "" if local else f" and costs {rate}"
        costs += " as soon as it is there," if costs and not found.created else ""
        return f"{found.name} is kept{costs} until `{by_hand(self.cloud, found)}`"

    def left(self) -> float:
        """Hours."""
        return self.budget.hours - self.ledger.spent(time.time())

    def spent(self) -> str:
        hours, lives = self.ledger.spent(time.time()), len(self.ledger.lives)
        words = f"had {cost.hours(hours)} of the slice in {lives} {'life' if lives == 1 else 'lives'}"
        return words if self.budget.rate is None else f"{words}, about ${hours * self.budget.rate:,.2f}"

    def say(self, words: str) -> None:
        self.voice.say(words)


def stopped(cloud: Cloud, found: Rented) -> str:
    """By somebody who means to start it again."""
    command = f"gcloud compute tpus tpu-vm start {found.name} --project={cloud.scope} --zone={found.zone}"
    return (
        f"{found.said} in {found.zone}, with its disks; `{command}` starts it "
        "(it deletes itself then if its hours are over), "
        f"`{by_hand(cloud, found)}` deletes it"
    )


def lacks(known: Rented, found: Rented | None) -> bool:
    """Whether the one that is known is not there any more, or not for long."""
    return found is None or found.state is State.DELETING or found.replaces(known)


def sold(slices: int, accelerator: str, terms: str) -> str:
    return f"{f'{slices}x' if slices > 1 else ''}{accelerator} {terms}"
