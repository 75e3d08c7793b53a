"""Trace which functions of the package a training step and a batch run through.

`python -m tests.support.hops` prints them as JSON: for a tiny Llama, the files and functions that tracing one
step enters, the functions on the stack at its first matrix product, and the files that reading one batch
enters."""

import inspect
import json
import sys
from pathlib import Path
from types import FrameType

import jax

import headrace
from headrace.config import recipe
from headrace.data.dataset import Dataset
from headrace.nn import module
from headrace.objectives import SpecialTokens
from headrace.training import setup, step
from headrace.training.batch import device_batch
from headrace.training.task import make_task

TESTS = Path(__file__).parents[1]
PACKAGE = str(Path(headrace.__file__).parent) + "/"
VOCAB = 320


class CallTrace:
    """Records the calls of the package's functions in this thread, while it is entered."""

    def __init__(self) -> None:
        self.functions: dict[str, None] = {}  # as FILE:NAME, in the order of their first calls
        self.stack_at_einsum: list[str] = []

    def __enter__(self) -> "CallTrace":
        sys.setprofile(self.record)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def record(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call":
            return
        if name := function_name(frame):
            self.functions[name] = None
        if not self.stack_at_einsum and frame.f_code.co_name == "einsum":
            self.stack_at_einsum = package_stack(frame)

    @property
    def files(self) -> list[str]:
        return sorted({name.partition(":")[0] for name in self.functions})


def function_name(frame: FrameType) -> str | None:
    """The function that a frame runs, as FILE:NAME; None outside of the package and for code that is not a
    function: modules, class bodies, comprehensions."""
    code = frame.f_code
    if not code.co_filename.startswith(PACKAGE) or not code.co_flags & inspect.CO_OPTIMIZED:
        return None
    if code.co_name.endswith("comp>") or code.co_name == "<genexpr>":
        return None
    return f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}"


def package_stack(frame: FrameType | None) -> list[str]:
    """The package's functions on the stack of a frame, outermost first."""
    names = []
    while frame is not None:
        names.append(function_name(frame))
        frame = frame.f_back
    return [name for name in reversed(names) if name]


def trace_step() -> CallTrace:
    """Trace one training step of the tiny Llama on one device."""
    cfg = recipe.load(TESTS.parent / "recipes/tiny/llama.yaml", ["data.path=nowhere", f"model.vocab={VOCAB}"])
    task = make_task(cfg, SpecialTokens(VOCAB, pad=0, bos=1, eos=2, mask=3))
    mesh = setup.make_mesh(cfg, jax.devices()[:1])
    with jax.set_mesh(mesh):
        update = setup.make_update(cfg, task)
        abstract, _ = setup.make_state(cfg, task, update, mesh)
        batch = setup.abstract_batch(cfg, mesh, has_loss_mask=False, has_labels=False)
        train_step = step.make_train_step(task, update, module.axes(task.family.Model, task.model))
        with CallTrace() as trace:
            jax.eval_shape(train_step, abstract, batch)
    return trace


def trace_batch() -> CallTrace:
    """Read one batch onto one device."""
    dataset = Dataset.open(TESTS / "golden/data", sequence_length=64)
    cfg = recipe.load(TESTS.parent / "recipes/tiny/llama.yaml", ["data.path=nowhere", f"model.vocab={VOCAB}"])
    mesh = setup.make_mesh(cfg, jax.devices()[:1])
    order = dataset.train_order(8, seed=1)
    with CallTrace() as trace:
        device_batch(dataset, order, mesh, 0)
    return trace


if __name__ == "__main__":
    one_step, one_batch = trace_step(), trace_batch()
    report = {
        "step files": one_step.files,
        "step functions": list(one_step.functions),
        "stack at the first einsum": one_step.stack_at_einsum,
        "batch files": one_batch.files,
        "batch functions": list(one_batch.functions),
    }
    print(json.dumps(report))
