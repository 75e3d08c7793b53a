"""A quantized model as a run folder: Hugging Face files in the format of its method, and the run's recipe.

Matrices that are read for use stay as they are stored. Each layer's are made dense when it runs."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from headrace.errors import UserError
from headrace.model_formats import gptq, vptq
from headrace.model_formats.gptq import GPTQMatrix
from headrace.model_formats.hf_tensors import (
    SafetensorsFolder,
    TensorFamily,
    layer_name,
    rearrange,
    split_spec,
)
from headrace.model_formats.vptq import VPTQMatrix
from headrace.nn import module
from headrace.nn.linear import project
from headrace.nn.module import Array, Axes, PyTree

QuantizedMatrix = GPTQMatrix | VPTQMatrix
FORMATS: dict[str, ModuleType] = {"gptq": gptq, "vptq": vptq}  # by `quant_method` of config.json


class LayersConfig(Protocol):
    """A model's config, as far as it is needed here."""

    @property
    def layers(self) -> int: ...


@dataclass(frozen=True)
class SubMatrix:
    """A weight's place in a stored matrix: one of its equal parts, with its axes in another order."""

    pattern: str  # from the stored matrix's axes to the weight's, as in `TensorTable`
    shape: tuple[int, ...]  # of the weight, without layers
    part: int = 0
    parts: int = 1


@partial(jax.tree_util.register_dataclass, data_fields=["stored"], meta_fields=["sub_matrix"])
@dataclass(frozen=True)
class QuantizedWeight:
    """A weight that is made dense when it meets an activation."""

    stored: QuantizedMatrix
    sub_matrix: SubMatrix

    def to_dense(self) -> Array:
        """Make the dense weight of one layer."""
        place = self.sub_matrix
        matrix = jnp.split(self.stored.to_dense(), place.parts)[place.part]
        sizes = dict(zip(place.pattern.split(" -> ")[1].split(), place.shape, strict=True))
        return rearrange(matrix, place.pattern, sizes)  # type: ignore[arg-type,return-value]


@project.register
def _(w: QuantizedWeight, x: Array, spec: str) -> Array:
    return project(w.to_dense().astype(x.dtype), x, spec)


@dataclass(frozen=True)
class Linear:
    """A linear layer of transformers, one in each layer of the model, and the weights that it consists of."""

    name: str  # without `.weight`, with {} for the layer
    paths: tuple[str, ...]  # of the weights, in the order of their parts
    sub_matrices: tuple[SubMatrix, ...]
    inputs: int
    outputs: int

    def to_weights(self, stored: QuantizedMatrix) -> dict[str, QuantizedWeight]:
        """The weights by their paths, from the linear layer's matrix or a stack of them."""
        return {
            path: QuantizedWeight(stored, sub_matrix)
            for path, sub_matrix in zip(self.paths, self.sub_matrices, strict=True)
        }


def find_linears(family: TensorFamily, cfg: object) -> list[Linear]:
    """Find the matrices of a model's layers that are linear layers in transformers."""
    table = family.tensor_table(cfg)
    shapes = dict(module.named_leaves(module.shapes(family.Model, cfg)))
    weights: dict[str, list[tuple[int, str, SubMatrix]]] = {}  # by the name of the linear layer
    inputs: dict[str, int] = {}
    for path, axes in module.named_leaves(module.axes(family.Model, cfg)):
        if path not in table:
            continue
        name, part, parts = split_spec(table[path][0])
        sub_matrix = SubMatrix(table[path][1], shapes[path].shape[1:], part, parts)
        if _is_linear(name, axes, sub_matrix):
            name = name.removesuffix(".weight")
            weights.setdefault(name, []).append((part, path, sub_matrix))
            inputs[name] = math.prod(sub_matrix.shape[: axes.num_input_axes])
    return [_make_linear(name, weights[name], inputs[name]) for name in weights]


def _make_linear(name: str, weights: list[tuple[int, str, SubMatrix]], inputs: int) -> Linear:
    _, paths, sub_matrices = zip(*sorted(weights, key=lambda entry: entry[0]), strict=True)
    outputs = sum(math.prod(sub_matrix.shape) for sub_matrix in sub_matrices) // inputs
    return Linear(name, paths, sub_matrices, inputs, outputs)


