"""The train state: what one training step passes to the next, and a checkpoint to the next process."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from headrace.nn import module
from headrace.nn.module import Array, PyTree, named_leaves, path_name
from headrace.nn.sharding import AnyMesh, partition_spec


@module.module
class State:
    """Everything that changes during training. The names of the fields are paths in checkpoints."""

    step: Array
    params: PyTree
    optimizer: PyTree  # the state of the optax transformation
    ema: PyTree  # moving average of the weights, or None
    key: Array  # never changes: step t draws from fold_in(key, t)
    skipped: Array  # number of skipped updates, whose loss was not finite or a spike
    recent: PyTree  # training.loss_spikes.LossHistory: the usual loss, and which updates were skipped


def init_state(
    params: PyTree, tx: optax.GradientTransformation, *, seed: int, ema: bool, history: PyTree
) -> State:
    """Make the state of step 0.

    With `ema` it has a moving average of the weights. `history` is an empty record of losses
    (training/loss_spikes.py)."""
    average = jax.tree.map(jnp.copy, params) if ema else None
    key = jax.random.key_data(jax.random.key(seed))
    step, skipped = jnp.zeros((2,), jnp.int32)
    return State(step, params, tx.init(params), average, key, skipped, history)


def state_shardings(state: State, axes: PyTree, mesh: AnyMesh) -> State:
    """The sharding of every leaf of a state, in a tree like it. `axes` are those of the weights.

    A leaf whose path ends in that of a weight and which has its rank (a moment, an average) is sharded like
    the weight, as far as its sizes allow. The others are small and replicated."""
    weights = dict(named_leaves(axes))

    def leaf_sharding(path: Sequence[object], leaf: Array) -> NamedSharding:
        name = path_name(path)
        for weight, weight_axes in weights.items():
            if name.endswith("." + weight) and leaf.ndim == len(weight_axes.names):
                return NamedSharding(mesh, partition_spec(weight_axes.names, leaf.shape, mesh))
        return NamedSharding(mesh, P())

    return jax.tree_util.tree_map_with_path(leaf_sharding, state)
