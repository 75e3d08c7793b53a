"""Products in 8 bits: how far they are from exact ones, and training with them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.config import sections
from headrace.errors import UserError
from headrace.low_precision import fp8, int8
from headrace.low_precision.cast import cast
from headrace.low_precision.support import emulation_warning, has_fast_matmul
from headrace.low_precision.weight import LowPrecisionWeight, round_weight
from headrace.nn.linear import project, quantize_input
from headrace.nn.module import Axes
from headrace.nn.stack import Execution, run_layers
from tests.training.test_step import Bench, weights

FORMATS = ("fp8", "int8")
# The largest rounding error relative to a number, half a step: e4m3 has 3 bits of mantissa, e5m2 has 2.
E4M3, E5M2 = 2.0**-4, 2.0**-3
# The axes and the shape of a weight, by the spec of its product.
CASES = {
    "bsd,dnh->bsnh": (Axes(("layers", "embed", "heads", "head_dim"), 1, 1), (3, 24, 4, 8)),
    "bsnh,nhd->bsd": (Axes(("layers", "heads", "head_dim", "embed"), 1, 2), (3, 4, 8, 24)),
    "bsf,fd->bsd": (Axes(("layers", "mlp", "embed"), 1, 1), (3, 40, 24)),
}


def random(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def layer(
    w: jax.Array, axes: Axes, format: str, *, native: bool = False, index: int = 1
) -> LowPrecisionWeight:
    """Round a stack of weights. Returns one layer of it."""
    stack = round_weight(w, axes, dtype=jnp.float32, format=format, native=native)
    return jax.tree.map(lambda leaf: leaf[index], stack)


def products(spec: str, format: str, *, native: bool = False) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Compute a product and its gradients in 8 bits. Returns these, and x, w and the product's gradient."""
    axes, shape = CASES[spec]
    w = random(0, *shape) * jnp.array([1.0, 0.01, 100.0]).reshape(3, *(1,) * (len(shape) - 1))
    x = random(1, 2, 16, *shape[1 : 1 + axes.num_input_axes])
    d = random(2, 2, 16, *shape[1 + axes.num_input_axes :]) * 1e-4

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return project(layer(w, axes, format, native=native), x, spec)

    y, pull = jax.vjp(product, x, w)
    d_x, d_w = pull(d)
    assert not d_w[0].any() and not d_w[2].any()
    return [np.asarray(a, np.float64) for a in (y, d_x, d_w[1])], [
        np.asarray(a, np.float64) for a in (x, w[1], d)
    ]


def exact_products(spec: str, x: np.ndarray, w: np.ndarray, d: np.ndarray) -> list[np.ndarray]:
    a, b, c = spec.replace("->", ",").split(",")
    return [np.einsum(spec, x, w), np.einsum(f"{c},{b}->{a}", d, w), np.einsum(f"{a},{c}->{b}", x, d)]


@pytest.mark.parametrize("spec", CASES)
def test_fp8_errors_are_within_those_of_its_formats(spec):
    """Each factor has a relative error, so the error of a sum is bounded by the sum of absolute values."""
    results, (x, w, d) = products(spec, "fp8")
    sizes = exact_products(spec, abs(x), abs(w), abs(d))
    for result, expected, size, error in zip(
        results, exact_products(spec, x, w, d), sizes, (2 * E4M3, E4M3 + E5M2, E4M3 + E5M2), strict=True
    ):
        # Subnormal numbers have an error relative to the largest number.
        assert (abs(result - expected) <= 1.1 * error * size + 1e-3 * size.max()).all()
        assert np.linalg.norm(result - expected) < 0.75 * error * np.linalg.norm(expected)


@pytest.mark.parametrize("spec", CASES)
def test_int8_errors_are_within_half_a_step(spec):
    """Of each factor: x has a step for each token, w for each output."""
    results, (x, w, d) = products(spec, "int8")
    inputs = CASES[spec][0].num_input_axes
    y, d_x, d_w = exact_products(spec, x, w, d)
    count = np.prod(x.shape[2:])
    token = abs(x).max(tuple(range(2, x.ndim)))
    output = abs(w).max(tuple(range(inputs)))
    limit = np.multiply.outer(token, output) * count / 127
    assert (abs(results[0] - y) <= limit).all()
    assert np.linalg.norm(results[0] - y) < 0.02 * np.linalg.norm(y)
    assert np.linalg.norm(results[1] - d_x) < 0.02 * np.linalg.norm(d_x)
    # The gradient of the weight is that of exact products.
    np.testing.assert_allclose(results[2], d_w, rtol=0, atol=1e-5 * abs(d_w).max())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("spec", CASES)
