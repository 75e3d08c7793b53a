"""What a training step carries to the next, and a checkpoint to the next process."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from headrace.nn import module
from headrace.training import loss_spikes as spikes
from headrace.nn.sharding import spec
from headrace.nn.module import Array, dotted, named


@module.module
class State:
    step: Array
    params: Any
    optimizer: Any
    ema: Any  # averaged weights, or None
    key: Array  # never changes: step t draws from fold_in(key, t)
    skipped: Array  # updates left out: a loss was not finite, or far above the usual
    recent: spikes.Recent  # what is usual, and which were left out


def fresh(params: Any, tx: Any, *, seed: int, ema: bool, turns: int = 1) -> State:
    """`turns` are the updates of a step, each with a loss and a gradient norm of its own."""
    average = jax.tree.map(jnp.copy, params) if ema else None
    key = jax.random.key_data(jax.random.key(seed))
    step, skipped = jnp.zeros((2,), jnp.int32)
    return State(step, params, tx.init(params), average, key, skipped, spikes.fresh(2 * turns))


def shardings(state: State, axes: Any, mesh: Mesh) -> State:
    """Where every leaf of the state lives. What is named like a weight and has its rank (moments, averages)
    is split like that weight, as far as its sizes allow; the rest is small and everywhere."""
    weights = dict(named(axes))

    def home(path: Any, leaf: Any) -> NamedSharding:
        name = dotted(path)
        for weight, its in weights.items():
            if name.endswith("." + weight) and leaf.ndim == len(its.names):
                return NamedSharding(mesh, spec(its.names, leaf.shape, mesh))
        return NamedSharding(mesh, P())

    return jax.tree_util.tree_map_with_path(home, state)
