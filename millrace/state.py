"""What a training step carries to the next, and a checkpoint to the next process."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from millrace import module
from millrace.module import Array, dotted, named


@module.module
class State:
    step: Array
    params: Any
    optimizer: Any
    ema: Any  # averaged weights, or None
    key: Array  # never changes: step t draws from fold_in(key, t)
    skipped: Array  # updates left out because a loss was not finite
    streak: Array  # how many of them in a row, just now


def fresh(params: Any, tx: Any, *, seed: int, ema: bool) -> State:
    average = jax.tree.map(jnp.copy, params) if ema else None
    key = jax.random.key_data(jax.random.key(seed))
    step, skipped, streak = jnp.zeros((3,), jnp.int32)
    return State(step, params, tx.init(params), average, key, skipped, streak)


def shardings(state: State, params: Any, mesh: Mesh) -> State:
    """Where every leaf of the state lives. Whatever is shaped and named like a weight (moments, averages)
    lies where that weight does; the rest is small and everywhere. `params`: the weights' shardings."""
    whole = NamedSharding(mesh, P())
    weights = [(path, leaf.shape) for path, leaf in named(state.params)]
    homes = dict(named(params))

    def home(path: Any, leaf: Any) -> NamedSharding:
        name = dotted(path)
        for weight, shape in weights:
            if (name == weight or name.endswith("." + weight)) and leaf.shape == shape:
                return homes[weight]
        return whole

    return jax.tree_util.tree_map_with_path(home, state)
