"""What a training step carries to the next, and a checkpoint to the next process."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from millrace import module
from millrace.mesh import spec
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
