"""Compiled steps in files: another process trains with them as with its own, and takes no other step's."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from headrace.config import reader
from headrace.training import compiled_step, setup, step
from tests.support import xla_flags
from tests.training.test_step import Bench


@pytest.fixture
def kept(tiny: Any, tmp_path: Path) -> Path:
    """A folder with the step of the recipe, over 8 devices."""
    bench = Bench(tiny(), dict(data=8))
    (tmp_path / "kept").mkdir()
    with jax.set_mesh(bench.devices):
        one = step.train_step(bench.task, bench.update, bench.axes)
        traced = setup.lower_step(bench.cfg, one, bench.abstract, bench.devices)
        compiled_step.save(traced, bench.step, tmp_path / "kept")
    (tmp_path / "train.yaml").write_text(reader.to_yaml(bench.cfg))
    return tmp_path / "kept"


def start(kept: Path, run: str, *words: str) -> tuple[str, list[float]]:
    """What `headrace train` says, and the losses."""
    command = [sys.executable, "-m", "headrace", "train", str(kept.parent / "train.yaml")]
    command += [f"run_dir={kept.parent}/{run}", "schedule.steps=12", *words]
    flags = {"XLA_FLAGS": xla_flags.flags(8), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (kept.parent / run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return done.stdout + done.stderr, [row["loss"] for row in rows if "loss" in row]


def test_another_process_trains_with_a_kept_step_and_takes_no_other(kept: Path) -> None:
    said, losses = start(kept, "with", "--program", str(kept))
    assert "loaded the compiled step from" in said
    assert len(losses) == 12 and losses == pytest.approx(start(kept, "without")[1], rel=1e-5)
    said, _ = start(kept, "other", "optimizer.b1=0.8", "--program", str(kept))
    assert "compiling the step; " in said


@pytest.mark.fault(28)
def test_a_file_that_is_damaged_is_told_and_the_step_compiled(kept: Path) -> None:
    (file,) = kept.glob("*.program")
    file.write_bytes(file.read_bytes()[:1000])
    said, losses = start(kept, "with", "--program", str(kept))
    assert f"{file} cannot be loaded" in said and len(losses) == 12


def test_a_step_of_another_version_of_jax_is_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    here = compiled_step.file_name(lowered)
    monkeypatch.setattr(jax, "__version__", "0.0.1")
    assert compiled_step.file_name(lowered) != here


@pytest.mark.parametrize(
    "platform, elsewhere, kept",
    [("tpu", None, "run/compiled"), ("gpu", "mine", "mine"), ("cpu", None, None)],
)
def test_what_a_run_compiles_is_kept_in_its_folder(
    monkeypatch: pytest.MonkeyPatch, platform: str, elsewhere: str | None, kept: str | None
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", elsewhere)
        compiled_step.enable_compilation_cache("run")
        assert jax.config.jax_compilation_cache_dir == kept
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_folder_that_is_not_there_is_told(kept: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "headrace",
        "train",
        str(kept.parent / "train.yaml"),
        "--program",
        "nowhere",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "--program: no such folder: nowhere" in done.stderr
