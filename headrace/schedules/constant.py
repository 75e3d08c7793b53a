"""Linear warmup, then the peak learning rate to the end."""

from dataclasses import dataclass

from headrace.schedules import Curves, ScheduleConfig, after_warmup, unit_curve


@dataclass(frozen=True)
class Config:
    """The keys that `use: constant` adds to the `schedule` section of a recipe: none."""


def make(cfg: ScheduleConfig) -> Curves:
    """Make the curves."""
    return Curves(after_warmup(cfg.warmup, unit_curve), unit_curve)
