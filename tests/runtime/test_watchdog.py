"""Runs that hang are ended and reported; long steps are not."""

import subprocess
import sys
import time
from pathlib import Path

from headrace.errors import ExitCode
from headrace.runtime.watchdog import MAX_STEP_RATIO, SLOW_FACTOR, Watchdog

LOOP = """
import sys, time
from headrace.runtime.watchdog import Watchdog
with Watchdog(0.5, sys.argv[1]) as dog:
    for step in range(1, 4):
        time.sleep(0.05)
        dog.step_done(step)
    dog.reset()
    time.sleep(1)  # longer than a step may take
    dog.step_done(4)
    def stuck():
        time.sleep(60)
    stuck()
"""


def test_a_hang_ends_the_process_and_leaves_the_stacks_of_all_threads(tmp_path):
    process = subprocess.run([sys.executable, "-c", LOOP, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    assert process.returncode == ExitCode.HUNG
    assert "after step 4: the run hangs" in process.stderr and "in stuck" in process.stderr
    (file,) = (tmp_path / "stacks").iterdir()
    assert file.name.startswith("0-") and "in stuck" in file.read_text()


def test_the_limit_is_a_multiple_of_the_median_step(tmp_path):
    dog = Watchdog(1.0, str(tmp_path))
    assert dog.limit() == SLOW_FACTOR  # the first
    dog.step_done(1)
    assert dog.limit() == 1.0
    dog.step_seconds.extend([2.0, 3.0, 100.0])
    assert dog.limit() == 3.0 * MAX_STEP_RATIO
    dog.reset()
    assert dog.limit() == 3.0 * MAX_STEP_RATIO * SLOW_FACTOR
    dog.step_done(2)
    assert len(dog.step_seconds) == 3  # only plain steps are counted


def test_a_watchdog_that_sees_no_hang_leaves_nothing_behind(tmp_path):
    with Watchdog(0.2, str(tmp_path)) as dog:
        dog.step_done(1)
        time.sleep(0.1)
    with Watchdog(0, str(tmp_path)):
        time.sleep(0.1)
    assert not list(Path(tmp_path).iterdir())
