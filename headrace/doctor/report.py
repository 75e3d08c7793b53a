"""`headrace doctor`: checks whatever may keep a run from working, before it starts.

Every line is ok, warn or fail, and says how to fix what is wrong."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from headrace.config.sections import TrainRecipe

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class CheckResult:
    """One line of the report."""

    state: State
    topic: str
    message: str
    fix: str = ""


Check = Callable[[], Sequence[CheckResult]]


def run_checks(
    recipe: TrainRecipe | None, path: str | None, overrides: Sequence[str]
) -> Iterator[CheckResult]:
    """Run all checks in parallel, since most of them wait, and yield the results in order.

    `path` and `overrides` are those of `recipe`."""
    from headrace.doctor import devices, gce, machine

    instance = gce.Instance.find()
    checks: dict[str, Check] = {
        "versions": machine.check_versions,
        "devices": lambda: devices.check_devices(recipe, path, overrides, instance),
        "driver": machine.check_driver,
        "limits": machine.check_limits,
        "ports": machine.check_port,
        "disk": lambda: machine.check_folders(recipe),
        "region": lambda: gce.check_regions(recipe, instance),
        "bucket": lambda: gce.check_soft_delete(recipe),
        "clock": lambda: gce.check_clock(recipe, instance),
    }
    with ThreadPoolExecutor(len(checks), "doctor") as pool:
        for results in pool.map(run_check, checks, checks.values()):
            yield from results


def run_check(topic: str, check: Check) -> Sequence[CheckResult]:
    """The results of a check; one warning if the check itself fails."""
    try:
        return check()
    except Exception as error:
        return [CheckResult("warn", topic, f"the check failed: {type(error).__name__}: {error}")]
