"""Outcomes of plans in Python and in notebooks."""

import dataclasses
from pathlib import Path

import pytest

import headrace as hr

RECIPE = Path(__file__).parents[2] / "recipes/llama3-8b.yaml"


def test_a_plan_in_python_is_a_table_in_notebooks():
    recipe = hr.load_recipe(RECIPE, ["batch.sequences=16", "batch.microbatches=1"])
    outcome = hr.plan(recipe, "v5p-32", fast=True)
    assert outcome.fits and outcome.step_seconds and outcome.dollars["spot"]
    html = outcome._repr_html_()
    for text in ("v5p-32, by arithmetic", "16 v5p", "about ", "8.03B", "131,072 tokens", " spot"):
        assert text in html
    assert "color" not in html  # readable in light and dark notebooks


def test_a_plan_that_does_not_fit_has_no_times():
    recipe = hr.load_recipe(RECIPE, ["batch.sequences=64", "batch.microbatches=1"])
    outcome = hr.plan(recipe, "v5e-16", fast=True)
    assert not outcome.fits and outcome.step_seconds is None
    assert outcome.dollars == {"on_demand": None, "spot": None}
    html = outcome._repr_html_()
    assert ">no<" in html and "cost" not in html


def test_own_prices_and_unknown_slices(tmp_path: Path):
    recipe = hr.load_recipe(RECIPE, ["batch.sequences=16", "batch.microbatches=1"])
    catalog = hr.plan(recipe, "v5p-32", fast=True)
    (tmp_path / "prices.yaml").write_text("v5p: {spot: 0.5}\n")
    own = hr.plan(recipe, "v5p-32", fast=True, prices=tmp_path / "prices.yaml")
    chip_hours = own.days * 24 * 16
    assert own.dollars["spot"] == pytest.approx((0.5 * chip_hours, 0.5 * chip_hours))
    assert dataclasses.replace(own, price=catalog.price) == catalog
    with pytest.raises(hr.UserError, match="slice: found v5p-33"):
        hr.plan(recipe, "v5p-33")
