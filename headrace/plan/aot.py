"""The step of a recipe, compiled for a slice that is not there by libtpu, the compiler that the slice itself
would use. In a process of its own: what it writes down is chosen by flags read once, and it may crash."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.config import reader as config, recipe, sections
from headrace.errors import UserError
from headrace.hardware.slices import Slice, parse

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # the slice is described, not there
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # two plans at once would stop at libtpu's lock
    "TPU_SKIP_MDS_QUERY": "1",  # ask no metadata server
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
# What libtpu says of a program that is too big: "... required ... (16.05G) exceeds available HBM (15.75G)".
TOO_BIG = re.compile(r"\(([\d.]+)([KMGT])\) exceeds available HBM \([\d.]+[KMGT]\)")
# And of a kernel whose tiles do not fit the memory beside the matrix units.
TOO_WIDE = re.compile(r"Scoped allocation with size ([\d.]+[KM]) and limit ([\d.]+[KM])")
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a program. Bytes are those of one device."""

    slice: str
    fits: bool
    mesh: dict[str, int]
    parameters: int
    flops_per_token: float
    weight_bytes: int
    frozen_bytes: int  # of the weights, those without a gradient
    optimizer_bytes: int  # and averaged weights
    argument_bytes: int
    temp_bytes: int
    hbm_bytes: int  # all that is taken at the worst moment; where it does not fit, all that would be needed
    seconds: float  # of CPU time that compiling took
    host_bytes: int = 0  # in the host's memory
    complaint: str = ""  # where it does not fit
    step_seconds: float | None = None
    parts: dict[str, float] = field(default_factory=dict)  # of these, by what they are spent on
    hidden: dict[str, float] = field(default_factory=dict)  # seconds of traffic that go on beside them
    cycle_seconds: float | None = None  # by the compiler's own estimate, for comparison
    doubts: tuple[str, ...] = ()  # what in the program could not be counted


def compile(cfg: sections.Run, where: Slice, folder: Path) -> Compiled:
    """Compiles the step for a slice. What the compiler writes down lies in `folder` afterwards."""
    if " " in str(folder):
        raise UserError(
            f"the compiler cuts paths at spaces, and would write to {folder}; name a folder without with "
            "--save, or by TMPDIR"
        )
    folder.mkdir(parents=True, exist_ok=True)
    # What an earlier plan left says nothing of this one.
    shutil.rmtree(folder / "dump", ignore_errors=True)
    for old in (folder / "result.json", *folder.glob("*.program")):
        old.unlink(missing_ok=True)
    (folder / "recipe.yaml").write_text(config.to_yaml(cfg))
    (folder / "slice").write_text(where.name)
    flags = f"--xla_dump_to={folder / 'dump'} --xla_dump_hlo_as_text"
    environment = os.environ | ENVIRONMENT | {"XLA_FLAGS": flags}
    command = [sys.executable, "-m", "headrace.plan.aot", str(folder)]
    with (folder / "log").open("wb") as log:
        code = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode
    if code or not (folder / "result.json").is_file():
        said = (folder / "log").read_text(errors="replace").strip().splitlines()
        why = next((line for line in reversed(said) if line.startswith("headrace: ")), None)
        if why is not None:
            raise UserError(why.removeprefix("headrace: "))
        # What goes wrong in the compiler has more lines after the one that names it.
        errors = [line for line in said if re.match(r"[\w.]+(Error|Exception): ", line)]
        last = (errors or said or ["no word"])[-1]
        raise UserError(f"the compiler ended with exit code {code}: {last}")
    return Compiled(**json.loads((folder / "result.json").read_bytes()))


def main(folder: Path) -> int:
    """What the process does."""
    where = parse((folder / "slice").read_text())
    try:
        found = compiled(recipe.load(folder / "recipe.yaml"), where, folder)
    except UserError as error:
        print(f"headrace: {error}")
        return 2
    (folder / "result.json").write_text(json.dumps(dataclasses.asdict(found)))
    return 0