def _is_linear(name: str, axes: Axes, sub_matrix: SubMatrix) -> bool:
    """Whether a tensor is the matrix [outputs inputs] of a linear layer, one for each layer."""
    is_matrix_of_layers = axes.is_hidden_matrix and axes.stacked == 1 and not axes.keep_float32
    if not (is_matrix_of_layers and name.endswith(".weight") and name.count("{") == 1):
        return False
    tensor_axes, weight_axes = sub_matrix.pattern.split(" -> ")
    names = weight_axes.split()
    group = lambda names: f"({' '.join(names)})" if names[1:] else "".join(names)
    return tensor_axes == f"{group(names[axes.num_input_axes :])} {group(names[: axes.num_input_axes])}"


def with_stored_stacks(
    params: PyTree, linears: Sequence[Linear], stacks: Mapping[str, QuantizedMatrix]
) -> PyTree:
    """Replace the weights of linear layers by stored matrices, each a stack over layers."""
    weights: dict[str, QuantizedWeight] = {}
    for linear in linears:
        weights |= linear.to_weights(stacks[linear.name])
    return jax.tree_util.tree_map_with_path(lambda path, w: weights.get(module.path_name(path), w), params)


def with_stored_layer(
    params: PyTree, linears: Sequence[Linear], matrices: Mapping[str, QuantizedMatrix]
) -> PyTree:
    """Replace the weights of linear layers by stored matrices of one layer, each a stack of this one."""
    return with_stored_stacks(params, linears, jax.tree.map(lambda x: jnp.asarray(x)[None], matrices))


def read_quant_config(folder: str | Path) -> dict[str, Any] | None:
    """Read `quantization_config` from a folder's config.json. None if the folder is not a quantized run.

    Raises UserError for a method that is not supported."""
    path = Path(folder) / "config.json"
    if not path.is_file() or not (Path(folder) / "recipe.yaml").is_file():
        return None
    try:
        settings = json.loads(path.read_text()).get("quantization_config")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if settings is not None and settings.get("quant_method") not in FORMATS:
        raise UserError(
            f"{path}: quant_method: found {settings.get('quant_method')}, expected one of "
            f"{', '.join(FORMATS)}"
        )
    return settings


def read_params(folder: str | Path, family: TensorFamily, cfg: LayersConfig) -> PyTree:
    """Read the weights of a quantized folder into host memory, those of linear layers as they are stored."""
    quant_config = read_quant_config(folder)
    assert quant_config is not None
    tensors, table = SafetensorsFolder(Path(folder)), family.tensor_table(cfg)
    find_tensor = lambda name: tensors.read_stored(name) if name in tensors.files else None
    quantized: dict[str, QuantizedWeight] = {}
    for linear in find_linears(family, cfg):
        layers = [
            load_matrix(quant_config, layer_name(linear.name, (layer,)), find_tensor)
            for layer in range(cfg.layers)
        ]
        quantized |= linear.to_weights(jax.tree.map(lambda *leaves: np.stack(leaves), *layers))

    def read_leaf(path: Sequence[object], shape: jax.ShapeDtypeStruct) -> PyTree:
        name = module.path_name(path)
        return quantized[name] if name in quantized else tensors.read_weight(*table[name], shape.shape)

    params = jax.tree_util.tree_map_with_path(read_leaf, module.shapes(family.Model, cfg))
    tensors.check_all_read()
    return params


def load_matrix(
    quant_config: Mapping[str, Any], name: str, find_tensor: Callable[[str], np.ndarray | None]
) -> QuantizedMatrix:
    """Load the stored matrix of a linear layer in one layer, by `quantization_config` and its tensors.

    `find_tensor` returns a tensor by its name, or None."""
    names = FORMATS[quant_config["quant_method"]].TENSORS.values()
    tensors = {part: tensor for part in names if (tensor := find_tensor(f"{name}.{part}")) is not None}
    if quant_config["quant_method"] == "gptq":
        return gptq.from_tensors(tensors, quant_config["bits"])
    return vptq.from_tensors(tensors, vptq.read_shape(quant_config["config_for_layers"][name]))


def matrix_tensors(name: str, stored: QuantizedMatrix) -> dict[str, np.ndarray]:
    """The tensors of a stored matrix, by their names in a file. `name` is that of its linear layer."""
    names = (gptq if isinstance(stored, GPTQMatrix) else vptq).TENSORS
    values = {hf_name: getattr(stored, field) for field, hf_name in names.items()}
    return {f"{name}.{hf_name}": np.asarray(value) for hf_name, value in values.items() if value is not None}
