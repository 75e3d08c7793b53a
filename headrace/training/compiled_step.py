"""Compiled steps in files.

`headrace plan --save` compiles a step for a slice, and `headrace train --program` loads it there. A run that
is started again finds the programs that it compiled before."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from headrace.data.shards import open_atomic
from headrace.nn.compile import compile_fast

SUFFIX = ".program"


def load_or_compile(
    lowered: jax.stages.Lowered, mesh: Mesh, folder: Path | None, report: Callable[[str], None]
) -> jax.stages.Compiled:
    """Load the program of a step from the file in `folder` that is of this very step, or else compile it."""
    if folder is not None:
        name = file_name(lowered)
        path = next(iter(sorted(folder.rglob(name))), None)
        if path is None:
            reason = f"{folder} has no program of this step for these devices and JAX {jax.__version__}"
        else:
            try:
                program = load(lowered, mesh, path)
                report(f"loaded the compiled step from {path}")
                return program
            except Exception as error:  # a damaged file makes the loader raise errors of every kind
                reason = f"{path} cannot be loaded: {str(error).partition(chr(10))[0]}"
        report(f"compiling the step; {reason}")
    platform = mesh.devices.flat[0].platform
    # On a CPU, which is for trying things out, there are no options to report.
    return compile_fast(lowered, platform) if platform == "cpu" else compile_fast(lowered, platform, report)


def file_name(lowered: jax.stages.Lowered) -> str:
    """Name the file of a step by the input of the compiler, and its version."""
    content = f"{lowered.as_text()}\0{jax.__version__}"
    return hashlib.sha256(content.encode()).hexdigest()[:32] + SUFFIX


def save(lowered: jax.stages.Lowered, program: jax.stages.Compiled, folder: Path) -> None:
    """Write a compiled step into `folder`."""
    content, _, _ = serialize_executable.serialize(program)
    with open_atomic(folder / file_name(lowered)) as file:
        file.write(content)


def load(lowered: jax.stages.Lowered, mesh: Mesh, path: Path) -> jax.stages.Compiled:
    """Load the compiled step from a file, which must be of this very step. Loading a file executes code from
    it, so it must come from a trusted source."""
    devices = list(mesh.devices.flat)
    return serialize_executable.deserialize_and_load(
        path.read_bytes(),
        jax.tree.structure(lowered.args_info),
        lowered.out_tree,
        devices[0].client,
        devices,
    )


def enable_compilation_cache(run_dir: str) -> None:
    """Store compiled programs in the run folder, unless the user has set another folder. Not for CPUs: what
    is compiled for one may not run on the next."""
    user_dir = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if jax.default_backend() != "cpu" and user_dir is None:
        jax.config.update("jax_compilation_cache_dir", f"{run_dir}/compiled")
