"""The whole story of a job: a slice is found or rented, set up, trained on, taken anew after a preemption,
and given back at the end, whatever the end is. Nothing of it is only in memory: who runs it again goes on."""

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from millrace import supervise
from millrace.errors import UserError
from millrace.tpu import bundle, cost, install, job, place
from millrace.tpu.cloud import Cloud, LoggedOut, Refused, Rented, Silent, State
from millrace.tpu.ending import POLL, End, Outcome, complain, give_back, verdict, whisper
from millrace.tpu.request import Request
from millrace.tpu.workers import UNREACHABLE, Failed, Workers

REACH = 30 * POLL  # seconds in which a machine that is said to be ready should answer
REST = 30 * POLL  # seconds that other workers have to end after the first, and all have to save
FAILURES = 5  # in a row, before a job is given up; preemptions do not count
LIVED = 600.0  # seconds of training that end such a row
QUOTA = 3  # rounds through all zones that all say the quota is used up
IDLE = 1800.0  # seconds after which a slice whose job has ended gives itself back


class Launcher:
    def __init__(
        self,
        cloud: Cloud,
        request: Request,
        task: job.Job,
        budget: cost.Budget,
        *,
        tree: Path,
        connect: Callable[[Rented], Workers],
        extras: Sequence[str] = (),
        keep: bool = False,
    ) -> None:
        self.cloud, self.request, self.task, self.budget = cloud, request, task, budget
        self.tree, self.connect, self.extras, self.keep = tree, connect, extras, keep
        self.ledger = place.Ledger(request.name, task.run)
        self.logs = place.folder(request.name)
        self.asked, self.gentle, self.mine, self.zone, self.shown = 0, False, False, 0, ""
        self.doing = ""
        self.created, self.rented, self.where = -60.0, None, request.zones[0]

    rented: Rented | None  # where a trainer may be at work that nobody follows

    def run(self) -> int:
        """Returns the exit code: the trainer's, or 75 where the same command goes on later."""
        code, gone = 1, True
        with place.watching(self.request.name), self.signals():
            try:
                # Once: what is changed here while it trains does not come into a later life of it.
                self.packed = bundle.make(self.tree)
                for name in self.packed.left_out:
                    self.say(f"not sent, since it is secret or large: {name}")
                code = self.lives()
            except KeyboardInterrupt:
                self.say("stopped before it trained; the same command goes on")
                code = supervise.PREEMPTED
            finally:
                self.gentle = True
                self.spare()
                if self.mine and not self.keep:
                    gone = self.delete_and_wait()
                if self.ledger.lives:
                    self.say(self.spent())
                if code == 0:  # the next job of this name begins anew
                    self.ledger.clear()
        return code if gone else 1

    def lives(self) -> int:
        failures, before = 0, ""
        while True:
            rented = self.ensure()
            begun = time.monotonic()
            how = self.live(rented)
            self.rented = None
            self.ledger.seen(rented.zone, rented.created, time.time())
            if how.end is End.LOST:
                self.ledger.close(time.time())
            if how.end is End.DONE:
                self.say("done")
                return 0
            if how.end is End.MISTAKE:
                self.say(f"the trainer {how.words}; another try would end the same")
                return how.code
            if how.end in (End.OVER, End.STOPPED):
                self.keep = self.keep and how.end is not End.OVER
                self.say(f"{how.end.value}{how.words}; the same command goes on{self.advice(how.end)}")
                return supervise.PREEMPTED
            if how.end is not End.LOST:
                failures = 1 if time.monotonic() - begun > LIVED else failures + 1
            if how.end is End.SET_UP and how.words == before:
                self.say(f"{how.end.value}{how.words}; given up, since it said the same before")
                return how.code
            before = how.words
            if failures >= FAILURES:
                self.say(f"{how.end.value}{how.words}; given up after {failures} times in a row")
                return how.code or 1
            if how.end in (End.AGAIN, End.SET_UP):
                self.say(f"{how.end.value}{how.words}: starts it again")
            else:
                self.say(f"{how.end.value}{how.words}: takes another")
                self.delete_and_wait()

    def advice(self, end: End) -> str:
        return " with a larger --max-hours or --max-cost" if end is End.OVER else ""

    # A slice that is ready, by whatever way that takes.

    def ensure(self) -> Rented:
        refusals, since, failed = 0, time.monotonic(), 0
        while True:
            found = self.look()
            if found is None:
                self.ledger.close(time.time())
                seconds = self.left() * 3600
                if seconds <= 3600 * min(cost.SOON, self.budget.hours / 5):
                    raise UserError(
                        f"{self.spent()}: nothing is left of --max-hours or --max-cost; more goes on"
                    )
                refusals = self.create(refusals, seconds)
                since = time.monotonic()
                continue
            self.check_ours(found)
            if found.state is State.READY:
                self.show("")
                self.rented = found
                return self.timed(found)
            if found.state in (State.LOST, State.FAILED):
                failed += found.state is State.FAILED
                if failed >= FAILURES:
                    raise UserError(f"{found.name}: {found.said}; given up after {failed} times")
                self.say(f"{found.name} is {found.said}: deletes it and asks again")
                self.delete_and_wait()
                self.zone += found.state is State.FAILED
            elif found.zone not in self.request.zones and found.said != "PROVISIONING":
                self.say(f"{found.name} is {found.said} in {found.zone}, which is no --zone now: deletes it")
                self.delete_and_wait()
            elif found.said != "PROVISIONING" and self.waited_enough(since):
                self.say(f"nothing in {found.zone} within {self.request.wait:g} min: tries the next zone")
                self.delete_and_wait()
                self.zone += 1
            else:
                minutes = (time.monotonic() - since) / 60
                self.show(f"{found.name} in {found.zone}: {found.said}", f" for {minutes:.0f} min")
                self.pause(POLL)

    def waited_enough(self, since: float) -> bool:
        return len(self.request.zones) > 1 and time.monotonic() - since > 60 * self.request.wait

    def create(self, refusals: int, seconds: float) -> int:
        """Returns how many zones in a row have refused."""
        zone = self.request.zones[self.zone % len(self.request.zones)]
        before = self.mine
        try:
            self.mine, self.created, self.where = True, time.monotonic(), zone
            self.cloud.create(self.request, zone, seconds, None if self.keep else IDLE)
            self.say(f"asked for {self.request.accelerator} {self.request.terms} in {zone}")
            self.pause(min(POLL, 2.0))  # before it is looked for
            return 0
        except Refused as why:
            refusals += 1
            rounds = refusals / len(self.request.zones)
            self.say(f"{zone}: {why}")
            if why.quota and rounds >= QUOTA:
                raise UserError(f"{zone}: {why} (asked {refusals} times)") from None
            self.zone += 1
            if rounds >= 1:
                self.pause(min(POLL * 2**rounds, 30 * POLL))
            return refusals
        except Silent as why:
            self.show(f"the cloud does not answer: {why}")
            self.pause(POLL)
            return refusals
        except UserError:  # what was asked for cannot be had: nothing was made
            self.mine = before
            raise

    def check_ours(self, found: Rented) -> None:
        if not found.ours and not self.keep:
            raise UserError(
                f"{found.name}: found a slice that Millrace did not make, and would delete at the end; "
                "--keep uses it and leaves it"
            )
        there = (found.slices, found.accelerator, found.terms)
        asked = (self.request.slice.slices, self.request.accelerator, self.request.terms)
        if there != asked:
            raise UserError(
                f"{found.name}: found a {sold(*there)} of that name in {found.zone}, asked for a "
                f"{sold(*asked)}; ask for what is there, give another --name, or delete it"
            )
        self.mine, self.where = True, found.zone

    def timed(self, found: Rented) -> Rented:
        """The timer on the slice ends it when what is left now is over; one that it has already stays if
        nothing else is asked for."""
        self.ledger.seen(found.zone, found.created, time.time(), found.seconds)
        before = self.ledger.spent(time.time(), but=found.created)
        if not self.budget.asked and found.seconds:
            self.budget = dataclasses.replace(self.budget, hours=before + found.seconds / 3600)
        seconds = (self.budget.hours - before) * 3600
        if found.ours and abs((found.seconds or 0.0) - seconds) > 60:
            try:
                self.cloud.extend(found, max(seconds, 1.0))
                self.ledger.seen(found.zone, found.created, time.time(), seconds)
            except UserError as why:  # it trains all the same, and its timer ends it when it would have
                self.say(f"the timer of {found.name} stays as it is: {why}")
        return found

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
                self.show(f"the cloud does not answer: {why}")
                self.pause(POLL)

    def delete_and_wait(self) -> bool:
        # What was asked for a moment ago may not be seen yet.
        time.sleep(max(0.0, min(POLL, 5.0) - (time.monotonic() - self.created)))
        gone = give_back(self.cloud, self.request.name, self.say, self.where)
        if gone:
            self.ledger.close(time.time())
        return gone

    def spare(self) -> None:
        """Lets a trainer save that was found at work, where we end before we follow it. One of another recipe
        is left alone, with its slice."""
        rented, self.rented = self.rented, None
        if rented is None or not self.mine:
            return
        workers, until, told = self.connect(rented), time.monotonic() + REST, False
        while time.monotonic() < until and self.asked < 2:
            running = [state for state in job.states(workers, self.task.name) if state and state["running"]]
            if any(state["identity"] != self.task.identity for state in running):
                self.mine = False
                return
            if not running:
                return
            if not told:
                self.say("lets the trainer save")
                job.stop(workers, self.task.name)
            told = True
            time.sleep(0.2)

    # One life: from a ready slice to an end.

    def live(self, rented: Rented) -> Outcome:
        workers = self.connect(rented)
        try:
            begun = self.set_up(workers)
        except Failed as why:
            if why.exit_code == UNREACHABLE:
                return self.gone() or Outcome(End.WORN, 1, f" ({why})")
            return self.gone() or Outcome(End.SET_UP, 1, f" while {self.doing}: {why.said}")
        if any(one.how == "other" for one in begun):
            self.mine = False
            raise UserError(
                f"{rented.name}: found another recipe in training there; give another --name, or "
                f"`millrace tpu delete {rented.name}` first"
            )
        adopted = all(one.how == "running" for one in begun)
        self.say(f"{'found it training' if adopted else 'trains'} on {len(workers)} workers")
        offsets = [one.offset for one in begun]
        following = job.Following(workers, self.task.name, offsets, self.put, self.logs)
        self.gentle = True
        try:
            return self.follow(following, workers, rented)
        except Exception:  # of which nobody thought: what was trained is saved all the same
            self.saved(End.STOPPED, following, workers)
            raise
        finally:
            self.gentle = False
            following.end()

    def set_up(self, workers: Workers) -> list[job.Begun]:
        """Everything that a worker has already is left as it is."""
        self.doing = "sending the tree"
        if bundle.push(workers, self.packed, REACH):
            size = len(self.packed.content) / 2**20
            self.say(f"sent {self.packed.files} files ({size:.1f} MiB) to {len(workers)} workers; installs")
        self.doing = "installing"
        install.install(workers, self.tree, REACH, self.extras)
        self.doing = "mounting a disk"
        for number, disk in enumerate(self.request.disks, 1):
            install.mount(workers, disk, number, "ro", REACH)
        self.doing = "starting the trainer"
        return self.task.start(workers, REACH)

    def follow(self, following: job.Following, workers: Workers, rented: Rented) -> Outcome:
        looked, first = time.monotonic(), 0.0
        while True:
            following.show(min(POLL, 0.5))
            if self.asked:
                return self.saved(End.STOPPED, following, workers)
            if following.done:
                return self.gone_unless_done(following)
            if any(following.codes) and not first:  # one of them ended badly: the others should soon
                first = time.monotonic()
            if first and time.monotonic() - first > REST:
                job.stop(workers, self.task.name, "kill")
            if first and time.monotonic() - first > 2 * REST:
                return Outcome(End.WORN, 1, " (a worker cannot be reached)")
            if time.monotonic() - looked < POLL:
                continue
            looked = time.monotonic()
            self.ledger.seen(rented.zone, rented.created, time.time())
            if (gone := self.gone()) is not None:
                return gone
            if self.left() * 3600 <= min(REST, 0.05 * self.budget.hours * 3600):
                return self.saved(End.OVER, following, workers)

    def gone(self) -> Outcome | None:
        """That the slice is lost, if it is known to be."""
        try:
            found = self.cloud.find(self.request.name)
        except UserError as why:  # also a login that has run out: training goes on without it
            self.show(f"the cloud does not answer: {why}")
            return None
        if found is not None and found.state in (State.READY, State.WAITING):
            return None
        return Outcome(End.LOST, 0, f" ({found.said})" if found else " (it is gone)")

    def gone_unless_done(self, following: job.Following) -> Outcome:
        how = verdict([code or 0 for code in following.codes])
        if how.end is End.DONE or how.end is End.MISTAKE:
            return how
        return self.gone() or how

    def saved(self, end: End, following: job.Following, workers: Workers) -> Outcome:
        """Lets the trainer save. A second Ctrl-C does not wait for it."""
        self.say(f"{end.value}: lets the trainer save")
        job.stop(workers, self.task.name)
        until = time.monotonic() + REST
        while not following.done and time.monotonic() < until and self.asked < 2:
            following.show(0.2)
        if following.done and not any(following.codes):
            return Outcome(End.DONE)
        if not following.done:
            job.stop(workers, self.task.name, "kill")
        return Outcome(end, supervise.PREEMPTED)

    # What is left, what is said, and signals.

    def left(self) -> float:
        """Hours."""
        return self.budget.hours - self.ledger.spent(time.time())

    def spent(self) -> str:
        hours, lives = self.ledger.spent(time.time()), len(self.ledger.lives)
        words = f"had {cost.hours(hours)} of the slice in {lives} {'life' if lives == 1 else 'lives'}"
        return words if self.budget.rate is None else f"{words}, about ${hours * self.budget.rate:,.2f}"

    def put(self, line: str) -> None:
        self.show("")
        self.print(line)

    def print(self, words: str, end: str = "\n") -> None:
        """Where nobody listens any more (`| head`), it ends as by Ctrl-C: saved, and given back."""
        try:
            print(words, end=end, flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.ask(signal.SIGPIPE, None)

    def say(self, words: str) -> None:
        self.put(f"{time.strftime('%H:%M:%S')} {words}")

    def show(self, words: str, more: str = "") -> None:
        """What is waited for: in place on a terminal, else a line whenever it changes."""
        if sys.stdout.isatty():
            self.print(f"\r\x1b[K{words}{more}", end="" if words else "\r")
        elif words and words != self.shown:
            self.print(f"{time.strftime('%H:%M:%S')} {words}")
        self.shown = words or self.shown

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def ask(self, number: int, frame: Any) -> None:
        """While it trains, a wish that the loop sees; before that, an end; while it deletes, nothing."""
        self.asked += 1
        if not self.gentle:
            raise KeyboardInterrupt
        whisper(complain, f"\nmillrace: {signal.Signals(number).name} heard; please wait")


def sold(slices: int, accelerator: str, terms: str) -> str:
    return f"{f'{slices}x' if slices > 1 else ''}{accelerator} {terms}"
