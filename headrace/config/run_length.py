"""How long a training recipe is, in whole steps and in tokens."""

import dataclasses
import math
import typing

from headrace.config.reader import Reader
from headrace.errors import UserError
from headrace.config.durations import Ramp, duration
from headrace.config.sections import Run


def ramp(run: Run, reader: Reader | None = None) -> Ramp:
    """How the batch grows, in parts of `batch.accumulate`; without a ramp it has them all from the start."""
    batch = run.batch
    if not batch.ramp_from:
        return Ramp(batch.accumulate, batch.accumulate)
    part = batch.sequences // batch.accumulate
    first, last = batch.ramp_from // part, batch.accumulate
    sizes = sum(range(first, last)) if isinstance(batch.ramp, str) else last - first
    try:
        each = duration(batch.ramp, sizes * part * run.data.sequence_length)
    except ValueError as error:
        if reader is None:
            raise UserError(f"batch.ramp: {error}") from None
        reader.fail("batch.ramp", "expected a whole number of steps or '3B tokens'")
    return Ramp(first, last, each if isinstance(batch.ramp, str) else math.ceil(each / sizes))


def tokens_until(run: Run, step: int) -> int:
    """Those that are read before a step."""
    part = run.batch.sequences // run.batch.accumulate
    return ramp(run).before(step) * part * run.data.sequence_length


def durations(run: Run, reader: Reader | None = None) -> dict[str, int]:
    """Every length of the schedule in whole steps: `steps`, `warmup`, and the durations of its file."""
    grows = ramp(run, reader)
    tokens = run.batch.sequences * run.data.sequence_length
    fields = [f.name for f in dataclasses.fields(run.schedule) if set(typing.get_args(f.type)) == {int, str}]
    lengths: dict[str, int] = {}
    for name in sorted(fields, key=lambda name: name != "steps"):
        try:
            value, whole = getattr(run.schedule, name), lengths.get("steps")
            # A decay is at the end, where the batch has grown.
            lengths[name] = duration(value, tokens, whole, None if name == "decay" else grows)
        except ValueError as error:
            if reader is None:
                raise UserError(f"schedule.{name}: {error}") from None
            ways = "steps or '3B tokens'" if name == "steps" else "steps, '3B tokens' or '20 %'"
            reader.fail(f"schedule.{name}", f"expected a whole number of {ways}")
    return lengths
