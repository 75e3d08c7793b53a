"""Goodput: categories of time, several attempts, wasted steps, and files that were cut off."""

import json
import os
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from headrace.checkpoint import inventory
from headrace.config import sections
from headrace.data.prefetch import read_ahead
from headrace.runtime import goodput
from headrace.runtime.goodput import DataWait, GoodputClock, note_exit, read_totals
from tests.e2e.test_train import finish, save_recipe, start


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def start_attempt(path: Path, clock: Clock, step: int) -> GoodputClock:
    """Start a process that prepares for 10 s and compiles for 20."""
    goodput_clock = GoodputClock(path, clock=clock, wall_clock=clock)
    clock.advance(2)
    goodput_clock.enter("preparation")
    clock.advance(8)
    with goodput_clock.category("compilation"):
        clock.advance(20)
    goodput_clock.begin(step, devices=8, kind="TPU v5e", hosts=2)
    goodput_clock.train(step)
    return goodput_clock


def test_the_reason_of_an_end_is_stored_without_secrets(tmp_path):
    path, clock = tmp_path / "goodput.jsonl", Clock()
    with pytest.raises(ValueError), start_attempt(path, clock, 0):
        raise ValueError(f"refused: key AIza{'x' * 35}, https://server/file?sig=hidden")
    assert "refused: key ***, https://server/file?***" in read_totals(path).attempts[-1].reason


def test_every_second_counts_once_and_in_its_category(tmp_path):
    path, clock = tmp_path / "goodput.jsonl", Clock()
    goodput_clock = start_attempt(path, clock, 0)
    clock.advance(50)
    goodput_clock.reclassify("data_loading", 4)
    goodput_clock.record_progress(10, skipped=1)  # one of ten, of the 50 s
    clock.advance(10)
    with goodput_clock.category("evaluation"):
        clock.advance(5)
        with goodput_clock.category("checkpoint_save"):
            clock.advance(3)
    goodput_clock.record_progress(12, skipped=1)
    goodput_clock.end(0)
    totals = read_totals(path)
    assert totals.seconds == pytest.approx(
        {
            **{"initialization": 2, "preparation": 8, "compilation": 20, "data_loading": 4},
            **{"productive": 50 - 4 - 5 + 10, "wasted_progress": 5, "evaluation": 5, "checkpoint_save": 3},
        }
    )
    assert totals.total == pytest.approx(clock.now - 1000) and totals.share == pytest.approx(51 / 98)
    assert totals.seconds == goodput_clock.totals.seconds
    assert (
        goodput_clock.metrics()["badput/compilation"] == 20
        and goodput_clock.metrics()["goodput"] == totals.share
    )
    assert goodput.summary_line(totals).startswith("goodput 52.0 % of 1.6 minutes; 20.4 % compiling")


def test_steps_that_a_later_attempt_repeats_are_wasted_and_the_time_between_is_lost(tmp_path):
    path, clock = tmp_path / "goodput.jsonl", Clock()
    goodput_clock = start_attempt(path, clock, 0)
    for step in (10, 20, 30):
        clock.advance(10)
        goodput_clock.record_progress(step)
    clock.advance(7)  # then it is killed
    text = path.read_text()
    path.write_text(text + '{"time": 1067.0, "ste')
    clock.advance(100)
    restarted = start_attempt(path, clock, 15)
    clock.advance(5)
    restarted.record_progress(20)
    totals = read_totals(path)
    assert totals.seconds["productive"] == pytest.approx(15 + 5)
    assert totals.seconds["wasted_progress"] == pytest.approx(15)
    assert totals.seconds["restart"] == pytest.approx(107)
    assert totals.total == pytest.approx(clock.now - 1000) and totals.lost_steps == 15
    attempts = [(attempt.first_step, attempt.last_step, attempt.exit_code) for attempt in totals.attempts]
    assert attempts == [(0, 30, None), (15, 20, None)]


