"""Ahead-of-time compilation of a recipe's step by libtpu, for a slice that is not present.

It runs in a subprocess: flags that choose what the compiler dumps are read once per process, and it may
crash."""

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
from typing import TYPE_CHECKING, Any

from headrace.config import reader
from headrace.config.recipe import load
from headrace.config.sections import TrainRecipe
from headrace.errors import ExitCode, UserError
from headrace.hardware.slices import SliceShape, parse_slice

if TYPE_CHECKING:  # imported at run time by the subprocess only
    import jax

    from headrace.objectives import SpecialTokens

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # the slice is described, not present
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # otherwise libtpu's lock allows one plan at a time
    "TPU_SKIP_MDS_QUERY": "1",  # no queries to the metadata server
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
# libtpu's error for a program that is too large: "... required ... (16.05G) exceeds available HBM (15.75G)".
HBM_EXCEEDED = re.compile(r"\(([\d.]+)([KMGT])\) exceeds available HBM \([\d.]+[KMGT]\)")
# Its error for a kernel whose tiles are too large for the memory next to the matrix units.
VMEM_EXCEEDED = re.compile(r"Scoped allocation with size ([\d.]+[KM]) and limit ([\d.]+[KM])")
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Compiled:
    """Memory and time of a compiled step. Bytes are per device."""

    slice_name: str
    fits: bool
    mesh: dict[str, int]
    parameters: int
    flops_per_token: float
    weight_bytes: int
    frozen_bytes: int  # part of the weights that has no gradient
    optimizer_bytes: int  # including averaged weights
    argument_bytes: int
    temp_bytes: int
    hbm_bytes: int  # at the peak; if it does not fit, the bytes that would be needed
    compile_seconds: float  # of CPU time
    host_bytes: int = 0  # in the host's memory
    error_text: str = ""  # of the compiler, if it does not fit
    step_seconds: float | None = None
    seconds_by_part: dict[str, float] = field(default_factory=dict)  # of a step
    hidden_seconds: dict[str, float] = field(default_factory=dict)  # of traffic in parallel with these
    cycle_seconds: float | None = None  # by the compiler's own estimate, for comparison
    caveats: tuple[str, ...] = ()  # parts of the program that could not be counted


def compile_step(recipe: TrainRecipe, slice_shape: SliceShape, folder: Path) -> Compiled:
    """Compile the step of a recipe for a slice, in a subprocess that writes the compiler's output to
    `folder`.

    Raises UserError if the compiler refuses it for another reason than memory."""
    if " " in str(folder):
        raise UserError(
            f"the compiler cuts paths at spaces, and would write to {folder}; name a folder without spaces "
            "with --save or TMPDIR"
        )
    folder.mkdir(parents=True, exist_ok=True)
    # Remove the output of an earlier plan.
    shutil.rmtree(folder / "dump", ignore_errors=True)
    for old in (folder / "result.json", *folder.glob("*.program")):
        old.unlink(missing_ok=True)
    (folder / "recipe.yaml").write_text(reader.to_yaml(recipe))
    (folder / "slice").write_text(slice_shape.name)
    flags = f"--xla_dump_to={folder / 'dump'} --xla_dump_hlo_as_text"
    environment = os.environ | ENVIRONMENT | {"XLA_FLAGS": flags}
    command = [sys.executable, "-m", "headrace.plan.aot", str(folder)]
    with (folder / "log").open("wb") as log:
        exit_code = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode
    if exit_code or not (folder / "result.json").is_file():
        raise _make_error((folder / "log").read_text(errors="replace"), exit_code)
    return Compiled(**json.loads((folder / "result.json").read_bytes()))


def _make_error(log: str, exit_code: int) -> UserError:
    """Make an error of the subprocess's message, or else of the last error in its log."""
    lines = log.strip().splitlines()
    message = next((line for line in reversed(lines) if line.startswith("headrace: ")), None)
    if message is not None:
        return UserError(message.removeprefix("headrace: "))
    # The compiler writes more lines after the one that names its error.
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    last = (errors or lines or ["it printed nothing"])[-1]
    return UserError(f"the compiler ended with exit code {exit_code}: {last}")


def main(folder: Path) -> int:
    """Compile the recipe in `folder` and write result.json there. Runs in the subprocess."""
    slice_shape = parse_slice((folder / "slice").read_text())
    try:
        result = compile_here(load(folder / "recipe.yaml"), slice_shape, folder)
    except UserError as error:
        print(f"headrace: {error}")
        return ExitCode.USER_ERROR
    (folder / "result.json").write_text(json.dumps(dataclasses.asdict(result)))
    return ExitCode.DONE


