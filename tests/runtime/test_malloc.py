"""Freed memory remains with the process: counted in pages that the system provides."""

import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = """
import resource, sys, threading
import numpy as np
from headrace.runtime import malloc

if sys.argv[1] == "keep":
    malloc.use_one_arena()
    malloc.keep_freed(1 << 30)
    malloc.keep_freed(32 << 20)  # a smaller limit has no effect

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
def test_freed_memory_of_a_thread_is_reused_for_the_next_block() -> None:
    faults = {}
    for mode in ("plain", "keep"):
        command = [sys.executable, "-c", FAULTS, mode]
        faults[mode] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert faults["keep"] < faults["plain"] / 10


BEFORE_JAX = """
import sys
from headrace.runtime import malloc
from headrace.cli import main as cli_main

malloc.use_one_arena = lambda: sys.exit("late" if "jax" in sys.modules else "in time")
cli_main.main(["train", sys.argv[1], "--once"])
"""


def test_training_sets_one_arena_before_jax_starts_threads() -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "demo.yaml"
    done = subprocess.run([sys.executable, "-c", BEFORE_JAX, str(recipe)], capture_output=True, text=True)
    assert done.stderr == "in time\n"
