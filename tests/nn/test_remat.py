"""What the backward pass keeps and computes again, by the names of `compute.remat`."""

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from headrace.config import reader, sections
from headrace.errors import UserError
from headrace.model_wrappers import load_family
from headrace.nn import compile as nn_compile
from headrace.nn import module, remat, sharding
from headrace.nn import stack as nn_stack
from headrace.nn.stack import Execution
from headrace.objectives import Batch, SpecialTokens
from headrace.plan import search
from headrace.training import step
from headrace.training.setup import lower_step, make_mesh, make_state, make_update
from headrace.training.task import make_task

SIZES = dict(layers=2, embed=32, heads=4, kv_heads=2, mlp=48, vocab=64)


def gradient(attention: str, remat: str) -> Any:
    """The jaxpr of a small Llama's gradient."""
    cfg = reader.part_class("models", "llama")(**SIZES)
    family = load_family(cfg)
    backend = reader.part_class("attention", attention)()
    exec_opts = Execution(backend, "float32", remat)
    params = jax.eval_shape(lambda: module.init(family.Model, cfg, jax.random.key(0)))
    tokens = jnp.zeros((1, 256), jnp.int32)
    loss = lambda params: jnp.sum(params(cfg, tokens, exec_opts=exec_opts).astype(jnp.float32))
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


@pytest.mark.thin(3)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("unroll", [1, 6])
def test_layers_taken_in_turn_are_those_of_a_plain_loop(count: int, unroll: int) -> None:
    """Three bodies: fewer layers than bodies, whole periods, and some left over; outputs and gradients."""
    keys = jax.random.split(jax.random.key(0), 2)
    stack = {"w": jax.random.normal(keys[0], (count, 4, 4)), "c": jax.random.normal(keys[1], (count, 2))}

    def body(number: int, x: jax.Array, layer: Any) -> Any:
        return jnp.sin((number + 1) * x @ layer["w"]), {"made": layer["c"] * x.sum() + number}

    bodies = [functools.partial(body, number) for number in range(3)]

    def in_turn(stack: Any) -> Any:
        x, outs = nn_stack.scan_periods(bodies, jnp.ones((2, 4)), stack, unroll=unroll)
        return x.sum() + (outs["made"] ** 2).sum(), outs["made"]

    def plain(stack: Any) -> Any:
        x, outs = jnp.ones((2, 4)), []
        for number in range(count):
            x, out = bodies[number % 3](x, jax.tree.map(lambda w, number=number: w[number], stack))
            outs.append(out["made"])
        return x.sum() + (jnp.stack(outs) ** 2).sum(), jnp.stack(outs)

    (loss, made), grads = jax.value_and_grad(in_turn, has_aux=True)(stack)
    (wanted, others), expected = jax.value_and_grad(plain, has_aux=True)(stack)
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)
    assert jnp.allclose(made, others, rtol=1e-5, atol=1e-5)
    for name, gradient in grads.items():
        assert jnp.abs(gradient - expected[name]).max() < 1e-4 * (1 + jnp.abs(expected[name]).max())


def test_each_body_is_compiled_once_however_many_layers_there_are() -> None:
    bodies = [functools.partial(lambda k, x, w: (jnp.sin(x @ w * k), None), k) for k in range(3)]

    def lines(count: int) -> int:
        run = lambda x, w: nn_stack.scan_periods(bodies, x, w)[0]
        text = jax.jit(run).lower(jnp.ones((2, 4)), jnp.ones((count, 4, 4))).as_text()
        return text.count("stablehlo.sine")

    assert lines(6) == lines(60) == 3
    assert lines(61) == 4  # one is left over


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_loop_over_periods_keeps_no_copy_of_the_weights(remat: str) -> None:
    """Of what its forward pass hands to the backward pass, nothing has a weight's shape."""
    exec_opts = Execution(reader.part_class("attention", "xla")(), "float32", remat)
    bodies = [functools.partial(lambda k, w, x: x + jnp.tanh(k * x @ w) @ w.T, k) for k in range(1, 4)]
    loss = lambda w: nn_stack.run_layers(exec_opts, bodies, jnp.ones((2, 4)), w).sum()
    jaxpr = jax.make_jaxpr(jax.grad(loss))(jnp.ones((7, 4, 5))).jaxpr
    forward, *_ = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    made = [variable.aval.shape for variable in forward.outvars]  # type: ignore[union-attr]
    assert (2, 2, 4) in made and not [shape for shape in made if shape[-2:] == (4, 5)]


def test_products_go_to_the_host_and_back() -> None:
    moves = operations(gradient("xla", "offload").jaxpr)["device_put"]
    assert moves > operations(gradient("xla", "dots").jaxpr)["device_put"]


@pytest.mark.slow
def test_a_step_that_offloads_is_the_step_that_keeps(tiny: Any) -> None:
    def updated(remat: str) -> Any:
        cfg = tiny("model.vocab=300", f"compute.remat={remat}", "mesh.fsdp=2", "mesh.tensor=2")
        devices = make_mesh(cfg)
        task = make_task(cfg, SpecialTokens(300, 0, 1, 2, 3))
        axes = module.axes(load_family(task.model).Model, task.model)
        with jax.set_mesh(devices):
            update = make_update(cfg, task)
            abstract, fresh = make_state(cfg, task, update, devices)
            program = lower_step(cfg, step.make_train_step(task, update, axes), abstract, devices).compile()
            rows = jax.random.randint(jax.random.key(1), (8, 64), 4, 300)
            ones = jnp.broadcast_to(jnp.arange(64), (8, 64))
            batch = Batch(rows, jnp.ones_like(rows), ones, None)
            homes = sharding.row_sharding(devices, (8, 64))
            state, _ = program(fresh(), jax.device_put(batch, homes))
        return jax.device_get(state.params)

    kept, offloaded = updated("dots"), updated("offload")
    for one, other in zip(jax.tree.leaves(kept), jax.tree.leaves(offloaded), strict=True):
        assert abs(one - other).max() < 1e-6


def test_a_compiler_without_the_hosts_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = sharding.make_mesh({"data": 8, "fsdp": 1, "tensor": 1, "context": 1})
    nn_compile.check_offload(devices)  # as it is here

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no such memory: pinned_host\nand more")

    monkeypatch.setitem(remat.REMAT_POLICIES, "offload", refuse)
    said = (
        r"^compute.remat: offload cannot .*\(no such memory: pinned_host\); expected none, dots, attention or"
    )
    with pytest.raises(UserError, match=said):
        nn_compile.check_offload(devices)


def test_every_policy_of_recipes_is_one_of_execution() -> None:
    names = {"none", *remat.REMAT_POLICIES}
    field = next(f for f in dataclasses.fields(sections.ComputeKeys) if f.name == "remat")
    assert set(field.type.__args__) == names  # type: ignore[union-attr]
    assert set(search.REMATS) == names - {"offload"}
