"""CPU seconds of every test: which are slow, whatever else the machine does."""

import json
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

SHOWN = 25  # tests in the report


class CpuTimes:
    """A plugin of pytest that adds up the CPU seconds of each test and of the processes it waits for. What a
    fixture takes counts for the first test that needs it."""

    def __init__(self, file: str | None) -> None:
        self.file = file
        self.last = cpu_seconds()
        self.by_test: Counter[str] = Counter()

    def pytest_runtest_logstart(self) -> None:
        """Leave out what happened before the test."""
        self.last = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note the CPU seconds of a phase in its report, with which they come out of xdist's workers."""
        report = yield
        now = cpu_seconds()
        report.user_properties.append(("cpu_seconds", now - self.last))
        self.last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up the phases of a test."""
        self.by_test[report.nodeid] += dict(report.user_properties).get("cpu_seconds", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write the sum and the slowest tests, and the seconds of all tests to the file of `--cpu-times`."""
        terminalreporter.write_line(f"{self.by_test.total():.0f} CPU seconds, most of them in")
        for test, seconds in self.by_test.most_common(SHOWN):
            if seconds >= 1:
                terminalreporter.write_line(f"{seconds:8.1f}  {test}")
        if self.file:
            Path(self.file).write_text(json.dumps(dict(self.by_test.most_common()), indent=0))


def cpu_seconds() -> float:
    """User and system time of this process, and of its children that have ended."""
    return sum(os.times()[:4])
