"""A run folder, opened for use: its recipe, its tokenizer and its newest weights."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from headrace.nn import sharding as mesh
from headrace.config import sections
from headrace.storage import files as store
from headrace.checkpoint.manager import Checkpoints
from headrace.model_formats import quantized_folder as stored
from headrace.data.tokenizer import tokenizer as tokenise
from headrace.data.memory_map import open_folder
from headrace.errors import UserError
from headrace.objectives import file


@dataclass(frozen=True)
class Opened:
    cfg: sections.Run
    params: Any
    step: int
    devices: Mesh
    tokenizer: tokenise.Tokenizer | None
    tokenizer_sha256: str | None


def open_run(cfg: sections.Run, *, item: Literal["params", "ema"] | None = None) -> Opened:
    """Restores the weights of the newest checkpoint, or their average, split over all devices there are.
    Unless one of them is named, the average where there is one."""
    if not store.is_url(cfg.run) and stored.settings_of(Path(cfg.run)) is not None:
        return open_quantised(cfg, item)
    checkpoints = Checkpoints(cfg.run)
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
        params = checkpoints.restore_params(step, mesh.placed(model, cfg.model, devices), item)
    finally:
        checkpoints.close()
    return with_tokenizer(cfg, params, step, devices)


def open_quantised(cfg: sections.Run, item: str | None) -> Opened:
    """A folder that `headrace quantize` wrote: its weights as they are stored, whole on every device."""
    if item == "ema":
        raise UserError(f"{cfg.run}: no average of the weights in it, since it is quantised")
    devices = mesh.make(dict.fromkeys(mesh.AXES, 1) | {"fsdp": jax.device_count()})
    params = stored.read(cfg.run, file("models", cfg.model), cfg.model)
    everywhere = NamedSharding(devices, PartitionSpec())
    return with_tokenizer(cfg, jax.device_put(params, everywhere), 0, devices)


def with_tokenizer(cfg: sections.Run, params: Any, step: int, devices: Mesh) -> Opened:
    with store.near(cfg.run, tokenise.FILES) as folder:
        if not (folder / "tokenizer.json").is_file():
            return Opened(cfg, params, step, devices, None, None)
        return Opened(cfg, params, step, devices, tokenise.load(folder), tokenise.sha256(folder))


def keep_tokenizer(source: str | Path, run: str | Path) -> None:
    """Copies the tokenizer beside the weights: a run folder needs no data folder to be of use."""
    folder = open_folder(source)
    for name in tokenise.FILES:
        with contextlib.suppress(FileNotFoundError):
            (Path(run) / name).write_bytes(folder.read(name))
