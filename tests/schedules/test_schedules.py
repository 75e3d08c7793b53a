"""Every schedule in headrace/schedules, against its formula written out; and lengths in steps and tokens."""

import dataclasses
import importlib
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import headrace.schedules
from headrace.config.durations import duration
from headrace.errors import UserError
from headrace.schedules import Curves

NAMES = sorted(p.stem for p in Path(headrace.schedules.__path__[0]).glob("*.py") if p.stem != "__init__")


def make(name: str, *, steps: int = 1000, warmup: int = 100, min_lr_ratio: float = 0.1, **own: Any) -> Curves:
    """As the run makes it: the file's own keys and the common ones, lengths resolved to steps."""
    part = importlib.import_module(f"headrace.schedules.{name}")
    keys = (
        dataclasses.asdict(part.Config()) | dict(steps=steps, warmup=warmup, min_lr_ratio=min_lr_ratio) | own
    )
    for field in dataclasses.fields(part.Config):
        if field.type == int | str:
            keys[field.name] = duration(keys[field.name], tokens_per_step=1, total=steps)
    return part.make(SimpleNamespace(**keys))


def rates(curves: Curves, *steps: int) -> list[float]:
    return [float(curves.learning_rate(step)) for step in steps]


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_warms_up_in_equal_steps_from_the_first_and_never_leaves_zero_to_one(name: str) -> None:
    curves = make(name)
    values = np.array(jax.vmap(curves.learning_rate)(jnp.arange(1200)))
    np.testing.assert_allclose(values[:100], np.arange(1, 101) / 100, rtol=1e-6)
    assert values[100] == 1
    assert (np.diff(values[100:]) <= 0).all()
    assert values.min() > 0
    decay = np.array(jax.vmap(curves.weight_decay)(jnp.arange(1200)))
    assert decay.shape == (1200,) and set(decay) <= {0.0, 1.0} and decay[0] == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_is_the_same_for_a_traced_step_and_a_python_one(name: str) -> None:
    curves = make(name)
    for curve in (curves.learning_rate, curves.weight_decay):
        for step in (0, 99, 100, 550, 999, 5000):
            traced = jax.jit(curve)(jnp.int32(step))
            assert traced.shape == () and traced.dtype == jnp.float32
            np.testing.assert_allclose(traced, curve(step), rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_without_warmup_begins_at_the_peak(name: str) -> None:
    assert rates(make(name, warmup=0), 0) == [1]


@pytest.mark.parametrize("name", ["cosine", "linear", "two_stage", "wsd"])
def test_a_decaying_schedule_ends_at_its_floor_and_stays_there(name: str) -> None:
    np.testing.assert_allclose(rates(make(name, min_lr_ratio=0.05), 1000, 1001, 10**6), 0.05, rtol=1e-6)
    np.testing.assert_allclose(rates(make(name, min_lr_ratio=0.0), 1000, 10**6), 0, atol=1e-7)


def test_cosine_and_linear_are_half_way_down_in_the_middle() -> None:
    for name, quarter in (("cosine", 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2), ("linear", 0.1 + 0.9 * 0.75)):
        np.testing.assert_allclose(rates(make(name), 100 + 225, 550), [quarter, 0.55], rtol=1e-6)


def test_constant_stays_and_inverse_sqrt_falls_whatever_the_length_of_the_run() -> None:
    assert rates(make("constant"), 100, 999, 10**6) == [1, 1, 1]
    np.testing.assert_allclose(rates(make("inverse_sqrt"), 100, 400, 10_000), [1, 0.5, 0.1], rtol=1e-6)
    np.testing.assert_allclose(rates(make("inverse_sqrt", warmup=0), 0, 3, 99), [1, 0.5, 0.1], rtol=1e-6)


@pytest.mark.parametrize(
    ("tail", "fallen"),
    [("linear", lambda x: x), ("sqrt", math.sqrt), ("cosine", lambda x: (1 - math.cos(math.pi * x)) / 2)],
)
def test_wsd_is_stable_until_its_tail(tail: str, fallen: Any) -> None:
    curves = make("wsd", decay="20 %", decay_type=tail)
    assert rates(curves, 100, 500, 800) == [1, 1, 1]
    expected = [1 - 0.9 * fallen(fraction) for fraction in (0.005, 0.25, 0.5, 0.995)]
    np.testing.assert_allclose(rates(curves, 801, 850, 900, 999), expected, rtol=1e-6)


def test_wsd_can_do_without_a_tail_or_without_a_stable_stretch() -> None:
    assert rates(make("wsd", decay=0), 999, 1000, 2000) == [1, 1, 1]
    np.testing.assert_allclose(rates(make("wsd", decay=900, decay_type="linear"), 550), 0.55, rtol=1e-6)


def test_two_stage_drops_at_the_switch_and_ends_weight_decay_there() -> None:
    curves = make(
        "two_stage", stage2_start=500, stage1_end_ratio=0.5, stage2_start_ratio=0.3, min_lr_ratio=0.0
    )
    np.testing.assert_allclose(
        rates(curves, 100, 300, 499, 500, 750), [1, 0.75, 0.50125, 0.3, 0.15], rtol=1e-6
    )
    assert [float(curves.weight_decay(step)) for step in (0, 499, 500, 1000)] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("name", "own"),
    [("wsd", dict(decay=901)), ("two_stage", dict(stage2_start=100)), ("two_stage", dict(stage2_start=1000))],
)
def test_stages_that_do_not_fit_the_run_are_refused(name: str, own: dict[str, int]) -> None:
    with pytest.raises(UserError, match=f"schedule.{next(iter(own))}: found"):
        make(name, **own)


