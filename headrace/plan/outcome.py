"""Result of a plan: whether a recipe fits a slice, how fast it is, and what it costs."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from headrace.config import run_length
from headrace.config.sections import TrainRecipe
from headrace.hardware.chips import PRICES_DATE, Price
from headrace.hardware.slices import SliceShape
from headrace.html_page import render_notebook_table
from headrace.plan.buffers import Buffer
from headrace.plan.units import (
    SECONDS_PER_DAY,
    Dollars,
    format_costs,
    format_count,
    format_days,
    format_seconds,
    format_size,
)


@dataclass(frozen=True)
class Outcome:
    """A recipe on a slice. Bytes are per chip."""

    slice_shape: SliceShape
    fits: bool
    mesh: dict[str, int]
    parameters: int
    tokens: int  # of the whole recipe
    tokens_per_step: int
    flops_per_token: float
    weight_bytes: int
    frozen_bytes: int  # part of the weights that has no gradient
    optimizer_bytes: int
    argument_bytes: int
    temp_bytes: int
    hbm_bytes: int
    host_bytes: int  # in the memory of the chip's host
    step_seconds: float | None  # None if it cannot run
    method: Literal["compiler", "arithmetic"]
    seconds_by_part: dict[str, float] = field(default_factory=dict)  # of a step
    hidden_seconds: dict[str, float] = field(default_factory=dict)  # of traffic in parallel with these
    caveats: tuple[str, ...] = ()  # about these seconds
    cycle_seconds: float | None = None  # by the compiler's own estimate, which omits kernels and traffic
    buffers: tuple[Buffer, ...] = ()
    price: Price = field(default_factory=Price)
    compile_seconds: float | None = None

    @property
    def tokens_per_second_per_chip(self) -> float | None:
        if not self.step_seconds:
            return None
        return self.tokens_per_step / self.step_seconds / self.slice_shape.chips

    @property
    def mfu(self) -> float | None:
        rate = self.tokens_per_second_per_chip
        return rate * self.flops_per_token / self.slice_shape.chip.flops if rate else None

    @property
    def days(self) -> float | None:
        """Days that the whole recipe takes."""
        if not self.step_seconds:
            return None
        return self.tokens / self.tokens_per_step * self.step_seconds / SECONDS_PER_DAY

    @property
    def dollars(self) -> Dollars:
        """Dollars for the whole recipe, low and high. None where a price is not known, or it cannot run."""
        if self.days is None:
            return {"on_demand": None, "spot": None}
        return compute_dollars(self.price, self.days * 24 * self.slice_shape.chips)

    def _repr_html_(self) -> str:
        """Render the main numbers as a table, for notebooks."""
        chip, rate, mfu = self.slice_shape.chip, self.tokens_per_second_per_chip, self.mfu
        memory = f"{format_size(self.hbm_bytes)} of {format_size(chip.usable_bytes)} per chip"
        rows = {
            "chips": f"{self.slice_shape.chips} {chip.name}",
            "fits": "yes" if self.fits else "no",
            "memory": memory if self.method == "compiler" else f"about {memory}",
            "parameters": format_count(self.parameters),
        }
        if self.step_seconds and self.days and rate and mfu:
            rows |= {
                "step": f"{format_seconds(self.step_seconds)} for {self.tokens_per_step:,} tokens",
                "speed": f"{rate * self.slice_shape.chips:,.0f} tokens per second, MFU {mfu:.1%}",
                "training": f"{format_days(self.days)} for {format_count(self.tokens)} tokens",
                "cost": format_costs(self.dollars),
            }
        return render_notebook_table(f"{self.slice_shape.name}, by {self.method}", rows)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `headrace plan --json` writes."""
        hidden = {kind: seconds for kind, seconds in self.hidden_seconds.items() if seconds > 1e-6}
        return {
            "slice": self.slice_shape.name,
            "chips": self.slice_shape.chips,
            "fits": self.fits,
            "by": self.method,
            "mesh": self.mesh,
            "parameters": self.parameters,
            "weight_bytes": self.weight_bytes,
            "frozen_bytes": self.frozen_bytes,
            "optimizer_bytes": self.optimizer_bytes,
            "argument_bytes": self.argument_bytes,
            "temp_bytes": self.temp_bytes,
            "hbm_bytes": self.hbm_bytes,
            "host_bytes": self.host_bytes,
            "hbm_limit_bytes": self.slice_shape.chip.usable_bytes,
            "step_seconds": self.step_seconds,
            "seconds_by_part": self.seconds_by_part,
            "hidden_seconds": hidden,
            "buffers": [asdict(buffer) for buffer in self.buffers],
            "doubts": self.caveats,
            "cycle_seconds": self.cycle_seconds,
            "tokens_per_second_per_chip": self.tokens_per_second_per_chip,
            "mfu": self.mfu,
            "tokens": self.tokens,
            "tokens_per_step": self.tokens_per_step,
            "days": self.days,
            "dollars": self.dollars,
            "prices_of": PRICES_DATE,
            "compile_seconds": self.compile_seconds,
        }


def compute_dollars(price: Price, chip_hours: float) -> Dollars:
    """Return the cost of chip-hours by terms, low and high. None where the price is not known."""
    prices = {"on_demand": price.on_demand, "spot": price.spot}
    return {
        terms: None if ends is None else (ends[0] * chip_hours, ends[1] * chip_hours)
        for terms, ends in prices.items()
    }


def count_tokens(recipe: TrainRecipe) -> tuple[int, int]:
    """Count the tokens of the whole recipe, and of a step."""
    tokens_per_step = recipe.batch.sequences * recipe.data.sequence_length
    total = run_length.tokens_until(recipe, run_length.durations(recipe)["steps"])
    return total, tokens_per_step
