"""Settings of config.json: how they are read, and rotary positions and windows in both directions."""

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import UserError
from headrace.model_formats import hf_config

THETA = dict(rope_theta=1e6, rope_local_theta=1e4, head_dim=64, rope_original_length=1024)
is_every_third = lambda layer, every: layer % every == every - 1


@pytest.mark.parametrize(
    ("scaling", "keys"),
    [
        ("none", {}),
        ("linear", dict(rope_factor=4.0)),
        ("yarn", dict(rope_factor=4.0, rope_original_length=1024)),
        ("llama3", dict(rope_factor=4.0, rope_original_length=1024)),
    ],
)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_rotary_positions_are_read_back_in_both_spellings(scaling: str, keys: Any, spelling: str):
    cfg = SimpleNamespace(rope_scaling=scaling, **({"rope_factor": 1.0} | THETA | keys))
    settings = hf_config.rope_settings(cfg)
    if spelling == "rope_parameters":
        settings = {"rope_parameters": settings["rope_parameters"]}
    else:
        del settings["rope_parameters"]
    expected = {"rope_theta": 1e6} | keys | ({} if scaling == "none" else {"rope_scaling": scaling})
    assert hf_config.rope_keys(settings) == expected


def test_ntk_scaling_is_written_as_a_larger_base():
    cfg = SimpleNamespace(rope_scaling="ntk", rope_factor=2.0, **THETA)
    assert hf_config.rope_keys(hf_config.rope_settings(cfg)) == {"rope_theta": 1e6 * 2 ** (64 / 62)}


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"rope_type": "dynamic"},
            "rope_type: found .dynamic., expected one of default, linear, llama3, yarn",
        ),
        ({"rope_type": "linear"}, "factor: found nothing"),
        (
            {"rope_type": "linear", "factor": 2, "beta_fast": 1},
            "beta_fast: found 1, no linear scaling with it",
        ),
        ({"rope_type": "yarn", "factor": 2, "beta_fast": 1}, "beta_fast: found 1, only 32 can be imported"),
        ([1], r"rope_scaling: found \[1\], expected values in braces"),
    ],
)
def test_rotary_positions_that_cannot_be_imported_are_refused(rope: Any, message: str):
    with pytest.raises(UserError, match=message):
        hf_config.rope_keys({"rope_scaling": rope, "max_position_embeddings": 64})


def test_positions_of_layers_with_windows_are_split_off():
    cfg = SimpleNamespace(rope_scaling="linear", rope_factor=8.0, **THETA)
    names = ("rope_theta", 1.0), ("rope_local_base_freq", 2.0)
    settings, local_theta = hf_config.split_local_rope(hf_config.two_rope_settings(cfg), *names)
    assert local_theta == 1e4
    assert hf_config.rope_keys(settings) == dict(rope_theta=1e6, rope_scaling="linear", rope_factor=8.0)
    settings, local_theta = hf_config.split_local_rope({"rope_local_base_freq": 3.0}, *names)
    assert (hf_config.rope_keys(settings)["rope_theta"], local_theta) == (1.0, 3.0)


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_the_order_of_layers_is_read_back(every: int):
    cfg = SimpleNamespace(layers=6, global_every=every)
    settings = hf_config.layer_type_settings(cfg, is_every_third) | {"num_hidden_layers": 6}
    assert hf_config.read_global_every(settings, 3, is_every_third) == every


def test_the_order_of_layers_is_the_default_or_refused_if_irregular():
    assert hf_config.read_global_every({"num_hidden_layers": 6}, 3, is_every_third) == 3
    irregular = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}
    with pytest.raises(
        UserError, match=r"layer_types: found .*, expected full_attention at every n-th layer"
    ):
        hf_config.read_global_every(irregular, 3, is_every_third)


def test_values_have_the_type_and_the_range_of_their_setting():
    settings = {"a": 3, "b": None, "c": 0, "d": "x", "e": True, "f": 0.5, "g": float("inf")}
    assert hf_config.get_int(settings, "a") == 3
    assert hf_config.get_int(settings, "b", 7) == hf_config.get_int(settings, "c", 7) == 7
    assert hf_config.get_float(settings, "f") == 0.5 and hf_config.get_float(settings, "b", 1.5) == 1.5
    assert hf_config.get_bool(settings, "e") and not hf_config.get_bool(settings, "b")
    for name in ("b", "c", "d", "e", "f"):
        with pytest.raises(UserError, match=f"config.json: {name}: found"):
            hf_config.get_int(settings, name)
    for name in ("b", "d", "e", "g"):
        with pytest.raises(UserError, match=f"config.json: {name}: found"):
            hf_config.get_float(settings, name)
    with pytest.raises(UserError, match=r"d: found .x., expected true or false"):
        hf_config.get_bool(settings, "d")
