"""Whether a run fits the memory of its devices, and what to change where it does not."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import jax

from headrace.checkpoint.state import State
from headrace.errors import DoesNotFit
from headrace.nn.module import named_leaves
from headrace.training import metrics

ADVICE = (
    "raise batch.microbatches, set compute.remat to dots, attention or full, or split more over devices with "
    "mesh.fsdp, mesh.tensor or mesh.context"
)


def bytes_per_device(tree: Any) -> int:
    """Bytes on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def check_memory(state: State, still: frozenset[str] = frozenset()) -> None:
    """Before anything is allocated: on a CPU, a state larger than the memory ends in swapping or a kill.
    Gradients count too, since all are there before the first weight moves, but not of weights that stay
    `still`; activations come on top."""
    moved = [leaf for name, leaf in named_leaves(state.params) if name not in still]
    devices = jax.local_devices()
    # Simulated devices have the memory of one machine between them.
    sharing = len(devices) if devices[0].platform == "cpu" else 1
    need, limit = sharing * (bytes_per_device(state) + bytes_per_device(moved)), metrics.memory_limit(devices)
    if limit is not None and need > limit:
        where = f"the {sharing} devices of this machine, which have" if sharing > 1 else "a device, which has"
        raise DoesNotFit(
            f"model: weights, gradients and optimizer state take {_gib(need)} on {where} {_gib(limit)}; "
            "choose a smaller model, split it over more devices with mesh.fsdp or mesh.tensor, or take an "
            "optimizer that keeps less"
        )


@contextlib.contextmanager
def translate_oom() -> Iterator[None]:
    """Tells of an allocation that failed, in compiling or in a step, as the user's choice that it is."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        said = " ".join(str(error).split())[:100]
        # On CPUs some of them come as INTERNAL.
        if "RESOURCE_EXHAUSTED" not in said and "Out of memory" not in said:
            raise
        raise DoesNotFit(f"batch: the step takes more memory than there is ({said}); {ADVICE}") from error


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"
