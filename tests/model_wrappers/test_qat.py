"""Training that sees the model it will be stored as: the numbers it begins with, its gradients, what is
merged."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace import model_wrappers
from headrace.checkpoint.open_run import open_run
from headrace.config import reader, recipe
from headrace.config.wrappers import QATKeys
from headrace.data.dataset import Dataset
from headrace.errors import UserError
from headrace.low_precision import grid
from headrace.model_formats import quantized_folder
from headrace.model_wrappers import load_family, qat
from headrace.nn import module
from headrace.nn.stack import Execution
from headrace.quantize import run as quantize_run
from headrace.quantize.methods import rtn
from headrace.training import run as training_run
from headrace.training import setup, step
from headrace.training.batch import fill_model_sizes, special_tokens
from headrace.training.evaluate import evaluate_run
from headrace.training.task import make_task

KEY = jax.random.key(0)
SIZES = dict(layers=2, embed=64, heads=4, kv_heads=4, mlp=64, vocab=64, window=8, global_every=2)


def weights(shape=(2, 64, 4, 8), seed=0):
    return jnp.asarray(0.05 * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("bits, group", [(2, 0), (3, 16), (4, 0), (4, 32)])
def test_low_rank_training_begins_at_rounding_to_nearest_exactly(bits, group):
    w = weights()
    made = qat.to_low_rank(w, qat.QuantGrid(bits, group, 4, 1), KEY)
    assert made.fixed.dtype == jnp.int8 and made.up.shape == (2, 4, 4, 8) and made.down.shape == (2, 64, 4)
    cfg = reader.part_class("quantize/methods", "rtn")(bits=bits, group_size=group)
    for number in range(2):
        one = jax.tree.map(lambda leaf, number=number: leaf[number], made)
        flat = w[number].reshape(64, 32)
        np.testing.assert_array_equal(
            one.to_dense().reshape(64, 32), rtn.quantize(cfg, flat, None, KEY).to_dense().T
        )


def test_fixed_point_is_as_near_as_8_bits_allow_and_never_at_the_next_number():
    x = jnp.asarray(np.random.default_rng(0).uniform(-9, 8, 100_000), jnp.float32)
    held = qat.to_fixed_point(x, 4).astype(jnp.float32) / 16
    np.testing.assert_array_equal(jnp.clip(jnp.round(held), -8, 7), grid.round_to_grid(x, 4))
    inside = (x > -8) & (x < 7)
    off = jnp.abs(held - x)[inside]
    assert off.max() <= 1.5 / 16 and jnp.mean(off > 0.51 / 16) < 0.13  # where 8 bits would round to the next


def test_gradients_go_straight_through_the_rounding_and_stop_at_the_ends():
    """Against the formulas of the paper, by hand in float64."""
    its = qat.QuantGrid(3, 16, 4, 1)
    w = qat.to_low_rank(weights((1, 32, 6)), its, KEY)
    draw = np.random.default_rng(1)
    w = dataclasses.replace(w, up=jnp.asarray(2 * draw.standard_normal(w.up.shape), jnp.float32))
    one = jax.tree.map(lambda leaf: leaf[0], w)
    given = jnp.asarray(draw.standard_normal((32, 6)), jnp.float32)
    still = lambda learns: dataclasses.replace(one, **learns)
    learns = {name: getattr(one, name) for name in ("scale", "down", "up")}
    found = jax.grad(lambda learns: jnp.sum(still(learns).to_dense() * given))(learns)
    down, up, scale, g = (np.asarray(a, np.float64) for a in (one.down, one.up, one.scale, given))
    phi = np.asarray(one.fixed, np.float64) / 32 + down @ up / 4
    numbers, each = np.clip(np.round(phi), -4, 3), np.repeat(scale, 16, axis=0)
    inner = g * each * ((phi >= -4) & (phi <= 3))
    assert 0.05 < np.mean((phi < -4) | (phi > 3)) < 0.95
    np.testing.assert_allclose(
        found["scale"], (g * numbers).reshape(2, 16, 6).sum(axis=1), rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(found["down"], inner @ up.T / 4, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found["up"], down.T @ inner / 4, rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def plain(trained_recipe):
    """Loads the recipe of a trained run, with overrides."""
    return lambda *overrides: recipe.load(trained_recipe, overrides)


def more(plain, tmp_path, name, *overrides, rate=1e-3):
    first = plain()
    again = f"run_dir={tmp_path}/{name}", f"init_from={first.run_dir}", f"optimizer.learning_rate={rate}"
    cfg = plain(*again, "optimizer.weight_decay=0.0", *overrides)
    assert training_run.run(cfg) == 0
    return open_run(recipe.load_run(cfg.run_dir))


LOW = ("qat.bits=3", "qat.rank=8")


@pytest.mark.thin(3)
@pytest.mark.parametrize("kind", [LOW, ("qat.bits=4", "qat.group_size=32")])
def test_what_is_merged_computes_what_training_saw_bit_for_bit(plain, tmp_path, kind):
    run = more(plain, tmp_path, "trained", *kind, "schedule.steps=3", "schedule.warmup=0")
    method = recipe.load_method(
        "rtn", [f"bits={run.recipe.model.qat.bits}", f"group_size={run.recipe.model.qat.group_size}"]
    )
    request = quantize_run.QuantizeRequest(f"{tmp_path}/merged", method, 1, "float32", run.recipe.data.path)
    quantize_run.quantize(run, request, lambda line: None)
    back = open_run(recipe.load_run(f"{tmp_path}/merged"))
    assert back.recipe.model.qat is None
    assert any(
        isinstance(w, quantized_folder.QuantizedWeight)
        for w in (back.params.blocks.w_q, back.params.blocks.w_down)
    )
    assert evaluate_run(back) == evaluate_run(run)
    whole = run.merged()
    assert evaluate_run(whole)["loss"] == evaluate_run(run)["loss"]


def test_low_rank_training_moves_the_thin_matrices_and_the_scales_alone(plain, tmp_path):
    before = open_run(recipe.load_run(plain().run_dir))
    run = more(plain, tmp_path, "trained", *LOW, "schedule.steps=2", "schedule.warmup=0")
    axes = module.axes(load_family(run.recipe.model).Model, run.recipe.model)
    learns = {name for name, moves in module.named_leaves(module.trainable_mask(axes)) if moves}
    assert learns and all(name.endswith((".up", ".down", ".scale")) for name in learns)
    assert run.params.blocks.w_q.fixed.dtype == jnp.int8
    assert float(jnp.abs(run.params.blocks.w_q.up).max()) > 0
    np.testing.assert_array_equal(run.params.embedding, before.params.embedding)
    rank, count = 8, sum(leaf.size for name, leaf in module.named_leaves(run.params) if name in learns)
    matrices = [
        its for its in quantized_folder.find_linears(load_family(before.recipe.model), before.recipe.model)
    ]
    assert count == 2 * sum(rank * (one.inputs + one.outputs) + one.outputs for one in matrices)


@pytest.mark.slow
def test_a_run_with_frozen_weights_goes_on_where_it_stopped(plain, tmp_path):
    kind = (*LOW, "schedule.steps=6", "checkpoint.every=3")
    once = more(plain, tmp_path, "once", *kind)
    cfg = plain(
        f"run_dir={tmp_path}/twice", f"init_from={plain().run_dir}", "optimizer.learning_rate=1e-3", *kind
    )
    assert training_run.run(cfg) == 0
    import shutil

    shutil.rmtree(tmp_path / "twice" / "checkpoints" / "6")
    assert training_run.run(cfg) == 0
    again = open_run(recipe.load_run(cfg.run_dir))
    for (name, one), (_, two) in zip(
        module.named_leaves(once.params), module.named_leaves(again.params), strict=True
    ):
        np.testing.assert_array_equal(one, two, err_msg=name)


@pytest.mark.slow
def test_trained_in_3_bits_is_better_than_rounded_to_3_bits(library, tmp_path):
    first = open_run(recipe.load_run(library().run_dir))
    found = {"plain": evaluate_run(first)["perplexity"]}
    for name in ("rtn", "gptq"):
        method = recipe.load_method(name, ["bits=3", "group_size=0"])
        request = quantize_run.QuantizeRequest(
            f"{tmp_path}/{name}", method, 64, "float32", first.recipe.data.path
        )
        quantize_run.quantize(first, request, lambda line: None)
        found[name] = evaluate_run(open_run(recipe.load_run(request.target)))["perplexity"]
    run = more(library, tmp_path, "low", *LOW, "schedule.steps=60", "schedule.warmup=6", rate=1e-2)
    found["low rank"] = evaluate_run(run)["perplexity"]
    print(found)
    assert found["low rank"] < found["gptq"] < found["rtn"]


def peak(cfg):
    """Bytes that a step takes, by its compiler."""
    dataset = Dataset.open(cfg.data.path, sequence_length=cfg.data.sequence_length)
    cfg = fill_model_sizes(cfg, dataset)
    task = make_task(cfg, special_tokens(dataset))
    devices = setup.make_mesh(cfg, jax.devices()[:1])
    with jax.set_mesh(devices):
        update = setup.make_update(cfg, task)
        abstract, _ = setup.make_state(cfg, task, update, devices)
        axes = module.axes(load_family(task.model).Model, task.model)
        one = step.make_train_step(task, update, axes)
        used = setup.lower_step(cfg, one, abstract, devices).compile().memory_analysis()
    return (
        used.argument_size_in_bytes
        + used.temp_size_in_bytes
        + used.output_size_in_bytes
        - used.alias_size_in_bytes
    )


def test_frozen_weights_take_less_memory_by_as_much_as_the_paper_says(plain):
    """98 GB for all weights of 7B and 20.5 GB with low rank; 62 GB where activations are computed again."""
    size = ("model.layers=8", "model.embed=256", "model.mlp=1024", "batch.sequences=1", "mesh.data=1")
    size += ("qat.bits=4", "init_from=somewhere", "compute.dtype=bfloat16", "compute.remat=full")
    whole, low = peak(plain(*size)), peak(plain(*size, "qat.rank=8"))
    print(whole, low, whole / low)
    assert whole / low > 62 / 20.5


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    "name", [name for name in reader.part_names("models") if name not in ("torch", "moe", "bitnet")]
)
def test_every_family_computes_from_frozen_weights_what_it_does_from_whole_ones(name):
    cls = reader.part_class("models", name)
    sizes = {key: value for key, value in SIZES.items() if key in cls.__dataclass_fields__}
    cfg = cls(**sizes, qat=QATKeys(bits=4, rank=4))
    model = load_family(cfg).Model
    params = jax.jit(lambda key: module.init(model, cfg, key))(KEY)
    assert any(".fixed" in name for name, _ in module.named_leaves(params))
    shapes = module.shapes(model, cfg)
    assert jax.tree.map(lambda w: (w.shape, w.dtype), params) == jax.tree.map(
        lambda w: (w.shape, w.dtype), shapes
    )
    bare = model_wrappers.without_wrapper(cfg)
    whole = jax.tree.map(
        lambda w: jax.lax.map(lambda one: one.to_dense(), w) if isinstance(w, qat.LRQATWeight) else w,
        params,
        is_leaf=lambda w: isinstance(w, qat.LRQATWeight),
    )
    exec_opts = Execution(reader.part_class("attention", "xla")(), "float32")
    tokens = jnp.asarray(np.random.default_rng(0).integers(4, 64, (2, 16)))
    run = jax.jit(lambda cfg, model, tokens: model(cfg, tokens, exec_opts=exec_opts), static_argnums=0)
    np.testing.assert_allclose(run(cfg, params, tokens), run(bare, whole, tokens), atol=1e-5)


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["qat.bits=5"], "qat.bits: found 5, expected one of 2, 3, 4, 8"),
        (["qat.rank=4"], "qat.bits: found nothing, expected one of 2, 3, 4, 8; it is required"),
        (["qat.bits=4", "qat.rank=4"], "expected init_from to be set"),
        (["qat.bits=8", "qat.rank=4", "init_from=x"], "expected 0 with 8 bits"),
        (["qat.bits=4", "compute.matmul=int8"], "already rounded in another way"),
        (
            ["qat.bits=4", "qat.rank=4", "init_from=x", "optimizer.ema_decay=0.9"],
            "optimizer.ema_decay: found 0.9",
        ),
        (["qat.bits=4", "recurrence.rounds=4", "model.layers=3"], "expected no qat with recurrence"),
    ],
)
def test_what_cannot_be_is_told(plain, overrides, said):
    with pytest.raises(UserError, match=said):
        plain(*overrides)
