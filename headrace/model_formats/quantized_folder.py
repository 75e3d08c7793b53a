"""A quantised model as a run folder: the files of Hugging Face that its method writes, with the run's recipe
beside them. Read for use, matrices stay as they are stored, and each layer's are made whole as it is run."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.errors import UserError
from headrace.model_formats import gptq, vptq
from headrace.model_formats.gptq import GPTQMatrix
from headrace.model_formats.hf_tensors import Table, TensorFamily, Tensors, layer_name, rearrange, split_spec
from headrace.model_formats.vptq import VPTQMatrix
from headrace.nn import module
from headrace.nn.linear import project
from headrace.nn.module import Array

READ: dict[str, Any] = {"gptq": gptq, "vptq": vptq}


@dataclass(frozen=True)
class SubMatrix:
    """Which of the equal parts of a matrix of theirs a weight of ours is, and how its axes lie there."""

    pattern: str
    shape: tuple[int, ...]
    part: int = 0
    parts: int = 1


@partial(jax.tree_util.register_dataclass, data_fields=["stored"], meta_fields=["place"])
@dataclass(frozen=True)
class QuantizedWeight:
    """A weight that is made whole where it meets an activation."""

    stored: GPTQMatrix | VPTQMatrix
    place: SubMatrix

    def to_dense(self) -> Array:
        place = self.place
        own = jnp.split(self.stored.to_dense(), place.parts)[place.part]
        sizes = dict(zip(place.pattern.split(" -> ")[1].split(), place.shape, strict=True))
        return rearrange(own, place.pattern, sizes)  # type: ignore[arg-type,return-value]


@project.register
def _(w: QuantizedWeight, x: Array, spec: str) -> Array:
    return project(w.to_dense().astype(x.dtype), x, spec)


@dataclass(frozen=True)
class Linear:
    """A matrix of theirs in every layer, `name` without its `.weight`, and the weights of ours that it is."""

    name: str
    paths: tuple[str, ...]
    places: tuple[SubMatrix, ...]
    inputs: int
    outputs: int

    def parts(self, stored: Any) -> dict[str, QuantizedWeight]:
        """Our weights, of what is stored."""
        return {
            path: QuantizedWeight(stored, place) for path, place in zip(self.paths, self.places, strict=True)
        }


def linears(family: TensorFamily, cfg: Any) -> list[Linear]:
    """The matrices of the layers that are linear layers there: [outputs inputs], one for each layer."""
    table: Table = family.tensor_table(cfg)
    axes, shapes = (dict(module.named_leaves(of(family.Model, cfg))) for of in (module.axes, module.shapes))
    found: dict[str, list[tuple[int, str, SubMatrix]]] = {}
    for path, its in axes.items():
        theirs, part, parts = split_spec(table[path][0]) if path in table else ("", 0, 1)
        if not (
            its.is_hidden_matrix and its.stacked == 1 and not its.keep_float32 and theirs.endswith(".weight")
        ):
            continue
        place = SubMatrix(table[path][1], shapes[path].shape[1:], part, parts)
        if theirs.count("{") == 1 and _is_linear(place, its.num_input_axes):
            found.setdefault(theirs.removesuffix(".weight"), []).append((part, path, place))
    made = []
    for name, ours in found.items():
        ours.sort(key=lambda one: one[0])
        inputs = int(np.prod(ours[0][2].shape[: axes[ours[0][1]].num_input_axes]))
        outputs = sum(int(np.prod(place.shape)) for *_, place in ours) // inputs
        made.append(
            Linear(
                name, tuple(path for _, path, _ in ours), tuple(place for *_, place in ours), inputs, outputs
            )
        )
    return made


def _is_linear(place: SubMatrix, inputs: int) -> bool:
    """Whether their tensor is [outputs inputs], ours having inputs first."""
    theirs, ours = place.pattern.split(" -> ")
    names = ours.split()
    both = lambda side: f"({' '.join(side)})" if side[1:] else "".join(side)
    return theirs == f"{both(names[inputs:])} {both(names[:inputs])}"


def with_stacks(params: Any, found: Sequence[Linear], stacks: dict[str, Any]) -> Any:
    """The model with its matrices as they are stored, each a stack over layers."""
    parts: dict[str, Any] = {}
    for one in found:
        parts |= one.parts(stacks[one.name])
    return jax.tree_util.tree_map_with_path(lambda path, w: parts.get(module.path_name(path), w), params)


def with_layer(params: Any, found: Sequence[Linear], made: dict[str, Any]) -> Any:
    """The model with the matrices of one layer as they are stored, each a stack of this layer alone."""
    return with_stacks(params, found, jax.tree.map(lambda x: jnp.asarray(x)[None], made))


def read_quant_config(folder: str | Path) -> dict[str, Any] | None:
    """What config.json says of how a folder is quantised, or None if it is not one of these."""
    path = Path(folder) / "config.json"
    if not path.is_file() or not (Path(folder) / "recipe.yaml").is_file():
        return None
    try:
        settings = json.loads(path.read_text()).get("quantization_config")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if settings is not None and settings.get("quant_method") not in READ:
        raise UserError(
            f"{path}: quant_method: found {settings.get('quant_method')}, expected one of {', '.join(READ)}"
        )
    return settings


def read(folder: str | Path, family: TensorFamily, cfg: Any) -> Any:
    """The weights of a quantised folder: those of its matrices as they are stored, in host memory."""
    settings = read_quant_config(folder)
    assert settings is not None
    tensors, table = Tensors(Path(folder)), family.tensor_table(cfg)
    packed: dict[str, QuantizedWeight] = {}
    take = lambda name: tensors.take(name) if name in tensors.places else None
    for one in linears(family, cfg):
        layers = [load(settings, layer_name(one.name, (number,)), take) for number in range(cfg.layers)]
        packed |= one.parts(jax.tree.map(lambda *each: np.stack(each), *layers))

    def leaf(path: Any, wanted: Any) -> Any:
        if module.path_name(path) in packed:
            return packed[module.path_name(path)]
        return tensors.weight(*table[module.path_name(path)], wanted.shape)

    params = jax.tree_util.tree_map_with_path(leaf, module.shapes(family.Model, cfg))
    tensors.check_all_read()
    return params


def load(settings: dict[str, Any], name: str, take: Callable[[str], np.ndarray | None]) -> Any:
    """A matrix of one layer, as it is stored; `take` finds a tensor, or None."""
    names = READ[settings["quant_method"]].TENSORS.values()
    found = {theirs: tensor for theirs in names if (tensor := take(f"{name}.{theirs}")) is not None}
    if settings["quant_method"] == "gptq":
        return gptq.read(found, settings["bits"])
    return vptq.read(found, vptq.read_sizes(settings["config_for_layers"][name]))


def tensors_of(name: str, stored: Any) -> dict[str, np.ndarray]:
    """A matrix of one layer under their names."""
    names = (gptq if isinstance(stored, GPTQMatrix) else vptq).TENSORS
    values = {theirs: getattr(stored, ours) for ours, theirs in names.items()}
    return {f"{name}.{theirs}": np.asarray(value) for theirs, value in values.items() if value is not None}
