"""Warmup, then half a cosine from the peak to the floor (arXiv 1608.03983, without its restarts)."""

from dataclasses import dataclass
from typing import Any

import optax

from headrace.config.durations import Curves
from headrace.schedules.constant import after_warmup, unchanged


@dataclass(frozen=True)
class Config:
    pass


def make(cfg: Any) -> Curves:
    decay = optax.cosine_decay_schedule(1.0, max(cfg.steps - cfg.warmup, 1), alpha=cfg.floor)
    return Curves(after_warmup(cfg.warmup, decay), unchanged)
