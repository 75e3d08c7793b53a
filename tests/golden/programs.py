"""Fingerprints of the programs that a recipe is compiled to."""

import hashlib
import re
from collections.abc import Mapping

import jax

from headrace.config import recipe
from headrace.model_wrappers import load_family
from headrace.nn import module
from headrace.objectives import Batch, SpecialTokens
from headrace.training import setup, step
from headrace.training.task import make_task
from tests.golden.cases import VOCAB, Case


def fingerprints(case: Case, devices: int, mesh: Mapping[str, int]) -> dict[str, str]:
    """Hashes of the train and the eval step, compiled for this many simulated devices."""
    jax.clear_caches()  # a function that was traced before, by another test, may be shared in the program
    sizes = [f"mesh.{axis}={size}" for axis, size in mesh.items()]
    overrides = ["data.path=nowhere", f"model.vocab={VOCAB}", *case.overrides, *sizes]
    cfg = recipe.load(case.recipe, overrides)
    task = make_task(cfg, SpecialTokens(VOCAB, pad=0, bos=1, eos=2, mask=3))
    layout = setup.make_mesh(cfg, jax.devices()[:devices])
    with jax.set_mesh(layout):
        update = setup.make_update(cfg, task)
        abstract, _ = setup.make_state(cfg, task, update, layout)
        axes = module.axes(load_family(task.model).Model, task.model)
        train = setup.lower_step(
            cfg,
            step.make_train_step(task, update, axes),
            abstract,
            layout,
            has_loss_mask=case.has_loss_mask,
            has_labels=case.has_labels,
        )
        rows = jax.ShapeDtypeStruct((cfg.batch.sequences, cfg.data.sequence_length), "int32")
        mask = jax.ShapeDtypeStruct(rows.shape, "bool") if case.has_loss_mask else None
        batch = Batch(rows, rows, rows, mask, rows if case.has_labels else None)
        evaluate = jax.jit(step.make_eval_step(task, axes, cfg.eval.repeats)).lower(abstract.params, batch, 0)
    return {"train": fingerprint(train.as_text()), "eval": fingerprint(evaluate.as_text())}


def fingerprint(program: str) -> str:
    """A hash of StableHLO that does not depend on the names of Python functions."""
    names: dict[str, str] = {}
    program = re.sub(
        r"@([A-Za-z_][\w.]*)", lambda match: "@" + names.setdefault(match[1], f"f{len(names)}"), program
    )
    return hashlib.sha256(re.sub(r"module @\w+", "module", program).encode()).hexdigest()[:16]