def compile_here(recipe: TrainRecipe, slice_shape: SliceShape, folder: Path) -> Compiled:
    """Compile the step of a recipe for a slice in this process."""
    import jax

    from headrace.model_wrappers import load_family
    from headrace.nn import module
    from headrace.training import compiled_step, setup, step
    from headrace.training.memory_check import bytes_per_device
    from headrace.training.task import make_task, recipe_flops_per_token

    topology_devices = _describe_devices(slice_shape)
    mesh = setup.make_mesh(recipe, topology_devices)
    special_tokens, batch_fields = _describe_batches(recipe)
    task = make_task(recipe, special_tokens, topology_devices[0])
    family = load_family(task.model)
    with jax.set_mesh(mesh):
        update = setup.make_update(recipe, task)
        abstract, _ = setup.make_state(recipe, task, update, mesh)
        axes = module.axes(family.Model, task.model)
        frozen = setup.frozen_names(recipe.freeze, axes)
        frozen_leaves = [leaf for name, leaf in module.named_leaves(abstract.params) if name in frozen]
        fields: dict[str, Any] = dict(
            slice_name=slice_shape.name,
            mesh=dict(mesh.shape),
            parameters=sum(leaf.size for leaf in jax.tree.leaves(abstract.params)),
            flops_per_token=recipe_flops_per_token(recipe),
            weight_bytes=bytes_per_device(abstract.params),
            frozen_bytes=bytes_per_device(frozen_leaves),
            optimizer_bytes=bytes_per_device((abstract.optimizer, abstract.ema)),
        )
        started_at = time.process_time()
        try:
            train_step = step.make_train_step(task, update, axes)
            lowered = setup.lower_step(recipe, train_step, abstract, mesh, **batch_fields)
            program: Any = compiled_step.load_or_compile(lowered, mesh, None, print)
            compiled_step.save(lowered, program, folder)
        except jax.errors.JaxRuntimeError as error:
            fields["compile_seconds"] = time.process_time() - started_at
            return _too_large(error, fields)
    fields["compile_seconds"] = time.process_time() - started_at
    return _measure(program, fields, folder, slice_shape, list(mesh.devices.flat))


def _describe_devices(slice_shape: SliceShape) -> "list[jax.Device]":
    """Return JAX devices that describe a slice. Raises UserError if libtpu is not installed."""
    from jax.experimental import topologies

    name, options = slice_shape.topology_name, slice_shape.topology_options
    try:
        return list(topologies.get_topology_desc(name, "tpu", **options).devices)
    except RuntimeError as error:
        if "TPU support not installed" not in str(error):
            raise
        raise UserError(
            "planning for TPUs needs their compiler: run `pip install -c constraints.txt -e '.[tpu]'` in a "
            "clone of Headrace"
        ) from None


def _describe_batches(recipe: TrainRecipe) -> "tuple[SpecialTokens, dict[str, bool]]":
    """Return the special tokens and the optional fields of batches: those of the data, if it is present.

    The program is then the one that `train` needs."""
    from headrace.data.dataset import Dataset
    from headrace.objectives import SpecialTokens
    from headrace.training.batch import special_tokens

    if not (Path(recipe.data.path) / "index.json").is_file():
        tokens = SpecialTokens(recipe.model.vocab, pad=0, bos=1, eos=2, mask=3)
        return tokens, dict(has_labels=recipe.model.labels > 0)
    dataset = Dataset.open(recipe.data.path, sequence_length=recipe.data.sequence_length)
    fields = dict(has_loss_mask=dataset.has_loss_mask, has_labels=dataset.has_labels)
    return special_tokens(dataset), fields


def _too_large(error: Exception, fields: dict[str, Any]) -> Compiled:
    """Return the result for a step that exceeds the memory. Raises other errors of the compiler."""
    if vmem := VMEM_EXCEEDED.search(str(error)):
        raise UserError(
            f"attention: its tiles take {vmem[1]}iB, expected at most {vmem[2]}iB; lower "
            "attention.block_q and attention.block_kv"
        ) from None
    match = HBM_EXCEEDED.search(str(error))
    if not match:
        raise error
    state_bytes = fields["weight_bytes"] + fields["optimizer_bytes"]
    required = int(float(match[1]) * UNITS[match[2]])
    return Compiled(
        **fields,
        fits=False,
        argument_bytes=state_bytes,
        temp_bytes=required - state_bytes,
        hbm_bytes=required,
        error_text=match[0],
    )


def _measure(
    program: Any, fields: dict[str, Any], folder: Path, slice_shape: SliceShape, devices: "list[jax.Device]"
) -> Compiled:
    """Return the memory of a compiled step, and its time by the schedule that the compiler dumped."""
    from headrace.plan.device_rates import make_rates
    from headrace.plan.hlo import read_program
    from headrace.plan.timing import time_step

    schedule = read_program(next((folder / "dump").glob("*jit_step*after_codegen.txt")))
    step_time = time_step(schedule, make_rates(slice_shape, devices))
    memory = program.memory_analysis()
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    parts = {
        "matrix units": step_time.matrix,
        "memory": step_time.memory,
        "kernels": step_time.pallas,
        "other": step_time.other,
    }
    collectives = step_time.collectives.items()
    exposed = {f"{kind}, not hidden": traffic.exposed for kind, traffic in collectives}
    hidden = {kind: max(traffic.seconds - traffic.exposed, 0.0) for kind, traffic in collectives}
    return Compiled(
        **fields,
        fits=True,
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        host_bytes=memory.host_temp_size_in_bytes,
        hbm_bytes=used + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
        step_seconds=step_time.seconds,
        seconds_by_part=parts | exposed,
        hidden_seconds=hidden,
        cycle_seconds=step_time.cycles,
        caveats=step_time.caveats,
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