def test_ten_million_steps_in_float32_are_as_exact_as_a_thousand() -> None:
    steps, warmup = 20_000_000, 1_000_000
    at = np.array([0, 1, 7, 999_999, 1_000_001, 10_000_001, 16_777_217, 19_999_999])
    down = (at - warmup) / (steps - warmup)
    tail = np.clip((at - 16_000_000) / 4_000_000, 0, 1)
    formulas = dict(
        constant=np.ones(8),
        linear=1 - 0.9 * down,
        cosine=0.1 + 0.9 * (1 + np.cos(np.pi * down)) / 2,
        inverse_sqrt=np.sqrt(warmup / np.maximum(at, 1)),
        wsd=1 - 0.9 * np.sqrt(tail),
    )
    for name, formula in formulas.items():
        curve = jax.jit(make(name, steps=steps, warmup=warmup).learning_rate)
        values = [float(curve(jnp.int32(step))) for step in at]
        np.testing.assert_allclose(values, np.where(at < warmup, (at + 1) / warmup, formula), rtol=1e-6)


@pytest.mark.parametrize(
    ("value", "steps"),
    [
        (400, 400),
        (0, 0),
        ("50_000 tokens", 13),
        ("40960 tokens", 10),
        ("40961 tokens", 11),
        ("300M tokens", 73_243),
        ("2B tokens", 488_282),
        ("1.7T tokens", 415_039_063),
        ("1.5 k tokens", 1),
        ("20 %", 200),
        ("0.05%", 1),
        ("100 %", 1000),
    ],
)
def test_a_duration_is_in_steps_tokens_or_a_share_of_the_run(value: int | str, steps: int) -> None:
    assert duration(value, tokens_per_step=4096, total=1000) == steps


@pytest.mark.parametrize(
    "value", ["2B", "many tokens", "-1 tokens", "1.2.3M tokens", "half", "", -5, 0.2, True]
)
def test_other_durations_are_refused_in_plain_words(value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        duration(value, tokens_per_step=4096, total=1000)
    assert str(caught.value) == f"expected a number of steps, '3B tokens' or '20 %', found {value!r}"


def test_a_share_of_an_unknown_length_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a number of steps or '3B tokens', found '20 %'"):
        duration("20 %", tokens_per_step=4096)


def test_durations_are_read_without_importing_jax() -> None:
    code = "import sys, headrace.config.durations; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
