"""The training step: its effect on the weights, which neither microbatches nor the mesh change."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.checkpoint.state import State
from headrace.config import reader
from headrace.data.dataset import Dataset
from headrace.low_precision.cast import cast as cast_weights
from headrace.model_wrappers import load_family
from headrace.models import fixed_matmul
from headrace.nn import module, sharding
from headrace.objectives import Batch, SpecialTokens, load_objective
from headrace.training import compiled_step, setup, step
from headrace.training.batch import device_batch, fill_model_sizes, special_tokens
from headrace.training.task import make_task

ENCODER = ("objective.use=masked", "model=null", "model.use=eurobert", "model.layers=2", "model.embed=32")
ENCODER += ("model.heads=4", "model.kv_heads=2", "model.mlp=64")


def family_overrides(use: str) -> tuple[str, ...]:
    """Make the overrides for a small model of any family."""
    cls = reader.part_class("models", use)
    sizes = dict(layers=2, embed=32, heads=4, kv_heads=2, mlp=64, head_dim=8, window=16, global_every=2)
    keys = [f"model.{f.name}={sizes[f.name]}" for f in dataclasses.fields(cls) if f.name in sizes]
    if use == "torch":
        names = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        keys = [f"model.config.{name}={size}" for name, size in names.items()]
        keys += ["model.module=transformers:LlamaForCausalLM", "model.config.tie_word_embeddings=true"]
    return (f"objective.use={'causal' if cls.causal else 'masked'}", "model=null", f"model.use={use}", *keys)


class Bench:
    """A recipe on a mesh, ready to take steps."""

    def __init__(self, cfg, sizes: dict[str, int] | None = None):
        sizes = {axis: 1 for axis in sharding.AXES} | (sizes or {})
        self.devices = sharding.make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])
        self.dataset = Dataset.open(cfg.data.path, sequence_length=cfg.data.sequence_length)
        self.cfg = fill_model_sizes(cfg, self.dataset)
        self.task = make_task(self.cfg, special_tokens(self.dataset))
        self.axes = module.axes(load_family(self.task.model).Model, self.task.model)
        with jax.set_mesh(self.devices):
            self.update = setup.make_update(self.cfg, self.task)
            self.abstract, self.fresh = setup.make_state(self.cfg, self.task, self.update, self.devices)
            train_step = step.make_train_step(self.task, self.update, self.axes)
            lowered = setup.lower_step(self.cfg, train_step, self.abstract, self.devices)
            self.step = compiled_step.load_or_compile(lowered, self.devices, None, print)

    def state(self) -> State:
        with jax.set_mesh(self.devices):
            return self.fresh()

    def batch(self, number: int = 0) -> Batch:
        sequences = self.cfg.batch.sequences
        return device_batch(self.dataset, self.dataset.train_order(sequences, seed=0), self.devices, number)

    def run(self, steps: int, state: State | None = None) -> tuple[State, list[dict[str, float]]]:
        state, rows = state or self.state(), []
        with jax.set_mesh(self.devices):
            for number in range(steps):
                state, metrics = self.step(state, self.batch(number))
                rows.append({name: float(value) for name, value in metrics.items()})
        return state, rows


def weights(state: State) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in module.named_leaves(state.params)}


def assert_close(first: State, second: State, tolerance: float) -> None:
    expected = weights(second)
    for name, value in weights(first).items():
        np.testing.assert_allclose(value, expected[name], atol=tolerance, rtol=0, err_msg=name)


@pytest.mark.parametrize("model", [(), ENCODER], ids=["llama", "eurobert"])
def test_microbatches_give_the_update_of_the_undivided_batch(tiny, model):
    # SGD, because Adam turns a gradient of 1e-9 that rounds to 0 into a full step.
    sgd = ("optimizer.use=sgd", "optimizer.learning_rate=0.5", *model)
    state, rows = Bench(tiny(*sgd)).run(2)
    split_state, split_rows = Bench(tiny(*sgd, "batch.microbatches=4")).run(2)
    assert_close(state, split_state, 2e-6)
    assert rows[1]["loss"] == pytest.approx(split_rows[1]["loss"], abs=1e-5)
    assert rows[1]["grad_norm"] == pytest.approx(split_rows[1]["grad_norm"], rel=1e-4)


def test_microbatches_are_weighted_by_their_tokens(tiny):
    """A mean of means would differ: one row is nearly all padding."""
    bench, split = Bench(tiny("optimizer.use=sgd")), Bench(tiny("optimizer.use=sgd", "batch.microbatches=8"))
    batch = bench.batch()
    tokens = batch.tokens.at[0, 5:].set(bench.dataset.pad_id)
    segments = batch.segments.at[0, 5:].set(0)
    lopsided = dataclasses.replace(batch, tokens=tokens, segments=segments)
    states = []
    for each in (bench, split):
        with jax.set_mesh(each.devices):
            states.append(each.step(each.state(), lopsided)[0])
    assert_close(*states, 1e-6)


CASTS = {
    "plain": (),
    "ramp": ("batch.ramp_from=2", "batch.ramp=2"),
    "fp8": ("compute.matmul=fp8",),
    "rounded": ("qat.bits=4",),
    "adapters": ("lora.rank=4", "init_from=elsewhere"),
}


@pytest.mark.parametrize("name", CASTS)
def test_matrices_are_cast_once_for_all_microbatches(tiny, name):
    # Three layers, and microbatches of two rows: nothing else has the shape of the layers' matrices.
    sizes = ("model.layers=3", "model.vocab=300", "batch.microbatches=4")
    cfg = tiny("compute.dtype=bfloat16", *sizes, *CASTS[name])
    family = load_family(cfg.model).Model
    hidden_matrices = {
        path for path, axes in module.named_leaves(module.axes(family, cfg.model)) if axes.is_hidden_matrix
    }
    shapes = {
        leaf.shape
        for path, leaf in module.named_leaves(module.shapes(family, cfg.model))
        if path in hidden_matrices
    }

    def cast_shapes(jaxpr) -> set[tuple[int, ...]]:
        """Shapes of the weights that the program casts to a smaller dtype."""
        casts = [e for e in equations(jaxpr) if e.primitive.name == "convert_element_type"]
        shorter = [e for e in casts if e.invars[0].aval.dtype.itemsize > e.params["new_dtype"].itemsize]
        return shapes & {e.outvars[0].aval.shape for e in shorter}

    program = traced(cfg, {axis: 1 for axis in sharding.AXES})
    assert cast_shapes(program)
    if name == "ramp":
        loops = [e.params["body_jaxpr"].jaxpr for e in equations(program) if e.primitive.name == "while"]
    else:
        scans = [e for e in equations(program) if e.primitive.name == "scan"]
        loops = [e.params["jaxpr"].jaxpr for e in scans if e.params["length"] == 4]
    assert any(e.primitive.name == "dot_general" for loop in loops for e in equations(loop))
    assert not any(cast_shapes(loop) for loop in loops)


def test_microbatches_in_bfloat16_give_the_bits_of_gradients_summed_by_hand(tiny):
    """By hand, the weights are cast for each microbatch."""
    # Not tied: the compiler chooses the order in which the two gradients of a tied embedding are added.
    bench = Bench(tiny("compute.dtype=bfloat16", "batch.microbatches=4", "model.tie_embeddings=false"))
    task, update, axes = bench.task, bench.update, bench.axes
    [phase] = load_objective(task.objective).phases
    trained = module.trainable_mask(axes, frozenset())

    @jax.jit
    def microbatch_gradients(params, microbatch):
        def loss(params):
            total = phase.loss(task, cast_weights(params, axes, task.exec_opts), microbatch).loss
            return total, {"loss": total, "count": microbatch.weights.sum()}

        return jax.grad(loss, has_aux=True)(params)

    def by_hand(params, microbatches):
        results = [
            microbatch_gradients(params, jax.tree.map(lambda x, n=n: x[n], microbatches)) for n in range(4)
        ]
        return functools.reduce(lambda total, result: jax.tree.map(jnp.add, total, result), results)

    @jax.jit
    def apply_update(state, grads, sums):
        means = jax.tree.map(lambda g: g / sums["count"], grads)
        clipped, norm = step.clip_by_global_norm(means, update.config.max_grad_norm, trained)
        metrics = {"loss": sums["loss"], "grad_norm": norm}
        return step.apply_update(update, axes, state, clipped, metrics, model=task.model)

    def run(gradients) -> tuple[list[float], dict[str, np.ndarray]]:
        state, losses = bench.state(), []
        for number in range(3):
            examples = load_objective(task.objective).prepare(task, bench.batch(number), jax.random.key(0))
            grads, sums = gradients(state.params, step.to_microbatches(examples, 4))
            state, metrics = apply_update(state, grads, sums)
            losses.append(float(metrics["loss"]))
        return losses, weights(state)

    with jax.set_mesh(bench.devices):
        losses, params = run(jax.jit(functools.partial(step.accumulate_gradients, task, axes)))
        expected_losses, expected = run(by_hand)
    assert losses == expected_losses
    for name, value in params.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def all_meshes() -> list[dict[str, int]]:
    sizes = itertools.product((1, 2, 4, 8), repeat=4)
    return [dict(zip(sharding.AXES, s, strict=False)) for s in sizes if math.prod(s) in (2, 4, 8)]


QUICK = [(2, 1, 1, 1), (1, 4, 1, 1), (1, 1, 4, 1), (1, 1, 1, 4), (1, 1, 1, 8), (2, 2, 2, 1), (1, 2, 2, 2)]


@pytest.fixture(scope="module")
def single_device_losses() -> dict[str, list[float]]:
    """The losses of each model on one device, once they were computed."""
    return {}


def check_mesh(tiny, single_device_losses, name: str, sizes: dict[str, int]) -> None:
    model = {"llama": (), "eurobert": ENCODER}.get(name) or family_overrides(name)
    if name not in single_device_losses:
        single_device_losses[name] = [row["loss"] for row in Bench(tiny(*model)).run(3)[1]]
    losses = [row["loss"] for row in Bench(tiny(*model), sizes).run(3)[1]]
    # A model that rounds may round the other way if sums are in another order.
    rounds = fixed_matmul(tiny(*model).model) != "compute"
    np.testing.assert_allclose(losses, single_device_losses[name], atol=1e-3 if rounds else 3e-5, rtol=0)


@pytest.mark.thin(3)
@pytest.mark.parametrize("sizes", QUICK, ids=str)
def test_the_mesh_does_not_change_the_loss_of_a_decoder(tiny, single_device_losses, sizes):
    check_mesh(tiny, single_device_losses, "llama", dict(zip(sharding.AXES, sizes, strict=False)))


@pytest.mark.thin(2)
@pytest.mark.parametrize("sizes", [(2, 2, 1, 2), (1, 1, 4, 2)], ids=str)
def test_the_mesh_does_not_change_the_loss_of_an_encoder(tiny, single_device_losses, sizes):
    check_mesh(tiny, single_device_losses, "eurobert", dict(zip(sharding.AXES, sizes, strict=False)))


# The first three have a quick mesh of both elsewhere; a torch module takes twice as long as the others.
ELSEWHERE = {"llama", "deberta", "moe", "torch"}


@pytest.mark.parametrize("name", sorted({*reader.part_names("models")} - ELSEWHERE))
def test_splitting_weights_both_ways_does_not_change_the_loss(tiny, single_device_losses, name):
    check_mesh(tiny, single_device_losses, name, dict(fsdp=2, tensor=2))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2, 2, 1), (1, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("name", sorted({*reader.part_names("models")} - {"llama", "eurobert"}))
def test_the_mesh_does_not_change_the_loss_of_any_family(tiny, single_device_losses, name, sizes):
    check_mesh(tiny, single_device_losses, name, dict(zip(sharding.AXES, sizes, strict=False)))


@pytest.mark.parametrize("sizes", [(1, 2, 2, 2), (2, 2, 2, 1)], ids=str)
def test_no_mesh_makes_the_compiler_copy_every_row_to_every_device(tiny, capfd, no_compilation_cache, sizes):
    """XLA prints a warning if it finds no better way."""
    Bench(tiny("model.tie_embeddings=false"), dict(zip(sharding.AXES, sizes, strict=False)))
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("sizes", all_meshes(), ids=lambda sizes: str(tuple(sizes.values())))
@pytest.mark.parametrize("name", ["llama", "eurobert"])
def test_no_mesh_at_all_changes_the_loss(tiny, single_device_losses, name, sizes):
    check_mesh(tiny, single_device_losses, name, sizes)


LONG = ("data.path=nowhere", "model.layers=2", "model.embed=2048", "model.heads=32", "model.kv_heads=8")
LONG += ("model.mlp=8192", "model.vocab=128256", "batch.sequences=1", "compute.dtype=bfloat16")
LONG += ("compute.remat=full", "attention.use=blockwise")


def traced(cfg, sizes: dict[str, int]):
    """Trace the jaxpr of a step."""
    devices = sharding.make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])
    task = make_task(cfg, SpecialTokens(cfg.model.vocab, 0, 1, 2, 3))
    axes = module.axes(load_family(task.model).Model, task.model)
    with jax.set_mesh(devices):
        update = setup.make_update(cfg, task)
        abstract, _ = setup.make_state(cfg, task, update, devices)
        rows = jax.ShapeDtypeStruct((cfg.batch.sequences, cfg.data.sequence_length), jnp.int32)
        program = jax.jit(step.make_train_step(task, update, axes)).trace(
            abstract, Batch(rows, rows, rows, None)
        )
    return program.jaxpr.jaxpr


def equations(jaxpr) -> Iterator[Any]:
    """Yield all equations of a program, including those of loops and kernels."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def computed_shapes(jaxpr) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of all arrays that a program computes."""
    for equation in equations(jaxpr):
        yield from (variable.aval.shape for variable in equation.outvars if hasattr(variable.aval, "shape"))


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 1, 2, 4)], ids=str)
@pytest.mark.parametrize("length", [32768, 131072])
def test_a_step_over_long_rows_has_no_array_of_the_length_squared(tiny, length, sizes):
    """Nor an array of 2**31 numbers on one device. (Without remat, the residuals of all layers are one array
    that may be longer: an int32 indexes each of its axes, and the compilers accept it.)"""
    cfg = tiny(*LONG)
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, sequence_length=length))
    shapes = set(computed_shapes(traced(cfg, dict(zip(sharding.AXES, sizes, strict=False)))))
    assert (1, length, 8192) in shapes  # arrays within a layer are seen
    assert max(math.prod(shape) for shape in shapes) < 2**31
    model_sizes = (2048, 8192, 128256, 128256 // 2)
    squares = [[size for size in shape if size > 2048 and size not in model_sizes] for shape in shapes]
    assert max(math.prod(long) for long in squares) <= 2 * length


def test_weights_and_moments_are_split_over_the_mesh(tiny):
    bench = Bench(tiny(), {"fsdp": 4, "tensor": 2})
    state = bench.state()
    for leaf in (state.params.blocks.w_gate, state.optimizer.mu.blocks.w_gate):
        assert leaf.addressable_shards[0].data.size == leaf.size // 8


@pytest.mark.thin(2)
@pytest.mark.parametrize("use", reader.part_names("optim"))
def test_no_optimizer_replicates_its_state_on_every_device(tiny, use):
    state = Bench(tiny(f"optimizer.use={use}"), {"fsdp": 4, "tensor": 2}).state()
    leaves = jax.tree.leaves(state.optimizer)
    local_size = sum(leaf.addressable_shards[0].data.size for leaf in leaves)
    assert local_size < 0.4 * sum(leaf.size for leaf in leaves)


@pytest.mark.parametrize("use", reader.part_names("optim"))
def test_every_optimizer_trains(tiny, use):
    rate = {"sgd": 0.5, "lion": 2e-3}.get(use, 1e-2)
    bench = Bench(tiny(f"optimizer.use={use}", f"optimizer.learning_rate={rate}", "schedule.steps=20"))
    _, rows = bench.run(20)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5


@pytest.mark.thin(3)
@pytest.mark.parametrize("use", reader.part_names("models"))
def test_every_model_trains(tiny, use):
    _, rows = Bench(tiny(*family_overrides(use), "schedule.steps=20")).run(20)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5


def test_bfloat16_compute_keeps_float32_weights(tiny):
    state, rows = Bench(tiny("compute.dtype=bfloat16")).run(3)
    _, exact = Bench(tiny()).run(3)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert rows[-1]["loss"] == pytest.approx(exact[-1]["loss"], abs=0.03)


@pytest.mark.parametrize("model", [(), ENCODER], ids=["llama", "eurobert"])
def test_bfloat16_gradients_of_embeddings_and_norms_are_sums_in_float32(tiny, model):
    """Thousands of tokens share a row of the embedding: summed in bf16, most of its gradient is lost."""
    moved = []
    for compute in ("float32", "bfloat16"):
        sgd = (
            "optimizer.use=sgd",
            "optimizer.momentum=0.0",
            "optimizer.max_grad_norm=null",
            "optimizer.weight_decay=0.0",
        )
        flat = ("schedule.use=constant", "schedule.warmup=0", "optimizer.learning_rate=1.0")
        bench = Bench(tiny(*model, *sgd, *flat, f"compute.dtype={compute}", "batch.sequences=256"))
        before = weights(bench.state())
        after = weights(bench.run(1)[0])
        moved.append({name: after[name] - before[name] for name in before})
    for name in moved[0]:
        if "norm" in name or name == "embedding":
            error = np.linalg.norm(moved[1][name] - moved[0][name]) / np.linalg.norm(moved[0][name])
            assert error < 0.02, f"{name}: {error}"


def test_clipping_scales_the_whole_gradient_to_the_bound(tiny):
    sgd = ("optimizer.use=sgd", "optimizer.weight_decay=0.0", "schedule.use=constant", "schedule.warmup=0")
    bench = Bench(tiny(*sgd, "optimizer.max_grad_norm=0.01", "optimizer.learning_rate=1.0"))
    before = weights(bench.state())
    after, rows = bench.run(1)
    moved = math.sqrt(sum(((weights(after)[name] - before[name]) ** 2).sum() for name in before))
    assert rows[0]["grad_norm"] > 0.1
    assert moved == pytest.approx(0.01, rel=1e-3)


def test_decay_shrinks_matrices_and_leaves_norms(tiny):
    plain = ("optimizer.max_grad_norm=null", "schedule.use=constant", "schedule.warmup=0")
    without, _ = Bench(tiny(*plain, "optimizer.weight_decay=0.0")).run(1)
    bench = Bench(tiny(*plain, "optimizer.weight_decay=0.5"))
    before = weights(bench.state())
    decayed, _ = bench.run(1)
    for name, value in weights(decayed).items():
        expected = weights(without)[name] - (0 if "norm" in name else 0.01 * 0.5 * before[name])
        np.testing.assert_allclose(value, expected, atol=1e-7, err_msg=name)


def test_the_average_follows_the_weights(tiny):
    bench = Bench(tiny("optimizer.ema_decay=0.75"))
    start = weights(bench.state())
    first, _ = bench.run(1)
    average = dict(module.named_leaves(first.ema))
    for name, value in weights(first).items():
        np.testing.assert_allclose(average[name], 0.75 * start[name] + 0.25 * value, atol=1e-7)


@pytest.mark.fault(14)
def test_a_gradient_that_overflows_with_a_finite_loss_skips_the_update(tiny):
    bench = Bench(tiny("model.tie_embeddings=false"))
    state, batch = bench.state(), bench.batch()
    far = dataclasses.replace(state.params, head=state.params.head * 1e22)  # its square overflows float32
    state = dataclasses.replace(state, params=far)
    before = weights(state)
    with jax.set_mesh(bench.devices):
        state, metrics = bench.step(state, batch)
    assert np.isfinite(metrics["loss"]) and np.isinf(metrics["grad_norm"])
    assert int(metrics["skipped"]) == 1
    for name, value in weights(state).items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.fault(12)
def test_a_loss_that_is_not_finite_skips_the_update_and_is_counted(tiny):
    bench = Bench(tiny("model.tie_embeddings=false"))
    state, batch = bench.state(), bench.batch()
    word = int(batch.tokens[0, 3])
    embedding = state.params.embedding.at[word].set(jnp.nan)
    broken = dataclasses.replace(state, params=dataclasses.replace(state.params, embedding=embedding))
    before = weights(broken)
    moments = np.asarray(broken.optimizer.mu.blocks.w_q)
    with jax.set_mesh(bench.devices):
        broken, metrics = bench.step(broken, batch)
        assert int(metrics["skipped"]) == int(metrics["left_out"]) == int(broken.step) == 1
        for name, value in weights(broken).items():
            np.testing.assert_array_equal(value, before[name])
        np.testing.assert_array_equal(broken.optimizer.mu.blocks.w_q, moments)
        harmless = jnp.where(batch.tokens == word, word + 1, batch.tokens)
        broken, metrics = bench.step(broken, dataclasses.replace(batch, tokens=harmless))
    assert (int(metrics["skipped"]), int(metrics["left_out"])) == (1, 0)
    assert any((weights(broken)[name] != before[name]).any() for name in before if name != "embedding")


def test_the_learning_rate_follows_the_schedule_in_tokens(tiny):
    tokens = 8 * 64
    _, rows = Bench(
        tiny(f"schedule.steps='{12 * tokens} tokens'", f"schedule.warmup='{4 * tokens} tokens'")
    ).run(4)
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])