def test_native_and_emulated_products_are_equal(spec, format):
    emulated, native = (products(spec, format, native=native)[0] for native in (False, True))
    for x, y in zip(emulated, native, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-6 * abs(y).max())


def test_int8_has_no_large_errors_beside_large_tokens_or_outputs():
    """A token, or an output, that is a million times larger does not affect the others."""
    x = random(0, 1, 4, 64) * jnp.array([1e6, 1.0, 1e-3, 1.0])[None, :, None]
    w = random(1, 1, 64, 3) * jnp.array([1e3, 1.0, 1e-3])
    y = project(layer(w, Axes(("layers", "mlp", "embed"), 1, 1), "int8", index=0), x, "bsf,fd->bsd")
    expected = np.einsum("bsf,fd->bsd", np.asarray(x, np.float64), np.asarray(w[0], np.float64))
    sizes = np.einsum("bsf,fd->bsd", abs(np.asarray(x, np.float64)), abs(np.asarray(w[0], np.float64)))
    assert (abs(y - expected) < 0.02 * sizes).all()


def test_scales_of_fp8_are_rounded_up_to_powers_of_two():
    numbers = np.array([1.0, 1.0001, 0.75, 3.0, 2.0**-40, 1e30], np.float32)
    expected = 2.0 ** np.ceil(np.log2(numbers.astype(np.float64)))
    np.testing.assert_array_equal(fp8.round_up_to_power_of_two(jnp.asarray(numbers)), expected)


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-30, 1.0, 3e38])
def test_rounding_works_for_numbers_of_any_size(largest):
    x = jnp.array([largest, -largest / 2, 0.0], jnp.float32)
    for dtype in (fp8.FORWARD, fp8.GRADIENT):
        values, scale = fp8.round_tensor(x, dtype, axis=(0,))
        np.testing.assert_allclose(values.astype(jnp.float32) * scale, x, atol=1e-17, rtol=E5M2)
    values, scale = int8.round_tensor(x, axis=(0,))
    np.testing.assert_allclose(values * scale, x, atol=max(1e-17, largest / 127), rtol=0)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("spec", CASES)
def test_zeros_give_zeros(format, spec):
    axes, shape = CASES[spec]
    x = jnp.zeros((2, 16, *shape[1 : 1 + axes.num_input_axes]))
    y, pull = jax.vjp(lambda x, w: project(layer(w, axes, format), x, spec), x, jnp.zeros(shape))
    assert not y.any()
    assert not any(d.any() for d in pull(jnp.zeros_like(y)))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_results_of_inputs_that_are_not_finite_are_not_finite(format, value):
    axes, shape = CASES["bsf,fd->bsd"]
    x, w, d = random(0, 2, 16, shape[1]), random(1, *shape), random(2, 2, 16, shape[2])

    def run(x, w, d):
        y, pull = jax.vjp(lambda x, w: project(layer(w, axes, format), x, "bsf,fd->bsd"), x, w)
        return y, *pull(d)

    y, _, d_w = run(x.at[0, 3, 5].set(value), w, d)
    assert not np.isfinite(y[0, 3]).any() and not np.isfinite(d_w).all()
    y, d_x, _ = run(x, w.at[1, 3, 5].set(value), d)
    assert not np.isfinite(y).all() and not np.isfinite(d_x).all()
    _, d_x, d_w = run(x, w, d.at[0, 3, 5].set(value))
    assert not np.isfinite(d_x[0, 3]).any() and not np.isfinite(d_w).all()


@pytest.mark.parametrize("format", FORMATS)
def test_an_input_is_rounded_once_for_all_weights(format):
    axes, shape = CASES["bsf,fd->bsd"]
    first, second = (layer(random(seed, *shape), axes, format) for seed in (0, 1))

    def share_input(x: jax.Array) -> jax.Array:
        rounded = quantize_input(first, x)
        return project(first, rounded, "bsf,fd->bsd") + project(second, rounded, "bsf,fd->bsd")

    x = random(2, 2, 16, shape[1])
    text = str(jax.make_jaxpr(share_input)(x))
    assert text.count("reduce_max") == 1
    round_twice = lambda x: project(first, x, "bsf,fd->bsd") + project(second, x, "bsf,fd->bsd")
    assert str(jax.make_jaxpr(round_twice)(x)).count("reduce_max") == 2
    np.testing.assert_array_equal(share_input(x), round_twice(x))


