"""What the backward pass keeps and computes again, by the names of `memory.remat`."""

import dataclasses
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from millrace import config, execution, mesh, module, recipe, step
from millrace.build import lowered, make_mesh, make_state, make_update
from millrace.errors import UserError
from millrace.execution import Execution
from millrace.objective import Batch, Vocabulary, file, make_task
from millrace.plan import arithmetic, search

SIZES = dict(layers=2, embed=32, heads=4, kv_heads=2, mlp=48, vocab=64)


def gradient(attention: str, remat: str) -> Any:
    """The jaxpr of a small Llama's gradient."""
    cfg = config.part_class("models", "llama")(**SIZES)
    family = file("models", cfg)
    backend = config.part_class("attention", attention)()
    how = Execution(backend, "float32", remat)
    params = jax.eval_shape(lambda: module.init(family.Model, cfg, jax.random.key(0)))
    tokens = jnp.zeros((1, 256), jnp.int32)
    loss = lambda params: jnp.sum(params(cfg, tokens, how=how).astype(jnp.float32))
    return jax.make_jaxpr(jax.grad(loss))(params)


def operations(jaxpr: Any) -> Counter[str]:
    """How often each is written in a program and in all it calls, where something comes of it."""
    found: Counter[str] = Counter()
    for equation in (one for one in jaxpr.eqns if one.outvars):
        found[equation.primitive.name] += 1
        for inner in jaxprs_in_params(equation.params):
            found += operations(inner)
    return found


@pytest.mark.parametrize(("attention", "operation"), [("splash", "pallas_call"), ("blockwise", "while")])
def test_attention_is_run_again_unless_what_it_gives_is_kept(attention: str, operation: str) -> None:
    counts = {
        remat: operations(gradient(attention, remat).jaxpr)[operation]
        for remat in ("none", "attention", "dots", "full")
    }
    assert counts["none"] == counts["attention"] < counts["dots"] == counts["full"]


def test_products_go_to_the_host_and_back() -> None:
    moves = operations(gradient("xla", "offload").jaxpr)["device_put"]
    assert moves > operations(gradient("xla", "dots").jaxpr)["device_put"]


@pytest.mark.slow
def test_a_step_that_offloads_is_the_step_that_keeps(tiny: Any) -> None:
    def updated(remat: str) -> Any:
        cfg = tiny("model.vocab=300", f"memory.remat={remat}", "mesh.fsdp=2", "mesh.tensor=2")
        devices = make_mesh(cfg)
        task = make_task(cfg, Vocabulary(300, 0, 1, 2, 3))
        axes = module.axes(file("models", task.model).Model, task.model)
        with jax.set_mesh(devices):
            update = make_update(cfg, task)
            abstract, fresh = make_state(cfg, task, update, devices)
            program = lowered(cfg, step.train_step(task, update, axes), abstract, devices).compile()
            rows = jax.random.randint(jax.random.key(1), (8, 64), 4, 300)
            ones = jnp.broadcast_to(jnp.arange(64), (8, 64))
            batch = Batch(rows, jnp.ones_like(rows), ones, None)
            homes = mesh.row_sharding(devices, (8, 64))
            state, _ = program(fresh(), jax.device_put(batch, homes))
        return jax.device_get(state.params)

    kept, offloaded = updated("dots"), updated("offload")
    for one, other in zip(jax.tree.leaves(kept), jax.tree.leaves(offloaded), strict=True):
        assert abs(one - other).max() < 1e-6


def test_a_compiler_without_the_hosts_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = mesh.make({"data": 8, "fsdp": 1, "tensor": 1, "context": 1})
    execution.check_offload(devices)  # as it is here

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no such memory: pinned_host\nand more")

    monkeypatch.setitem(execution.REMAT, "offload", refuse)
    said = (
        r"^memory.remat: offload cannot .*\(no such memory: pinned_host\); expected none, dots, attention or"
    )
    with pytest.raises(UserError, match=said):
        execution.check_offload(devices)


def test_every_policy_of_recipes_is_one_of_execution() -> None:
    names = {"none", *execution.REMAT}
    remat = next(f for f in dataclasses.fields(recipe.Memory) if f.name == "remat")
    assert set(remat.type.__args__) == names == set(arithmetic.KEPT)  # type: ignore[union-attr]
    assert set(search.REMATS) == names - {"offload"}
