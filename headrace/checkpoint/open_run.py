"""Run folders, opened for use: the recipe, the tokenizer, and the weights of the newest checkpoint."""

import contextlib
import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from headrace import model_wrappers
from headrace.checkpoint.manager import Checkpoints
from headrace.config.sections import TrainRecipe
from headrace.data.memory_map import open_folder
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.errors import UserError
from headrace.model_formats import quantized_folder
from headrace.model_wrappers import load_family
from headrace.models import Model
from headrace.nn import sharding
from headrace.nn.module import PyTree
from headrace.storage import files

WeightItem = Literal["params", "ema"]  # the weights, or their moving average


@dataclass(frozen=True)
class LoadedRun:
    """A run folder with its weights on the devices: what evaluation, generation, serving and export take."""

    recipe: TrainRecipe
    params: PyTree
    step: int  # training steps behind the weights; 0 for imported and quantized models
    mesh: Mesh
    tokenizer: tokenizer_io.Tokenizer | None  # None if the run folder has none
    tokenizer_sha256: str | None  # of tokenizer.json

    @property
    def model(self) -> Model:
        """The weights as a model to be called: `run.model(run.recipe.model, tokens, exec_opts=...)`."""
        model: Model = self.params
        return model

    def merged(self) -> "LoadedRun":
        """Merge what wraps the weights (LoRA, QAT, a frozen copy) into plain arrays of the same model."""
        cfg = self.recipe.model
        if not model_wrappers.has_wrapped_weights(cfg):
            return self
        plain = model_wrappers.without_wrapper(cfg)
        unwrap = functools.partial(model_wrappers.unwrap_params, load_family(plain).Model, cfg)
        recipe = dataclasses.replace(self.recipe, model=plain)
        return dataclasses.replace(self, recipe=recipe, params=jax.jit(unwrap)(self.params))


def open_run(recipe: TrainRecipe, *, item: WeightItem | None = None) -> LoadedRun:
    """Restore the weights of a run's newest intact checkpoint, sharded over all devices.

    `item` chooses between the weights and their moving average; by default it is the average if the
    checkpoint has one. A folder that `headrace quantize` wrote is opened alike."""
    run_dir = recipe.run_dir
    if not files.is_url(run_dir) and quantized_folder.read_quant_config(Path(run_dir)) is not None:
        return _open_quantized(recipe, item)
    checkpoints = Checkpoints(run_dir)
    try:
        step = checkpoints.latest_step()
        if step is None:
            raise UserError(f"{run_dir}: no checkpoint in it yet")
        if item is None:
            item = "ema" if checkpoints.has_item(step, "ema") else "params"
        if item == "ema" and not checkpoints.has_item(step, item):
            raise UserError(f"{run_dir}: no averaged weights in it; train with optimizer.ema_decay above 0")
        mesh = _mesh_of_all_devices()
        abstract = sharding.abstract_params(load_family(recipe.model).Model, recipe.model, mesh)
        params = checkpoints.restore_params(step, abstract, item)
    finally:
        checkpoints.close()
    return _with_tokenizer(recipe, params, step, mesh)


def _open_quantized(recipe: TrainRecipe, item: WeightItem | None) -> LoadedRun:
    """Open a folder that `headrace quantize` wrote. Its weights stay packed, with a copy on every device."""
    if item == "ema":
        raise UserError(f"{recipe.run_dir}: no averaged weights in it, since it is quantized")
    mesh = _mesh_of_all_devices()
    params = quantized_folder.read_params(recipe.run_dir, load_family(recipe.model), recipe.model)
    replicated = NamedSharding(mesh, PartitionSpec())
    return _with_tokenizer(recipe, jax.device_put(params, replicated), 0, mesh)


def _mesh_of_all_devices() -> Mesh:
    return sharding.make_mesh(dict.fromkeys(sharding.AXES, 1) | {"fsdp": jax.device_count()})


def _with_tokenizer(recipe: TrainRecipe, params: PyTree, step: int, mesh: Mesh) -> LoadedRun:
    with files.local_copy(recipe.run_dir, tokenizer_io.TOKENIZER_FILES) as folder:
        if not (folder / "tokenizer.json").is_file():
            return LoadedRun(recipe, params, step, mesh, None, None)
        tokenizer = tokenizer_io.load(folder)
        return LoadedRun(recipe, params, step, mesh, tokenizer, tokenizer_io.file_sha256(folder))


def copy_tokenizer(source: str | Path, target: str | Path) -> None:
    """Copy the files of a tokenizer, so that a run folder can be used without its data folder."""
    folder = open_folder(source)
    for name in tokenizer_io.TOKENIZER_FILES:
        with contextlib.suppress(FileNotFoundError):
            (Path(target) / name).write_bytes(folder.read(name))
