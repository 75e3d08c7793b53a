"""One attempt to train on a slice that is ready: set up the workers, start the trainers, follow them to an
end."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ExitCode, UserError
from headrace.tpu import bundle, clock, install, job, job_ledger, timeouts, timer_health
from headrace.tpu.cloud import Slice, SliceState, delete_command
from headrace.tpu.outcome import JobEnd, JobOutcome, classify_exit
from headrace.tpu.ownership import stopped_slice_advice
from headrace.tpu.provision import Provisioner
from headrace.tpu.workers import UNREACHABLE, WorkerFailed, Workers

MAX_SHOWN_WORKERS = 4  # in a message about broken connections


@dataclass(frozen=True)
class AttemptContext:
    """The data that all attempts of a job share."""

    provisioner: Provisioner
    task: job.Job
    tree: Path
    packed: bundle.Bundle
    connect: Callable[[Slice], Workers]
    extras: Sequence[str]  # of pyproject.toml
    reached: set[float]  # creation times of slices whose workers all answered


class Attempt:
    """An attempt: `run` -> `set_up` -> `follow`, until the trainers end or the slice is lost."""

    def __init__(self, context: AttemptContext, slice_: Slice) -> None:
        self.context, self.slice = context, slice_
        self.provisioner, self.task = context.provisioner, context.task
        self.cloud, self.console = self.provisioner.cloud, self.provisioner.console
        self.log = self.provisioner.log
        self.phase = ""  # of the setup, for error messages

    def run(self) -> JobOutcome:
        """Train on the slice, and return how that ended."""
        self.workers = self.context.connect(self.slice)
        self.workers.on_retry = self.show_retry
        try:
            results = self.set_up()
        except WorkerFailed as error:
            return self.find_loss() or self.setup_outcome(error)
        is_adopted = all(result.status == "running" for result in results)
        self.log(f"{'found it training' if is_adopted else 'training'} on {len(self.workers)} workers")
        self.provisioner.losses = 0
        log_dir = job_ledger.job_dir(self.provisioner.ledger.job)
        offsets = [result.offset for result in results]
        self.monitor = job.JobMonitor(self.workers, self.task.name, offsets, self.console.print_line, log_dir)
        self.console.finish_gracefully = True
        try:
            return self.follow()
        except Exception:  # even after a bug the trainer saves
            self.stop_and_save(JobEnd.INTERRUPTED)
            raise
        finally:
            self.console.finish_gracefully = False
            self.monitor.close()

    def set_up(self) -> list[job.StartResult]:
        """Make sure that the trainers run. Raises WorkerFailed.

        First the workers are asked what runs there; only then is anything changed, including the timer and
        the ledger. Where this very job trains already, nothing is installed."""
        self.phase = "asking what runs there"
        states = job.query_workers(self.workers, self.task.name, retry_seconds=timeouts.CONNECT_TIMEOUT)
        self.check_no_other_training(states)
        self.context.reached.add(self.slice.created_at)
        job.reset_idle_timer(self.workers, self.task.name, retry_seconds=timeouts.CONNECT_TIMEOUT)
        self.provisioner.set_timer(self.slice)
        if all(state.running for state in states):
            results = [job.StartResult("running", state.recent) for state in states]
        else:
            results = self.install_and_start()
        self.warn_about_timer()
        return results

    def install_and_start(self) -> list[job.StartResult]:
        """Install what is missing on the workers, and start the trainers."""
        workers, packed, retry_seconds = self.workers, self.context.packed, timeouts.CONNECT_TIMEOUT
        self.phase = "sending the working tree"
        if bundle.send_if_missing(workers, packed, retry_seconds=retry_seconds):
            size = f"{packed.files} files ({len(packed.content) / 2**20:.1f} MiB)"
            self.log(f"sent {size} to {len(workers)} workers; installing")
        self.phase = "installing"
        install.install(workers, self.context.tree, retry_seconds=retry_seconds, extras=self.context.extras)
        self.phase = "mounting a disk"
        for number, disk in enumerate(self.provisioner.request.disks, 1):
            install.mount(workers, disk, number, "ro", retry_seconds=retry_seconds)
        self.phase = "starting the trainer"
        results = self.task.start_trainers(workers, retry_seconds=retry_seconds)
        if any(result.status == "other" for result in results):  # it started a moment ago
            self.check_no_other_training(job.try_query_workers(workers, self.task.name))
        return results

    def warn_about_timer(self) -> None:
        """Warn if the slice may fail to delete itself. By now its machines have looked up their
        permissions."""
        if not self.slice.is_managed or self.slice.zone == "local":
            return
        if problem := timer_health.find_timer_problem(self.workers):
            self.log(timer_health.format_warning(self.slice.name, problem))

    def check_no_other_training(self, states: Sequence[job.WorkerState]) -> None:
        """Raise UserError, and give up the slice, if another training runs on it."""
        if job.has_other_training(states, self.task.identity):
            self.provisioner.abandon()
            recipe = next((f" ({state.elsewhere})" for state in states if state.elsewhere), "")
            raise UserError(
                f"{self.slice.name}: found another recipe in training there{recipe}; choose another --name, "
                f"or run `{delete_command(self.cloud, self.slice)}` first"
            )

    def setup_outcome(self, error: WorkerFailed) -> JobOutcome:
        """The outcome of a setup that failed on a slice that is well according to the cloud."""
        if error.worker_exit_code != UNREACHABLE:
            return JobOutcome(JobEnd.SETUP_FAILED, 1, f" while {self.phase}: {error.output}")
        some_answer = 0 < len(self.workers.reached) < len(self.workers)
        if some_answer and self.provisioner.ownership.is_new and not self.provisioner.keep:
            return JobOutcome(JobEnd.FAULTY_WORKER, 1, f" ({error})")
        return JobOutcome(JobEnd.UNREACHABLE, 1, f" ({error})")

    def show_retry(self, worker: int, error: str) -> None:
        """Show that a worker is tried again."""
        self.console.show_status(f"w{worker} does not answer yet: {error}")

    def follow(self) -> JobOutcome:
        """Print the output of the trainers until they end, the slice is lost, or this command has to stop."""
        polled_at, first_end, broken = clock.monotonic(), 0.0, ""
        while True:
            self.monitor.print_lines_for(min(timeouts.POLL, 0.5))
            broken = self.log_connection_changes(broken)
            if self.console.stop_requests:
                return self.stop_and_save(JobEnd.INTERRUPTED)
            if self.monitor.all_ended:
                return self.outcome_of_exit_codes()
            if self.monitor.any_ended and not first_end:  # the others should end soon as well
                first_end = clock.monotonic()
            if first_end and clock.monotonic() - first_end > timeouts.SHUTDOWN_GRACE:
                job.stop_trainers(self.workers, self.task.name, "kill")
            if first_end and clock.monotonic() - first_end > 2 * timeouts.SHUTDOWN_GRACE:
                return JobOutcome(JobEnd.FAULTY_WORKER, 1, " (a worker cannot be reached)")
            if clock.monotonic() - polled_at < timeouts.POLL:
                continue
            polled_at = clock.monotonic()
            self.provisioner.record(self.slice)
            if (outcome := self.find_loss()) is not None:
                return outcome
            self.update_addresses()
            if self.provisioner.hours_left() * 3600 <= self.seconds_to_save():
                return self.stop_and_save(JobEnd.OUT_OF_BUDGET)

    def seconds_to_save(self) -> float:
        """Seconds before the end of the budget at which the trainer is asked to save."""
        return min(timeouts.SHUTDOWN_GRACE, 0.05 * self.provisioner.budget.hours * 3600)

    def log_connection_changes(self, previously_lost: str) -> str:
        """Log which connections are broken when that changes, and return it. The output of these workers is
        printed later."""
        workers = self.monitor.disconnected_workers(timeouts.LINK_TIMEOUT)
        current = ", ".join(f"w{worker}" for worker in workers[:MAX_SHOWN_WORKERS])
        if len(workers) > MAX_SHOWN_WORKERS:
            current += f" and {len(workers) - MAX_SHOWN_WORKERS} more"
        if current and current != previously_lost:
            self.log(f"lost the connection to {current}, reconnecting; training may continue there")
        elif current != previously_lost:
            self.log("connected to all workers again")
        return current

    def update_addresses(self) -> None:
        """Connect to the addresses that the cloud reports now: a repaired machine may have a new one."""
        current = self.provisioner.current
        if current is None or current.state is not SliceState.READY or current.workers == self.slice.workers:
            return
        with contextlib.suppress(UserError):  # for example if the key is gone: the open connections remain
            addresses = self.context.connect(current).addresses
            if len(addresses) == len(self.workers):
                self.log(f"{current.name} has new addresses: connecting to them")
                self.workers.addresses, self.slice = addresses, current

    def find_loss(self) -> JobOutcome | None:
        """The outcome if the slice is lost, deleted or stopped according to the cloud; None if it is well, or
        if the cloud does not answer: training does not need it.

        Two lookups must agree that the slice or some of its nodes are missing."""
        for is_last in (False, True):
            try:
                slice_ = self.cloud.find(self.provisioner.request.name, self.provisioner.last_zone)
            except UserError as error:  # also expired credentials
                self.console.show_status(f"the cloud does not answer: {error}")
                return None
            if slice_ is not None and slice_.replaces(self.slice):
                self.provisioner.abandon()
                return JobOutcome(JobEnd.SLICE_DELETED, 0, ", and another one has its name now")
            if slice_ is not None and slice_.state in (SliceState.READY, SliceState.WAITING):
                self.provisioner.current = slice_
                return None
            if slice_ is not None and slice_.state is SliceState.STOPPED:
                advice = stopped_slice_advice(self.cloud, slice_)
                return JobOutcome(JobEnd.SLICE_STOPPED, 0, f": it is {advice}")
            self.provisioner.current = None
            if slice_ is not None and slice_.state is not SliceState.DELETING:
                lacks_nodes = slice_.status_text.startswith("ACTIVE")
                if is_last or not lacks_nodes:
                    return self.lost_outcome(slice_)
            clock.sleep(min(timeouts.POLL, 5.0))
        return self.deleted_outcome()

    def lost_outcome(self, slice_: Slice) -> JobOutcome:
        """The outcome of a slice that the cloud took away. Before training started it counts as a loss in a
        row."""
        if not self.console.finish_gracefully:
            self.provisioner.count_loss(slice_.status_text)
        return JobOutcome(JobEnd.SLICE_LOST, 0, f" ({slice_.status_text})")

    def deleted_outcome(self) -> JobOutcome:
        """The outcome of a slice that was deleted, by its own timer or by somebody else."""
        is_over = self.provisioner.hours_left() <= 0
        return JobOutcome(JobEnd.OUT_OF_BUDGET if is_over else JobEnd.SLICE_DELETED)

    def outcome_of_exit_codes(self) -> JobOutcome:
        """The outcome when all trainers have ended. Exit code 1 may be the effect of a machine that was taken
        away; 2 and 3 mean a mistake in the recipe."""
        outcome = classify_exit([code or 0 for code in self.monitor.exit_codes])
        is_mistake = outcome.end is JobEnd.FAILED and outcome.exit_code != ExitCode.FAILED
        if outcome.end is JobEnd.DONE or is_mistake:
            return outcome
        return self.find_loss() or outcome

    def stop_and_save(self, end: JobEnd) -> JobOutcome:
        """Stop the trainers and wait until they have saved, for `SHUTDOWN_GRACE` or until the next Ctrl-C.
        The outcome is `end`, or DONE if they finished on their own."""
        self.log(f"{end.value}: waiting for the trainer to save")
        job.stop_trainers(self.workers, self.task.name)
        deadline = clock.monotonic() + timeouts.SHUTDOWN_GRACE
        while not self.monitor.all_ended and clock.monotonic() < deadline and self.console.stop_requests < 2:
            self.monitor.print_lines_for(0.2)
        if self.monitor.all_ended and not any(self.monitor.exit_codes):
            return JobOutcome(JobEnd.DONE)
        if not self.monitor.all_ended:
            job.stop_trainers(self.workers, self.task.name, "kill")
        return JobOutcome(end, ExitCode.PREEMPTED)
