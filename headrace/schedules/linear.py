"""Warmup, then a straight line from the peak to the floor."""

from dataclasses import dataclass
from typing import Any

import optax

from headrace.config.durations import Curves
from headrace.schedules.constant import after_warmup, unchanged


@dataclass(frozen=True)
class Config:
    pass


def make(cfg: Any) -> Curves:
    decay = optax.linear_schedule(1.0, cfg.floor, max(cfg.steps - cfg.warmup, 1))
    return Curves(after_warmup(cfg.warmup, decay), unchanged)
