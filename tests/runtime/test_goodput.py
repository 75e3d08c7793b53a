"""The account of a run's time: categories, several lives, what is wasted, and files that were cut off."""

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

    def pass_(self, seconds: float) -> None:
        self.now += seconds


def life(path: Path, clock: Clock, step: int) -> GoodputClock:
    """A process that has prepared for 10 s and compiled for 20."""
    ledger = GoodputClock(path, clock=clock, wall_clock=clock)
    clock.pass_(2)
    ledger.enter("preparation")
    clock.pass_(8)
    with ledger.category("compilation"):
        clock.pass_(20)
    ledger.begin(step, devices=8, kind="TPU v5e", hosts=2)
    ledger.train(step)
    return ledger


def test_why_a_process_ended_is_kept_without_its_secrets(tmp_path):
    path, clock = tmp_path / "goodput.jsonl", Clock()
    with pytest.raises(ValueError), life(path, clock, 0):
        raise ValueError(f"refused: key AIza{'x' * 35}, https://server/file?sig=hidden")
    assert "refused: key ***, https://server/file?***" in read_totals(path).attempts[-1].reason


def test_every_second_counts_once_and_in_its_category(tmp_path):
    path, clock = tmp_path / "goodput.jsonl", Clock()
    ledger = life(path, clock, 0)
    clock.pass_(50)
    ledger.reclassify("data_loading", 4)
    ledger.record_progress(10, skipped=1)  # one of ten, of the 50 s
    clock.pass_(10)
    with ledger.category("evaluation"):
        clock.pass_(5)
        with ledger.category("checkpoint_save"):
            clock.pass_(3)
    ledger.record_progress(12, skipped=1)
    ledger.end(0)
    account = read_totals(path)
    assert account.seconds == pytest.approx(
        {
            **{"initialization": 2, "preparation": 8, "compilation": 20, "data_loading": 4},
            **{"productive": 50 - 4 - 5 + 10, "wasted_progress": 5, "evaluation": 5, "checkpoint_save": 3},
        }
    )
    assert account.total == pytest.approx(clock.now - 1000) and account.share == pytest.approx(51 / 98)
    assert account.seconds == ledger.totals.seconds
    assert ledger.metrics()["badput/compilation"] == 20 and ledger.metrics()["goodput"] == account.share
    assert goodput.summary_line(account).startswith("goodput 52.0 % of 1.6 minutes; 20.4 % compiling")


def test_what_a_later_life_does_again_was_wasted_and_the_time_between_is_lost(tmp_path):
    path, clock = tmp_path / "goodput.jsonl", Clock()
    ledger = life(path, clock, 0)
    for step in (10, 20, 30):
        clock.pass_(10)
        ledger.record_progress(step)
    clock.pass_(7)  # and then it is killed
    text = path.read_text()
    path.write_text(text + '{"time": 1067.0, "ste')
    clock.pass_(100)
    again = life(path, clock, 15)
    clock.pass_(5)
    again.record_progress(20)
    account = read_totals(path)
    assert account.seconds["productive"] == pytest.approx(15 + 5)
    assert account.seconds["wasted_progress"] == pytest.approx(15)
    assert account.seconds["restart"] == pytest.approx(107)
    assert account.total == pytest.approx(clock.now - 1000) and account.lost_steps == 15
    attempts = [(attempt.first_step, attempt.last_step, attempt.exit_code) for attempt in account.attempts]
    assert attempts == [(0, 30, None), (15, 20, None)]


@pytest.mark.parametrize(
    "code, why, counts", [(75, "SIGTERM", True), (75, "SIGINT", False), (0, "", False), (1, "", False)]
)
def test_time_in_which_nobody_waited_for_the_run_is_not_lost(tmp_path, code, why, counts):
    path, clock = tmp_path / "goodput.jsonl", Clock()
    ledger = life(path, clock, 0)
    clock.pass_(10)
    ledger.record_progress(10)
    ledger.end_reason = why
    ledger.end(code)
    clock.pass_(5000)
    life(path, clock, 10)
    assert read_totals(path).seconds.get("restart", 0) == pytest.approx(5000 if counts else 0)
    assert read_totals(path).seconds.get("wasted_progress", 0) == 0


