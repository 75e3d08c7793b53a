"""Where weights meet activations: products and gradients are those of the definition on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.nn import sharding
from headrace.nn.linear import project

SPECS = {"bsd,dnh->bsnh": (5, 2, 3), "bsnh,nhd->bsd": (2, 3, 5), "bsd,vd->bsv": (7, 5), "bsf,fd->bsd": (5, 4)}
MESHES = {"one device": None, "a mesh": {"data": 4, "fsdp": 1, "tensor": 1, "context": 2}}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_products_and_gradients_are_those_of_the_definition(spec: str, sizes: dict[str, int] | None) -> None:
    random = np.random.default_rng(0)
    left, right = spec.split("->")[0].split(",")
    letters = dict(zip(right, SPECS[spec], strict=True)) | {"b": 4, "s": 6}
    x, w = (random.normal(size=[letters[letter] for letter in side]) for side in (left, right))
    out = spec.split("->")[1]
    d = random.normal(size=[letters[letter] for letter in out])
    wanted = [np.einsum(spec, x, w), np.einsum(f"{out},{right}->{left}", d, w)]
    wanted.append(np.einsum(f"{left},{out}->{right}", x, d))

    def both(x, w, d):
        product, pull = jax.vjp(lambda x, w: project(w, x, spec), x, w)
        return product, *pull(d)

    arrays = [jnp.asarray(array, jnp.float32) for array in (x, w, d)]
    if sizes is None:
        found = jax.jit(both)(*arrays)
    else:
        with jax.set_mesh(sharding.make_mesh(sizes)):
            found = jax.jit(both)(*arrays)
    for ours, exact in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-5)


def test_on_one_cpu_the_gradient_of_a_weight_sums_over_one_axis() -> None:
    """Over rows and positions apart, the compiler would transpose both factors first."""

    def gradient(x, w):
        return jax.grad(lambda w: project(w, x, "bsd,df->bsf").sum())(w)

    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 6, 5), (5, 3)))
    text = jax.jit(gradient).lower(x, w).as_text()
    assert "contracting_dims = [0] x [0]" in text and "contracting_dims = [0, 1] x [0, 1]" not in text
