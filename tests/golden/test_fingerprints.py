"""Compiled training steps are what they were: refactoring does not change the program.

When a change is meant to alter a step, `python -m tests.golden.record fingerprints` records it again; the
commit then says why it differs."""

import json
from pathlib import Path

import jax
import pytest

from tests.golden.cases import CASES, MESHES
from tests.golden.programs import fingerprint, fingerprints

RECORDED = json.loads((Path(__file__).parent / "fingerprints.json").read_text())


def test_every_case_is_recorded():
    for version, cases in RECORDED.items():
        assert set(cases) == {f"{name}, {mesh}" for name in CASES for mesh in MESHES}, version


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", CASES)
def test_the_compiled_steps_are_the_recorded_ones(name: str, mesh: str):
    if jax.__version__ not in RECORDED:
        pytest.skip(f"fingerprints are not recorded for JAX {jax.__version__}")
    devices, sizes = MESHES[mesh]
    assert fingerprints(CASES[name], devices, sizes) == RECORDED[jax.__version__][f"{name}, {mesh}"]


def test_a_fingerprint_depends_on_the_computation_and_not_on_names():
    def double(x):
        return x * 2

    def renamed(y):
        return y * 2

    def triple(x):
        return x * 3

    programs = [jax.jit(lambda x, f=f: jax.jit(f)(x)).lower(1.0).as_text() for f in (double, renamed, triple)]
    first, second, third = map(fingerprint, programs)
    assert programs[0] != programs[1] and first == second != third
