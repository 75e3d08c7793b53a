"""Learning rate schedules: plugins of `schedule.use`, one per file, with `Config` and `make`."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, cast

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

Curve: TypeAlias = Callable[[ArrayLike], Array]  # step -> multiplier


@dataclass(frozen=True)
class Curves:
    """Multipliers, by step, of the recipe's peak learning rate and of its weight decay."""

    learning_rate: Curve
    weight_decay: Curve


class ScheduleConfig(Protocol):
    """The `schedule` section of a recipe, with durations in steps. Each schedule adds keys of its own."""

    @property
    def use(self) -> str: ...
    @property
    def steps(self) -> int: ...
    @property
    def warmup(self) -> int: ...
    @property
    def min_lr_ratio(self) -> float: ...


class Schedule(Protocol):
    """A schedule's module."""

    def make(self, cfg: ScheduleConfig) -> Curves:
        """Make the curves."""


def load_schedule(cfg: ScheduleConfig) -> Schedule:
    """Load the schedule that `schedule.use` names."""
    return cast(Schedule, importlib.import_module(f"headrace.schedules.{cfg.use}"))


def unit_curve(step: ArrayLike) -> Array:
    """The multiplier 1 at every step."""
    return jnp.ones(jnp.shape(step), jnp.float32)


def after_warmup(warmup: int, curve: Curve) -> Curve:
    """Put a linear warmup before `curve`, which counts steps from the warmup's end. Step 0 has the
    multiplier 1 / warmup, not 0, so that it already trains."""

    def multiplier(step: ArrayLike) -> Array:
        step = jnp.asarray(step)
        return jnp.where(step < warmup, (step + 1) / max(warmup, 1), curve(jnp.maximum(step - warmup, 0)))

    return multiplier