def test_going_back_within_a_life_wastes_what_came_after(tmp_path):
    path, clock = tmp_path / "goodput.jsonl", Clock()
    ledger = life(path, clock, 0)
    for step in (10, 20):
        clock.pass_(10)
        ledger.record_progress(step)
    clock.pass_(4)
    ledger.rewind(5)
    with ledger.category("checkpoint_restore"):
        clock.pass_(3)
    ledger.train(5)
    clock.pass_(5)
    ledger.record_progress(10)
    ledger.end(0)
    found = read_totals(path).seconds
    assert found["productive"] == pytest.approx(5 + 5) and found["wasted_progress"] == pytest.approx(15 + 4)
    assert found["checkpoint_restore"] == pytest.approx(3)


def test_how_a_process_ended_is_noted_by_who_watched_it_and_by_nobody_else(tmp_path):
    path, clock = tmp_path / "goodput.jsonl", Clock()
    clock.now = time.time() - 60
    ledger = life(path, clock, 0)
    ledger.record_progress(10)
    note_exit(str(tmp_path), os.getpid() + 1, 1, "another host's")
    assert read_totals(path).attempts[0].exit_code is None
    note_exit(str(tmp_path), os.getpid(), 137, "was ended by SIGKILL")
    account = read_totals(path)
    assert (account.attempts[0].exit_code, account.attempts[0].reason) == (137, "was ended by SIGKILL")
    assert account.attempts[0].host == socket.gethostname()
    assert account.seconds["wasted_progress"] == pytest.approx(30, abs=5)  # since it was last heard of
    note_exit(str(tmp_path / "none"), 1, 1, "")
    assert not (tmp_path / "none").exists()


def test_a_disk_that_is_full_for_a_while_loses_no_line(tmp_path, monkeypatch):
    path, clock = tmp_path / "goodput.jsonl", Clock()
    ledger = life(path, clock, 0)
    path.chmod(0o400)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
        clock.pass_(5)
        ledger.record_progress(5)
    path.chmod(0o600)
    clock.pass_(5)
    ledger.record_progress(10)
    assert read_totals(path).seconds["productive"] == pytest.approx(10)


def test_only_the_time_in_which_the_device_waits_too_is_lost_to_data():
    clock, ready = Clock(), False
    idle = DataWait(clock)
    idle.step_output = SimpleNamespace(is_ready=lambda: ready)
    for _ in range(3):
        clock.pass_(1)
        idle.watch()
    ready = True
    idle.watch()
    clock.pass_(2)
    idle.watch()
    assert idle.finish() == 2 and idle.finish() == 0
    called = []
    slow = read_ahead(lambda step: time.sleep(0.05) or step, 0, 2, lambda: called.append(1))
    assert list(slow) == [0, 1] and len(called) > 5


HOUR, WEEK = 3600.0, 7 * 24 * 3600.0


