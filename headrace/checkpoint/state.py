"""What a training step carries to the next, and a checkpoint to the next process."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from headrace.nn import module
from headrace.nn.module import Array, PyTree, named_leaves, path_name
from headrace.nn.sharding import partition_spec


@module.module
class State:
    step: Array
    params: Any
    optimizer: Any
    ema: Any  # averaged weights, or None
    key: Array  # never changes: step t draws from fold_in(key, t)
    skipped: Array  # updates left out: a loss was not finite, or far above the usual
    recent: Any  # training.loss_spikes.LossHistory: what is usual, and which were left out


def new_state(
    params: PyTree, tx: optax.GradientTransformation, *, seed: int, ema: bool, history: PyTree
) -> State:
    """Make the state of step 0. `history` is an empty record of losses (training/loss_spikes.py)."""
    average = jax.tree.map(jnp.copy, params) if ema else None
    key = jax.random.key_data(jax.random.key(seed))
    step, skipped = jnp.zeros((2,), jnp.int32)
    return State(step, params, tx.init(params), average, key, skipped, history)


def shardings(state: State, axes: Any, mesh: Mesh) -> State:
    """Where every leaf of the state lives. What is named like a weight and has its rank (moments, averages)
    is split like that weight, as far as its sizes allow; the rest is small and everywhere."""
    weights = dict(named_leaves(axes))

    def home(path: Any, leaf: Any) -> NamedSharding:
        name = path_name(path)
        for weight, its in weights.items():
            if name.endswith("." + weight) and leaf.ndim == len(its.names):
                return NamedSharding(mesh, partition_spec(its.names, leaf.shape, mesh))
        return NamedSharding(mesh, P())

    return jax.tree_util.tree_map_with_path(home, state)
