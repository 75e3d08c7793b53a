"""What schedules share: the curves they make, and lengths given in steps, in tokens or as a share of the run.
Recipes are checked with this file, so it stays free of JAX."""

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
    """By step, the multipliers of a recipe's peak learning rate and of its weight decay."""

    learning_rate: Curve
    weight_decay: Curve


def duration(value: int | str, tokens_per_step: int, total: int | None = None) -> int:
    """A length in whole steps, rounded up: 400, "2B tokens", or "20 %" of `total` steps."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    text = str(value).strip().lower()
    number = r"(\d[\d_]*(?:\.\d+)?)"
    if tokens := re.fullmatch(rf"{number}\s*([kmbt]?)\s*tokens", text):
        return math.ceil(Fraction(tokens[1].replace("_", "")) * UNITS[tokens[2]] / tokens_per_step)
    share = re.fullmatch(rf"{number}\s*%", text)
    if share and total is not None:
        return math.ceil(Fraction(share[1].replace("_", "")) * total / 100)
    ways = "a number of steps or '3B tokens'" if total is None else "a number of steps, '3B tokens' or '20 %'"
    raise ValueError(f"expected {ways}, found {value!r}")
