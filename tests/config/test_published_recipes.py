"""Recipes of published models learn at the published rates, and let weights decay as was published."""

import dataclasses
from pathlib import Path

import pytest

from headrace.config import recipe, run_length
from headrace.schedules import load_schedule

ROOT = Path(__file__).parents[2]

# The learning rate after the warm-up, and at the last step.
RATES = {
    "bitnet-2b4t": (1.5e-3, 0),
    "deberta-v3-xsmall": (6e-4, 0),
    "deberta-v3-small": (6e-4, 0),
    "deberta-v3-base": (6e-4, 0),
    "deberta-v3-large": (3e-4, 0),
    "ettin-decoder-150m": (8e-4, 8e-4),
    "eurobert-210m": (1e-4, 1e-4),
    "eurobert-610m": (1e-4, 1e-4),
    "eurobert-2.1b": (1e-4, 1e-4),
    "eurobert-210m-phase2": (1e-4, 0),
    "eurobert-610m-phase2": (1e-4, 0),
    "eurobert-2.1b-phase2": (1e-4, 0),
    "fanformer-1b": (4e-4, 4e-5),
    "huginn-3.5b": (4e-5, 0),
    "llada-8b": (4e-4, 1e-5),
    "lunaris-270m": (3e-4, 3e-6),
    "mdlm-owt": (3e-4, 3e-4),
    "mini-llama-114m": (6e-4, 6e-5),
    "modernbert-base": (8e-4, 8e-4),
    "modernbert-base-phase2": (3e-4, 3e-4),
    "modernbert-base-phase3": (3e-4, 0),
    "modernbert-large": (5e-4, 5e-4),
}
# Published decoupled weight decay, independent of the learning rate: the factor at the peak.
SHRINK = {
    "ettin-decoder-150m": 1e-5,
    "huginn-3.5b": 4e-5,
    "modernbert-base": 1e-5,
    "modernbert-base-phase2": 1e-5,
    "modernbert-base-phase3": 1e-5,
    "modernbert-large": 1e-5,
}


@pytest.mark.parametrize(("name", "rates"), RATES.items())
def test_a_published_recipe_starts_and_ends_at_the_published_rate(
    name: str, rates: tuple[float, float]
) -> None:
    run = recipe.load(ROOT / f"recipes/{name}.yaml")
    schedule = dataclasses.replace(run.schedule, **run_length.durations(run))
    curve = load_schedule(run.schedule).make(schedule).learning_rate
    actual = [
        run.optimizer.learning_rate * float(curve(step)) for step in (schedule.warmup, schedule.steps - 1)
    ]
    # The rate reaches 0 only after the last step.
    assert actual == pytest.approx(rates, rel=1e-3, abs=1e-3 * rates[0])


@pytest.mark.parametrize(("name", "share"), SHRINK.items())
def test_decay_published_independently_of_the_learning_rate_is_divided_by_it(name: str, share: float) -> None:
    optimizer = recipe.load(ROOT / f"recipes/{name}.yaml").optimizer
    assert optimizer.learning_rate * optimizer.weight_decay == pytest.approx(share, rel=2e-3)
