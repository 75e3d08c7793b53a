"""Every optimizer in headrace/optim keeps the contract, and each agrees with a reference that is not ours."""

import dataclasses
import functools
import importlib
import operator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import headrace.optim
from headrace.kernels.newton_schulz import newton_schulz
from headrace.nn import module, sharding
from headrace.nn.module import Array, Axes, stack, weight
from headrace.optim import adafactor, adamw, lion, muon, sgd, stable_adamw

NAMES = sorted(p.stem for p in Path(headrace.optim.__path__[0]).glob("*.py") if p.stem != "__init__")
SIZES = SimpleNamespace(layers=3, embed=16, heads=4, head_dim=8, mlp=24, vocab=40)


@module.module
class Block:
    norm: Array = weight("embed", init=module.ones)
    w_q: Array = weight("embed", "heads", "head_dim")
    w_o: Array = weight("heads", "head_dim", "embed", num_input_axes=2)
    w_up: Array = weight("embed", "mlp")


@module.module
class Model:
    embedding: Array = weight("vocab", "embed")
    blocks: Block = stack(Block)
    head: Array | None = weight("embed", "vocab", when=lambda cfg: False)

    def __call__(self, tokens: Array) -> Array:
        """Makes the tree callable, as every model is."""
        return self.embedding[tokens]


@functools.cache
def weights(seed: int = 0) -> Model:
    return module.init(Model, SIZES, jax.random.key(seed))


def gradients(seed: int, like: Any) -> Any:
    generator = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(generator.standard_normal(p.shape), p.dtype), like)


@functools.cache
def make(name: str) -> optax.GradientTransformation:
    """Made once, so that what one test has compiled serves the next."""
    part = importlib.import_module(f"headrace.optim.{name}")
    return part.make(part.Config(), module.axes(Model, SIZES))


def directions(tx: optax.GradientTransformation, params: Any, grads: list[Any]) -> list[Any]:
    """The direction after each gradient, the weights standing still."""
    update, out = jax.jit(tx.update), []
    state = jax.jit(tx.init)(params)
    for grad in grads:
        direction, state = update(grad, state, params)
        out.append(direction)
    return out


def descend(tx: Any, params: Any, grads: list[Any], *, lr: float, decay: float = 0.0) -> Any:
    """The rule of training/step.py: learning rate and decoupled decay are applied outside of the
    optimizer."""

    @jax.jit
    def step(params: Any, state: Any, grad: Any) -> tuple[Any, Any]:
        direction, state = tx.update(grad, state, params)
        return jax.tree.map(lambda p, d: p - lr * (d + decay * p), params, direction), state

    state = tx.init(params)
    for grad in grads:
        params, state = step(params, state, grad)
    return params


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_directions_have_the_shape_and_dtype_of_their_weights(name: str, dtype: Any) -> None:
    params = jax.tree.map(lambda p: p.astype(dtype), weights())
    (direction,) = directions(make(name), params, [gradients(1, params)])
    assert jax.tree.map(lambda d: (d.shape, d.dtype), direction) == jax.tree.map(
        lambda p: (p.shape, p.dtype), params
    )


