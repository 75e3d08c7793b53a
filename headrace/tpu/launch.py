"""The whole story of a job: a slice is found or rented, set up, trained on, taken anew after a preemption,
and given back at the end, whatever the end is. Nothing of it is only in memory: who runs it again goes on."""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.runtime import supervisor as supervise
from headrace.errors import UserError
from headrace.tpu import timer_health as alarm, bundle, install, job, job_ledger as place
from headrace.tpu.cloud import Rented, State, by_hand
from headrace.tpu.outcome import End, Outcome, verdict
from headrace.tpu.provision import FAILURES, Renter, stopped
from headrace.tpu.timeouts import BROKEN, POLL, REACH, REST
from headrace.tpu.workers import UNREACHABLE, Failed, Workers

LIVED = 600.0  # seconds of training that end a row of failures; preemptions do not count as such


class Launcher:
    def __init__(
        self,
        renter: Renter,
        task: job.Job,
        *,
        tree: Path,
        connect: Callable[[Rented], Workers],
        extras: Sequence[str] = (),
    ) -> None:
        self.renter, self.task = renter, task
        self.tree, self.connect, self.extras = tree, connect, extras
        self.cloud, self.request, self.voice = renter.cloud, renter.request, renter.voice
        self.ledger, self.say = renter.ledger, renter.voice.say
        self.logs = place.folder(renter.ledger.key)
        self.doing, self.rented = "", None

    rented: Rented | None  # where a trainer may be at work that nobody follows

    def run(self) -> int:
        """Returns the exit code: the trainer's, or 75 where the same command goes on later."""
        code, gone = 1, True
        with place.watching(self.ledger.key), self.voice.signals():
            try:
                # Once: what is changed here while it trains does not come into a later life of it.
                self.packed = bundle.make(self.tree)
                for name in self.packed.left_out:
                    self.say(f"not sent, since it is secret or large: {name}")
                code = self.lives()
            except KeyboardInterrupt:
                self.voice.gentle = True
                self.say("stopped before it trained; the same command goes on")
                code = supervise.PREEMPTED
            finally:
                self.voice.gentle, self.voice.alone = True, False
                gone = self.finish()
                if self.ledger.lives:
                    self.say(self.renter.spent())
                if code == 0:  # the next job of this name begins anew
                    self.ledger.clear()
        return code if gone else 1

    def lives(self) -> int:
        failures, before = 0, ""
        while True:
            self.rented = rented = self.renter.ensure()
            begun = time.monotonic()
            how = self.live(rented)
            if how.end is not End.SET_UP:  # which leaves a trainer at work where there was one
                self.rented = None
            if how.end is End.UNREACHED:
                return self.left_alone(rented, how)
            if rented.state is State.READY:
                self.renter.seen(rented)
            if how.end in (End.LOST, End.DELETED, End.HALTED):
                self.ledger.close(time.time())
            if (code := self.ended(how)) is not None:
                return code
            if how.end is not End.LOST:
                failures = 1 if time.monotonic() - begun > LIVED else failures + 1
            if how.end is End.SET_UP and how.words == before:
                return self.given_up(rented, how, ", since it said the same before")
            before = how.words
            if failures >= FAILURES:
                return self.given_up(rented, how, f" after {failures} times in a row")
            if how.end in (End.AGAIN, End.SET_UP):
                self.say(f"{how.end.value}{how.words}: starts it again")
            else:
                self.say(f"{how.end.value}{how.words}: takes another")
                self.renter.delete()

    def ended(self, how: Outcome) -> int | None:
        """The exit code where that is the end of the job, for now or for ever."""
        if how.end is End.DONE:
            self.say("done")
            return 0
        if how.end is End.MISTAKE:
            self.say(f"the trainer {how.words}; another try would end the same")
            return how.code
        if how.end is End.HALTED:
            self.renter.mine = self.renter.held = False  # nor kept: it is what its owner makes of it
            self.say(f"{how.end.value}{how.words}; the same command goes on once it is started or deleted")
            return supervise.PREEMPTED
        if how.end in (End.OVER, End.STOPPED, End.DELETED):
            self.renter.keep = self.renter.keep and how.end is not End.OVER
            more = " with a larger --max-hours or --max-cost" if how.end is End.OVER else ""
            self.say(f"{how.end.value}{how.words}; the same command goes on{more}")
            return supervise.PREEMPTED
        worn = how.end is End.WORN and (self.renter.keep or not self.renter.made)
        if worn or how.end is End.LOST and not self.renter.mine:
            held = "was there before" if self.renter.mine else "is not ours to delete"
            held = "is kept" if self.renter.mine and self.renter.keep else held
            self.say(f"{how.end.value}{how.words}; {self.request.name} {held}: delete it to take another")
            self.renter.mine = self.renter.mine and self.renter.made
            return how.code or 1
        return None

    def given_up(self, rented: Rented, how: Outcome, why: str) -> int:
        self.say(f"{how.end.value}{how.words}; given up{why}")
        if how.end is End.SET_UP and not self.renter.made:  # what was on it before is not ended by that
            self.rented = None
            if self.renter.mine and not self.renter.keep:
                self.left_alone(rented, how)
        return how.code or 1

    def left_alone(self, rented: Rented, how: Outcome) -> int:
        """The cloud says that the machines are well: somebody's training may be on them, which is not ended
        because we do not see it. One that was made here and never heard of us has none, and is given back."""
        fresh = self.renter.made and not self.renter.keep and rented.created not in self.reached
        said = f"{how.end.value}{how.words}"
        if fresh:
            self.say(f"{said}; looked for: a firewall that lets port 22 through, the key (--ssh-key)")
            return how.code
        self.renter.mine = self.renter.held = False
        self.say(f"{said}; it is {rented.said} at the cloud, left alone, and costs money until")
        self.say(f"  {by_hand(self.cloud, rented)}")
        return how.code

    def finish(self) -> bool:
        """Whether nothing is left that should be gone. Whatever goes wrong on the way, it gets there."""
        rented, self.rented = self.rented, None
        try:
            if rented is not None and self.renter.mine and self.renter.held:
                self.spare(rented)
        except Exception as why:
            if rented is not None and not self.renter.made:
                self.left_alone(rented, Outcome(End.UNREACHED, 1, f": {why!r}"))
        return self.renter.give_up()

    def spare(self, rented: Rented) -> None:
        """Lets a trainer save that was found at work, where we end before we follow it. One of another recipe
        is left alone, with its slice, and so is one that cannot be asked. Ctrl-C does not shorten the asking,
        however often it comes; once the trainer is told to save, it does."""
        workers, until, told = self.connect(rented), time.monotonic() + REST, 0
        while not told or time.monotonic() < until and self.voice.asked < told:
            states = job.states(workers, self.task.name)
            if not self.renter.made and any(state.unknown for state in states):
                self.left_alone(rented, Outcome(End.UNREACHED, 1, f": {told_by(states)}"))
                return
            running = [state for state in states if state.running]
            if any(one.identity != self.task.identity for one in running) or any(
                one.elsewhere for one in states
            ):
                self.renter.mine = self.renter.held = False
                return
            if not running:
                return
            if not told:
                self.say("lets the trainer save")
                job.stop(workers, self.task.name)
                told = self.voice.asked + 1
            time.sleep(0.2)

    # One life: from a ready slice to an end.

    reached: frozenset[float] = frozenset()  # when slices were created whose workers all answered

    def live(self, rented: Rented) -> Outcome:
        if rented.state is State.DELETING:  # since the life before
            return self.deleted()
        workers, self.addresses = self.connect(rented), rented.workers
        workers.trouble = self.trouble
        try:
            begun = self.set_up(workers, rented)
        except Failed as why:
            return self.gone() or self.failed(why, workers)
        adopted = all(one.how == "running" for one in begun)
        self.say(f"{'found it training' if adopted else 'trains'} on {len(workers)} workers")
        self.renter.lost = 0
        offsets = [one.offset for one in begun]
        following = job.Following(workers, self.task.name, offsets, self.voice.put, self.logs)
        self.voice.gentle = True
        try:
            return self.follow(following, workers, rented)
        except Exception:  # of which nobody thought: what was trained is saved all the same
            self.saved(End.STOPPED, following, workers)
            raise
        finally:
            self.voice.gentle = False
            following.end()

    def set_up(self, workers: Workers, rented: Rented) -> list[job.Begun]:
        """Who is at work there is asked before anything is changed, its timer and our ledger included.
        Everything that a worker has already is left as it is, and all of it where this very job trains."""
        self.doing = "asking what runs there"
        states = job.ask(workers, self.task.name, REACH)
        self.refuse_other(states, rented)
        self.reached |= {rented.created}
        job.announce(workers, self.task.name, REACH)
        self.renter.timed(rented)
        if all(state.running for state in states):
            begun = [job.Begun("running", state.recent) for state in states]
        else:
            begun = self.start(workers, rented)
        self.warn_of_timer(workers, rented)
        return begun

    def start(self, workers: Workers, rented: Rented) -> list[job.Begun]:
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
        begun = self.task.start(workers, REACH)
        if any(one.how == "other" for one in begun):  # since a moment
            self.refuse_other(job.states(workers, self.task.name), rented)
        return begun

    def warn_of_timer(self, workers: Workers, rented: Rented) -> None:
        """The machines have asked by then what their account may do; nobody else can ask that."""
        if rented.ours and rented.zone != "local" and (why := alarm.doubt(workers)):
            self.say(alarm.warning(rented.name, why))

    def refuse_other(self, states: Sequence[job.State], rented: Rented) -> None:
        other = next((state.elsewhere for state in states if state.elsewhere), "")
        if other or any(state.running and state.identity != self.task.identity for state in states):
            self.renter.mine = self.renter.held = False
            where = f" ({other})" if other else ""
            raise UserError(
                f"{rented.name}: found another recipe in training there{where}; give "
                f"another --name, or `{by_hand(self.cloud, rented)}` first"
            )

    def failed(self, why: Failed, workers: Workers) -> Outcome:
        """What setting up came to, where the cloud says that the slice is well."""
        if why.exit_code != UNREACHABLE:
            return Outcome(End.SET_UP, 1, f" while {self.doing}: {why.said}")
        some = 0 < len(workers.reached) < len(workers)
        if some and self.renter.made and not self.renter.keep:  # others answer: it is that machine
            return Outcome(End.WORN, 1, f" ({why})")
        return Outcome(End.UNREACHED, 1, f" ({why})")

    def trouble(self, worker: int, said: str) -> None:
        self.voice.show(f"w{worker} does not answer yet: {said}")

    def follow(self, following: job.Following, workers: Workers, rented: Rented) -> Outcome:
        looked, first, silent = time.monotonic(), 0.0, ""
        while True:
            following.show(min(POLL, 0.5))
            silent = self.tell_silence(following.unheard(BROKEN), silent)
            if self.voice.asked:
                return self.saved(End.STOPPED, following, workers)
            if following.done:
                return self.gone_unless_done(following)
            if following.some and not first:  # one of them ended, well or badly: the others should soon
                first = time.monotonic()
            if first and time.monotonic() - first > REST:
                job.stop(workers, self.task.name, "kill")
            if first and time.monotonic() - first > 2 * REST:
                return Outcome(End.WORN, 1, " (a worker cannot be reached)")
            if time.monotonic() - looked < POLL:
                continue
            looked = time.monotonic()
            self.renter.seen(rented)
            if (gone := self.gone()) is not None:
                return gone
            self.connect_anew(workers)
            if self.renter.left() * 3600 <= min(REST, 0.05 * self.renter.budget.hours * 3600):
                return self.saved(End.OVER, following, workers)

    def tell_silence(self, unheard: Sequence[int], before: str) -> str:
        """Says whose connection is broken, when that changes. What they say meanwhile is not lost."""
        few = ", ".join(f"w{worker}" for worker in unheard[:4])
        now = f"{few} and {len(unheard) - 4} more" if len(unheard) > 4 else few
        if now != before and now:
            self.say(f"the connection to {now} is broken, and tried again; whether it trains is not known")
        elif now != before:
            self.say("connected to all workers again")
        return now

    def connect_anew(self, workers: Workers) -> None:
        """A machine that was repaired may have another address."""
        found = self.renter.found
        if found is None or found.state is not State.READY or found.workers == self.addresses:
            return
        with contextlib.suppress(UserError):  # no key any more, say: what is there goes on
            places = self.connect(found).places
            if len(places) == len(workers):
                self.say(f"{found.name} has other addresses than before: connects to these")
                workers.places, self.addresses = places, found.workers
                self.rented = found  # who ends this asks there

    def gone(self) -> Outcome | None:
        """That the slice is lost, if it is known to be. One that is deleted was so by somebody who meant it,
        or by its own timer."""
        for last in (False, True):  # that something is not there is believed when it is said twice
            try:
                found = self.cloud.find(self.request.name, self.renter.where)
            except UserError as why:  # also a login that has run out: training goes on without it
                self.voice.show(f"the cloud does not answer: {why}")
                return None
            if found is not None and self.rented is not None and found.replaces(self.rented):
                self.renter.mine = False
                self.renter.let_go()
                return Outcome(End.DELETED, 0, ", and another of its name is there since")
            if found is not None and found.state in (State.READY, State.WAITING):
                self.renter.found = found
                return None
            if found is not None and found.state is State.STOPPED:
                return Outcome(End.HALTED, 0, f": it is {stopped(self.cloud, found)}")
            self.renter.found = None
            lacking = found is None or found.said.startswith("ACTIVE") and not last
            if found is not None and not lacking and found.state is not State.DELETING:
                if not self.voice.gentle:
                    self.renter.count_loss(found.said)
                return Outcome(End.LOST, 0, f" ({found.said})")
            time.sleep(min(POLL, 5.0))
        return self.deleted()

    def deleted(self) -> Outcome:
        return Outcome(End.OVER if self.renter.left() <= 0 else End.DELETED)

    def gone_unless_done(self, following: job.Following) -> Outcome:
        """A trainer that ends with 1 may have seen its machines go; 2 and 3 it says of the recipe."""
        how = verdict([code or 0 for code in following.codes])
        if how.end is End.DONE or how.end is End.MISTAKE and how.code != 1:
            return how
        return self.gone() or how

    def saved(self, end: End, following: job.Following, workers: Workers) -> Outcome:
        """Lets the trainer save. A second Ctrl-C does not wait for it."""
        self.say(f"{end.value}: lets the trainer save")
        job.stop(workers, self.task.name)
        until = time.monotonic() + REST
        while not following.done and time.monotonic() < until and self.voice.asked < 2:
            following.show(0.2)
        if following.done and not any(following.codes):
            return Outcome(End.DONE)
        if not following.done:
            job.stop(workers, self.task.name, "kill")
        return Outcome(end, supervise.PREEMPTED)


def told_by(states: Sequence[job.State]) -> str:
    return next(f"[w{number}] {state.unknown}" for number, state in enumerate(states) if state.unknown)
