"""What activations keep for the backward pass, and that the gradient does not suffer: exactly jax.grad's, or
the published step function's."""

import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.low_precision.weight import round_weight
from headrace.models import deberta
from headrace.nn import activations, mlp
from headrace.nn.mlp import Activation, activate, glu, project_gated
from headrace.nn.module import Axes
from headrace.plan.activations import LayerSpec

SPECIAL = [0.0, -0.0, 1e-3, -1e-3, 3.5, -3.5, np.inf, -np.inf, np.nan]
PLAIN: dict[str, tuple[Callable[..., jax.Array], Callable[..., jax.Array]]] = {
    "relu": (activations.relu, jax.nn.relu),
    "relu2": (activations.relu2, lambda x: jnp.square(jax.nn.relu(x))),
    "relu_bits": (activations.relu_bits, jax.nn.relu),
}
GATES: list[Activation] = ["swiglu", "geglu", "reglu", "relu2"]


def plain(x: Any) -> np.ndarray:
    """As float64, in which numpy knows that a NaN is one."""
    return np.asarray(x, np.float64)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, shape)


def kept(function: Callable[..., jax.Array], *inputs: Any) -> dict[tuple[str, tuple[int, ...]], int]:
    """How often arrays of each kind are kept for the backward pass."""
    pull = jax.eval_shape(lambda *inputs: jax.vjp(function, *inputs)[1], *inputs)
    counts: dict[tuple[str, tuple[int, ...]], int] = {}
    for leaf in jax.tree.leaves(pull):
        if leaf.ndim:
            counts[str(leaf.dtype), leaf.shape] = counts.get((str(leaf.dtype), leaf.shape), 0) + 1
    return counts


def temporaries(body: Callable[..., jax.Array], weights: list[Any], x: Any, trained: Any = None) -> int:
    """Bytes of the gradient of a stack of layers, by the compiler."""

    def loss(weights: list[Any], x: Any) -> jax.Array:
        held = [
            w if trained is None or n in trained else jax.lax.stop_gradient(w) for n, w in enumerate(weights)
        ]
        return jnp.sum(jax.lax.scan(lambda x, layer: (x + body(x, *layer), None), x, held)[0])

    found = jax.jit(jax.grad(loss)).lower(weights, x).compile().memory_analysis()
    assert found is not None
    return found.temp_size_in_bytes


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", PLAIN)
def test_gradients_of_relu_are_those_of_jax_to_the_last_bit(name: str, dtype: Any) -> None:
    ours, theirs = PLAIN[name]
    values = np.concatenate([SPECIAL, numbers(4991)]).reshape(2, 50, 50)
    x, d = jnp.asarray(values, dtype), jnp.asarray(numbers(2, 50, 50, seed=1), dtype)
    (y, pull), (wanted, reference) = jax.vjp(ours, x), jax.vjp(theirs, x)
    np.testing.assert_array_equal(plain(y), plain(wanted))
    np.testing.assert_array_equal(plain(pull(d)[0]), plain(reference(d)[0]))
    assert pull(d)[0].dtype == dtype


def test_the_root_of_a_rounded_square_is_exact_for_every_bfloat16_whose_square_is_normal() -> None:
    every = jnp.arange(2**15, dtype=jnp.uint16)
    x = jax.lax.bitcast_convert_type(every, jnp.bfloat16)
    square = jnp.square(x.astype(jnp.float32))
    inside = np.asarray((square > 1.2e-38) & (square < 3e38))
    ones = jnp.ones_like(x)
    ours = np.asarray(jax.vjp(activations.relu2, x)[1](ones)[0], np.float32)
    np.testing.assert_array_equal(ours[inside], 2 * np.asarray(x, np.float32)[inside])
    assert inside.sum() > 16_000


def test_relu_keeps_its_output_alone_and_bits_an_eighth_of_a_byte_each() -> None:
    x = jax.ShapeDtypeStruct((2, 64, 96), jnp.bfloat16)
    for name in ("relu", "relu2"):
        assert kept(lambda x, name=name: PLAIN[name][0](x * 2), x) == {("bfloat16", (2, 64, 96)): 1}
    assert kept(activations.relu_bits, x) == {("uint8", (2, 8, 96)): 1}
    assert kept(lambda x: activations.smooth_bits("silu", x), x) == {("uint8", (2, 16, 96)): 1}


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (8, 5), (2, 9, 4), (2, 3, 17, 1)])
def test_codes_of_any_number_come_back(bits: int, shape: tuple[int, ...]) -> None:
    codes = jnp.asarray(np.random.default_rng(0).integers(0, 2**bits, shape), jnp.uint8)
    packed = activations.pack(codes, bits)
    assert packed.nbytes == packed.size == codes.size // shape[-2] * -(-shape[-2] * bits // 8)
    np.testing.assert_array_equal(activations.unpack(packed, bits, shape[-2]), codes)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("kind", ["silu", "gelu"])
