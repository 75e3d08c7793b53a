"""The meter with a simulated clock, deferred reading of metrics, and the output of each tracker."""

import io
import json
import math
import re
import resource
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from headrace import trackers
from headrace.trackers import Trackers, terminal
from headrace.trackers.jsonl import Jsonl
from headrace.trackers.tensorboard import TensorBoard
from headrace.training import metrics
from headrace.training.metrics import DeferredMetrics, Meter

ROW = {
    "step": 1200,
    "loss": 2.34512,
    "learning_rate": 2.96e-4,
    "grad_norm": 0.82,
    "tokens": 9_830_400,
    "tokens_per_second": 12_345.0,
    "mfu": 0.382,
    "memory": 71.2 * 2**30,
    "eta_seconds": 7_500.0,
    "goodput": 0.971,
    "step_seconds": 0.66,
    "skipped": 0,
}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class RecordingTracker:
    """A tracker that records rows and events, or fails on rows if `fails`."""

    def __init__(self, name: str = "recording", *, fails: bool = False) -> None:
        self.name = name
        self.optional = True
        self.fails = fails
        self.rows: list[int] = []
        self.events: list[str] = []

    def write(self, step: int, row: dict[str, Any]) -> None:
        if self.fails:
            raise ConnectionError("the server\n  has gone away.")
        self.rows.append(step)

    def event(self, message: str, level: str) -> None:
        self.events.append(message)

    def close(self) -> None:
        pass


def meter(clock: Clock, **changes: Any) -> Meter:
    settings: dict[str, Any] = dict(
        tokens_per_step=1000,
        flops_per_token=6e9,
        total_steps=100,
        num_devices=4,
        peak_flops=1e12,
        clock=clock,
    )
    return Meter(**settings | changes)


def test_rates_count_the_time_of_steps_and_not_of_pauses() -> None:
    clock = Clock()
    measured = meter(clock)
    clock.now += 8
    with measured.pause():
        clock.now += 50
        with measured.pause():
            clock.now += 10
    clock.now += 2
    row = measured.make_row(5, {"loss": 2.0, "grad_norm": 0.5})
    assert row["step"] == 5 and row["loss"] == 2.0 and row["grad_norm"] == 0.5
    assert row["tokens"] == 5000
    assert row["step_seconds"] == pytest.approx(2.0)
    assert row["tokens_per_second"] == pytest.approx(500)
    assert row["mfu"] == pytest.approx(6e9 * 500 / (4 * 1e12))
    # What is left includes pauses at the rate of so far: 70 seconds for 5 steps.
    assert row["eta_seconds"] == pytest.approx(95 * 70 / 5)

    clock.now += 5
    assert measured.make_row(10, {})["tokens_per_second"] == pytest.approx(1000), "a rate since the last row"


def test_a_resumed_run_measures_from_the_step_it_resumes_from() -> None:
    clock = Clock()
    measured = meter(clock)
    clock.now += 500
    measured.begin(80)
    clock.now += 10
    row = measured.make_row(85, {})
    assert row["tokens"] == 85_000
    assert row["step_seconds"] == pytest.approx(2)
    assert row["eta_seconds"] == pytest.approx(15 * 2)


def test_a_failing_pause_ends() -> None:
    clock = Clock()
    measured = meter(clock)
    with pytest.raises(RuntimeError), measured.pause():
        clock.now += 7
        raise RuntimeError
    clock.now += 1
    assert measured.make_row(1, {})["step_seconds"] == pytest.approx(1)


def test_mfu_is_absent_where_the_peak_is_unknown() -> None:
    clock = Clock()
    measured = meter(clock, peak_flops=metrics.peak_flops(jax.devices()[0]))
    clock.now += 1
    assert measured.make_row(1, {})["mfu"] is None


