"""Rounding to nearest: each weight to the nearest multiple of its scale. Needs no text, and is what the other
methods are measured against."""

from dataclasses import dataclass
from typing import Any

import jax

from headrace.low_precision import grid
from headrace.model_formats import gptq as integers

CALIBRATED = False  # whether it looks at what goes into a matrix


@dataclass(frozen=True)
class Config:
    bits: int = 4  # of a weight: 2, 3, 4 or 8
    group: int = 128  # inputs of an output that share a scale; 0: all of them

    def __post_init__(self):
        if self.bits not in (2, 3, 4, 8):
            raise ValueError("bits: expected 2, 3, 4 or 8")
        if self.group < 0:
            raise ValueError("group: expected a number of inputs, or 0 for all of them")


def quantize(cfg: Any, w: jax.Array, hessian: jax.Array | None, key: jax.Array) -> integers.Integers:
    """A matrix [inputs outputs]."""
    scales = grid.searched(w, cfg.bits, cfg.group)
    each = grid.spread(scales, w.shape[0], cfg.group)
    return integers.store(grid.integers(w / each, cfg.bits), scales, cfg.bits, cfg.group)


def settings(cfg: Any, layers: dict[str, Any]) -> dict[str, Any]:
    return integers.settings(cfg.bits, cfg.group)


def size(cfg: Any, inputs: int, outputs: int) -> int:
    """Bits of a file that a matrix takes."""
    return integers.size(inputs, outputs, bits=cfg.bits, group=cfg.group)
