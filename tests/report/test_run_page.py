"""The page about a run: its text for runs in every state, and that it loads nothing from elsewhere."""

import html.parser
import itertools
import json
import math
import time
from pathlib import Path

import pytest
from etils import epath

from headrace.checkpoint import manifest
from headrace.cli.main import main
from headrace.errors import UserError
from headrace.report import charts, facts, run_page
from headrace.runtime import goodput
from headrace.runtime.goodput import GoodputClock

NOW = time.time()


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run(tiny, tmp_path) -> Path:
    """A run folder with two attempts on four v5e chips, at step 100 of 200 a minute ago."""
    from headrace.config import reader

    folder = tmp_path / "run <b>"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(reader.to_yaml(tiny("schedule.steps=200")))
    clock, rows = Clock(NOW - 3600), []
    for first, last in ((0, 60), (50, 100)):
        ledger = GoodputClock(folder / "goodput.jsonl", clock=clock, wall_clock=clock)
        clock.now += 100
        ledger.enter("compilation")
        clock.now += 200
        ledger.begin(first, devices=4, kind="TPU v5 lite", hosts=2)
        ledger.train(first)
        for step in range(first + 10, last + 1, 10):
            clock.now += 50
            ledger.record_progress(step)
            row = {"loss": 5 - step / 50, "grad_norm": 0.5, "tokens": step * 512, "eta_seconds": 3600.0}
            row |= {"tokens_per_second": 100.0, "step_seconds": 5.0, "memory": 2**33, "skipped": 1}
            rows.append({"step": step} | row)
        clock.now += 30
    rows.insert(3, {"step": 40, "loss": None, "grad_norm": None, "finite": False})
    rows.append({"step": 100, "evaluate/loss": 3.5, "evaluate/bits_per_byte": 1.25})
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 110, "lo'
    )
    (folder / "log.txt").write_text(
        "2026-11-16 01:00:00  llama with 5 parameters\n"
        "2026-11-16 01:00:01  warning: <script>alert('&')</script>\n"
    )
    lines = (folder / "goodput.jsonl").read_text().splitlines()
    shift = NOW - 60 - json.loads(lines[-1])["time"]
    moved = [json.loads(line) | {"time": json.loads(line)["time"] + shift} for line in lines]
    (folder / "goodput.jsonl").write_text("".join(json.dumps(line) + "\n" for line in moved))
    return folder