@pytest.mark.parametrize("name", NAMES)
def test_state_arrays_have_the_axes_of_their_weight_so_that_they_shard_with_it(name: str) -> None:
    shapes = dict(module.named_leaves(module.shapes(Model, SIZES)))
    state = jax.eval_shape(make(name).init, module.shapes(Model, SIZES))
    arrays = [(path, leaf.shape) for path, leaf in module.named_leaves(state) if leaf.shape]
    assert arrays
    for path, shape in arrays:
        (whole,) = [leaf.shape for weight, leaf in shapes.items() if path.endswith(f".{weight}")]
        assert len(shape) == len(whole)
        assert all(size in (1, full) for size, full in zip(shape, whole, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_quadratic_falls_and_falls_the_same_way_twice(name: str) -> None:
    target = weights(seed=1)
    tx = make(name)

    def loss(params: Model) -> Array:
        return optax.tree.norm(optax.tree.sub(params, target), squared=True) / 2

    @jax.jit
    def step(params: Model, state: Any) -> tuple[Model, Any, Array]:
        value, grads = jax.value_and_grad(loss)(params)
        direction, state = tx.update(grads, state, params)
        return jax.tree.map(lambda p, d: p - 2e-3 * d, params, direction), state, value

    def run() -> list[float]:
        params, values = weights(), []
        state = tx.init(params)
        for _ in range(30):
            params, state, value = step(params, state)
            values.append(float(value))
        return values

    values = run()
    assert values[-1] < 0.8 * values[0]
    assert run() == values


@pytest.mark.parametrize("name", NAMES)
def test_each_layer_of_a_stack_moves_as_if_it_were_alone(name: str) -> None:
    def blocks(tree: Model, change: Any) -> Model:
        return dataclasses.replace(tree, blocks=jax.tree.map(change, tree.blocks))

    params = weights()
    # Layers of very different size: whatever is averaged over all of them shows.
    sizes = np.array([1e-3, 1.0, 50.0], np.float32)
    grads = [
        blocks(gradients(seed, params), lambda g: g * sizes.reshape(3, *[1] * (g.ndim - 1)))
        for seed in range(3)
    ]
    together = directions(make(name), params, grads)[-1].blocks
    for layer in range(SIZES.layers):
        one = operator.itemgetter(slice(layer, layer + 1))
        alone = directions(make(name), blocks(params, one), [blocks(grad, one) for grad in grads])[-1].blocks
        for ours, theirs in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(one(ours), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_eight_devices_find_the_direction_of_one(name: str) -> None:
    params, axes = weights(), module.axes(Model, SIZES)
    grads = [gradients(seed, params) for seed in range(2)]
    alone = directions(make(name), params, grads)[-1]
    devices = sharding.make_mesh(dict(data=2, fsdp=2, tensor=2, context=1))
    shardings = sharding.shardings(axes, params, devices)
    with jax.set_mesh(devices):
        split = directions(make(name), *jax.device_put((params, grads), (shardings, [shardings] * 2)))[-1]
    assert split.blocks.w_up.sharding.num_devices == 8
    for ours, theirs in zip(jax.tree.leaves(split), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_zero_and_tiny_gradients_give_finite_directions(name: str) -> None:
    params = weights()
    zero = optax.tree.zeros_like(params)
    tiny = optax.tree.scale(1e-12, gradients(1, params))
    for direction in directions(make(name), params, [zero, tiny, tiny]):
        assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(direction))


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (lambda: adamw.Config(b1=1.0), "b1"),
        (lambda: stable_adamw.Config(b2=-0.1), "b2"),
        (lambda: lion.Config(b2=99), "b2"),
        (lambda: sgd.Config(momentum=1.5), "momentum"),
        (lambda: muon.Config(momentum=1.0), "momentum"),
        (lambda: muon.Config(ns_steps=0), "ns_steps"),
    ],
)
def test_values_that_cannot_work_are_refused_by_key(config: Any, key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}: expected"):
        config()


MATRIX = Axes(("embed", "mlp"))
ONE_LAYER = Axes(("layers", "embed", "mlp"), stacked=1)


def numbers(*shape: int, count: int = 6, seed: int = 0) -> tuple[np.ndarray, list[np.ndarray]]:
    generator = np.random.default_rng(seed)
    draw = lambda: generator.standard_normal(shape).astype(np.float32)
    return 0.1 * draw(), [draw() for _ in range(count)]


def torch_descend(make: Any, start: np.ndarray, grads: list[np.ndarray]) -> np.ndarray:
    parameter = torch.nn.Parameter(torch.tensor(start))
    optimizer = make([parameter])
    for grad in grads:
        parameter.grad = torch.tensor(grad)
        optimizer.step()
    return parameter.detach().numpy()


def test_adamw_with_decoupled_decay_is_torchs() -> None:
    start, grads = numbers(32, 16)
    tx = adamw.make(adamw.Config(b2=0.98, eps=1e-6), MATRIX)
    theirs = torch_descend(
        lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.3), start, grads
    )
    np.testing.assert_allclose(descend(tx, start, grads, lr=0.02, decay=0.3), theirs, atol=2e-7)


