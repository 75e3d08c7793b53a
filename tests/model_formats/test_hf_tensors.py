"""Names and layouts of tensors, and reading them from safetensors files."""

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.errors import UserError
from headrace.model_formats.hf_tensors import (
    SafetensorsFolder,
    layer_name,
    rearrange,
    split_spec,
    to_hf_layout,
    to_tensors,
)
from headrace.nn.module import module

TABLE = {
    "w_q": ("layers.{}.qkv.weight[0/2]", "(n h) d -> d n h"),
    "w_k": ("layers.{}.qkv.weight[1/2]", "(n h) d -> d n h"),
    "scale": ("norm.scale", "d -> d"),
}


@module
class Weights:
    w_q: np.ndarray
    w_k: np.ndarray
    scale: np.ndarray


@pytest.fixture
def weights() -> Weights:
    rng = np.random.default_rng(0)
    w_q, w_k = (rng.normal(size=(3, 4, 2, 5)).astype(np.float32) for _ in range(2))
    return Weights(w_q, w_k, rng.normal(size=4).astype(np.float32))


@pytest.fixture
def folder(weights: Weights, tmp_path: Path) -> Path:
    save_file(dict(to_tensors(TABLE, weights, "float32")), tmp_path / "model.safetensors")
    return tmp_path


def test_a_name_is_split_into_name_and_part():
    assert split_spec("a.{}.qkv.weight[1/3]") == ("a.{}.qkv.weight", 1, 3)
    assert split_spec("norm.weight") == ("norm.weight", 0, 1)


def test_placeholders_are_replaced_by_layer_and_expert():
    assert layer_name("layers.{}.experts.{}.up", (3, 7)) == "layers.3.experts.7.up"
    assert layer_name("layers.{+1}.norm", (3,)) == "layers.4.norm"
    assert layer_name("norm", ()) == "norm"


def test_axes_are_split_merged_and_transposed():
    x = np.arange(24).reshape(6, 4)
    sizes = dict(n=2, h=3, d=4)
    split = rearrange(x, "(n h) d -> d n h", sizes)
    np.testing.assert_array_equal(split, x.reshape(2, 3, 4).transpose(2, 0, 1))
    np.testing.assert_array_equal(to_hf_layout(split, "(n h) d -> d n h"), x)
    with pytest.raises(ValueError, match=re.escape("(6, 4) is not [9, 4]")):
        rearrange(x, "(n h) d -> d n h", sizes | dict(n=3))


def test_tensors_are_written_per_layer_with_their_parts_concatenated(weights: Weights):
    tensors = dict(to_tensors(TABLE, weights, "float32"))
    assert list(tensors) == [f"layers.{layer}.qkv.weight" for layer in range(3)] + ["norm.scale"]
    parts = [w[1].transpose(1, 2, 0).reshape(10, 4) for w in (weights.w_q, weights.w_k)]
    np.testing.assert_array_equal(tensors["layers.1.qkv.weight"], np.concatenate(parts))


def test_weights_are_read_back(weights: Weights, folder: Path):
    tensors = SafetensorsFolder(folder)
    for name, (spec, pattern) in TABLE.items():
        expected = getattr(weights, name)
        np.testing.assert_array_equal(tensors.read_weight(spec, pattern, expected.shape), expected)
    tensors.check_all_read()


def test_unread_tensors_are_refused_unless_skipped_or_ignored(weights: Weights, folder: Path):
    tensors = SafetensorsFolder(folder)
    with pytest.raises(
        UserError, match=r"no place in this model for the tensor layers.0.qkv.weight and 3 more"
    ):
        tensors.check_all_read()
    tensors.skip_weight(TABLE["w_q"][0])
    with pytest.raises(UserError, match=r"for the tensor norm.scale$"):
        tensors.check_all_read()
    tensors.ignored = ("norm.*",)
    tensors.check_all_read()


def test_absent_and_misshapen_tensors_are_refused(folder: Path):
    tensors = SafetensorsFolder(folder)
    with pytest.raises(UserError, match=r"no tensor layers.3.qkv.weight in its .safetensors files"):
        tensors.read_weight(*TABLE["w_q"], (4, 4, 2, 5))
    message = r"norm.scale is of shape \(4,\), and by config.json its parts are \(5,\)"
    with pytest.raises(UserError, match=message):
        tensors.read_weight(*TABLE["scale"], (5,))


def test_a_folder_without_readable_files_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"no .safetensors file in it"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(UserError, match=r"model.safetensors: not a complete safetensors file"):
        SafetensorsFolder(tmp_path)