class PageParser(html.parser.HTMLParser):
    """Tags and text of a page. Asserts that every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "line", "path", "polyline", "polygon"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if self.open and self.open[-1] not in ("style", "script") else ""


def read(folder: Path) -> PageParser:
    (folder / "report.html").write_bytes(run_page.render(facts.read_facts(str(folder), NOW)))
    return PageParser((folder / "report.html").read_text())


def test_a_page_shows_the_state_of_the_run_and_loads_nothing(run):
    found = read(run)
    for text in (
        "At step 100 of 200, done in about 1h 00m",
        "last output 1m 00s ago",
        "1 restart, 10 steps",
    ):
        assert text in found.text, text
    account = goodput.read_totals(run / "goodput.jsonl")
    assert f"Goodput {100 * account.share:.1f} %" in found.text
    assert "Cost until the end" in found.text and "4 x v5e" in found.text
    assert not any("src" in attrs or "href" in attrs for _, attrs in found.tags)
    assert [tag for tag, _ in found.tags].count("svg") == 5 and "http" not in found.text


def test_text_from_files_is_escaped(run):
    (run / "samples.jsonl").write_text(
        json.dumps({"step": 50, "text": "</pre><img src=x onerror=alert(1)>"}) + "\n"
    )
    found = read(run)
    assert "<script>alert('&')</script>" in found.text and "<img src=x" in found.text
    assert not {tag for tag, _ in found.tags} & {"img"}
    scripts = [attrs for tag, attrs in found.tags if tag == "script"]
    assert [attrs.get("type") for attrs in scripts].count(None) == 1  # the script of the page


def test_the_cost_is_for_the_time_of_processes_without_gaps(run):
    run_facts = facts.read_facts(str(run), NOW)
    spent = facts.compute_cost(run_facts)
    hours = (run_facts.totals.total - run_facts.totals.seconds["restart"]) / 3600
    assert spent is not None and spent.on_demand == pytest.approx((1.20 * 4 * hours, 1.42 * 4 * hours))
    cost = facts.compute_cost(run_facts, include_remaining=True)
    assert cost is not None and cost.on_demand is not None
    assert cost.on_demand[0] == pytest.approx(1.2 * 4 * (hours + 1))
    run_facts.totals.attempts[-1].kind = "cpu"
    assert facts.compute_cost(run_facts) is None


@pytest.mark.parametrize(
    "line, word",
    [
        ({"end": 0}, "done"),
        ({"end": 75, "why": "SIGTERM"}, "stopped"),
        ({"end": 1, "why": "ValueError: no"}, "failed"),
        ({"exit": 137, "why": "was ended by SIGKILL"}, "failed"),
        (None, "running"),
    ],
)
def test_the_status_of_a_run_is_a_single_word(run, line, word):
    if line is not None:
        with open(run / "goodput.jsonl", "a") as file:
            file.write(json.dumps(line | {"time": NOW - 50}) + "\n")
    assert facts.assess_status(facts.read_facts(str(run), NOW)).word == word
    if word == "stopped":  # the last step may lie between two rows
        (run / "checkpoints" / "107").mkdir(parents=True)
        manifest.seal(epath.Path(run / "checkpoints" / "107"), step=107, tier="temporary")
        assert "Stopped at step 107 of 200" in facts.assess_status(facts.read_facts(str(run), NOW)).text
    later = facts.assess_status(facts.read_facts(str(run), NOW + 7200))
    assert later.word == ("silent" if line is None else word)


def test_a_run_without_goodput_or_rows_has_a_page(run):
    (run / "goodput.jsonl").unlink()
    assert "there is no goodput.jsonl" in read(run).text
    (run / "metrics.jsonl").write_text("")
    (run / "recipe.yaml").write_text("run: [")
    assert "Nothing yet." in read(run).text
    (run / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"found no metrics\.jsonl in it, expected a run folder"):
        read(run)


@pytest.mark.parametrize(
    "low, high", [(0, 1), (2.013, 2.019), (0, 3e-4), (1e9, 9.1e9), (-3, 7), (0.0, 1234.5)]
)
def test_ticks_are_round_and_cover_the_range(low, high):
    found = charts.round_ticks(low, high)
    assert found[0] <= low + 1e-9 * abs(low) and found[-1] >= high * (1 - 1e-9) and 3 <= len(found) <= 8
    steps = [b - a for a, b in itertools.pairwise(found)]
    assert max(steps) == pytest.approx(min(steps)) and f"{steps[0]:.1e}"[0] in "125"


def test_a_long_curve_is_binned_without_losing_spikes():
    points = [(n, 2.0 if n != 77_777 else 50.0) for n in range(100_000)] + [
        (100_000, math.nan),
        (100_001, None),
    ]
    bins = charts.bin_points(points)
    assert len(bins) <= charts.MAX_BINS and max(bin_.high for bin_ in bins) == 50 and bins[-1].x == 99_999
    assert charts.value_range([bins], False) == (2.0, 50.0)
    flat = charts.render_chart([charts.Curve("flat", [(1, 0.0), (2, 0.0)])], format_value=str)
    assert "polyline" in flat and "nan" not in flat


@pytest.mark.parametrize(
    "text, short", [("2.5000", "2.5"), ("10.0M", "10M"), ("3.00e-4", "3e-4"), ("100", "100")]
)
def test_trailing_zeros_are_removed(text, short):
    assert charts.strip_zeros(text) == short


def test_the_command_writes_to_the_path_in_out(run, tmp_path, capsys):
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert (
        capsys.readouterr().out == f"{tmp_path / 'page.html'}\n" and (tmp_path / "page.html").stat().st_size
    )
    assert main(["report", str(run), "--samples", "0"]) == 2
    assert main(["report", str(tmp_path)]) == 2
    assert "expected a run folder" in capsys.readouterr().err