@pytest.mark.parametrize(
    "platform, kind, peak",
    [
        ("tpu", "TPU v5 lite", 197e12),
        ("tpu", "TPU v5", 459e12),
        ("tpu", "TPU v3", 61.5e12),
        ("tpu", "TPU7x", 1153.5e12),
        ("gpu", "NVIDIA H100 80GB HBM3", 989e12),
        ("gpu", "NVIDIA A100-SXM4-80GB", 312e12),
        ("gpu", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("gpu", "NVIDIA H100 PCIe", None),
        ("gpu", "NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("gpu", "Some Card of 2031", None),
        ("tpu", "TPU v9", None),
    ],
)
def test_the_peak_is_that_of_one_device(platform: str, kind: str, peak: float | None) -> None:
    assert metrics.peak_flops(SimpleNamespace(platform=platform, device_kind=kind)) == peak


def test_memory_is_the_fullest_device_or_the_process() -> None:
    def device(stats: dict[str, int] | None) -> SimpleNamespace:
        return SimpleNamespace(platform="tpu", memory_stats=lambda: stats)

    full = device({"peak_bytes_in_use": 9, "bytes_in_use": 20})
    assert metrics.peak_memory([device({"peak_bytes_in_use": 7}), full, device(None)]) == 9
    assert metrics.peak_memory([device(None)]) is None
    used = metrics.peak_memory()
    assert used is not None and 2**26 < used < 2**40


def test_device_scalars_of_any_kind_are_fetched_as_floats() -> None:
    values = metrics.read_scalars({"loss": jnp.bfloat16(1.5), "skipped": jnp.int32(2), "learning_rate": 0.25})
    assert values == {"loss": 1.5, "skipped": 2.0, "learning_rate": 0.25}
    assert all(type(value) is float for value in values.values())


def test_a_step_is_read_only_after_the_next_was_dispatched() -> None:
    read: list[int] = []

    class Scalar:
        def __init__(self, step: int) -> None:
            self.step = step

        def copy_to_host_async(self) -> None:
            pass

        def __float__(self) -> float:
            read.append(self.step)
            return float(self.step)

    late = DeferredMetrics()
    assert late.push(1, {"loss": Scalar(1)}) == [] and read == []
    assert late.push(2, {"loss": Scalar(2)}) == [(1, {"loss": 1.0})] and read == [1]
    assert late.flush() == [(2, {"loss": 2.0})] and read == [1, 2]
    assert late.flush() == []


def rows(path: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_resuming_removes_later_rows_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = Jsonl(path)
    for step in (10, 20, 30, 40):
        first.write(step, {"loss": 1.0 / step})
    first.write(20, {"evaluate/loss": 3.0})
    with path.open("ab") as file:
        file.write(b'{"step": 15, "lo')
    again = Jsonl(path, step=30)
    again.write(40, {"loss": 9.0})
    assert [row["step"] for row in rows(path)] == [10, 20, 30, 20, 40]
    assert rows(path)[-1]["loss"] == 9.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_from_the_start_begins_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    Jsonl(path).write(10, {"loss": 1.0})
    Jsonl(path, step=0)
    assert path.read_bytes() == b""


def test_a_row_that_is_not_finite_is_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    jsonl = Jsonl(path)
    jsonl.write(1, {"loss": math.nan, "grad_norm": math.inf, "mfu": None, "tokens": 5})
    jsonl.write(2, {"loss": 1.5})
    assert rows(path) == [
        {"step": 1, "loss": None, "grad_norm": None, "mfu": None, "tokens": 5, "finite": False},
        {"step": 2, "loss": 1.5},
    ]


def test_a_full_disk_causes_one_warning_and_loses_no_row(tmp_path: Path) -> None:
    path, recording = tmp_path / "metrics.jsonl", RecordingTracker()
    outputs = Trackers([Jsonl(path), recording])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        for step in range(1, 9):
            outputs.write(step, {"loss": 1.0, "grad_norm": 2.0})
        full = path.read_bytes()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(full) == 100 and not full.endswith(b"\n"), "the limit must have cut a row in two"
    outputs.write(9, {"loss": 1.0})
    assert [row["step"] for row in rows(path)] == list(range(1, 10))
    assert recording.rows == list(range(1, 10))
    assert len(recording.events) == 1 and "metrics.jsonl" in recording.events[0]


@pytest.mark.fault(21)
def test_an_optional_tracker_that_fails_is_removed_with_one_warning(tmp_path: Path) -> None:
    recording, broken = RecordingTracker(), RecordingTracker("broken", fails=True)
    outputs = Trackers([broken, recording, Jsonl(tmp_path / "metrics.jsonl")])
    for step in (1, 2, 3):
        outputs.write(step, {"loss": 1.0})
    outputs.event("saved")
    outputs.close()
    assert recording.rows == [1, 2, 3]
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert recording.events == [
        "broken failed and is off: the server has gone away; training continues",
        "saved",
    ]
    assert broken.events == []


def test_missing_wandb_causes_one_warning_with_the_command_that_installs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    outputs = trackers.make_trackers(tmp_path, total_steps=10, wandb=True)
    outputs.write(1, ROW)
    outputs.close()
    assert capsys.readouterr().out.count("pip install wandb") == 1
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1]


@pytest.mark.fault(21)
def test_the_wait_for_wandb_is_limited_and_announced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[str] = []

    def init(settings: SimpleNamespace, **options: Any) -> None:
        printed.append(capsys.readouterr().out)
        assert f"for at most {settings.init_timeout} s" in printed[0]
        raise TimeoutError("no answer")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Settings=SimpleNamespace, init=init))
    trackers.make_trackers(tmp_path, total_steps=10, wandb=True).close()
    assert printed and "wandb is off: no answer" in capsys.readouterr().out