class Week:
    """A run that is preempted once an hour for a week, by the rules of the real one. Seconds are of a large
    model: a step of 1 s, a save that holds up the loop for 0.3 s and is whole 10 s later, and 40 s from a
    kill to the first step: 10 until there is a process again, and its start with what was compiled before."""

    step, blocked, behind, gone = 1.0, 0.3, 10.0, 10.0
    start = {"initialization": 8.0, "preparation": 4.0, "checkpoint_restore": 8.0, "compilation": 10.0}

    def __init__(self, checkpoint: sections.CheckpointKeys, log: sections.LogKeys) -> None:
        self.checkpoint, self.log, self.clock = checkpoint, log, Clock()
        self.account, self.whole, self.most_lost = goodput.GoodputTotals(), 0, 0

    def live(self, until: float, *, told: bool) -> None:
        """One process. SIGTERM is told: it saves and says why it ends. SIGKILL is not."""
        ledger = GoodputClock(None, clock=self.clock, wall_clock=self.clock)
        ledger.totals = self.account  # as it would be read from the run folder
        for category, seconds in self.start.items():
            ledger.enter(category)
            self.clock.pass_(seconds)
        number, saving = self.whole, (0, float("inf"))
        ledger.begin(number, devices=8, kind="TPU v5e", hosts=2)
        ledger.train(number)
        while self.clock.now < until:
            self.clock.pass_(self.step)
            number += 1
            if number % self.log.every == 0:
                ledger.record_progress(number)
            if self.clock.now >= saving[1]:
                self.whole, saving = saving[0], (0, float("inf"))
            if inventory.tier_due(self.checkpoint, number):
                with ledger.category("checkpoint_save"):
                    self.clock.pass_(self.blocked)
                saving = number, self.clock.now + self.behind
        if told:
            with ledger.category("checkpoint_save"):
                self.clock.pass_(self.blocked + self.behind)
            ledger.record_progress(number)
            ledger.end_reason, self.whole = "SIGTERM", number
            ledger.end(75)
        self.most_lost = max(self.most_lost, number - self.whole)
        self.clock.pass_(self.gone)


@pytest.mark.fault(34)
@pytest.mark.parametrize("told", [True, False], ids=["SIGTERM", "SIGKILL"])
def test_a_week_with_a_preemption_an_hour_is_97_percent_good(told, record_property):
    week, random = Week(sections.CheckpointKeys(every=64), sections.LogKeys()), np.random.default_rng(0)
    begun = week.clock.now
    for hour in range(7 * 24):  # at any moment of each hour
        week.live(begun + (hour + random.uniform(0.2, 1.0)) * HOUR, told=told)
    week.live(begun + WEEK, told=True)
    account = week.account
    assert len(account.attempts) == 7 * 24 + 1
    assert account.total == pytest.approx(week.clock.now - week.gone - begun, abs=1.0)
    kept = week.whole * week.step / account.total  # what was not done again, without the account
    unlogged = 0 if told else week.log.every * week.step * 7 * 24 / account.total  # what a kill leaves unsaid
    assert kept - unlogged - 1e-4 <= account.share <= kept + 1e-4
    assert account.share >= 0.97
    assert week.most_lost <= (0 if told else 64)
    record_property("seen", goodput.summary_line(account))


@pytest.mark.slow
def test_goodput_is_of_all_lives_of_a_run(tiny, tmp_path):
    """One that is killed without a word is started again by who watches it."""
    long = ("schedule.steps=40", "schedule.use=constant", "schedule.warmup=0", "checkpoint.every=10")
    path = save_recipe(tiny(*long, "mesh.data=1"), tmp_path / "long.yaml")
    process = start(path)
    log = tmp_path / "run" / "goodput.jsonl"
    while process.poll() is None and not (log.exists() and '"step": 22' in log.read_text()):
        time.sleep(0.01)
    os.kill(read_totals(log).attempts[0].pid, signal.SIGKILL)
    code, said = finish(process)
    assert code == 0, said
    account = read_totals(log)
    assert [one.exit_code for one in account.attempts] == [137, 0] and account.attempts[1].first_step >= 10
    assert account.seconds["restart"] > 0.3 and account.seconds["wasted_progress"] > 0
    assert account.seconds["checkpoint_restore"] > 0 and 0 < account.share < 1
    begun, ended = account.attempts[0].started_at, account.attempts[1].ended_at
    assert account.total == pytest.approx(ended - begun, abs=1.0)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "loss" in row][-1]
    assert last["step"] == 40 and last["badput/restart"] == pytest.approx(
        account.seconds["restart"], abs=0.01
    )
    assert "goodput " in said and "between the end of a process and the next" in said
