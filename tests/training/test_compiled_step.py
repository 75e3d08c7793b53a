"""Compiled steps in files: another process loads its own step, and no other."""

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
def program_dir(tiny: Any, tmp_path: Path, no_compilation_cache: None) -> Path:
    """A folder with the compiled step of train.yaml next to it, for 8 devices. Steps from JAX's cache lack
    functions when they are stored again, on a CPU."""
    bench = Bench(tiny(), dict(data=8))
    (tmp_path / "programs").mkdir()
    with jax.set_mesh(bench.devices):
        train_step = step.make_train_step(bench.task, bench.update, bench.axes)
        lowered = setup.lower_step(bench.cfg, train_step, bench.abstract, bench.devices)
        compiled_step.save(lowered, bench.step, tmp_path / "programs")
    (tmp_path / "train.yaml").write_text(reader.to_yaml(bench.cfg))
    return tmp_path / "programs"


def train(program_dir: Path, run: str, *options: str) -> tuple[str, list[float]]:
    """Run `headrace train`. Returns its output and the losses."""
    folder = program_dir.parent
    command = [sys.executable, "-m", "headrace", "train", str(folder / "train.yaml")]
    command += [f"run_dir={folder}/{run}", "schedule.steps=12", *options]
    flags = {"XLA_FLAGS": xla_flags.flags(8), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return done.stdout + done.stderr, [row["loss"] for row in rows if "loss" in row]


def test_another_process_loads_the_compiled_step_but_not_that_of_another_recipe(program_dir: Path) -> None:
    output, losses = train(program_dir, "with", "--program", str(program_dir))
    assert "loaded the compiled step from" in output
    assert len(losses) == 12 and losses == pytest.approx(train(program_dir, "without")[1], rel=1e-5)
    output, _ = train(program_dir, "other", "optimizer.b1=0.8", "--program", str(program_dir))
    assert "compiling the step; " in output


@pytest.mark.fault(28)
def test_a_damaged_file_is_reported_and_the_step_compiled(program_dir: Path) -> None:
    (file,) = program_dir.glob("*.program")
    file.write_bytes(file.read_bytes()[:1000])
    output, losses = train(program_dir, "with", "--program", str(program_dir))
    assert f"{file} cannot be loaded" in output and len(losses) == 12


def test_the_file_name_depends_on_the_version_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    name = compiled_step.file_name(lowered)
    monkeypatch.setattr(jax, "__version__", "0.0.1")
    assert compiled_step.file_name(lowered) != name


@pytest.mark.parametrize(
    "platform, user_dir, expected",
    [("tpu", None, "run/compiled"), ("gpu", "user", "user"), ("cpu", None, None)],
)
def test_compiled_programs_are_cached_in_the_run_folder(
    monkeypatch: pytest.MonkeyPatch, platform: str, user_dir: str | None, expected: str | None
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", user_dir)
        compiled_step.enable_compilation_cache("run")
        assert jax.config.jax_compilation_cache_dir == expected
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_missing_program_folder_is_an_error(program_dir: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "headrace",
        "train",
        str(program_dir.parent / "train.yaml"),
        "--program",
        "nowhere",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "--program: no such folder: nowhere" in done.stderr