def test_sgd_with_momentum_is_torchs() -> None:
    start, grads = numbers(32, 16)
    tx = sgd.make(sgd.Config(momentum=0.8), MATRIX)
    theirs = torch_descend(lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.8), start, grads)
    np.testing.assert_allclose(descend(tx, start, grads, lr=0.02), theirs, atol=2e-7)


def test_lion_takes_the_very_steps_of_lion_pytorch() -> None:
    lion_pytorch = pytest.importorskip("lion_pytorch")
    start, grads = numbers(32, 16, count=20)
    found = directions(lion.make(lion.Config(), MATRIX), start, grads)
    # At learning rate 1 from 0 and without decay, a weight is minus the sum of the signs so far: exact.
    positions = [
        torch_descend(lambda p: lion_pytorch.Lion(p, lr=1.0), np.zeros_like(start), grads[: i + 1])
        for i in range(20)
    ]
    np.testing.assert_array_equal(-np.cumsum(found, axis=0), positions)
    theirs = torch_descend(lambda p: lion_pytorch.Lion(p, lr=0.01, weight_decay=0.5), start, grads)
    tx = lion.make(lion.Config(), MATRIX)
    np.testing.assert_allclose(descend(tx, start, grads, lr=0.01, decay=0.5), theirs, atol=2e-7)


def test_muon_is_torchs_to_bfloat16_and_not_the_one_without_nesterov() -> None:
    start, grads = numbers(32, 16)

    def theirs(nesterov: bool) -> np.ndarray:
        # torch runs the iteration in bfloat16; its matrices are [out, in], which the iteration does not mind.
        return torch_descend(
            lambda p: torch.optim.Muon(
                p, lr=0.02, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"
            ),
            start,
            grads,
        )

    tx = muon.make(muon.Config(), ONE_LAYER)
    ours = descend(tx, start[None], [grad[None] for grad in grads], lr=0.02, decay=0.1)[0]
    assert np.abs(ours - theirs(nesterov=True)).max() < 5e-3
    assert np.abs(ours - theirs(nesterov=False)).max() > 5e-3
    assert np.abs(ours - start).max() > 5e-2


def test_muon_sees_heads_and_head_dim_as_one_side_of_the_output_matrix() -> None:
    shape = (2, SIZES.heads, SIZES.head_dim, SIZES.embed)
    flat = (2, SIZES.heads * SIZES.head_dim, SIZES.embed)
    start, grads = numbers(*shape)
    names = ("layers", "heads", "head_dim", "embed")
    expected = directions(
        muon.make(muon.Config(), ONE_LAYER), start.reshape(flat), [g.reshape(flat) for g in grads]
    )[-1].reshape(shape)

    def found(inputs: int) -> Array:
        return directions(
            muon.make(muon.Config(), Axes(names, stacked=1, num_input_axes=inputs)), start, grads
        )[-1]

    np.testing.assert_allclose(found(inputs=2), expected, atol=1e-5)
    assert jnp.abs(found(inputs=1) - expected).max() > 0.1


def test_muon_leaves_embeddings_and_norms_to_adamw() -> None:
    params = weights()
    grads = [gradients(seed, params) for seed in range(3)]
    ours, adam = (directions(make(name), params, grads)[-1] for name in ("muon", "adamw"))
    np.testing.assert_allclose(ours.embedding, adam.embedding, rtol=1e-6)
    np.testing.assert_allclose(ours.blocks.norm, adam.blocks.norm, rtol=1e-6)
    assert jnp.abs(ours.blocks.w_up - adam.blocks.w_up).max() > 0.1


