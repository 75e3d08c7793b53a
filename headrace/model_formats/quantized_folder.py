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

from headrace.nn import module
from headrace.model_formats import gptq as integers, vptq as vectors
from headrace.model_formats.gptq import Integers
from headrace.model_formats.vptq import Vectors
from headrace.errors import UserError
from headrace.model_formats.hf_tensors import Table, Tensors, in_place, part_of, rearrange, table_of
from headrace.nn.module import Array
from headrace.nn.linear import project

READ: dict[str, Any] = {"gptq": integers, "vptq": vectors}


@dataclass(frozen=True)
class Place:
    """Which of the equal parts of a matrix of theirs a weight of ours is, and how its axes lie there."""

    pattern: str
    shape: tuple[int, ...]
    part: int = 0
    parts: int = 1


@partial(jax.tree_util.register_dataclass, data_fields=["stored"], meta_fields=["place"])
@dataclass(frozen=True)
class Part:
    """A weight that is made whole where it meets an activation."""

    stored: Integers | Vectors
    place: Place

    def whole(self) -> Array:
        place = self.place
        own = jnp.split(self.stored.whole(), place.parts)[place.part]
        sizes = dict(zip(place.pattern.split(" -> ")[1].split(), place.shape, strict=True))
        return rearrange(own, place.pattern, sizes)  # type: ignore[arg-type,return-value]


@project.register
def _(w: Part, x: Array, spec: str) -> Array:
    return project(w.whole().astype(x.dtype), x, spec)


@dataclass(frozen=True)
class Linear:
    """A matrix of theirs in every layer, `name` without its `.weight`, and the weights of ours that it is."""

    name: str
    paths: tuple[str, ...]
    places: tuple[Place, ...]
    inputs: int
    outputs: int

    def parts(self, stored: Any) -> dict[str, Part]:
        """Our weights, of what is stored."""
        return {path: Part(stored, place) for path, place in zip(self.paths, self.places, strict=True)}


def linears(family: Any, cfg: Any) -> list[Linear]:
    """The matrices of the layers that are linear layers there: [outputs inputs], one for each layer."""
    table: Table = table_of(family, cfg)
    axes, shapes = (dict(module.named(of(family.Model, cfg))) for of in (module.axes, module.shapes))
    found: dict[str, list[tuple[int, str, Place]]] = {}
    for path, its in axes.items():
        theirs, part, parts = part_of(table[path][0]) if path in table else ("", 0, 1)
        if not (its.is_hidden_matrix and its.stacked == 1 and not its.exact and theirs.endswith(".weight")):
            continue
        place = Place(table[path][1], shapes[path].shape[1:], part, parts)
        if theirs.count("{") == 1 and _is_linear(place, its.inputs):
            found.setdefault(theirs.removesuffix(".weight"), []).append((part, path, place))
    made = []
    for name, ours in found.items():
        ours.sort(key=lambda one: one[0])
        inputs = int(np.prod(ours[0][2].shape[: axes[ours[0][1]].inputs]))
        outputs = sum(int(np.prod(place.shape)) for *_, place in ours) // inputs
        made.append(
            Linear(
                name, tuple(path for _, path, _ in ours), tuple(place for *_, place in ours), inputs, outputs
            )
        )
    return made


def _is_linear(place: Place, inputs: int) -> bool:
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
    return jax.tree_util.tree_map_with_path(lambda path, w: parts.get(module.dotted(path), w), params)


def with_layer(params: Any, found: Sequence[Linear], made: dict[str, Any]) -> Any:
    """The model with the matrices of one layer as they are stored, each a stack of this layer alone."""
    return with_stacks(params, found, jax.tree.map(lambda x: jnp.asarray(x)[None], made))


def settings_of(folder: str | Path) -> dict[str, Any] | None:
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


def read(folder: str | Path, family: Any, cfg: Any) -> Any:
    """The weights of a quantised folder: those of its matrices as they are stored, in host memory."""
    settings = settings_of(folder)
    assert settings is not None
    tensors, table = Tensors(Path(folder)), table_of(family, cfg)
    packed: dict[str, Part] = {}
    take = lambda name: tensors.take(name) if name in tensors.places else None
    for one in linears(family, cfg):
        layers = [load(settings, in_place(one.name, (number,)), take) for number in range(cfg.layers)]
        packed |= one.parts(jax.tree.map(lambda *each: np.stack(each), *layers))

    def leaf(path: Any, wanted: Any) -> Any:
        if module.dotted(path) in packed:
            return packed[module.dotted(path)]
        return tensors.weight(*table[module.dotted(path)], wanted.shape)

    params = jax.tree_util.tree_map_with_path(leaf, module.shapes(family.Model, cfg))
    tensors.check_all_read()
    return params


def load(settings: dict[str, Any], name: str, take: Callable[[str], np.ndarray | None]) -> Any:
    """A matrix of one layer, as it is stored; `take` finds a tensor, or None."""
    names = READ[settings["quant_method"]].TENSORS.values()
    found = {theirs: tensor for theirs in names if (tensor := take(f"{name}.{theirs}")) is not None}
    if settings["quant_method"] == "gptq":
        return integers.read(found, settings["bits"])
    return vectors.read(found, vectors.read_sizes(settings["config_for_layers"][name]))


def tensors_of(name: str, stored: Any) -> dict[str, np.ndarray]:
    """A matrix of one layer under their names."""
    names = (integers if isinstance(stored, Integers) else vectors).TENSORS
    values = {theirs: getattr(stored, ours) for ours, theirs in names.items()}
    return {f"{name}.{theirs}": np.asarray(value) for theirs, value in values.items() if value is not None}