def test_tensorboard_accepts_nan_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    board = TensorBoard(tmp_path)
    board.write(1, {"loss": float("nan")})
    board.close()
    assert caplog.text == ""


def test_plain_output_has_every_column_aligned_and_no_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = trackers.make_trackers(tmp_path, total_steps=4000)
    for step in range(100, 2600, 100):
        outputs.write(step, ROW)
    outputs.write(2500, {"evaluate/loss": 2.4012, "evaluate/perplexity": 142.7034})
    outputs.event("a \x1b[31mred\r word", "warning")
    outputs.close()
    output = capsys.readouterr().out
    assert all(char.isprintable() or char == "\n" for char in output)
    lines = output.splitlines()
    assert lines[0].split() == ["step", "loss", "lr", "grad", "tok/s", "MFU", "memory", "goodput", "left"]
    assert lines[1].split("  ")[-1].strip() == "2h 05m"
    for value in ("100", "2.3451", "2.96e-4", "0.820", "12.3k", "38.2 %", "71.2 GiB", "97.1 %"):
        assert f" {value} " in lines[1]
    assert len({len(line) for line in lines[:25]}) == 1 and len(lines[0]) <= 80
    assert output.count(lines[0]) == 2, "the header comes again after 20 rows"
    assert lines[-2] == "evaluate at step 2,500   loss 2.4012   perplexity 142.70"
    assert lines[-1].startswith("warning: a ")
    logged = (tmp_path / "log.txt").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", line) for line in logged)
    assert [line[21:] for line in logged] == lines


def test_columns_without_a_value_are_omitted_and_skipped_updates_appear(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = terminal.make_terminal(4000)
    plain.write(1, ROW | {"mfu": None, "memory": None})
    plain.write(2, ROW | {"mfu": None, "memory": None, "skipped": 3})
    output = capsys.readouterr().out
    assert "None" not in output and "MFU" not in output and "memory" not in output
    headers = [line for line in output.splitlines() if "loss" in line]
    assert ["skipped" in header for header in headers] == [False, True]


def screen(console: Console) -> list[str]:
    """The lines that were printed, redraws one after the other, without control codes."""
    assert isinstance(console.file, io.StringIO)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue().replace("\r", "\n"))
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize("width", [30, 50, 80, 120])
def test_the_display_fits_the_terminal(width: int) -> None:
    console = Console(width=width, height=24, file=io.StringIO(), force_terminal=True)
    live = terminal.LiveTerminal(1_000_000, console=console)
    assert "waiting for the first step" in screen(console)[-1]
    widest = ROW | {"loss": 12.3456, "grad_norm": 0.0123, "eta_seconds": 86_000.0, "skipped": 12}
    live.write(999_990, widest)
    live.event("saved [not markup] " + "and so on " * 20, "info")
    live.close()
    lines = screen(console)
    assert max(len(line) for line in lines) <= width
    assert any("[not" in line for line in lines)
    # Nothing ran over into a line of its own: the last two are the whole display.
    assert "999,990/1,000,000" in lines[-2] and lines[-1].startswith(" loss 12.3456")
    # Whole cells only, and all of them where there is room.
    far = ["999,990/1,000,000", "99 %", "23h 53m left", "97.1 % goodput"]
    near = [
        "loss 12.3456",
        "lr 2.96e-4",
        "grad 0.0123",
        "12.3k tok/s",
        "38.2 % MFU",
        "12 skipped",
        "71.2 GiB",
    ]
    shown = [re.split(r" {2,}", line.strip(" ━╸╺")) for line in lines[-2:]]
    assert shown == [far[: len(shown[0])], near[: len(shown[1])]]
    assert len(shown[0]) == 4 or width < 80
    assert len(shown[1]) >= {30: 2, 50: 3, 80: 6, 120: 7}[width]