def test_masking_has_the_configured_rates(tiny):
    rates = ("objective.mask_rate=0.3", "objective.mask_token_share=0.8", "objective.random_token_share=0.1")
    bench = Bench(tiny(*ENCODER, *rates, "batch.sequences=64"))
    batches = [bench.batch(number) for number in range(4)]
    prepare = jax.jit(lambda batch, key: load_objective(bench.task.objective).prepare(bench.task, batch, key))
    examples = [prepare(batch, jax.random.key(n)) for n, batch in enumerate(batches)]
    tokens = np.concatenate([np.asarray(batch.tokens) for batch in batches])
    inputs = np.concatenate([np.asarray(example.inputs) for example in examples])
    selected = np.concatenate([np.asarray(example.weights) for example in examples]) > 0
    special = bench.dataset.index.special
    plain = ~np.isin(tokens, [special.bos, special.eos, special.pad])
    assert not selected[~plain].any()
    assert selected[plain].mean() == pytest.approx(0.3, abs=0.015)
    assert (inputs[selected] == special.mask).mean() == pytest.approx(0.8, abs=0.02)
    assert (inputs[selected] == tokens[selected]).mean() == pytest.approx(0.1, abs=0.02)
    np.testing.assert_array_equal(inputs[~selected], tokens[~selected])


def test_causal_targets_stay_within_a_document(tiny):
    bench = Bench(tiny())
    batch = bench.batch()
    examples = load_objective(bench.task.objective).prepare(bench.task, batch, jax.random.key(0))
    tokens, segments = np.asarray(batch.tokens), np.asarray(batch.segments)
    for row, column in itertools.product(range(tokens.shape[0]), range(63)):
        same = segments[row, column] == segments[row, column + 1] != 0
        assert bool(examples.weights[row, column]) == same
        assert not same or examples.targets[row, column] == tokens[row, column + 1]
    assert not np.asarray(examples.weights)[:, -1].any()
