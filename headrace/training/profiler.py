"""A trace of some steps, which TensorBoard and XProf open, and the operations in it that take longest."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

LISTED = 10  # operations that are named at the end
HOLDERS = ("while", "conditional", "call")  # which last as long as what is in them
GRAPH = "command_buffer"  # in place of the instruction, of kernels that a GPU starts as one graph


@dataclass(frozen=True)
class StepRange:
    """The first and the last step of a trace. `10:15` is these and those between."""

    first: int = 0
    last: int = 0

    @classmethod
    def parse(cls, text: str | None) -> "StepRange":
        return cls(*map(int, text.split(":"))) if text else cls()


class Trace:
    """Starts before one step of a run and ends after another. What it finds lies in RUN/profile."""

    def __init__(self, steps: str | None, near: Path, run: str) -> None:
        """`near` is where files of the run folder are written."""
        self.steps, self.folder, self.running = StepRange.parse(steps), near / "profile", False
        self.shown = f"{run}/profile"

    def maybe_start(self, number: int, state: Any) -> None:
        if number == self.steps.first:
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(self.folder))
            self.running = True

    def should_stop(self, number: int, *, run_ends: bool) -> bool:
        return self.running and (run_ends or number == self.steps.last)

    def stop(self, number: int, state: Any) -> list[str]:
        """What there is to say."""
        jax.block_until_ready(state)
        jax.profiler.stop_trace()
        self.running = False
        spent = operations(self.folder)
        total, count = sum(spent.values()), number - self.steps.first + 1
        steps = f"steps {self.steps.first} to {number}"
        told = [f"{steps} are traced; `tensorboard --logdir {self.shown}` shows them"]
        if total:
            # The threads of a CPU are added up, and come to more than the step lasts.
            by = "by all threads of the CPU together" if jax.default_backend() == "cpu" else "on the device"
            told.append(f"{1e3 * total / count:,.1f} ms a step are spent {by}, most of them on")
        for name, seconds in spent.most_common(LISTED):
            told.append(f"  {1e3 * seconds / count:10,.2f} ms  {seconds / total:6.1%}  {name}")
        return told


def operations(folder: Path) -> Counter[str]:
    """Seconds of a device by operation, from the last trace in a folder: kernels by the instruction of the
    compiled program that they are of."""
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    spent: Counter[str] = Counter()
    if not files:
        return spent
    planes = list(jax.profiler.ProfileData.from_file(str(files[-1])).planes)
    devices = sorted(plane.name for plane in planes if plane.name.startswith("/device:"))
    chosen = devices[0] if devices else "/host:CPU"
    for line in (line for plane in planes if plane.name == chosen for line in plane.lines):
        for event in line.events:
            stats = {key: value for key, value in event.stats if key == "hlo_op"}
            instruction = str(stats.get("hlo_op", event.name))
            name = kind(event.name if instruction.startswith(GRAPH) else instruction)
            if (line.name == "XLA Ops" or "hlo_op" in stats) and name not in HOLDERS:
                spent[name] += event.duration_ns / 1e9
    return spent


def kind(name: str) -> str:
    """Instructions of a name that differ in their numbers go together."""
    return re.sub(r"(\.\d+)+$", "", name.split(" = ")[0].lstrip("%"))