def test_stable_adamw_is_its_paper() -> None:
    start, grads = numbers(32, 16, count=8)
    grads = [grad * (30 if i == 5 else 1) for i, grad in enumerate(grads)]
    b1, b2, eps, lr, decay = 0.9, 0.98, 1e-6, 0.01, 0.1
    p, m, v = start.astype(np.float64), np.zeros((32, 16)), np.zeros((32, 16))
    clipped = 0
    for t, g in enumerate(grads, start=1):
        hat1, hat2 = ((b**t - b) / (b**t - 1) for b in (b1, b2))
        m, v = hat1 * m + (1 - hat1) * g, hat2 * v + (1 - hat2) * g.astype(np.float64) ** 2
        rms = np.sqrt(np.mean(g**2 / np.maximum(v, eps**2)))
        clipped += rms > 1.5
        p = p - lr / max(1, rms) * m / (np.sqrt(v) + eps) - lr * decay * p
    assert clipped  # the spike: elsewhere it would be AdamW
    tx = stable_adamw.make(stable_adamw.Config(b1, b2, eps), MATRIX)
    np.testing.assert_allclose(descend(tx, start, grads, lr=lr, decay=decay), p, atol=1e-6)


def test_adafactor_factors_a_stacked_query_weight_by_its_inputs_and_outputs() -> None:
    start, grads = numbers(3, 16, 4, 8)
    axes = Axes(("layers", "embed", "heads", "head_dim"), stacked=1)
    rows, columns = np.zeros((3, 16, 1)), np.zeros((3, 1, 32))
    for t, grad in enumerate(grads, start=1):
        g = grad.reshape(3, 16, 32).astype(np.float64)
        keep = 1 - t**-0.8
        rows = keep * rows + (1 - keep) * (g**2).mean(2, keepdims=True)
        columns = keep * columns + (1 - keep) * (g**2).mean(1, keepdims=True)
        update = g / np.sqrt(rows * columns / rows.mean(1, keepdims=True))
        update = update / np.maximum(1, np.sqrt((update**2).mean((1, 2), keepdims=True)))
    found = directions(adafactor.make(adafactor.Config(), axes), start, grads)[-1]
    np.testing.assert_allclose(found, update.reshape(3, 16, 4, 8), atol=1e-5)


@pytest.mark.parametrize("parameter_scale", [False, True])
@pytest.mark.parametrize("shape", [(32, 16), (32,)])
def test_adafactor_on_one_matrix_or_vector_is_optaxs(shape: tuple[int, ...], parameter_scale: bool) -> None:
    start, grads = numbers(*shape)
    axes = Axes(("embed", "mlp")[: len(shape)])
    found = directions(adafactor.make(adafactor.Config(parameter_scale), axes), start, grads)
    reference = optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=1),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms() if parameter_scale else optax.identity(),
    )
    np.testing.assert_allclose(found, directions(reference, start, grads), atol=1e-5)


def test_newton_schulz_brings_all_singular_values_of_a_wide_matrix_near_one() -> None:
    wide = jax.random.normal(jax.random.key(0), (2, 64, 256))
    for matrix in (wide, wide.mT):
        values = np.linalg.svd(newton_schulz(matrix), compute_uv=False)
        assert values.min() > 0.65 and values.max() < 1.25
    square = jax.random.normal(jax.random.key(1), (128, 128))
    assert np.linalg.svd(newton_schulz(square), compute_uv=False).max() <= 1.21


def test_newton_schulz_keeps_the_singular_vectors() -> None:
    matrix = jax.random.normal(jax.random.key(0), (16, 64))
    left, _, right = np.linalg.svd(matrix, full_matrices=False)
    values = left.T @ newton_schulz(1000 * matrix) @ right.T
    np.testing.assert_allclose(values, np.diag(np.diag(values)), atol=1e-4)
