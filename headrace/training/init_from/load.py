"""Read the weights of another model onto the devices, in the sizes and shardings of the run's model."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from headrace import model_wrappers
from headrace.checkpoint import open_hf
from headrace.checkpoint.manager import Checkpoints
from headrace.config.source_model import read_hf_config
from headrace.errors import UserError
from headrace.model_formats import hf_ternary
from headrace.model_formats.hf_tensors import SafetensorsFolder
from headrace.model_wrappers import frozen_reference, load_family
from headrace.models import ModelConfig
from headrace.nn import module, sharding
from headrace.nn.module import Array, PyTree, named_leaves
from headrace.training import grow
from headrace.training.init_from.check import (
    InitSource,
    axes_by_path,
    changed_settings,
    delta_weights,
    is_run,
)
from headrace.training.init_from.vocab_rows import vocab_row_map

Weights = dict[str, Array]  # by path


def load_weights(
    source: InitSource, model: ModelConfig, fresh: PyTree, mesh: Mesh, data_path: str
) -> tuple[PyTree, str]:
    """Replace the freshly initialized weights of `model` by those of the source, with the same shardings.

    Returns them with a summary for the log. The folder `data_path` has the tokenizer of the new model."""
    plain_model = model_wrappers.without_wrapper(model)
    family = load_family(plain_model).Model
    has_frozen_base = model_wrappers.has_frozen_base(model)
    plain = sharding.abstract_params(family, plain_model, mesh) if has_frozen_base else fresh
    rows, vocab_note = vocab_row_map(source.path, data_path, source.model.vocab, model.vocab)
    targets = {name: leaf for name, leaf in named_leaves(plain) if name in source.selected}
    adapter = WeightAdapter(source, plain_model, targets, rows)
    text = describe_initialization(adapter, [name for name, _ in named_leaves(plain)], vocab_note)
    if has_frozen_base and not frozen_reference.has_reference(model):
        return load_frozen(adapter, model, fresh, mesh), text

    weights = adapter.adapt(
        {name: w for name, w in read_source_weights(source, mesh).items() if name in source.selected}
    )
    if source.sums_deltas:
        weights |= to_stored_differences(plain_model, weights, dict(named_leaves(plain)))
    dense = jax.tree_util.tree_map_with_path(lambda path, w: weights.get(module.path_name(path), w), plain)
    if not has_frozen_base:
        return dense, text
    shardings = jax.tree.map(lambda leaf: leaf.sharding, fresh)
    wrap = jax.jit(partial(model_wrappers.wrap_params, family, model), out_shardings=shardings)
    return wrap(dense, jax.random.key(0)), text


def to_stored_differences(model: ModelConfig, weights: Weights, fresh: Weights) -> Weights:
    """Compute the weights that `model` stores as differences."""
    return {
        name: jax.jit(jnp.subtract, out_shardings=fresh[name].sharding)(
            weights[name], (fresh | weights)[base]
        )
        for name, base in delta_weights(model).items()
        if name in weights
    }


@dataclass(frozen=True)
class WeightAdapter:
    """Turns weights of the source into those of a model: larger, with other rows of the vocabulary, and with
    the shardings of `targets`."""

    source: InitSource
    model: ModelConfig
    targets: Weights  # shapes and shardings of the selected weights
    vocab_rows: np.ndarray | None  # row of the source for each token; None: the same

    def adapt(self, weights: Weights) -> Weights:
        """Adapt some weights. Those that need no change are not copied: this is where a run needs most memory
        beyond its state."""
        axes = axes_by_path(self.source.model)
        depths = self.source.model.layers, self.model.layers

        def grow_weights(weights: Weights) -> Weights:
            return {
                name: grow.grow_weight(w, axes[name], self.targets[name].shape, depths, self.vocab_rows)
                for name, w in weights.items()
            }

        def fits(name: str, w: Array) -> bool:
            has_other_rows = self.vocab_rows is not None and "vocab" in axes[name].names
            target = self.targets[name]
            return not has_other_rows and (w.shape, w.sharding) == (target.shape, target.sharding)

        changed = {name: w for name, w in weights.items() if not fits(name, w)}
        if not changed:
            return weights
        shardings = {name: self.targets[name].sharding for name in changed}
        return weights | jax.jit(grow_weights, out_shardings=shardings)(changed)


def describe_initialization(adapter: WeightAdapter, names: list[str], vocab_note: str) -> str:
    """Summarize which weights of `names` come from the source and which are initialized at random."""
    source = adapter.source
    text = f"init_from: {len(adapter.targets)} of {len(names)} weights from {source.path}"
    initialized = sorted(set(names) - source.selected)
    if initialized:
        text += f"; {', '.join(initialized[:3])}{' and others' * (len(initialized) > 3)} initialized"
    axes = axes_by_path(source.model)
    has_vocab_axis = any("vocab" in axes[name].names for name in source.selected)
    notes = [vocab_note] if vocab_note and has_vocab_axis else []
    notes += changed_settings(source.model, adapter.model)
    notes += [source.ignored_note] if source.ignored_note else []
    return "; ".join([text, *notes])


def load_frozen(adapter: WeightAdapter, model: ModelConfig, fresh: PyTree, mesh: Mesh) -> PyTree:
    """Load a wrapped model whose base is frozen, one weight at a time.

    The dense model need not fit in memory, only its frozen form does. The leaves of `fresh` that are not
    drawn are deleted first."""
    plain_model, key = model_wrappers.without_wrapper(model), jax.random.key(0)
    family = load_family(plain_model).Model
    plain = sharding.abstract_params(family, plain_model, mesh)
    structure: Any = jax.tree.structure(plain)
    wrapped_shardings = structure.flatten_up_to(jax.tree.map(lambda leaf: leaf.sharding, fresh))
    shardings = {
        name: wrapped for (name, _), wrapped in zip(named_leaves(plain), wrapped_shardings, strict=True)
    }
    for name, leaf in named_leaves(fresh):
        if not model_wrappers.is_randomly_initialized(name):
            leaf.delete()
    frozen: dict[str, PyTree] = {}
    for name, w in iter_source_weights(adapter.source, mesh):
        freeze = jax.jit(
            partial(model_wrappers.wrap_weight, family, model, name), out_shardings=shardings[name]
        )
        frozen[name] = jax.block_until_ready(freeze(adapter.adapt({name: w})[name], key))
        del w  # before the next is read
    loaded = structure.unflatten([frozen[name] for name in shardings])

    def keep_drawn(path: tuple[object, ...], loaded: Array, fresh: Array) -> Array:
        return fresh if model_wrappers.is_randomly_initialized(module.path_name(path)) else loaded

    return jax.tree_util.tree_map_with_path(keep_drawn, loaded, fresh)


def iter_source_weights(source: InitSource, mesh: Mesh) -> Iterator[tuple[str, Array]]:
    """Yield the weights of the source one by one, sharded over the devices."""
    path, family = source.path, load_family(source.model)
    target = sharding.abstract_params(family.Model, source.model, mesh)
    if not is_run(path):
        leaves, table = dict(named_leaves(target)), family.tensor_table(source.model)
        ternary_format = hf_ternary.read_format(read_hf_config(Path(path)))
        tensors = SafetensorsFolder(Path(path), ternary_format, source.ignored_tensors)
        for name, w in open_hf.iter_weights(table, target, tensors, source.selected):
            yield name, jax.make_array_from_callback(w.shape, leaves[name].sharding, w.__getitem__)
    elif model_wrappers.has_frozen_base(source.stored_model) or source.sums_deltas:
        remaining = list(read_source_weights(source, mesh).items())
        while remaining:
            yield remaining.pop(0)
    else:
        with open_newest_checkpoint(path) as (checkpoints, step):
            yield from checkpoints.iter_params(step, target)


def read_source_weights(source: InitSource, mesh: Mesh) -> Weights:
    """Read all weights of the source at once. With `sums_deltas` they are those that an export would have."""
    if not is_run(source.path):
        return dict(iter_source_weights(source, mesh))
    params = restore_run_weights(source, mesh)
    weights = dict(named_leaves(params))
    if source.sums_deltas:
        # Of models that were trained as a pair, the main one is exported under the name "".
        _, exported = load_family(source.model).split_for_export(source.model, params)[""]
        weights |= dict(named_leaves(exported))
    return weights


def restore_run_weights(source: InitSource, mesh: Mesh) -> PyTree:
    """Restore the plain weights of a run: what wraps them is merged into them."""
    family = load_family(source.model).Model
    target = sharding.abstract_params(family, source.model, mesh)
    with open_newest_checkpoint(source.path) as (checkpoints, step):
        if not model_wrappers.has_frozen_base(source.stored_model):
            return checkpoints.restore_params(step, target)
        wrapped = sharding.abstract_params(load_family(source.stored_model).Model, source.stored_model, mesh)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
        unwrap = partial(model_wrappers.unwrap_params, family, source.stored_model)
        return jax.jit(unwrap, out_shardings=shardings)(checkpoints.restore_params(step, wrapped))


@contextlib.contextmanager
def open_newest_checkpoint(run_dir: str) -> Iterator[tuple[Checkpoints, int]]:
    """Open the newest checkpoint of a run. Raises UserError if there is none."""
    checkpoints = Checkpoints(run_dir)
    try:
        if (step := checkpoints.latest_step()) is None:
            raise UserError(f"init_from: {run_dir}: no checkpoint in it yet")
        yield checkpoints, step
    finally:
        checkpoints.close()
