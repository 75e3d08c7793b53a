"""A matrix of the layers in 8 bits or less: how it is made, once a step, and how it meets an activation."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from headrace.nn.module import Axes
from headrace.low_precision import fp8, int8, ternary
from headrace.low_precision.dot import How, kept
from headrace.nn.linear import prepared, project

Array = jax.Array
FORMATS: dict[str, Any] = {"fp8": fp8, "int8": int8, "ternary": ternary}


@partial(jax.tree_util.register_dataclass, data_fields=["w", "values", "scale"], meta_fields=["how"])
@dataclass(frozen=True)
class Weight:
    """`w`, in the compute dtype, is read by nobody, so that no memory is spent on it: its gradient is the
    weight's."""

    w: Array
    values: Array
    scale: Array
    how: How


@dataclass(frozen=True)
class Input:
    """An activation, rounded once for all products that read it."""

    x: Array
    values: Array
    scale: Array


def round_weight(w: Array, axes: Axes, *, dtype: Any, format: str, native: bool) -> Weight:
    values, scale = FORMATS[format].round_weight(jax.lax.stop_gradient(w), axes)
    return Weight(w.astype(dtype), values, scale, How(format, native, axes.inputs))


@prepared.register
def _(w: Weight, x: Array) -> Input:
    return Input(x, *FORMATS[w.how.format].round_input(jax.lax.stop_gradient(x), w.how.inputs))


@project.register
def _(w: Weight, x: Array | Input, spec: str) -> Array:
    assert _is_matrix_product(spec, w.how.inputs), spec
    x = x if isinstance(x, Input) else prepared(w, x)
    return kept(FORMATS[w.how.format].multiply(w.how, x.x, w.w, (x.values, x.scale), (w.values, w.scale)))


def _is_matrix_product(spec: str, inputs: int) -> bool:
    """Of tokens by inputs with inputs by outputs, such as "bsd,dnh->bsnh"."""
    x, w, out = spec.replace("->", ",").split(",")
    return x[-inputs:] == w[:inputs] and out == x[:-inputs] + w[inputs:]
