"""What becomes of processes here when a question to a worker ends otherwise than with an answer."""

import signal
import time

import pytest

from headrace.tpu.workers import UNREACHABLE, WorkerAddress, WorkerFailed, Workers


@pytest.mark.parametrize(
    "ask", [lambda workers: workers.run_on(0, "sleep 60"), lambda w: w.run_on_all("sleep 60")]
)
def test_an_interrupted_command_leaves_no_process_and_no_pipe(ask):
    workers, started = Workers([WorkerAddress((), is_remote=False)]), []
    start = workers.start_script
    workers.start_script = lambda *given, **more: started.append(start(*given, **more)) or started[-1]
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            ask(workers)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    (process,) = started
    process.wait(10)
    deadline = time.monotonic() + 10  # of the thread that reads, where there is one
    while not all(pipe.closed for pipe in (process.stdin, process.stdout, process.stderr)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not workers.processes


@pytest.mark.parametrize(
    "ask",
    [lambda w: w.run_on(0, "sleep 60", timeout=0.3), lambda w: w.run_on_all("sleep 60", timeout=0.3)],
)
def test_a_worker_that_hangs_counts_as_not_reached(ask):
    workers, begun = Workers([WorkerAddress((), is_remote=False)]), time.monotonic()
    with pytest.raises(WorkerFailed, match=r"no answer within 0.3 s") as told:
        ask(workers)
    assert told.value.worker_exit_code == UNREACHABLE and time.monotonic() - begun < 20
    assert not workers.reached and not workers.processes
