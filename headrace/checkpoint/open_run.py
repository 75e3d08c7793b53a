"""A run folder, opened for use: its recipe, its tokenizer and its newest weights."""

import contextlib
import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from headrace import model_wrappers
from headrace.checkpoint.manager import Checkpoints
from headrace.config import sections
from headrace.data.memory_map import open_folder
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.errors import UserError
from headrace.model_formats import quantized_folder
from headrace.model_wrappers import load_family
from headrace.nn import sharding
from headrace.storage import files


@dataclass(frozen=True)
class LoadedRun:
    recipe: sections.TrainRecipe
    params: Any
    step: int
    devices: Mesh
    tokenizer: tokenizer_io.Tokenizer | None
    tokenizer_sha256: str | None

    def merged(self) -> "LoadedRun":
        """The run with plain weights: adapters and grids are merged into the matrices."""
        cfg = self.recipe.model
        if not model_wrappers.has_wrapped_weights(cfg):
            return self
        plain = model_wrappers.without_wrapper(cfg)
        unwrap = functools.partial(model_wrappers.unwrap_params, load_family(plain).Model, cfg)
        recipe = dataclasses.replace(self.recipe, model=plain)
        return dataclasses.replace(self, recipe=recipe, params=jax.jit(unwrap)(self.params))


def open_run(cfg: sections.TrainRecipe, *, item: Literal["params", "ema"] | None = None) -> LoadedRun:
    """Restores the weights of the newest checkpoint, or their average, split over all devices there are.
    Unless one of them is named, the average where there is one."""
    if not files.is_url(cfg.run_dir) and quantized_folder.read_quant_config(Path(cfg.run_dir)) is not None:
        return open_quantised(cfg, item)
    checkpoints = Checkpoints(cfg.run_dir)
    try:
        step = checkpoints.latest_step()
        if step is None:
            raise UserError(f"{cfg.run_dir}: no checkpoint in it yet")
        if item is None:
            item = "ema" if checkpoints.has_item(step, "ema") else "params"
        if item == "ema" and not checkpoints.has_item(step, item):
            raise UserError(
                f"{cfg.run_dir}: no average of the weights in it; train with optimizer.ema_decay above 0"
            )
        model = load_family(cfg.model).Model
        devices = sharding.make_mesh(dict.fromkeys(sharding.AXES, 1) | {"fsdp": jax.device_count()})
        params = checkpoints.restore_params(step, sharding.abstract_params(model, cfg.model, devices), item)
    finally:
        checkpoints.close()
    return with_tokenizer(cfg, params, step, devices)


def open_quantised(cfg: sections.TrainRecipe, item: str | None) -> LoadedRun:
    """A folder that `headrace quantize` wrote: its weights as they are stored, whole on every device."""
    if item == "ema":
        raise UserError(f"{cfg.run_dir}: no average of the weights in it, since it is quantised")
    devices = sharding.make_mesh(dict.fromkeys(sharding.AXES, 1) | {"fsdp": jax.device_count()})
    params = quantized_folder.read(cfg.run_dir, load_family(cfg.model), cfg.model)
    everywhere = NamedSharding(devices, PartitionSpec())
    return with_tokenizer(cfg, jax.device_put(params, everywhere), 0, devices)


def with_tokenizer(cfg: sections.TrainRecipe, params: Any, step: int, devices: Mesh) -> LoadedRun:
    with files.local_copy(cfg.run_dir, tokenizer_io.TOKENIZER_FILES) as folder:
        if not (folder / "tokenizer.json").is_file():
            return LoadedRun(cfg, params, step, devices, None, None)
        return LoadedRun(
            cfg, params, step, devices, tokenizer_io.load(folder), tokenizer_io.file_sha256(folder)
        )


def copy_tokenizer(source: str | Path, run: str | Path) -> None:
    """Copies the tokenizer beside the weights: a run folder needs no data folder to be of use."""
    folder = open_folder(source)
    for name in tokenizer_io.TOKENIZER_FILES:
        with contextlib.suppress(FileNotFoundError):
            (Path(run) / name).write_bytes(folder.read(name))
