"""Adapters beside frozen weights: where they begin, what learns, what is merged, and that no mesh changes
it."""

import dataclasses
import shutil
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace import model_wrappers
from headrace.checkpoint.open_run import open_run
from headrace.config import reader, recipe
from headrace.config.wrappers import LoRAKeys
from headrace.data.dataset import Dataset
from headrace.errors import UserError
from headrace.inference.generate import generate
from headrace.inference.sampling import Sampling
from headrace.low_precision import grid, nf4
from headrace.model_wrappers import load_family, lora
from headrace.nn import module
from headrace.nn.stack import Execution
from headrace.training import run as training_run
from headrace.training import setup, step
from headrace.training.batch import device_batch, fill_model_sizes, special_tokens
from headrace.training.evaluate import evaluate_run
from headrace.training.task import make_task, recipe_flops_per_token

KEY = jax.random.key(0)
SIZES = dict(layers=2, embed=64, heads=4, kv_heads=4, mlp=64, vocab=64, window=8, global_every=2)
LORA = ("lora.rank=4", "lora.alpha=12")
DORA, FOUR = (*LORA, "lora.dora=true"), (*LORA, "lora.base_bits=4")


def drawn(shape=(2, 64, 4, 8), seed=0, size=0.05):
    return jnp.asarray(size * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.fixture(scope="module")
def plain(trained_recipe):
    """Loads the recipe of a trained run, with overrides."""
    return lambda *overrides: recipe.load(trained_recipe, overrides)


def more(plain, tmp_path, name, *overrides, rate=1e-2, steps=3, start=None):
    """A run that went on from the plain one."""
    again = (
        f"run_dir={tmp_path}/{name}",
        f"init_from={start or plain().run_dir}",
        f"optimizer.learning_rate={rate}",
    )
    cfg = plain(*again, f"schedule.steps={steps}", "schedule.warmup=0", *overrides)
    assert training_run.run(cfg) == 0
    return open_run(recipe.load_run(cfg.run_dir))


def one_layer(w, number=0):
    return jax.tree.map(lambda leaf: leaf[number], w)


def made(axes, w, **keys):
    cls = reader.part_class("models", "llama")
    cfg = cls(layers=2, embed=64, heads=4, kv_heads=4, mlp=64, lora=LoRAKeys(4, 12.0, **keys))
    return lora.from_dense(cfg, axes, w, KEY)


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_multiplies_as_its_formula_says_and_as_its_whole_matrix_does(dora):
    """Of a matrix with two axes of inputs, against float64, forward and backward."""
    draw = np.random.default_rng(1)
    axes = module.Axes(("layers", "heads", "head_dim", "embed"), 1, 2)
    w = made(axes, drawn((1, 4, 8, 6)), dora=dora)
    w = dataclasses.replace(w, up=jnp.asarray(draw.standard_normal(w.up.shape), jnp.float32))
    if dora:
        w = dataclasses.replace(w, magnitude=w.magnitude * 1.5)
    w, x, given = one_layer(w), drawn((2, 3, 4, 8), 2, 1.0), drawn((2, 3, 6), 3, 1.0)
    learns = {name: getattr(w, name) for name in ("down", "up", *("magnitude",) * dora)}

    def through(learns, x, form):
        return jnp.sum(form(dataclasses.replace(w, **learns), x) * given)

    seam = lambda w, x: lora.project(w, x, "bsnh,nhd->bsd")
    base, down, up = (np.asarray(a, np.float64) for a in (w.base, w.down, w.up))
    base, down, scale = base.reshape(32, 6), down.reshape(32, 4), 3.0
    rows, out = np.asarray(x, np.float64).reshape(6, 32), np.asarray(given, np.float64).reshape(6, 6)
    whole = base + scale * down @ up
    stretch = np.ones(6)
    if dora:
        norm = np.linalg.norm(whole, axis=0)
        stretch = np.asarray(w.magnitude, np.float64) / norm
    np.testing.assert_allclose(seam(w, x).reshape(6, 6), rows @ (whole * stretch), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(w.to_dense().reshape(32, 6), whole * stretch, rtol=1e-5, atol=1e-6)
    found, d_x = jax.grad(through, argnums=(0, 1))(learns, x, seam)
    g = rows.T @ (out * stretch)  # the length of the sum has no gradient
    np.testing.assert_allclose(found["down"].reshape(32, 4), scale * g @ up.T, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found["up"], scale * down.T @ g, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(d_x.reshape(6, 32), (out * stretch) @ whole.T, rtol=1e-3, atol=1e-4)
    if dora:
        np.testing.assert_allclose(
            found["magnitude"], ((rows @ whole) * out).sum(0) / norm, rtol=1e-3, atol=1e-4
        )


def test_the_16_numbers_of_4_bits_are_quantiles_of_a_normal_distribution():
    """As the paper makes them, of 8 below and 9 above zero, in float64."""
    at, last = NormalDist().inv_cdf, 0.5 * ((1 - 1 / 32) + (1 - 1 / 30))
    above = [at(p) for p in np.linspace(last, 0.5, 9)[:-1]]
    below = [-at(p) for p in np.linspace(last, 0.5, 8)[:-1]]
    wanted = np.sort([*above, 0.0, *below]) / max(above)
    np.testing.assert_allclose(nf4.LEVELS, wanted, atol=1e-6)


@pytest.mark.parametrize("shape, inputs", [((2, 128, 4, 8), 1), ((2, 4, 40, 16), 2)])
def test_frozen_weights_are_the_nearest_that_their_bits_allow(shape, inputs):
    w = drawn(shape)
    for bits, most in ((4, 4.26), (8, 8.26)):
        held = nf4.from_dense(w, bits, inputs)
        for number in range(2):
            flat = np.asarray(w[number]).reshape(int(np.prod(shape[1 : 1 + inputs])), -1)
            whole = np.asarray(one_layer(held, number).to_dense()).reshape(flat.shape)
            for first in range(0, len(flat), 64):
                group = flat[first : first + 64]
                largest = np.abs(group).max(axis=0)
                numbers = np.asarray(nf4.LEVELS) if bits == 4 else np.arange(-127, 128) / 127
                every = largest[:, None] * numbers
                nearest = np.abs(group[..., None] - every).min(axis=-1)
                found = np.abs(group - whole[first : first + 64])
                np.testing.assert_allclose(found, nearest, atol=1.1e-3 * largest.max())  # float16 scales
        if shape[1] == 128:
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(held)) * 8 / w.size
            assert bits < size <= most, size


def test_quantiles_are_nearer_to_normal_weights_than_even_steps():
    w = drawn((1, 256, 256))
    even = grid.absmax_scales(w[0], 4, 64)
    spread = grid.expand_scales(even, 256, 64)
    steps = spread * grid.round_to_grid(w[0] / spread, 4)
    normal = one_layer(nf4.from_dense(w, 4, 1)).to_dense()
    error = lambda found: float(jnp.mean((found - w[0]) ** 2))
    assert error(normal) < 0.85 * error(steps), (error(normal), error(steps))


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind, exact", [(LORA, True), (DORA, False)])
def test_training_begins_at_the_model_it_starts_from(plain, tmp_path, kind, exact):
    first = open_run(recipe.load_run(plain().run_dir))
    run = more(plain, tmp_path, "still", *kind, rate=1e-30)
    before, after = evaluate_run(first)["loss"], evaluate_run(run)["loss"]
    assert before == after if exact else abs(before - after) < 1e-6
    np.testing.assert_array_equal(run.params.blocks.w_q.base, first.params.blocks.w_q)


def test_adapters_alone_learn_and_the_optimizer_keeps_nothing_of_the_rest(plain, tmp_path):
    first = open_run(recipe.load_run(plain().run_dir))
    run = more(plain, tmp_path, "trained", *DORA)
    axes = module.axes(load_family(run.recipe.model).Model, run.recipe.model)
    learns = {name for name, moves in module.named_leaves(module.trainable_mask(axes)) if moves}
    assert learns and all(name.endswith((".up", ".down", ".magnitude")) for name in learns)
    for name, w in module.named_leaves(run.params):
        if name not in learns:
            ours = dict(module.named_leaves(first.params))[name.removesuffix(".base")]
            np.testing.assert_array_equal(w, ours, err_msg=name)
    assert all(float(jnp.abs(w.up).max()) > 0 for w in (run.params.blocks.w_q, run.params.blocks.w_down))
    task, update = stepped(run.recipe)[:2]
    abstract, _ = setup.make_state(run.recipe, task, update, setup.make_mesh(run.recipe))
    count = sum(leaf.size for name, leaf in module.named_leaves(run.params) if name in learns)
    assert sum(leaf.size for leaf in jax.tree.leaves(abstract.optimizer)) <= 2 * count + 2
    assert evaluate_run(run)["loss"] != evaluate_run(first)["loss"]


def test_lora_targets_choose_matrices_and_freeze_may_choose_among_their_adapters(plain, tmp_path):
    on = ("lora.targets=blocks.w_[qv]", "freeze=blocks.w_v.down")
    run = more(plain, tmp_path, "some", *LORA, *on)
    held = [name for name, _ in module.named_leaves(run.params) if name.endswith(".up")]
    assert held == ["blocks.w_q.up", "blocks.w_v.up"]
    moved = lambda name: (
        not np.array_equal(getattr(run.params.blocks, name).down, getattr(again.params.blocks, name).down)
    )
    again = more(plain, tmp_path, "still", *LORA, *on, rate=1e-30)
    assert moved("w_q") and not moved("w_v")
    with pytest.raises(UserError, match=r"lora.targets: found blocks.w_x, which matches no weight"):
        more(plain, tmp_path, "none", *LORA, "lora.targets=blocks.w_x")


def stepped(cfg):
    dataset = Dataset.open(cfg.data.path, sequence_length=cfg.data.sequence_length)
    cfg = fill_model_sizes(cfg, dataset)
    task = make_task(cfg, special_tokens(dataset))
    return task, setup.make_update(cfg, task), dataset, cfg


@pytest.mark.thin(3)
@pytest.mark.parametrize("kind", [LORA, DORA, FOUR])
def test_eight_devices_learn_what_one_does(plain, tmp_path, kind):
    """With matrices split along the width and along heads and hidden units."""
    keys = (*kind, f"init_from={plain().run_dir}", "optimizer.learning_rate=1e-2", "schedule.warmup=0")
    one = losses(plain(*keys, "mesh.data=1", "mesh.fsdp=1"), jax.devices()[:1])
    many = losses(plain(*keys, "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"), jax.devices())
    assert one[0][-1] < one[0][0] - 0.01
    np.testing.assert_allclose(one[0], many[0], rtol=1e-5)
    for (name, alone), (_, shared) in zip(
        module.named_leaves(one[1]), module.named_leaves(many[1]), strict=True
    ):
        if name.endswith((".up", ".down", ".magnitude")):
            np.testing.assert_allclose(alone, shared, atol=2e-4, err_msg=name)


def losses(cfg, devices):
    """Of some steps, and the weights after them."""
    from headrace.training.init_from.check import check_source
    from headrace.training.init_from.load import load_weights

    task, update, dataset, cfg = stepped(cfg)
    axes = module.axes(load_family(task.model).Model, task.model)
    laid = setup.make_mesh(cfg, devices)
    with jax.set_mesh(laid):
        _abstract, fresh = setup.make_state(cfg, task, update, laid)
        source = check_source(cfg.init_from, task.model)
        state = fresh()
        params, _ = load_weights(source, task.model, state.params, laid, cfg.data.path)
        state = dataclasses.replace(state, params=params)
        take, told = jax.jit(step.make_train_step(task, update, axes)), []
        batch = device_batch(dataset, dataset.train_order(cfg.batch.sequences, seed=0), laid, 0)
        for _ in range(4):
            state, metrics = take(state, batch)
            told.append(float(metrics["loss"]))
    return told, jax.device_get(state.params)


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", [LORA, (*FOUR, "lora.dora=true")])
def test_a_run_with_adapters_goes_on_where_it_stopped(plain, tmp_path, kind):
    kind = (*kind, "checkpoint.every=2")
    once = more(plain, tmp_path, "once", *kind, steps=4)
    cfg = recipe.load_run(more(plain, tmp_path, "twice", *kind, steps=4).recipe.run_dir)
    shutil.rmtree(tmp_path / "twice" / "checkpoints" / "4")
    assert training_run.run(cfg) == 0
    again = open_run(recipe.load_run(cfg.run_dir))
    for (name, one), (_, two) in zip(
        module.named_leaves(once.params), module.named_leaves(again.params), strict=True
    ):
        np.testing.assert_array_equal(one, two, err_msg=name)


def test_frozen_weights_take_the_bytes_that_their_bits_say(plain):
    """A model with little but matrices; 8 outputs share no scale, 64 inputs of an output do."""
    size = ("model.layers=2", "model.embed=256", "model.mlp=1024", "init_from=somewhere", *LORA)

    def held(*keys):
        task, update, _, cfg = stepped(plain(*size, *keys))
        abstract, _ = setup.make_state(cfg, task, update, setup.make_mesh(cfg))
        of = lambda leaf: leaf.size * leaf.dtype.itemsize
        return sum(of(leaf) for name, leaf in module.named_leaves(abstract.params.blocks) if ".base" in name)

    whole = held()
    for bits, wanted in ((16, 16), (8, 8.25), (4, 4.25)):
        assert held(f"lora.base_bits={bits}") == whole * wanted / 32


def test_what_is_merged_computes_what_the_adapters_do(plain, tmp_path):
    for number, kind in enumerate((LORA, (*FOUR, "lora.dora=true"))):
        run = more(plain, tmp_path, f"trained{number}", *kind)
        whole = run.merged()
        assert (
            whole.recipe.model == model_wrappers.without_wrapper(run.recipe.model)
            and whole.recipe.model.lora is None
        )
        assert abs(evaluate_run(whole)["loss"] - evaluate_run(run)["loss"]) < 1e-5
        greedy = Sampling(temperature=0.0)
        said, wanted = ("".join(generate(one, "Text 3: the", 8, greedy)) for one in (run, whole))
        assert said == wanted
    # And another run may start from it, whose adapters are new.
    second = more(plain, tmp_path, "second", *LORA, rate=1e-30, start=run.recipe.run_dir)
    assert abs(evaluate_run(second)["loss"] - evaluate_run(run)["loss"]) < 1e-5


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    "name", [name for name in reader.part_names("models") if name not in ("torch", "bitnet")]
)
def test_every_family_computes_with_adapters_what_it_does_from_whole_matrices(name):
    cls = reader.part_class("models", name)
    sizes = {key: value for key, value in SIZES.items() if key in cls.__dataclass_fields__}
    cfg = cls(**sizes, lora=LoRAKeys(4, base_bits=4, dora=True))
    model = load_family(cfg).Model
    params = jax.jit(lambda key: module.init(model, cfg, key))(KEY)
    stirred = lambda path, w: drawn(w.shape, 1) if module.path_name(path).endswith(".up") else w
    params = jax.tree_util.tree_map_with_path(stirred, params)
    assert any(".up" in name for name, _ in module.named_leaves(params))
    kinds = lambda tree: jax.tree.map(lambda w: (w.shape, w.dtype), tree)
    assert kinds(params) == kinds(module.shapes(model, cfg))
    bare = model_wrappers.without_wrapper(cfg)
    whole = model_wrappers.unwrap_params(load_family(bare).Model, cfg, params)
    exec_opts = Execution(reader.part_class("attention", "xla")(), "float32")
    tokens = jnp.asarray(np.random.default_rng(0).integers(4, 64, (2, 16)))
    run = jax.jit(lambda cfg, model, tokens: model(cfg, tokens, exec_opts=exec_opts), static_argnums=0)
    found, wanted = run(cfg, params, tokens), run(bare, whole, tokens)
    np.testing.assert_allclose(found, wanted, atol=2e-5 * float(jnp.abs(wanted).max()))
    base = run(cfg, lora.frozen_base(params), tokens)
    assert float(jnp.abs(found - base).max()) > 1e-2


def test_flops_leave_out_the_gradients_of_what_is_frozen(plain):
    whole, thin = plain("model.vocab=300"), plain("model.vocab=300", *LORA, "init_from=x")
    held = load_family(whole.model).Model
    shapes = dict(module.named_leaves(module.shapes(held, whole.model)))
    hidden = [w for name, w in shapes.items() if name.startswith("blocks.w_")]
    count = sum(w.size for w in hidden)
    pairs = 2 * 4 * (4 * 64 + 64 + 2 * 32 + 64 + 3 * (64 + 128))  # q o, k v, and the three of the MLP
    assert recipe_flops_per_token(whole) - recipe_flops_per_token(thin) == 2 * count - 6 * pairs


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["lora.alpha=-4"], "lora.alpha: found -4, expected a number above 0"),
        (["lora.rank=4"], "lora.rank: found 4, expected init_from to be set"),
        ([*LORA, "init_from=x", "lora.base_bits=5"], "lora.base_bits: found 5, expected one of 0, 4, 8, 16"),
        ([*LORA, "init_from=x", "qat.bits=4"], "lora.rank: found 4, expected no lora with qat"),
        ([*LORA, "init_from=x", "compute.matmul=int8"], "multiplied in few bits"),
        ([*LORA, "init_from=x", "optimizer.ema_decay=0.9"], "optimizer.ema_decay: found 0.9"),
        ([*LORA, "init_from=x", "init_weights=blocks.*"], "init_weights: found .blocks"),
    ],
)
def test_what_cannot_be_is_told(plain, overrides, said):
    with pytest.raises(UserError, match=said):
        plain(*overrides)
