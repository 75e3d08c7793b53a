"""The whole training step through the real TPU compiler, on a machine without a TPU."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.config import reader, recipe

TINY = sorted((Path(__file__).parents[2] / "recipes/tiny").glob("*.yaml"))

SCRIPT = """
import sys
import jax
from jax.experimental import topologies
from headrace.training import setup, compiled_step, step
from headrace.nn import sharding, module
from headrace.config import recipe
from headrace.objectives import SpecialTokens
from headrace.training.task import make_task

sizes = dict(zip(sharding.AXES, map(int, sys.argv[2].split(",")), strict=False))
cfg = recipe.load(sys.argv[1], sys.argv[3:])
slice_ = topologies.get_topology_desc(topology_name="v5e:2x4", platform="tpu")
devices = sharding.make_mesh(sizes, slice_.devices)
task = make_task(cfg, SpecialTokens(cfg.model.vocab, 0, 1, 2, 3))
with jax.set_mesh(devices):
    update = setup.make_update(cfg, task)
    abstract, _ = setup.make_state(cfg, task, update, devices)
    axes = module.axes(task.family.Model, task.model)
    traced = setup.lower_step(cfg, step.make_train_step(task, update, axes), abstract, devices)
    compiled = compiled_step.load_or_compile(traced, devices, None, print)
used = compiled.memory_analysis()
print("arguments", used.argument_size_in_bytes, "aliased", used.alias_size_in_bytes)
"""


def compiled(path: Path, sizes: str, *overrides: str) -> dict[str, int]:
    """Bytes of the arguments of the compiled step, and how many of them its results reuse."""
    command = [sys.executable, "-c", SCRIPT, str(path), sizes, *overrides]
    env = os.environ | {"XLA_FLAGS": "", "TPU_WORKER_HOSTNAMES": "localhost"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    numbers = done.stdout.splitlines()[-1].split()  # above it are messages of the compiler
    return dict(zip(numbers[::2], map(int, numbers[1::2]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "eurobert"])
def test_the_step_compiles_for_a_tpu_slice_with_the_state_donated(libtpu, tiny, tmp_path, name):
    cfg = tiny("model.vocab=512", "model.embed=256", "model.heads=4", "model.mlp=512", "data.path=nowhere")
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, sequence_length=512))
    (tmp_path / "tpu.yaml").write_text(reader.to_yaml(cfg))
    encoder = [
        "objective.use=masked",
        "model={use: eurobert, layers: 2, embed: 256, heads: 4, kv_heads: 2, mlp: 512}",
    ]
    overrides = ["model.vocab=512", "compute.dtype=bfloat16"]
    overrides = encoder + overrides if name == "eurobert" else overrides
    numbers = compiled(tmp_path / "tpu.yaml", "1,2,2,2", *overrides)
    # The new state reuses the memory of the old one; only the batch is not reused.
    assert numbers["aliased"] > 0.9 * numbers["arguments"]


@pytest.mark.slow
@pytest.mark.parametrize("path", TINY, ids=lambda path: path.stem)
def test_the_step_of_every_family_compiles_for_a_tpu_slice(libtpu, path):
    if path.stem == "torch":
        pytest.importorskip("torchax", reason="needs torchax: pip install 'headrace[torch]'")
    overrides = ["data.sequence_length=512", "model.vocab=2048", "compute.dtype=bfloat16"]
    if recipe.load(path).model.use == "deberta":  # has as many positions
        overrides.append("model.max_relative_positions=512")
    numbers = compiled(path, "1,4,2,1", *overrides)
    assert numbers["aliased"] > 0.9 * numbers["arguments"]
