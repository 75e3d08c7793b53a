"""A matrix of the layers in 8 bits or fewer: made once a step, and multiplied by activations."""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax
from jax.typing import DTypeLike

from headrace.low_precision import fp8, int8, ternary
from headrace.low_precision.dot import MatmulSpec, Scaled, mark_saved
from headrace.nn.linear import project, quantize_input
from headrace.nn.module import Axes

Array = jax.Array


class MatmulFormat(Protocol):
    """A format's module."""

    def round_weight(self, w: Array, axes: Axes) -> Scaled:
        """Round stacked weights, each layer by itself."""

    def round_input(self, x: Array, num_input_axes: int) -> Scaled:
        """Round an activation, whose last `num_input_axes` axes a product sums over."""

    def multiply(self, spec: MatmulSpec, x: Array, w: Array, x8: Scaled, w8: Scaled) -> Array:
        """Multiply x8 by w8, the rounded x and w, in x's dtype. Gradients go to x and w."""


FORMATS: dict[str, MatmulFormat] = {"fp8": fp8, "int8": int8, "ternary": ternary}


@partial(jax.tree_util.register_dataclass, data_fields=["w", "values", "scale"], meta_fields=["spec"])
@dataclass(frozen=True)
class LowPrecisionWeight:
    """A weight rounded to 8 bits or fewer.

    `w` is the weight in the compute dtype. Only its gradient is used, so that it takes no memory."""

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


def round_weight(w: Array, axes: Axes, *, dtype: DTypeLike, format: str, native: bool) -> LowPrecisionWeight:
    """Round stacked weights to a format; their gradients will have `dtype`. `native` says that the chip
    multiplies the format itself."""
    values, scale = FORMATS[format].round_weight(jax.lax.stop_gradient(w), axes)
    return LowPrecisionWeight(w.astype(dtype), values, scale, MatmulSpec(format, native, axes.num_input_axes))


@quantize_input.register
def _(w: LowPrecisionWeight, x: Array) -> LowPrecisionInput:
    spec = w.spec
    values, scale = FORMATS[spec.format].round_input(jax.lax.stop_gradient(x), spec.num_input_axes)
    return LowPrecisionInput(x, values, scale)


@project.register
def _(w: LowPrecisionWeight, x: Array | LowPrecisionInput, spec: str) -> Array:
    assert _is_matrix_product(spec, w.spec.num_input_axes), spec
    x = x if isinstance(x, LowPrecisionInput) else quantize_input(w, x)
    product = FORMATS[w.spec.format].multiply(w.spec, x.x, w.w, (x.values, x.scale), (w.values, w.scale))
    return mark_saved(product)


def _is_matrix_product(spec: str, num_input_axes: int) -> bool:
    """Whether an einsum multiplies tokens by inputs with inputs by outputs, such as "bsd,dnh->bsnh"."""
    x, w, out = spec.replace("->", ",").split(",")
    return x[-num_input_axes:] == w[:num_input_axes] and out == x[:-num_input_axes] + w[num_input_axes:]
