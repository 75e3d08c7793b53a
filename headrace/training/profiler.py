"""A profile of some steps, for TensorBoard and XProf, and the operations in it that take longest."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import jax

from headrace.nn.module import PyTree

MAX_LISTED = 10  # operations that are listed after a trace
CONTAINERS = ("while", "conditional", "call")  # contain the operations that they run
GPU_GRAPH = "command_buffer"  # stands for the instruction of kernels that a GPU starts as one graph


@dataclass(frozen=True)
class StepRange:
    """First and last step of a trace, as in `10:15`. Both are 0 if nothing is traced."""

    first: int = 0
    last: int = 0

    @classmethod
    def parse(cls, text: str | None) -> "StepRange":
        """Parse the recipe's `profile_steps`."""
        return cls(*map(int, text.split(":"))) if text else cls()


class Trace:
    """The trace of a range of steps, written to RUN/profile."""

    def __init__(self, steps: str | None, local_dir: Path, run_dir: str) -> None:
        """Parse the recipe's `profile_steps`. `local_dir` is where files of the run folder are written."""
        self.steps, self.folder, self.is_running = StepRange.parse(steps), local_dir / "profile", False
        self.shown_path = f"{run_dir}/profile"

    def maybe_start(self, step: int, state: PyTree) -> None:
        """Start if `step`, which runs next, is the first to be traced. Waits for `state` then."""
        if step == self.steps.first:
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(self.folder))
            self.is_running = True

    def should_stop(self, step: int, *, run_ends: bool) -> bool:
        """Whether the trace ends after `step`."""
        return self.is_running and (run_ends or step == self.steps.last)

    def stop(self, step: int, state: PyTree) -> list[str]:
        """Write the trace, which ends with `step`. Returns messages about it."""
        jax.block_until_ready(state)
        jax.profiler.stop_trace()
        self.is_running = False
        seconds_by_operation = read_operations(self.folder)
        total, count = sum(seconds_by_operation.values()), step - self.steps.first + 1
        lines = [
            f"steps {self.steps.first} to {step} are traced; `tensorboard --logdir {self.shown_path}` shows "
            "them"
        ]
        if total:
            # The threads of a CPU are added up, and come to more than the step lasts.
            device = "all threads of the CPU" if jax.default_backend() == "cpu" else "the device"
            lines.append(f"{device} spent {1e3 * total / count:,.1f} ms per step, most of them on")
        for name, seconds in seconds_by_operation.most_common(MAX_LISTED):
            lines.append(f"  {1e3 * seconds / count:10,.2f} ms  {seconds / total:6.1%}  {name}")
        return lines


def read_operations(folder: Path) -> Counter[str]:
    """Sum the seconds that a device spent on each operation, from the latest trace in a folder.

    Kernels count for the instruction of the compiled program that they belong to."""
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    seconds: Counter[str] = Counter()
    if not files:
        return seconds
    planes = list(jax.profiler.ProfileData.from_file(str(files[-1])).planes)
    devices = sorted(plane.name for plane in planes if plane.name.startswith("/device:"))
    selected = devices[0] if devices else "/host:CPU"
    for line in (line for plane in planes if plane.name == selected for line in plane.lines):
        for event in line.events:
            stats = {key: value for key, value in event.stats if key == "hlo_op"}
            instruction = str(stats.get("hlo_op", event.name))
            name = operation_name(event.name if instruction.startswith(GPU_GRAPH) else instruction)
            if (line.name == "XLA Ops" or "hlo_op" in stats) and name not in CONTAINERS:
                seconds[name] += event.duration_ns / 1e9
    return seconds


def operation_name(instruction: str) -> str:
    """The name of an instruction without the numbers that distinguish it from others of its kind."""
    return re.sub(r"(\.\d+)+$", "", instruction.split(" = ")[0].lstrip("%"))
