"""The worker pool: tasks in processes and on Ray, and failures of tasks and workers."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.data.pipeline.pool import WorkerPool
from headrace.errors import UserError


def square(number: int) -> int:
    return number * number


def refuse(number: int) -> int:
    if number == 3:
        raise UserError("the third is bad")
    return number


def die_once(task: tuple[str, int]) -> int:
    folder, number = task
    mark = Path(folder, f"{number}")
    if number == 2 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def die(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def tell(folder: str) -> int:
    Path(folder, f"{time.time_ns()}-{os.getpid()}").touch()
    time.sleep(0.3)
    return os.getpid()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_item_is_returned_with_its_result(workers: int) -> None:
    results = list(WorkerPool("local", workers).run(square, range(11)))
    assert sorted(results) == [(number, number * number) for number in range(11)]


SCRIPT = """\
from headrace.data.pipeline.pool import WorkerPool
print("started")
print(sorted(WorkerPool("local", 2).run(abs, [-1, -2, -3])))
"""


def test_workers_do_not_run_the_script_that_starts_them(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.stdout == "started\n[(-3, 3), (-2, 2), (-1, 1)]\n", done.stderr


@pytest.mark.parametrize("workers", [1, 2])
def test_a_user_error_in_a_task_is_raised_as_a_user_error(workers: int) -> None:
    with pytest.raises(UserError, match="the third is bad"):
        list(WorkerPool("local", workers).run(refuse, range(10)))


def test_tasks_run_in_parallel_in_separate_processes(tmp_path: Path) -> None:
    pids = {result for _, result in WorkerPool("local", 2).run(tell, [str(tmp_path)] * 4)}
    assert len(pids) == 2 and os.getpid() not in pids


def test_only_the_task_of_a_killed_worker_is_retried(tmp_path: Path) -> None:
    tasks = [(str(tmp_path), number) for number in range(6)]
    results = list(WorkerPool("local", 2).run(die_once, tasks))
    assert sorted(result for _, result in results) == list(range(6))


def test_a_task_that_always_kills_its_worker_is_reported() -> None:
    with pytest.raises(UserError, match="a worker was killed 4 times, probably because memory ran out"):
        list(WorkerPool("local", 2).run(die, range(3)))


def test_no_items_give_no_results() -> None:
    assert list(WorkerPool("local", 2).run(square, [])) == []
