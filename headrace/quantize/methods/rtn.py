"""Rounding to nearest: each weight to the nearest multiple of its scale. Needs no text, and is what the other
methods are measured against."""

from dataclasses import dataclass
from typing import Any

import jax

from headrace.low_precision import grid
from headrace.model_formats import gptq

CALIBRATED = False  # whether it looks at what goes into a matrix


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
    """A matrix [inputs outputs]."""
    scales = grid.search_scales(w, cfg.bits, cfg.group_size)
    each = grid.expand_scales(scales, w.shape[0], cfg.group_size)
    return gptq.store(grid.round_to_grid(w / each, cfg.bits), scales, cfg.bits, cfg.group_size)


def settings(cfg: Any, layers: dict[str, Any]) -> dict[str, Any]:
    return gptq.settings(cfg.bits, cfg.group_size)


def size(cfg: Any, inputs: int, outputs: int) -> int:
    """Bits of a file that a matrix takes."""
    return gptq.size(inputs, outputs, bits=cfg.bits, group=cfg.group_size)