@pytest.mark.parametrize(
    "code, reason, counts", [(75, "SIGTERM", True), (75, "SIGINT", False), (0, "", False), (1, "", False)]
)
def test_time_after_a_final_exit_is_not_lost(tmp_path, code, reason, counts):
    path, clock = tmp_path / "goodput.jsonl", Clock()
    goodput_clock = start_attempt(path, clock, 0)
    clock.advance(10)
    goodput_clock.record_progress(10)
    goodput_clock.end_reason = reason
    goodput_clock.end(code)
    clock.advance(5000)
    start_attempt(path, clock, 10)
    assert read_totals(path).seconds.get("restart", 0) == pytest.approx(5000 if counts else 0)
    assert read_totals(path).seconds.get("wasted_progress", 0) == 0


def test_a_rollback_wastes_the_steps_after_its_target(tmp_path):
    path, clock = tmp_path / "goodput.jsonl", Clock()
    goodput_clock = start_attempt(path, clock, 0)
    for step in (10, 20):
        clock.advance(10)
        goodput_clock.record_progress(step)
    clock.advance(4)
    goodput_clock.rewind(5)
    with goodput_clock.category("checkpoint_restore"):
        clock.advance(3)
    goodput_clock.train(5)
    clock.advance(5)
    goodput_clock.record_progress(10)
    goodput_clock.end(0)
    seconds = read_totals(path).seconds
    assert seconds["productive"] == pytest.approx(5 + 5)
    assert seconds["wasted_progress"] == pytest.approx(15 + 4)
    assert seconds["checkpoint_restore"] == pytest.approx(3)


def test_the_supervisor_notes_the_end_of_its_own_process_only(tmp_path):
    path, clock = tmp_path / "goodput.jsonl", Clock()
    clock.now = time.time() - 60
    goodput_clock = start_attempt(path, clock, 0)
    goodput_clock.record_progress(10)
    note_exit(str(tmp_path), os.getpid() + 1, 1, "another host's")
    assert read_totals(path).attempts[0].exit_code is None
    note_exit(str(tmp_path), os.getpid(), 137, "was ended by SIGKILL")
    totals = read_totals(path)
    assert (totals.attempts[0].exit_code, totals.attempts[0].reason) == (137, "was ended by SIGKILL")
    assert totals.attempts[0].host == socket.gethostname()
    assert totals.seconds["wasted_progress"] == pytest.approx(30, abs=5)  # since its last line
    note_exit(str(tmp_path / "none"), 1, 1, "")
    assert not (tmp_path / "none").exists()


def test_no_line_is_lost_when_the_disk_is_full_for_a_while(tmp_path, monkeypatch):
    path, clock = tmp_path / "goodput.jsonl", Clock()
    goodput_clock = start_attempt(path, clock, 0)
    path.chmod(0o400)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
        clock.advance(5)
        goodput_clock.record_progress(5)
    path.chmod(0o600)
    clock.advance(5)
    goodput_clock.record_progress(10)
    assert read_totals(path).seconds["productive"] == pytest.approx(10)


def test_only_time_in_which_the_device_is_idle_counts_as_waiting_for_data():
    clock, ready = Clock(), False
    idle = DataWait(clock)
    idle.step_output = SimpleNamespace(is_ready=lambda: ready)
    for _ in range(3):
        clock.advance(1)
        idle.watch()
    ready = True
    idle.watch()
    clock.advance(2)
    idle.watch()
    assert idle.finish() == 2 and idle.finish() == 0
    called = []
    slow = read_ahead(lambda step: time.sleep(0.05) or step, 0, 2, lambda: called.append(1))
    assert list(slow) == [0, 1] and len(called) > 5


HOUR, WEEK = 3600.0, 7 * 24 * 3600.0


