"""The launcher of a job: rents a slice, trains on it, replaces it if it is lost, and deletes it at the end.

All of its state is also outside this process: after a crash the same command resumes."""

from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.errors import ExitCode
from headrace.tpu import bundle, clock, job, job_ledger, timeouts
from headrace.tpu.attempt import Attempt, AttemptContext
from headrace.tpu.cloud import Slice, SliceState, delete_command
from headrace.tpu.outcome import JobEnd, JobOutcome
from headrace.tpu.provision import MAX_FAILURES, Provisioner
from headrace.tpu.workers import Workers

PROGRESS_SECONDS = 600.0  # an attempt of this length ends a series of failures


class Launcher:
    """Runs one job to its end, in as many attempts as it takes.

    `run` -> `run_attempts` -> for each attempt: `Provisioner.ensure_ready`, `run_attempt`, `exit_code_for`
    (end the command?) or else restart on the same or on another slice -> `finish`."""

    def __init__(
        self,
        provisioner: Provisioner,
        task: job.Job,
        *,
        tree: Path,
        connect: Callable[[Slice], Workers],
        extras: Sequence[str] = (),
    ) -> None:
        """`tree` is the working tree that is sent to the workers, `extras` those of pyproject.toml to
        install."""
        self.provisioner, self.task = provisioner, task
        self.tree, self.connect, self.extras = tree, connect, extras
        self.console, self.ledger, self.log = provisioner.console, provisioner.ledger, provisioner.log
        self.reached: set[float] = set()  # creation times of slices whose workers all answered
        self.unwatched: Slice | None = None  # a slice on which a trainer may run that no one follows

    def run(self) -> int:
        """Run the job, and return the exit code of the command: that of the trainer, or 75 if the same
        command resumes it. It is 1 if a slice is left that should be gone."""
        code, is_clean = int(ExitCode.FAILED), True
        with job_ledger.watch_lock(self.ledger.job), self.console.signal_handlers():
            try:
                # Packed once: a file that changes during the training does not get into a later attempt.
                self.packed = bundle.make_bundle(self.tree)
                for name in self.packed.skipped:
                    self.log(f"not sent, since it may be secret or is too large: {name}")
                code = self.run_attempts()
            except KeyboardInterrupt:
                self.console.finish_gracefully = True
                self.log("stopped before training started; the same command starts again")
                code = ExitCode.PREEMPTED
            finally:
                self.console.finish_gracefully, self.console.detach_on_hangup = True, False
                is_clean = self.finish()
                if self.ledger.attempts:
                    self.log(self.provisioner.usage_text())
                if code == ExitCode.DONE:
                    self.ledger.clear()
        return code if is_clean else ExitCode.FAILED

    def run_attempts(self) -> int:
        """Train in one attempt after another until the job ends or is given up. Returns the exit code."""
        failures, last_detail = 0, ""
        while True:
            self.unwatched = slice_ = self.provisioner.ensure_ready()
            started_at = clock.monotonic()
            outcome = self.run_attempt(slice_)
            if outcome.end is JobEnd.UNREACHABLE:
                return self.abandon_safely(slice_, outcome)
            if slice_.state is SliceState.READY:
                self.provisioner.record(slice_)
            if outcome.end in (JobEnd.SLICE_LOST, JobEnd.SLICE_DELETED, JobEnd.SLICE_STOPPED):
                self.ledger.close(clock.now())
            if (code := self.exit_code_for(outcome)) is not None:
                return code
            if outcome.end is not JobEnd.SLICE_LOST:  # a preemption is no failure
                failures = 1 if clock.monotonic() - started_at > PROGRESS_SECONDS else failures + 1
            if outcome.end is JobEnd.SETUP_FAILED and outcome.detail == last_detail:
                return self.give_up(slice_, outcome, "with the same error as before")
            last_detail = outcome.detail
            if failures >= MAX_FAILURES:
                return self.give_up(slice_, outcome, f"after {failures} failures in a row")
            if outcome.end in (JobEnd.RESTARTABLE, JobEnd.SETUP_FAILED):
                self.log(f"{outcome}: restarting it")
            else:
                self.log(f"{outcome}: renting another slice")
                self.provisioner.delete()

    def run_attempt(self, slice_: Slice) -> JobOutcome:
        """Set the slice up and train on it until that ends. `slice_` may be one that somebody deletes now."""
        context = AttemptContext(
            self.provisioner, self.task, self.tree, self.packed, self.connect, self.extras, self.reached
        )
        attempt = Attempt(context, slice_)
        if slice_.state is SliceState.DELETING:
            outcome = attempt.deleted_outcome()
        else:
            try:
                outcome = attempt.run()
            finally:
                self.unwatched = attempt.slice  # the workers may have new addresses
        if outcome.end is not JobEnd.SETUP_FAILED:  # after that, an earlier trainer may still run
            self.unwatched = None
        return outcome

    def exit_code_for(self, outcome: JobOutcome) -> int | None:
        """The exit code if this outcome ends the command, with its message; None if another attempt
        follows."""
        end, provisioner = outcome.end, self.provisioner
        if end is JobEnd.DONE:
            self.log("done")
            return ExitCode.DONE
        if end is JobEnd.FAILED:
            self.log(f"{outcome}; a restart would fail in the same way")
            return outcome.exit_code
        if end is JobEnd.SLICE_STOPPED:
            provisioner.abandon()  # its owner decides what becomes of it
            self.log(f"{outcome}; once it is started or deleted, the same command resumes")
            return ExitCode.PREEMPTED
        if end is JobEnd.OUT_OF_BUDGET:
            provisioner.keep = False
            self.log(f"{outcome}; the same command with a larger --max-hours or --max-cost resumes")
            return ExitCode.PREEMPTED
        if end in (JobEnd.INTERRUPTED, JobEnd.SLICE_DELETED):
            self.log(f"{outcome}; the same command resumes")
            return ExitCode.PREEMPTED
        if reason := self.reason_not_to_replace(end):
            self.log(f"{outcome}; {self.provisioner.request.name} {reason}: delete it to rent another")
            if not provisioner.ownership.is_new:
                provisioner.protect()
            return outcome.exit_code or ExitCode.FAILED
        return None

    def reason_not_to_replace(self, end: JobEnd) -> str:
        """Why a slice that is faulty or lost must not be replaced by another one; empty if it may be."""
        ownership, keep = self.provisioner.ownership, self.provisioner.keep
        if end is JobEnd.SLICE_LOST and not ownership.may_delete:
            return "is not yours to delete"
        if end is not JobEnd.FAULTY_WORKER or (ownership.is_new and not keep):
            return ""
        if not ownership.may_delete:
            return "is not yours to delete"
        return "is kept" if keep else "existed before this command"

    def give_up(self, slice_: Slice, outcome: JobOutcome, reason: str) -> int:
        """End the command after repeated failures. A trainer that ran on the slice before is left alone, with
        its slice."""
        self.log(f"{outcome}; giving up {reason}")
        if outcome.end is JobEnd.SETUP_FAILED and not self.provisioner.ownership.is_new:
            self.unwatched = None
            if self.provisioner.ownership.may_delete and not self.provisioner.keep:
                self.abandon_safely(slice_, outcome)
        return outcome.exit_code or ExitCode.FAILED

    def abandon_safely(self, slice_: Slice, outcome: JobOutcome) -> int:
        """End the command although the state of the workers is not known, and return the exit code.

        The cloud says that the machines are well, so somebody's training may run there: the slice is left
        alone. But a new one whose workers never all answered has none, and is deleted."""
        ownership = self.provisioner.ownership
        if ownership.is_new and not self.provisioner.keep and slice_.created_at not in self.reached:
            self.log(f"{outcome}; check that a firewall does not block port 22, and the key (--ssh-key)")
            return outcome.exit_code
        self.provisioner.abandon()
        status = f"the cloud reports it as {slice_.status_text}"
        self.log(f"{outcome}; {status}, so it is left alone, and costs money until you run")
        self.log(f"  {delete_command(self.provisioner.cloud, slice_)}")
        return outcome.exit_code

    def finish(self) -> bool:
        """Stop a trainer that is not followed, then delete the slice or keep it, whatever goes wrong on the
        way. Return False if a slice is left that should be gone."""
        slice_, self.unwatched = self.unwatched, None
        ownership = self.provisioner.ownership
        try:
            if slice_ is not None and ownership.may_use and ownership.may_delete:
                self.request_save(slice_)
        except Exception as error:
            if slice_ is not None and not ownership.is_new:
                self.abandon_safely(slice_, JobOutcome(JobEnd.UNREACHABLE, 1, f": {error!r}"))
        return self.provisioner.delete_or_keep()

    def request_save(self, slice_: Slice) -> None:
        """Let a trainer save that was found running, where the command ends before it follows the trainer.

        A trainer of another recipe, or one that cannot be asked, is left alone with its slice. Ctrl-C does
        not shorten the first question; once the trainer is asked to save, it ends the waiting."""
        workers, deadline, expected_stops = (
            self.connect(slice_),
            clock.monotonic() + timeouts.SHUTDOWN_GRACE,
            0,
        )
        while not expected_stops or (
            clock.monotonic() < deadline and self.console.stop_requests < expected_stops
        ):
            states = job.try_query_workers(workers, self.task.name)
            error = job.first_error(states)
            if error and not self.provisioner.ownership.is_new:
                self.abandon_safely(slice_, JobOutcome(JobEnd.UNREACHABLE, 1, f": {error}"))
                return
            if job.has_other_training(states, self.task.identity):
                self.provisioner.abandon()
                return
            if not any(state.running for state in states):
                return
            if not expected_stops:
                self.log("waiting for the trainer to save")
                job.stop_trainers(workers, self.task.name)
                expected_stops = self.console.stop_requests + 1
            clock.sleep(0.2)