def compiled(cfg: sections.Run, where: Slice, folder: Path) -> Compiled:
    import jax
    from jax.experimental import topologies

    from headrace.training import setup as build, compiled_step as programs, step
    from headrace.nn import module
    from headrace.data.dataset import Dataset
    from headrace.training.evaluate import vocabulary
    from headrace.training.memory_check import held
    from headrace.objectives import Vocabulary, file, flops, make_task
    from headrace.plan import hlo as instructions
    from headrace.plan import timing

    try:
        topology = topologies.get_topology_desc(where.topology, "tpu", **where.options)
    except RuntimeError as error:
        if "TPU support not installed" not in str(error):
            raise
        raise UserError('planning for TPUs takes their compiler: `pip install ".[tpu]"`') from None
    devices = build.make_mesh(cfg, topology.devices)
    special, marks = (
        Vocabulary(cfg.model.vocab, pad=0, bos=1, eos=2, mask=3),
        dict(has_labels=cfg.model.labels > 0),
    )
    if (Path(cfg.data.path) / "index.json").is_file():  # then it is the program that `train` will want
        dataset = Dataset.open(cfg.data.path, sequence_length=cfg.data.sequence_length)
        special = vocabulary(dataset)
        marks = dict(has_loss=dataset.has_loss, has_labels=dataset.has_labels)
    task = make_task(cfg, special, topology.devices[0])
    family = file("models", task.model)
    with jax.set_mesh(devices):
        update = build.make_update(cfg, task)
        abstract, _ = build.make_state(cfg, task, update, devices)
        axes = module.axes(family.Model, task.model)
        still = build.frozen(cfg, axes)
        weights, rest = held(abstract.params), held((abstract.optimizer, abstract.ema))
        known: dict[str, Any] = dict(
            slice=where.name,
            mesh=dict(devices.shape),
            parameters=sum(leaf.size for leaf in jax.tree.leaves(abstract.params)),
            flops_per_token=flops(cfg),
            weight_bytes=weights,
            frozen_bytes=held([leaf for name, leaf in module.named(abstract.params) if name in still]),
            optimizer_bytes=rest,
        )
        began = time.process_time()
        try:
            one = step.train_step(task, update, axes)
            traced = build.lowered(cfg, one, abstract, devices, **marks)
            program: Any = programs.compiled(traced, devices, None, print)
            programs.save(traced, program, folder)
        except jax.errors.JaxRuntimeError as error:
            if wide := TOO_WIDE.search(str(error)):
                raise UserError(
                    f"attention: its tiles take {wide[1]}iB, expected at most {wide[2]}iB; lower "
                    "attention.block_q and attention.block_kv"
                ) from None
            found = TOO_BIG.search(str(error))
            if not found:
                raise
            need = int(float(found[1]) * UNITS[found[2]])
            return Compiled(
                **known,
                fits=False,
                argument_bytes=weights + rest,
                temp_bytes=need - weights - rest,
                hbm_bytes=need,
                seconds=time.process_time() - began,
                complaint=found[0],
            )
    scheduled = instructions.read(next((folder / "dump").glob("*jit_step*after_codegen.txt")))
    time_ = timing.step(scheduled, timing.rates(where, list(devices.devices.flat)))
    memory: Any = program.memory_analysis()
    taken = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(
        **known,
        fits=True,
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        host_bytes=memory.host_temp_size_in_bytes,
        hbm_bytes=taken + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
        seconds=time.process_time() - began,
        step_seconds=time_.seconds,
        parts={
            "matrix units": time_.matrix,
            "memory": time_.memory,
            "kernels": time_.pallas,
            "other": time_.other,
        }
        | {f"{kind}, in the open": traffic.exposed for kind, traffic in time_.collectives.items()},
        hidden={kind: max(one.seconds - one.exposed, 0.0) for kind, one in time_.collectives.items()},
        cycle_seconds=time_.cycles,
        doubts=time_.doubts,
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
