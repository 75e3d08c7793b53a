"""examples/whole.sh: from text to a model that other libraries load."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import xla_flags

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Run it in a folder of its own. Returns the folder, and the output of each part."""
    place = tmp_path_factory.mktemp("whole")
    (place / "bin").mkdir()
    for name, words in (("headrace", "-m headrace"), ("python", "")):
        shim = place / "bin" / name
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        shim.chmod(0o755)
    env = os.environ | {"XLA_FLAGS": xla_flags.flags(1), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    text = (ROOT / "examples" / "whole.sh").read_text().replace("$PWD/.venv/bin:", f"{place}/bin:")

    def run() -> tuple[Path, dict[str, str]]:
        done = subprocess.run(
            ["bash", "-c", text, str(ROOT / "examples" / "whole.sh"), str(place / "all"), "60"],
            env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return place / "all", dict(re.findall(r"^== (.*)\n((?:(?!== ).*\n)*)", done.stdout, re.M))

    return run


def test_from_text_to_a_model_that_others_load(script):
    folder, parts = script()
    before, after, four = (
        float(re.findall(r"evaluation loss (\S+) nats", parts[name], re.M)[0])
        for name in (
            "Loss on the instructions before fine-tuning",
            "Loss after fine-tuning",
            "Quantizing to 4 bits per weight",
        )
    )
    assert after < before - 1 and abs(four - after) < 0.05
    assert "the same 24 tokens" in parts["Reloading"] and "bit for bit" in parts["Reloading"]
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        path.name for path in (folder / "adapter").iterdir()
    }


@pytest.mark.slow
def test_it_can_be_run_again(script):
    script()
    _, parts = script()
    assert "the same 24 tokens" in parts["Reloading"]
