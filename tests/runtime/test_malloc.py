"""Memory that is freed stays with the process: counted in pages that the system hands out."""

import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = """
import resource, sys, threading
import numpy as np
from headrace.runtime import malloc

if sys.argv[1] == "kept":
    malloc.use_one_arena()
    malloc.keep_freed(1 << 30)
    malloc.keep_freed(32 << 20)  # a smaller wish takes nothing back

def work():
    for number in range(10):
        if number == 1:  # the first has to come from the system
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        np.ones(25_000_000, np.float32)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_of_a_thread_stays_for_the_next_block() -> None:
    faults = {}
    for how in ("plain", "kept"):
        done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
        faults[how] = int(done.stdout)
    assert faults["kept"] < faults["plain"] / 10


SOON = """
import sys
from headrace.runtime import malloc
from headrace.cli import main as cli_main

malloc.use_one_arena = lambda: sys.exit("late" if "jax" in sys.modules else "in time")
cli_main.main(["train", sys.argv[1], "--once"])
"""


def test_training_asks_for_one_stock_before_jax_starts_threads() -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "demo.yaml"
    done = subprocess.run([sys.executable, "-c", SOON, str(recipe)], capture_output=True, text=True)
    assert done.stderr == "in time\n"
