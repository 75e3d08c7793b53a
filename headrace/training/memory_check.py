"""Check that a run fits into the memory of its devices, and advice on what to change if it does not."""

import contextlib
import math
from collections.abc import Iterator

import jax

from headrace.checkpoint.state import State
from headrace.errors import DoesNotFit
from headrace.nn.module import PyTree, named_leaves
from headrace.training import metrics

ADVICE = (
    "raise batch.microbatches, set compute.remat to dots, attention or full, or split more over devices with "
    "mesh.fsdp, mesh.tensor or mesh.context"
)


def bytes_per_device(tree: PyTree) -> int:
    """Sum the bytes that arrays with shardings take on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def check_memory(state: State, frozen: frozenset[str] = frozenset()) -> None:
    """Raise DoesNotFit if the state and the gradients take more memory than the devices have.

    Call it before anything is allocated: on a CPU, a state larger than the memory ends in swapping or a kill.
    Gradients count, since all of them exist before the first weight is updated, but not those of `frozen`
    weights. Activations come on top."""
    trained = [leaf for name, leaf in named_leaves(state.params) if name not in frozen]
    devices = jax.local_devices()
    # Simulated devices share the memory of one machine.
    sharing = len(devices) if devices[0].platform == "cpu" else 1
    needed = sharing * (bytes_per_device(state) + bytes_per_device(trained))
    limit = metrics.memory_limit(devices)
    if limit is not None and needed > limit:
        owner = f"the {sharing} devices of this machine, which have" if sharing > 1 else "a device, which has"
        raise DoesNotFit(
            f"model: weights, gradients and optimizer state take {_gib(needed)} on {owner} {_gib(limit)}; "
            "choose a smaller model, split it over more devices with mesh.fsdp or mesh.tensor, or use an "
            "optimizer with a smaller state"
        )


@contextlib.contextmanager
def translate_oom() -> Iterator[None]:
    """Turn out-of-memory errors of XLA, when compiling or in a step, into DoesNotFit with advice."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        text = " ".join(str(error).split())[:100]
        # On CPUs some of them come as INTERNAL.
        if "RESOURCE_EXHAUSTED" not in text and "Out of memory" not in text:
            raise
        raise DoesNotFit(f"batch: the step takes more memory than there is ({text}); {ADVICE}") from error


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"