def test_a_usual_row_fits_on_eighty_columns() -> None:
    console = Console(width=80, height=24, file=io.StringIO(), force_terminal=True)
    live = terminal.LiveTerminal(400_000, console=console)
    live.write(399_000, ROW)
    live.write(400_000, {"evaluate/loss": 2.5})
    live.write(400_000, ROW)
    live.close()
    lines = screen(console)
    assert lines[-1].split("   ") == [
        " loss 2.3451", "lr 2.96e-4", "grad 0.820", "12.3k tok/s", "38.2 % MFU", "71.2 GiB",
    ]  # fmt: skip
    assert "400,000/400,000   100 %   done   97.1 % goodput" in lines[-2]
    assert any(line.endswith("evaluate at step 400,000   loss 2.5000") for line in lines)


def test_numbers_have_few_digits_and_units() -> None:
    assert [terminal.format_short(x) for x in (0, 0.5, 999.6, 12_345, 1.2e9)] == [
        "0.00", "0.500", "1.00k", "12.3k", "1.20G",
    ]  # fmt: skip
    assert [terminal.format_duration(x) for x in (0, 59.6, 200, 7_500, 180_000)] == [
        "0s", "1m 00s", "3m 20s", "2h 05m", "2d 02h",
    ]  # fmt: skip
    assert [terminal.format_bytes(x) for x in (12, 5 * 2**20, 1.25 * 2**30, 139 * 2**30)] == [
        "12 B", "5.0 MiB", "1.2 GiB", "139 GiB",
    ]  # fmt: skip
    assert [terminal.format_scientific(x) for x in (3e-4, 0, 1.0)] == ["3.00e-4", "0", "1.00e0"]
    assert [terminal.format_number(x) for x in (math.nan, -math.inf, 2.5, 123.456, 1e9)] == [
        "nan", "-inf", "2.5000", "123.46", "1e+09",
    ]  # fmt: skip


def tensorboard_events(folder: Path) -> list[list[Any]]:
    """The events of each file, oldest first, read by the TFRecord layout."""
    from tensorboardX.proto.event_pb2 import Event

    files = []
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data, at, events = path.read_bytes(), 0, []
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            events.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += 16 + length
        files.append(events)
    return files


def test_tensorboard_files_have_the_scalars_and_hide_those_after_the_resumed_step(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.write(100, ROW | {"mfu": None})
    board.write(100, {"evaluate/loss": 2.5})
    board.close()
    TensorBoard(tmp_path, step=60).close()
    first, second = tensorboard_events(tmp_path)
    scalars = {v.tag: (e.step, v.simple_value) for e in first for v in e.summary.value}
    assert scalars["train/loss"] == (100, pytest.approx(2.34512))
    assert scalars["evaluate/loss"] == (100, 2.5)
    assert "train/mfu" not in scalars and "train/step" not in scalars
    assert [(e.step, e.session_log.status) for e in second if e.HasField("session_log")] == [(61, 1)]


def test_a_tensorboard_that_cannot_be_opened_does_not_stop_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    outputs = trackers.make_trackers(tmp_path, total_steps=10, tensorboard=True)
    outputs.write(1, ROW)
    outputs.close()
    assert capsys.readouterr().out.count("tensorboard is off") == 1
    assert len(rows(tmp_path / "metrics.jsonl")) == 1
