"""Inputs of training from a dataset: batches on the devices, special token ids, sizes of the model."""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from headrace.config.sections import TrainRecipe
from headrace.data.batch_order import BatchOrder
from headrace.data.dataset import Dataset
from headrace.model_wrappers import classification_head
from headrace.nn.sharding import row_sharding
from headrace.objectives import Batch, SpecialTokens, check_dataset_kind, load_objective


def device_batch(dataset: Dataset, order: BatchOrder, mesh: Mesh, step: int) -> Batch:
    """The global batch of `step` as sharded arrays, [b s] each. Hosts read only the rows of their devices.

    The arrays keep their full size during a batch-size ramp. Of every `ramp.last` consecutive rows, one for
    each microbatch (`step.to_microbatches`), those of microbatches that the step does not use are padding."""
    shape = (order.batch_size, dataset.sequence_length)
    sharding = row_sharding(mesh, shape)
    host = host_rows(sharding, shape)
    active, total = order.ramp.microbatches_at(step), order.ramp.last
    # The batch that is read has no such padding yet.
    slots = slice(host.start * active // total, host.stop * active // total)
    arrays = {
        name: to_global_array(pad_ramp(rows, active, total), host.start, shape, sharding)
        for name, rows in dataset.batch(order, step, slots).arrays().items()
    }
    return Batch(**arrays)


def host_rows(sharding: NamedSharding, shape: tuple[int, int]) -> range:
    """The range of rows, in a global batch of this shape, that the devices of this host have a part of."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    slices = [index[0].indices(shape[0]) for index in indices if index is not None]
    return range(min(start for start, _, _ in slices), max(stop for _, stop, _ in slices))


def pad_ramp(rows: np.ndarray, active: int, total: int) -> np.ndarray:
    """Put `total - active` rows of zeros after every `active` rows."""
    groups = rows.reshape(-1, active, *rows.shape[1:])
    return np.pad(groups, [(0, 0), (0, total - active), (0, 0)]).reshape(-1, *rows.shape[1:])


def to_global_array(
    rows: np.ndarray, first_row: int, shape: tuple[int, int], sharding: NamedSharding
) -> jax.Array:
    """Make a sharded array of `shape`, of which this host provides `rows`, the first of them `first_row`."""

    def read_shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        start, stop, _ = index[0].indices(shape[0])
        return rows[start - first_row : stop - first_row, index[1]]

    return jax.make_array_from_callback(shape, sharding, read_shard)


def special_tokens(dataset: Dataset) -> SpecialTokens:
    """Token ids with a meaning of their own, for an objective."""
    special = dataset.index.special
    return SpecialTokens(dataset.vocab, dataset.pad_id, special.bos, special.eos, special.mask)


def fill_model_sizes(recipe: TrainRecipe, dataset: Dataset) -> TrainRecipe:
    """Complete a recipe with sizes that it leaves to the data: the vocabulary, and the number of labels.

    Refuses data of a kind that the objective cannot train on."""
    check_dataset_kind(recipe.objective, recipe.data.path, dataset.index)
    model = recipe.model
    if load_objective(recipe.objective).data_kind == "labels":
        model = classification_head.with_label_count(model, len(dataset.index.labels), dataset.index.labelled)
    if not model.vocab:
        model = dataclasses.replace(model, vocab=dataset.vocab)
    return recipe if model is recipe.model else dataclasses.replace(recipe, model=model)
