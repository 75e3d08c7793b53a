"""What a plan says of a recipe on a slice: does it fit, how fast is it, what does it cost."""

from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.config import run_length as lengths, sections
from headrace.hardware.chips import PRICES_DATE, Price, Range
from headrace.plan.buffers import Buffer
from headrace.hardware.slices import Slice

DAY = 24 * 3600.0


@dataclass(frozen=True)
class Outcome:
    """Bytes are of a chip."""

    where: Slice
    fits: bool
    mesh: dict[str, int]
    parameters: int
    tokens: int  # of the whole recipe
    tokens_per_step: int
    flops_per_token: float
    weight_bytes: int
    frozen_bytes: int  # of the weights, those without a gradient
    optimizer_bytes: int
    argument_bytes: int
    temp_bytes: int
    hbm_bytes: int
    host_bytes: int  # in the memory of the machine that the chip is in
    step_seconds: float | None  # None where it cannot run
    by: str  # compiler or arithmetic
    parts: dict[str, float] = field(default_factory=dict)  # seconds of a step, by what they are spent on
    hidden: dict[str, float] = field(default_factory=dict)  # seconds of traffic that go on beside them
    doubts: tuple[str, ...] = ()  # about these seconds
    cycle_seconds: float | None = None  # by the compiler's own estimate, which leaves out kernels and traffic
    buffers: tuple[Buffer, ...] = ()
    price: Price = Price()
    compile_seconds: float | None = None

    @property
    def tokens_per_second_per_chip(self) -> float | None:
        return self.tokens_per_step / self.step_seconds / self.where.chips if self.step_seconds else None

    @property
    def mfu(self) -> float | None:
        rate = self.tokens_per_second_per_chip
        return rate * self.flops_per_token / self.where.chip.flops if rate else None

    @property
    def days(self) -> float | None:
        return self.tokens / self.tokens_per_step * self.step_seconds / DAY if self.step_seconds else None

    @property
    def dollars(self) -> dict[str, Range | None]:
        """For the whole recipe, low and high; None where a price is not known, or nothing can run."""

        def cost(price: Range | None) -> Range | None:
            if price is None or self.days is None:
                return None
            hours = self.days * 24 * self.where.chips
            return price[0] * hours, price[1] * hours

        return {"on_demand": cost(self.price.on_demand), "spot": cost(self.price.spot)}

    def as_json(self) -> dict[str, Any]:
        return {
            "slice": self.where.name,
            "chips": self.where.chips,
            "fits": self.fits,
            "by": self.by,
            "mesh": self.mesh,
            "parameters": self.parameters,
            "weight_bytes": self.weight_bytes,
            "frozen_bytes": self.frozen_bytes,
            "optimizer_bytes": self.optimizer_bytes,
            "argument_bytes": self.argument_bytes,
            "temp_bytes": self.temp_bytes,
            "hbm_bytes": self.hbm_bytes,
            "host_bytes": self.host_bytes,
            "hbm_limit_bytes": self.where.chip.usable,
            "step_seconds": self.step_seconds,
            "seconds_by_part": self.parts,
            "hidden_seconds": {kind: seconds for kind, seconds in self.hidden.items() if seconds > 1e-6},
            "buffers": [asdict(buffer) for buffer in self.buffers],
            "doubts": self.doubts,
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


def tokens_of(cfg: sections.Run) -> tuple[int, int]:
    """Of the whole recipe, and of a step."""
    each = cfg.batch.sequences * cfg.data.sequence_length
    return lengths.tokens_until(cfg, lengths.durations(cfg)["steps"]), each
