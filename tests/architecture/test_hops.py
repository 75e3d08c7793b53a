"""The way of a batch through the package is short enough to be read: files and functions are counted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hops() -> dict[str, list[str]]:
    """What tests/support/hops.py traces, in a process of its own: nothing is cached, and there is one
    device."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.support.hops"]
    return json.loads(subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE).stdout)


@pytest.mark.parametrize(
    "what, most",
    [("step files", 23), ("batch files", 7), ("stack at the first einsum", 10)],
)
def test_a_batch_takes_few_hops(hops: dict[str, list[str]], what: str, most: int) -> None:
    print(f"{what}: {len(hops[what])}, at most {most}")
    print(*hops[what], sep="\n")
    assert len(hops[what]) <= most, "\n".join(hops[what])
