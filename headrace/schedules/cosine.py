"""Warmup, then half a cosine from the peak to the floor (arXiv 1608.03983, without its restarts)."""

from dataclasses import dataclass

import optax

from headrace.schedules import Curves, ScheduleConfig, after_warmup, unit_curve


@dataclass(frozen=True)
class Config:
    """The keys that `use: cosine` adds to the `schedule` section of a recipe: none."""


def make(cfg: ScheduleConfig) -> Curves:
    """Make the curves."""
    decay = optax.cosine_decay_schedule(1.0, max(cfg.steps - cfg.warmup, 1), alpha=cfg.min_lr_ratio)
    return Curves(after_warmup(cfg.warmup, decay), unit_curve)