def test_a_model_learns_in_8_bits_as_in_float32(tiny):
    """Losses: from 5.738 to 2.905 in float32, 2.907 in fp8, 2.906 in int8."""
    steps = ("schedule.steps=60", "optimizer.learning_rate=3e-3")
    curves = {}
    for name in ("compute", *FORMATS):
        _, rows = Bench(tiny(*steps, f"compute.matmul={name}")).run(60)
        curves[name] = [row["loss"] for row in rows]
    ends = {name: np.mean(curve[-5:]) for name, curve in curves.items()}
    assert ends["compute"] < curves["compute"][0] - 2
    for name in FORMATS:
        assert curves[name][10] != curves["compute"][10]
        assert abs(ends[name] - ends["compute"]) < 0.02, name


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "fsdp": 2, "tensor": 2},
        pytest.param({"fsdp": 8}, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2, "tensor": 2, "context": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_mesh_gives_the_update_of_one_device(tiny, format, sizes):
    """Up to rounding: sums in another order may round a number in the other direction."""
    sgd = ("optimizer.use=sgd", "optimizer.learning_rate=0.5", f"compute.matmul={format}")
    bench = Bench(tiny(*sgd))
    start = weights(bench.state())
    single, rows = bench.run(2)
    sharded, sharded_rows = Bench(tiny(*sgd), sizes).run(2)
    assert sharded_rows[0]["loss"] == pytest.approx(rows[0]["loss"], abs=1e-3)
    assert sharded_rows[1]["loss"] == pytest.approx(rows[1]["loss"], abs=2e-3)
    expected = weights(sharded)
    for name, value in weights(single).items():
        assert np.linalg.norm(value - expected[name]) < 0.05 * np.linalg.norm(value - start[name]), name


@pytest.mark.parametrize("format", FORMATS)
def test_a_step_that_is_not_finite_is_skipped(tiny, format):
    bench = Bench(tiny(f"compute.matmul={format}"))
    state = bench.state()
    blocks = state.params.blocks
    blocks = dataclasses.replace(blocks, w_up=blocks.w_up.at[0, 3, 5].set(jnp.nan))
    state = dataclasses.replace(state, params=dataclasses.replace(state.params, blocks=blocks))
    before = weights(state)
    after, rows = bench.run(1, state)
    assert rows[0]["skipped"] == 1 and rows[0]["left_out"] == 1
    for name, value in weights(after).items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["remat=dots", "remat=full", "unroll=2"])
@pytest.mark.parametrize("format", FORMATS)
def test_remat_and_unrolling_change_nothing(tiny, format, setting):
    default, _ = Bench(tiny(f"compute.matmul={format}", "optimizer.use=sgd")).run(2)
    changed, _ = Bench(tiny(f"compute.matmul={format}", "optimizer.use=sgd", f"compute.{setting}")).run(2)
    expected = weights(changed)
    for name, value in weights(default).items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5, rtol=0, err_msg=name)


def test_a_cpu_has_no_fast_products_and_the_warning_says_so():
    device = jax.devices()[0]
    for format in FORMATS:
        assert not has_fast_matmul(device, format)
        assert f"{format} brings nothing here: cpu" in emulation_warning("compute.matmul", format, device)


def test_formats_that_do_not_exist_are_refused(tiny):
    with pytest.raises(UserError, match=r"compute.matmul: found .fp4., expected one of compute, fp8, int8"):
        tiny("compute.matmul=fp4")
    assert tiny().compute.matmul == "compute"
    assert sections.ComputeKeys(matmul="fp8").dtype == "bfloat16"


@pytest.mark.parametrize(("remat", "count"), [("dots", 3), ("full", 4)])
@pytest.mark.parametrize("format", FORMATS)
def test_saved_products_are_not_computed_again(format, remat, count):
    """One product forward and two backward; a maximum each of the weight, of x and of the gradient."""
    exec_opts = Execution(None, "float32", remat=remat, matmul=format)
    axes, w, x = Axes(("layers", "mlp", "embed"), 1, 1), random(0, 3, 16, 16), random(1, 2, 8, 16)

    def loss(w: jax.Array) -> jax.Array:
        body = lambda w, x: jnp.tanh(project(w, x, "bsf,fd->bsd"))
        return run_layers(exec_opts, [body], x, cast(w, axes, exec_opts)).sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(w))
    assert text.count("dot_general[") == text.count("reduce_max[") == count
