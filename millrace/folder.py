"""A run folder, opened for use: its recipe, its tokenizer and its newest weights."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from millrace import mesh, module, recipe
from millrace.checkpoint import Checkpoints
from millrace.data import tokenise
from millrace.data.mapped import open_folder
from millrace.errors import UserError
from millrace.objective import file


@dataclass(frozen=True)
class Opened:
    cfg: recipe.Run
    params: Any
    step: int
    devices: Mesh
    tokenizer: tokenise.Tokenizer | None
    tokenizer_sha256: str | None


def open_run(cfg: recipe.Run, *, item: Literal["params", "ema"] | None = None) -> Opened:
    """Restores the weights of the newest checkpoint, or their average, split over all devices there are.
    Unless one of them is named, the average where there is one."""
    folder, checkpoints = Path(cfg.run), Checkpoints(cfg.run)
    try:
        step = checkpoints.latest()
        if step is None:
            raise UserError(f"{cfg.run}: no checkpoint in it yet")
        if item is None:
            item = "ema" if checkpoints.has(step, "ema") else "params"
        if item == "ema" and not checkpoints.has(step, item):
            raise UserError(f"{cfg.run}: no average of the weights in it; train with optimizer.ema above 0")
        model = file("models", cfg.model).Model
        devices = mesh.make(dict.fromkeys(mesh.AXES, 1) | {"fsdp": jax.device_count()})
        shapes, axes = module.shapes(model, cfg.model), module.axes(model, cfg.model)
        target = jax.tree.map(
            lambda leaf, home: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=home),
            shapes,
            mesh.shardings(axes, shapes, devices),
        )
        params = checkpoints.restore_params(step, target, item)
    finally:
        checkpoints.close()
    if not (folder / "tokenizer.json").is_file():
        return Opened(cfg, params, step, devices, None, None)
    return Opened(cfg, params, step, devices, tokenise.load(folder), tokenise.sha256(folder))


@contextlib.contextmanager
def lock(run: str) -> Iterator[None]:
    """Keeps a second trainer out of a run folder: it would clear away what the first is writing. The kernel
    lets go of the lock when the process dies, however it does. One host of several holds it; a folder that is
    not a local one, or whose file system has no locks, goes without."""
    if "://" in run or jax.process_index():
        yield
        return
    Path(run).mkdir(parents=True, exist_ok=True)
    with open(Path(run) / ".lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise UserError(
                f"{run}: another process trains in this folder (pid {holder}); wait for it, stop it, or use "
                "another `run`"
            ) from None
        except OSError:
            pass
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def keep_tokenizer(source: str | Path, run: str | Path) -> None:
    """Copies the tokenizer beside the weights: a run folder needs no data folder to be of use."""
    folder = open_folder(source)
    for name in tokenise.FILES:
        with contextlib.suppress(FileNotFoundError):
            (Path(run) / name).write_bytes(folder.read(name))
