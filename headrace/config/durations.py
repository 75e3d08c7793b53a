"""Durations in steps, in tokens or as a share of the run; batch-size ramps; the curves that schedules make.

Recipes are checked with this file, so it stays free of JAX."""

import bisect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import ArrayLike

Curve: TypeAlias = "Callable[[ArrayLike], Array]"

UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


@dataclass(frozen=True)
class Curves:
    """Multipliers of a recipe's peak learning rate and of its weight decay, by step."""

    learning_rate: Curve
    weight_decay: Curve


@dataclass(frozen=True)
class Ramp:
    """A batch that grows by one microbatch after every `each` steps, from `first` to `last` microbatches.

    So every size has as many updates, as in ModernBERT (arXiv 2412.13663)."""

    first: int
    last: int
    each: int = 1  # steps

    def microbatches_at(self, step: int) -> int:
        """Number of microbatches in the batch of a step."""
        return min(self.first + step // self.each, self.last)

    def microbatches_before(self, step: int) -> int:
        """Number of microbatches in all steps before this one."""
        grown = min(step // self.each, self.last - self.first)
        sizes = self.each * (grown * self.first + grown * (grown - 1) // 2)
        return sizes + (step - grown * self.each) * (self.first + grown)

    def steps(self, parts: Fraction) -> int:
        """Number of steps, rounded up, in which that many microbatches are read."""
        ramp = self.each * (self.last - self.first)
        if parts >= self.microbatches_before(ramp):
            return ramp + math.ceil((parts - self.microbatches_before(ramp)) / self.last)
        return bisect.bisect_left(
            range(ramp), parts, key=lambda step: Fraction(self.microbatches_before(step))
        )


def duration(
    value: int | str, tokens_per_step: int, total: int | None = None, ramp: Ramp | None = None
) -> int:
    """Convert a duration to steps, rounded up: 400, "2B tokens", or "20 %" of `total` steps.

    With a ramp, the duration starts at the first step, and `tokens_per_step` is that of the largest batch.
    Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    text = str(value).strip().lower()
    number = r"(\d[\d_]*(?:\.\d+)?)"
    if tokens := re.fullmatch(rf"{number}\s*([kmbt]?)\s*tokens", text):
        ramp = ramp or Ramp(1, 1)
        count = Fraction(tokens[1].replace("_", "")) * UNITS[tokens[2]]
        return ramp.steps(count * ramp.last / tokens_per_step)
    share = re.fullmatch(rf"{number}\s*%", text)
    if share and total is not None:
        return math.ceil(Fraction(share[1].replace("_", "")) * total / 100)
    valid = (
        "a number of steps or '3B tokens'" if total is None else "a number of steps, '3B tokens' or '20 %'"
    )
    raise ValueError(f"expected {valid}, found {value!r}")
