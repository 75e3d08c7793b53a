"""Rounding to nearest: each weight to the nearest multiple of its scale. Needs no calibration data; the
baseline of the other methods."""

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.low_precision import grid
from headrace.model_formats import gptq
from headrace.model_formats.gptq import GPTQMatrix
from headrace.model_formats.hf_config import HFSettings
from headrace.nn.module import Array

IS_CALIBRATED = False


@dataclass(frozen=True)
class Config:
    """The settings of `--method rtn`."""

    bits: int = 4  # size of a quantized weight: 2, 3, 4 or 8 [bits]
    group_size: int = 128  # inputs of an output that share a scale; 0: all of them

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4, 8):
            raise ValueError("bits: expected 2, 3, 4 or 8")
        if self.group_size < 0:
            raise ValueError("group_size: expected a number of inputs, or 0 for all of them")


def quantize(cfg: Config, w: Array, hessian: Array | None, key: Array) -> GPTQMatrix:
    """Round a matrix [inputs outputs] to integers and scales. The other arguments are not used."""
    scales = grid.search_scales(w, cfg.bits, cfg.group_size)
    weight_scales = grid.expand_scales(scales, w.shape[0], cfg.group_size)
    return gptq.pack_matrix(grid.round_to_grid(w / weight_scales, cfg.bits), scales, cfg.bits, cfg.group_size)


def quantization_config(cfg: Config, matrices: Mapping[str, GPTQMatrix]) -> HFSettings:
    """The `quantization_config` of config.json."""
    return gptq.quantization_config(cfg.bits, cfg.group_size)
