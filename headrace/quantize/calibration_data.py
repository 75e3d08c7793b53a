"""The data that quantization is calibrated on: training rows, as the run's objective prepares them."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from headrace.checkpoint.open_run import LoadedRun
from headrace.config import reader
from headrace.config.sections import TrainRecipe
from headrace.data.dataset import Dataset
from headrace.errors import UserError
from headrace.nn import sharding
from headrace.nn.module import Array
from headrace.objectives import check_dataset_kind, load_objective
from headrace.quantize.calibrate import CalibrationBatch
from headrace.training.evaluate import device_batch, special_tokens
from headrace.training.task import make_task


def open_calibration_data(run: LoadedRun, path: str, *, is_trained_on: bool = False) -> Dataset:
    """Open packed data for a run's model. Raises UserError if it is of another tokenizer or kind, or if it is
    trained on and holds rejected answers."""
    length = run.recipe.data.sequence_length
    dataset = Dataset.open(path, sequence_length=length, tokenizer_sha256=run.tokenizer_sha256)
    check_dataset_kind(calibration_recipe(run.recipe, dataset).objective, path, dataset.index, "data")
    if is_trained_on and dataset.index.pairs:
        raise UserError(
            f"finetune_steps: {path} holds pairs of answers, and codebooks would be trained on the rejected "
            "ones too; choose other data"
        )
    return dataset


def calibration_recipe(recipe: TrainRecipe, dataset: Dataset) -> TrainRecipe:
    """The recipe with an objective that reads this data: after DPO, other data than pairs is plain text."""
    return recipe if dataset.index.pairs else without_preference(recipe)


def without_preference(recipe: TrainRecipe) -> TrainRecipe:
    """The recipe with objective `causal` instead of `dpo`, which needs the reference model it was trained
    with."""
    if recipe.objective.use != "dpo":
        return recipe
    return dataclasses.replace(recipe, objective=reader.part_class("objectives", "causal")())


def choose_batch_size(run: LoadedRun, num_samples: int) -> int:
    """Choose the number of rows that are on the devices at a time: at most a microbatch, and a multiple of
    the number of devices."""
    microbatch = run.recipe.batch.sequences // run.recipe.batch.microbatches
    rows = max(run.mesh.size, min(num_samples, microbatch))
    return rows - rows % run.mesh.size


def load_calibration_batches(
    run: LoadedRun, dataset: Dataset, num_samples: int
) -> Iterator[CalibrationBatch]:
    """Yield `num_samples` rows of the training split in batches, with inputs as the objective makes them."""
    task = make_task(calibration_recipe(run.recipe, dataset), special_tokens(dataset))
    rows, seed = choose_batch_size(run, num_samples), run.recipe.seed
    prepare = jax.jit(lambda batch, key: load_objective(task.objective).prepare(task, batch, key))
    order = dataset.train_order(rows, seed=seed)
    for step in range(max(1, num_samples // rows)):
        batch = device_batch(dataset, order, run.mesh, step)
        examples = prepare(batch, jax.random.fold_in(jax.random.key(seed), step))
        token_mask = (batch.segments > 0).astype(jnp.float32)
        yield CalibrationBatch(examples.inputs, examples.segments, examples.positions, token_mask)


def shard_rows(mesh: Mesh, x: np.ndarray) -> Array:
    """Move hidden states [b s d] to the devices, sharded like a batch."""
    spec = sharding.partition_spec(("batch", "sequence", None), x.shape, mesh)
    return jax.device_put(x, NamedSharding(mesh, spec))