class Week:
    """A run that is preempted once per hour for a week.

    The times are those of a large model: a step takes 1 s; a save stalls the loop for 0.3 s and is complete
    10 s later; from a kill to the first step it takes 40 s: 10 s until the process is restarted, and its
    start with a step that was compiled before."""

    step, stall, save_seconds, restart_seconds = 1.0, 0.3, 10.0, 10.0
    start = {"initialization": 8.0, "preparation": 4.0, "checkpoint_restore": 8.0, "compilation": 10.0}

    def __init__(self, checkpoint: sections.CheckpointKeys, log: sections.LogKeys) -> None:
        self.checkpoint, self.log, self.clock = checkpoint, log, Clock()
        self.totals, self.last_saved, self.most_lost = goodput.GoodputTotals(), 0, 0

    def run_attempt(self, until: float, *, is_graceful: bool) -> None:
        """Run one process. After SIGTERM (`is_graceful`) it saves and records its end, after SIGKILL not."""
        goodput_clock = GoodputClock(None, clock=self.clock, wall_clock=self.clock)
        goodput_clock.totals = self.totals  # as if read from the run folder
        for category, seconds in self.start.items():
            goodput_clock.enter(category)
            self.clock.advance(seconds)
        step, saving = self.last_saved, (0, float("inf"))
        goodput_clock.begin(step, devices=8, kind="TPU v5e", hosts=2)
        goodput_clock.train(step)
        while self.clock.now < until:
            self.clock.advance(self.step)
            step += 1
            if step % self.log.every == 0:
                goodput_clock.record_progress(step)
            if self.clock.now >= saving[1]:
                self.last_saved, saving = saving[0], (0, float("inf"))
            if inventory.tier_due(self.checkpoint, step):
                with goodput_clock.category("checkpoint_save"):
                    self.clock.advance(self.stall)
                saving = step, self.clock.now + self.save_seconds
        if is_graceful:
            with goodput_clock.category("checkpoint_save"):
                self.clock.advance(self.stall + self.save_seconds)
            goodput_clock.record_progress(step)
            goodput_clock.end_reason, self.last_saved = "SIGTERM", step
            goodput_clock.end(75)
        self.most_lost = max(self.most_lost, step - self.last_saved)
        self.clock.advance(self.restart_seconds)


@pytest.mark.fault(34)
@pytest.mark.parametrize("is_graceful", [True, False], ids=["SIGTERM", "SIGKILL"])
def test_a_week_with_a_preemption_per_hour_has_97_percent_goodput(is_graceful, record_property):
    week, random = Week(sections.CheckpointKeys(every=64), sections.LogKeys()), np.random.default_rng(0)
    started_at = week.clock.now
    for hour in range(7 * 24):  # at a random time in each hour
        until = started_at + (hour + random.uniform(0.2, 1.0)) * HOUR
        week.run_attempt(until, is_graceful=is_graceful)
    week.run_attempt(started_at + WEEK, is_graceful=True)
    totals = week.totals
    assert len(totals.attempts) == 7 * 24 + 1
    assert totals.total == pytest.approx(week.clock.now - week.restart_seconds - started_at, abs=1.0)
    share = week.last_saved * week.step / totals.total  # of steps that were not repeated
    # Steps after the last logged row before a kill are not recorded.
    unlogged = 0 if is_graceful else week.log.every * week.step * 7 * 24 / totals.total
    assert share - unlogged - 1e-4 <= totals.share <= share + 1e-4
    assert totals.share >= 0.97
    assert week.most_lost <= (0 if is_graceful else 64)
    record_property("seen", goodput.summary_line(totals))


@pytest.mark.slow
def test_goodput_counts_all_attempts_of_a_run(tiny, tmp_path):
    """The trainer is killed, and the supervisor restarts it."""
    long = ("schedule.steps=40", "schedule.use=constant", "schedule.warmup=0", "checkpoint.every=10")
    path = save_recipe(tiny(*long, "mesh.data=1"), tmp_path / "long.yaml")
    process = start(path)
    log = tmp_path / "run" / "goodput.jsonl"
    while process.poll() is None and not (log.exists() and '"step": 22' in log.read_text()):
        time.sleep(0.01)
    os.kill(read_totals(log).attempts[0].pid, signal.SIGKILL)
    code, output = finish(process)
    assert code == 0, output
    totals = read_totals(log)
    assert [attempt.exit_code for attempt in totals.attempts] == [137, 0] and totals.attempts[
        1
    ].first_step >= 10
    assert totals.seconds["restart"] > 0.3 and totals.seconds["wasted_progress"] > 0
    assert totals.seconds["checkpoint_restore"] > 0 and 0 < totals.share < 1
    seconds = totals.attempts[1].ended_at - totals.attempts[0].started_at
    assert totals.total == pytest.approx(seconds, abs=1.0)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "loss" in row][-1]
    assert last["step"] == 40 and last["badput/restart"] == pytest.approx(totals.seconds["restart"], abs=0.01)
    assert "goodput " in output and "between the end of a process and the next" in output
