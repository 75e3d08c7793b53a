"""Local processes after a query to a worker that was interrupted or timed out."""

import signal
import time

import pytest

from headrace.tpu.workers import UNREACHABLE, WorkerAddress, WorkerFailed, Workers


@pytest.mark.parametrize(
    "query", [lambda workers: workers.run_on(0, "sleep 60"), lambda w: w.run_on_all("sleep 60")]
)
def test_an_interrupted_command_leaves_no_process_and_no_pipe(query):
    workers, started = Workers([WorkerAddress((), is_remote=False)]), []
    start = workers.start_script
    workers.start_script = lambda *args, **kwargs: started.append(start(*args, **kwargs)) or started[-1]
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            query(workers)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    (process,) = started
    process.wait(10)
    deadline = time.monotonic() + 10  # for the reading thread, if any
    while not all(pipe.closed for pipe in (process.stdin, process.stdout, process.stderr)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not workers.processes


@pytest.mark.parametrize(
    "query",
    [lambda w: w.run_on(0, "sleep 60", timeout=0.3), lambda w: w.run_on_all("sleep 60", timeout=0.3)],
)
def test_a_worker_that_hangs_counts_as_not_reached(query):
    workers, started_at = Workers([WorkerAddress((), is_remote=False)]), time.monotonic()
    with pytest.raises(WorkerFailed, match=r"no answer within 0.3 s") as failure:
        query(workers)
    assert failure.value.worker_exit_code == UNREACHABLE and time.monotonic() - started_at < 20
    assert not workers.reached and not workers.processes
