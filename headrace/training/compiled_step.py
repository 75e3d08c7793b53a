"""Compiled steps in files. From what `headrace plan --save` compiled for a slice, `headrace train --program`
starts on that slice; and what a run has compiled, it finds when it is started again."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from headrace.data.shards import open_atomic
from headrace.nn.compile import compile_fast

SUFFIX = ".program"


def load_or_compile(
    lowered: Any, devices: Mesh, folder: Path | None, say: Callable[[str], None]
) -> Callable[..., Any]:
    """The program of a step: from a file in the folder if one is of this very step, else by the compiler."""
    if folder is not None:
        wanted = name(lowered)
        file = next(iter(sorted(folder.rglob(wanted))), None)
        if file is None:
            why = f"none in {folder} is of this step, these devices and JAX {jax.__version__}"
        else:
            try:
                program = load(lowered, devices, file)
                say(f"the step was compiled before: {file}")
                return program
            except Exception as error:  # a damaged file makes the loader raise errors of every kind
                why = f"{file} cannot be loaded: {str(error).partition(chr(10))[0]}"
        say(f"the step is compiled anew; {why}")
    platform = devices.devices.flat[0].platform
    # A CPU is for trying things out, and has nothing to choose.
    return compile_fast(lowered, platform) if platform == "cpu" else compile_fast(lowered, platform, say)


def name(lowered: Any) -> str:
    """The file of a step: by what goes into the compiler, and its version."""
    known = f"{lowered.as_text()}\0{jax.__version__}"
    return hashlib.sha256(known.encode()).hexdigest()[:32] + SUFFIX


def save(lowered: Any, program: Any, folder: Path) -> None:
    content, _, _ = serialize_executable.serialize(program)
    with open_atomic(folder / name(lowered)) as file:
        file.write(content)


def load(lowered: Any, devices: Mesh, file: Path) -> Any:
    """The file must be of this step, and one's own: to load it is to run it."""
    all_devices = list(devices.devices.flat)
    return serialize_executable.deserialize_and_load(
        file.read_bytes(),
        jax.tree.structure(lowered.args_info),
        lowered.out_tree,
        all_devices[0].client,
        all_devices,
    )


def enable_compilation_cache(run: str) -> None:
    """A run that is started again finds its programs in its folder, unless the user keeps them elsewhere. Not
    for CPUs: what is compiled for one may not run on the next."""
    elsewhere = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if jax.default_backend() != "cpu" and elsewhere is None:
        jax.config.update("jax_compilation_cache_dir", f"{run}/compiled")
