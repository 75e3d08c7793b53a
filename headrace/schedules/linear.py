"""Warmup, then a straight line from the peak to the floor."""

from dataclasses import dataclass

import optax

from headrace.schedules import Curves, ScheduleConfig, after_warmup, unit_curve


@dataclass(frozen=True)
class Config:
    """The keys that `use: linear` adds to the `schedule` section of a recipe: none."""


def make(cfg: ScheduleConfig) -> Curves:
    """Make the curves."""
    decay = optax.linear_schedule(1.0, cfg.min_lr_ratio, max(cfg.steps - cfg.warmup, 1))
    return Curves(after_warmup(cfg.warmup, decay), unit_curve)
