"""The whole training step through the real TPU compiler, on a machine without a TPU."""

import dataclasses
import os
import subprocess
import sys

import pytest

from millrace import config

SCRIPT = """
import sys
import jax
from jax.experimental import topologies
from millrace import build, mesh, module, programs, recipe, step
from millrace.objective import Vocabulary, file, make_task

cfg = recipe.load(sys.argv[1], sys.argv[2:])
slice_ = topologies.get_topology_desc(topology_name="v5e:2x4", platform="tpu")
devices = mesh.make(dict(data=1, fsdp=2, tensor=2, context=2), slice_.devices)
task = make_task(cfg, Vocabulary(cfg.model.vocab, 0, 1, 2, 3))
with jax.set_mesh(devices):
    update = build.make_update(cfg, task)
    abstract, _ = build.make_state(cfg, task, update, devices)
    axes = module.axes(file("models", task.model).Model, task.model)
    traced = build.lowered(cfg, step.train_step(task, update, axes), abstract, devices)
    compiled = programs.compiled(traced, devices, None, print)
used = compiled.memory_analysis()
print("arguments", used.argument_size_in_bytes, "aliased", used.alias_size_in_bytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "eurobert"])
def test_the_step_compiles_for_a_tpu_slice_with_the_state_donated(libtpu, tiny, tmp_path, name):
    cfg = tiny("model.vocab=512", "model.embed=256", "model.heads=4", "model.mlp=512", "data.path=nowhere")
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, sequence_length=512))
    (tmp_path / "tpu.yaml").write_text(config.to_yaml(cfg))
    encoder = [
        "objective.use=masked",
        "model={use: eurobert, layers: 2, embed: 256, heads: 4, kv_heads: 2, mlp: 512}",
    ]
    overrides = ["model.vocab=512", "memory.compute=bfloat16"]
    overrides = encoder + overrides if name == "eurobert" else overrides
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "tpu.yaml"), *overrides]
    env = os.environ | {"XLA_FLAGS": "", "TPU_WORKER_HOSTNAMES": "localhost"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    numbers = dict(zip(*[iter(done.stdout.split())] * 2, strict=True))
    # All of the state comes back in its own place; only the batch does not.
    assert int(numbers["aliased"]) > 0.9 * int(numbers["arguments"])