def test_two_bits_have_the_published_derivative_and_the_exact_value(kind: str, dtype: Any) -> None:
    places, rises = activations.STEPS[kind]
    near = [place + step for place in places for step in (-0.1, 0.1)]
    x = jnp.asarray(np.concatenate([SPECIAL, near, numbers(84)]).reshape(3, 33, 1), dtype)
    d = jnp.asarray(numbers(3, 33, 1, seed=1), dtype)
    y, pull = jax.vjp(lambda x: activations.smooth_bits(kind, x), x)
    exact = jax.nn.silu(x) if kind == "silu" else jax.nn.gelu(x, approximate=False)
    np.testing.assert_array_equal(plain(y), plain(exact))
    wide = plain(x)
    slope = sum(rise * (wide > place) for place, rise in zip(places, rises, strict=True))
    np.testing.assert_allclose(plain(pull(d)[0]), plain(d) * slope, rtol=3 * float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("kind", GATES)
def test_a_gated_mlp_has_the_gradients_of_the_plain_formula(kind: Activation, merges: bool) -> None:
    with jax.enable_x64(True):
        gate, up, d = (jnp.asarray(numbers(2, 5, 7, seed=n)) for n in range(3))
        gate = gate.at[0, 0, 0].set(0.0)
        w, d = jnp.asarray(numbers(7, 3)), d[..., :3]
        ours = jax.vjp(lambda *inputs: project_gated(kind, *inputs, prevent_cse=merges), gate, up, w)
        plain = jax.vjp(lambda gate, up, w: (activate(kind, gate) * up) @ w, gate, up, w)
        for one, other in zip((ours[0], *ours[1](d)), (plain[0], *plain[1](d)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", GATES)
def test_a_gated_mlp_keeps_gate_and_up_and_not_its_hidden_units(kind: Activation) -> None:
    wide = jax.ShapeDtypeStruct((2, 16, 64), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((64, 8), jnp.bfloat16)

    def ours(gate: Any, up: Any, w: Any) -> jax.Array:
        return project_gated(kind, gate * 2, up * 2, w, prevent_cse=False)

    assert kept(ours, wide, wide, w) == {("bfloat16", (2, 16, 64)): 2, ("bfloat16", (64, 8)): 1}
    separate = kept(lambda gate, up, w: glu(kind, gate * 2, up * 2) @ w, wide, wide, w)
    assert separate["bfloat16", (2, 16, 64)] == 3


def silu_bits(x: jax.Array) -> jax.Array:
    return activations.smooth_bits("silu", x)


def test_the_compiler_takes_less_memory_for_each() -> None:
    layers, width, hidden = 4, 16, 256
    x = jax.ShapeDtypeStruct((2, 128, width), jnp.float32)
    one = [jax.ShapeDtypeStruct((layers, *side), jnp.float32) for side in ((width, hidden), (hidden, width))]
    two = [one[0], *one]
    tensor = layers * 2 * 128 * hidden * 4

    def mlp(activation: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda x, w, w_down: activation(x @ w) @ w_down

    usual = temporaries(mlp(jax.nn.relu), one, x)
    assert temporaries(mlp(activations.relu), one, x) <= usual - 0.9 * tensor / 4  # a byte an element
    square = lambda x: jnp.square(jax.nn.relu(x))
    assert temporaries(mlp(activations.relu2), one, x) <= temporaries(mlp(square), one, x) - tensor
    # Where w_down is not trained, bits are all that is left of the hidden units.
    for usual, bits in ((jax.nn.relu, activations.relu_bits), (jax.nn.silu, silu_bits)):
        frozen = temporaries(mlp(usual), one, x, trained=(0,))
        assert temporaries(mlp(bits), one, x, trained=(0,)) <= frozen - 0.5 * tensor / 4

    def swiglu(x: Any, w_gate: Any, w_up: Any, w_down: Any) -> jax.Array:
        return project_gated("swiglu", x @ w_gate, x @ w_up, w_down, prevent_cse=False)

    separate = temporaries(lambda x, g, u, w: glu("swiglu", x @ g, x @ u) @ w, two, x)
    assert temporaries(swiglu, two, x) <= separate - 0.9 * tensor


def test_without_a_loop_the_compiler_is_held_back_from_keeping_hidden_units() -> None:
    layers, width, hidden = 3, 16, 256
    sides = ((width, hidden), (width, hidden), (hidden, width))
    weights = [jax.ShapeDtypeStruct((layers, *side), jnp.float32) for side in sides]
    x = jax.ShapeDtypeStruct((2, 128, width), jnp.float32)

    def unrolled(body: Callable[..., jax.Array]) -> int:
        def loss(weights: list[Any], x: Any) -> jax.Array:
            for layer in range(layers):
                x = x + body(x, *(w[layer] for w in weights))
            return jnp.sum(x)

        found: Any = jax.jit(jax.grad(loss)).lower(weights, x).compile().memory_analysis()
        return found.temp_size_in_bytes

    guarded = unrolled(lambda x, g, u, w: project_gated("swiglu", x @ g, x @ u, w, prevent_cse=True))
    assert guarded < unrolled(lambda x, g, u, w: glu("swiglu", x @ g, x @ u) @ w) - 2 * 128 * hidden * 4


@pytest.mark.parametrize(("kind", "bits"), [("relu_bits", 1), ("gelu_bits", 2), ("silu_bits", 2)])
def test_an_mlp_whose_second_matrix_is_frozen_keeps_bits_alone(kind: Any, bits: int) -> None:
    up, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 64, 96), (96, 32)))
    frozen = lambda up, w: mlp.project_plain(kind, up, jax.lax.stop_gradient(w), prevent_cse=True)
    found = kept(frozen, up, w)
    assert found.pop(("float32", (96, 32))) == 1  # the matrix itself
    assert found == {("uint8", (2, 64 * bits // 8, 96)): 1}
    trained = kept(lambda up, w: mlp.project_plain(kind, up, w, prevent_cse=True), up, w)
    assert ("float32", (2 * 64, 96)) in trained  # the hidden units, for its gradient


@pytest.mark.parametrize("kind", ["gelu", "silu"])
def test_an_mlp_keeps_of_a_smooth_activation_its_input_alone(kind: Any) -> None:
    x, up, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 64, 8), (8, 96), (96, 32)))
    ours = lambda x, up, w: mlp.project_plain(kind, x @ up, w, prevent_cse=False)
    assert kept(ours, x, up, w)["float32", (2, 64, 96)] == 1


def test_every_activation_of_an_mlp_without_a_gate_is_a_choice_of_deberta() -> None:
    names = {*typing.get_args(mlp.PlainActivation)}
    assert names == {*activations.PLAIN}
    assert names == {*typing.get_args(typing.get_type_hints(deberta.Config)["activation"])}
    assert {f"{kind}_bits" for kind in ("relu", *activations.STEPS)} <= names


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("products", ["compute", "fp8", "int8"])
@pytest.mark.parametrize("kind", ["swiglu", *activations.PLAIN])
def test_a_plan_counts_what_jax_keeps_of_an_mlp(kind: Any, products: str, frozen: bool) -> None:
    """In bytes for each hidden unit of bfloat16. Arrays of another shape and as many numbers are the same one
    again, which XLA sees."""
    gates = 2 if kind == "swiglu" else 1
    wide = [jax.ShapeDtypeStruct((2, 64, 96), jnp.bfloat16)] * gates
    w = jax.ShapeDtypeStruct((96, 40), jnp.bfloat16)

    def run(*inputs: Any) -> jax.Array:
        *hidden, down = [x * 2 for x in inputs]
        down = jax.lax.stop_gradient(down) if frozen else down
        if products != "compute":
            axes = Axes(("mlp", "embed"), stacked=0, num_input_axes=1)
            down = round_weight(down, axes, dtype=jnp.bfloat16, format=products, native=False)
        if gates == 2:
            return project_gated(kind, *hidden, down, prevent_cse=True)
        return mlp.project_plain(kind, *hidden, down, prevent_cse=True)

    counts: dict[tuple[str, int], int] = {}
    for (dtype, shape), often in kept(run, *wide, w).items():
        size = int(np.prod(shape))
        if size > 96 * 8 and size != 96 * 40:  # neither scales nor the weight
            counts[dtype, size] = max(counts.get((dtype, size), 0), often)
    found = sum(jnp.dtype(dtype).itemsize * size * often for (dtype, size), often in counts.items())
    layer = LayerSpec(itemsize=2, matmul=products, activation=kind, up_matrices=gates, is_down_frozen=frozen)
    assert 2 * layer.saved_mlp_units() * 2 * 64 * 96 == found
