"""What there is to compile for, asked in processes of their own."""

import os
import subprocess
import sys

import pytest

from tests.support import xla_flags


@pytest.mark.parametrize("devices", [1, 64])
def test_the_threads_of_a_device_are_its_share_of_the_cores(devices: int) -> None:
    flags = {"XLA_FLAGS": xla_flags.flags(devices), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "from headrace.nn.compile_target import threads; print(threads())"]
    done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True, check=True)
    assert int(done.stdout) == max(len(os.sched_getaffinity(0)) // devices, 1)
