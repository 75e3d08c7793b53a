"""GPTQ (arXiv 2210.17323): weights are rounded input by input, and the inputs that are not rounded yet
compensate for the error, weighted by the inputs' correlations in calibration data. Inputs with the largest
activations come first (`act_order`); scales are chosen beforehand, for groups of inputs in their original
order."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from headrace.low_precision import grid
from headrace.model_formats import gptq
from headrace.model_formats.gptq import GPTQMatrix
from headrace.model_formats.hf_config import HFSettings
from headrace.nn.module import Array
from headrace.quantize.hessian import RoundInput, cholesky_inverse, gptq_sweep, regularize

IS_CALIBRATED = True


@dataclass(frozen=True)
class Config:
    """The settings of `--method gptq`."""

    bits: int = 4  # size of a quantized weight: 2, 3, 4 or 8 [bits]
    group_size: int = 128  # inputs of an output that share a scale; 0: all of them

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4, 8):
            raise ValueError("bits: expected 2, 3, 4 or 8")
        if self.group_size < 0:
            raise ValueError("group_size: expected a number of inputs, or 0 for all of them")


def quantize(cfg: Config, w: Array, hessian: Array | None, key: Array) -> GPTQMatrix:
    """Round a matrix [inputs outputs] to integers and scales, given the Hessian [inputs inputs]. The key is
    not used."""
    assert hessian is not None
    w, hessian = regularize(w.astype(jnp.float32), hessian)
    scales = grid.search_scales(w, cfg.bits, cfg.group_size)
    order = jnp.argsort(-jnp.diag(hessian))
    upper = cholesky_inverse(hessian[order][:, order])
    weight_scales = grid.expand_scales(scales, w.shape[0], cfg.group_size)[order]
    sweep = gptq_sweep(w[order], upper, make_round_input(cfg.bits), None, weight_scales)
    return gptq.pack_matrix(sweep.codes[jnp.argsort(order)], scales, cfg.bits, cfg.group_size)


@functools.cache  # compiled programs depend on the function's identity
def make_round_input(bits: int) -> RoundInput:
    """Make the function that rounds the weights of one input to multiples of their scales."""

    def round_input(shared: None, scales: Array, weights: Array) -> tuple[Array, Array]:
        integers = grid.round_to_grid(weights / scales, bits)
        return integers * scales, integers.astype(jnp.int8)

    return round_input


def quantization_config(cfg: Config, matrices: Mapping[str, GPTQMatrix]) -> HFSettings:
    """The `quantization_config` of config.json."""
    return gptq.quantization_config(cfg.bits, cfg.group_size)
