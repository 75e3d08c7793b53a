"""A matrix of the layers in 8 bits or less: how it is made, once a step, and how it meets an activation."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from headrace.low_precision import fp8, int8, ternary
from headrace.low_precision.dot import MatmulSpec, kept
from headrace.nn.linear import project, quantize_input
from headrace.nn.module import Axes

Array = jax.Array
FORMATS: dict[str, Any] = {"fp8": fp8, "int8": int8, "ternary": ternary}


@partial(jax.tree_util.register_dataclass, data_fields=["w", "values", "scale"], meta_fields=["spec"])
@dataclass(frozen=True)
class LowPrecisionWeight:
    """`w`, in the compute dtype, is read by nobody, so that no memory is spent on it: its gradient is the
    weight's."""

    w: Array
    values: Array
    scale: Array
    spec: MatmulSpec


@dataclass(frozen=True)
class LowPrecisionInput:
    """An activation, rounded once for all products that read it."""

    x: Array
    values: Array
    scale: Array


def round_weight(w: Array, axes: Axes, *, dtype: Any, format: str, native: bool) -> LowPrecisionWeight:
    values, scale = FORMATS[format].round_weight(jax.lax.stop_gradient(w), axes)
    return LowPrecisionWeight(w.astype(dtype), values, scale, MatmulSpec(format, native, axes.num_input_axes))


@quantize_input.register
def _(w: LowPrecisionWeight, x: Array) -> LowPrecisionInput:
    return LowPrecisionInput(x, *FORMATS[w.spec.format].round_input(jax.lax.stop_gradient(x), w.spec.inputs))


@project.register
def _(w: LowPrecisionWeight, x: Array | LowPrecisionInput, spec: str) -> Array:
    assert _is_matrix_product(spec, w.spec.inputs), spec
    x = x if isinstance(x, LowPrecisionInput) else quantize_input(w, x)
    return kept(FORMATS[w.spec.format].multiply(w.spec, x.x, w.w, (x.values, x.scale), (w.values, w.scale)))


def _is_matrix_product(spec: str, inputs: int) -> bool:
    """Of tokens by inputs with inputs by outputs, such as "bsd,dnh->bsnh"."""
    x, w, out = spec.replace("->", ",").split(",")
    return x[-inputs:] == w[:inputs] and out == x[:-inputs] + w[inputs:]
