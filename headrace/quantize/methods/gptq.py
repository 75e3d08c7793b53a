"""GPTQ (arXiv 2210.17323): weights are rounded input by input, and those of the inputs that are left make up
for it as well as they can, by what goes into the matrix in calibration. Inputs with the largest activations
come first (its `act_order`); scales are set before, by groups of inputs in their own order."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from headrace.low_precision import grid
from headrace.model_formats import gptq
from headrace.quantize import hessian as quantize_hessian

CALIBRATED = True


@dataclass(frozen=True)
class Config:
    bits: int = 4  # size of a quantized weight: 2, 3, 4 or 8 [bits]
    group_size: int = 128  # inputs of an output that share a scale; 0: all of them

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4, 8):
            raise ValueError("bits: expected 2, 3, 4 or 8")
        if self.group_size < 0:
            raise ValueError("group_size: expected a number of inputs, or 0 for all of them")


def quantize(cfg: Any, w: jax.Array, hessian: jax.Array | None, key: jax.Array) -> gptq.GPTQMatrix:
    """A matrix [inputs outputs], by the Hessian [inputs inputs] of its inputs."""
    assert hessian is not None
    w, hessian = quantize_hessian.regularize(w.astype(jnp.float32), hessian)
    scales = grid.search_scales(w, cfg.bits, cfg.group_size)
    order = jnp.argsort(-jnp.diag(hessian))
    upper = quantize_hessian.cholesky_inverse(hessian[order][:, order])
    each = grid.expand_scales(scales, w.shape[0], cfg.group_size)[order]
    numbers = quantize_hessian.gptq_sweep(w[order], upper, NEAREST[cfg.bits], None, each)[0]
    return gptq.store(numbers[jnp.argsort(order)], scales, cfg.bits, cfg.group_size)


def _nearest(bits: int) -> Any:
    def nearest(given: None, scale: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        number = grid.round_to_grid(w / scale, bits)
        return number * scale, number.astype(jnp.int8)

    return nearest


NEAREST = {
    bits: _nearest(bits) for bits in (2, 3, 4, 8)
}  # functions that stay the same, for the compiler's sake


def settings(cfg: Any, layers: dict[str, Any]) -> dict[str, Any]:
    return gptq.settings(cfg.bits, cfg.group_size)


def size(cfg: Any, inputs: int, outputs: int) -> int:
    """Bits of a file that a matrix takes."""
    return gptq.size(inputs, outputs, bits=cfg.bits, group=cfg.group_size)
