"""Weights as Hugging Face has them: under its names, with its axes, one tensor for each layer."""

import fnmatch
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from headrace.errors import UserError
from headrace.model_formats import hf_ternary
from headrace.nn import module

TIED = ("lm_head.weight", "decoder.weight")  # often stored beside the embedding that they equal

# Our weight -> their tensor, and its axes in terms of ours. In the name {} is the layer, {+1} the one after,
# and [0/3] the first of three equal parts of the tensor. A second {} is the number along the weight's next
# axis, such as the expert.
Table = dict[str, tuple[str, str]]


class TensorFamily(Protocol):
    """What naming tensors needs of a model family (`models.Family`)."""

    @property
    def Model(self) -> module.ModelClass: ...

    def tensor_table(self, cfg: Any) -> Table: ...


def to_tensors(table: Table, params: Any, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """Their names and tensors, one stacked weight in memory at a time, or those that are one tensor there."""
    weights = [
        (*split_spec(table[path][0]), table[path][1], leaf) for path, leaf in module.named_leaves(params)
    ]
    for theirs in dict.fromkeys(name for name, *_ in weights):
        same = [(part, pattern, leaf) for name, part, _, pattern, leaf in weights if name == theirs]
        parts = sorted(same, key=lambda one: one[0])
        arrays = [np.asarray(jax.device_get(leaf.astype(jnp.dtype(dtype)))) for *_, leaf in parts]
        for place in np.ndindex(arrays[0].shape[: theirs.count("{")]):
            made = [to_hf_layout(array[place], part[1]) for array, part in zip(arrays, parts, strict=True)]
            whole = np.concatenate(made) if made[1:] else made[0]  # a number alone has no axis to join
            yield layer_name(theirs, place), np.asarray(whole, order="C")


def to_hf_layout(array: np.ndarray, pattern: str) -> np.ndarray:
    left, right = pattern.split(" -> ")
    return rearrange(array, f"{right} -> {left}", dict(zip(right.split(), array.shape, strict=True)))


def split_spec(theirs: str) -> tuple[str, int, int]:
    """A name of the table without its part, which part it is and of how many."""
    found = re.fullmatch(r"(.*)\[(\d+)/(\d+)\]", theirs)
    return (found[1], int(found[2]), int(found[3])) if found else (theirs, 0, 1)


def layer_name(theirs: str, place: Iterable[int]) -> str:
    """The name for a layer, and an expert where there is one."""
    numbers = iter(place)
    return re.sub(r"{(\+\d+)?}", lambda found: str(next(numbers) + int(found[1] or 0)), theirs)


def rearrange(array: np.ndarray, pattern: str, sizes: dict[str, int]) -> np.ndarray:
    """Axes by name, those in brackets lying in one: (n h) d -> d n h. ValueError if they do not fit."""
    sides = [re.findall(r"(?<=[(])[^)]+|[^ ()]+", side) for side in pattern.split(" -> ")]
    before, after = ([math.prod(sizes[name] for name in axis.split()) for axis in side] for side in sides)
    if array.shape != tuple(before):
        raise ValueError(f"{array.shape} is not {before}")
    left, right = (" ".join(side).split() for side in sides)
    turned = array.reshape([sizes[name] for name in left]).transpose([left.index(name) for name in right])
    return turned.reshape(after)


def is_like(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


class Tensors:
    """The tensors of one or several safetensors files by name. Those like `aside` need no place anywhere."""

    def __init__(self, folder: Path, stored: str | None = None, aside: tuple[str, ...] = ()):
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UserError(f"{folder}: no .safetensors file in it")
        self.folder, self.stored, self.aside = folder, stored, aside
        self.places: dict[str, Any] = {}
        for path in files:
            try:
                opened = safe_open(path, framework="np")
            except SafetensorError as error:
                raise UserError(f"{path}: not a whole safetensors file: {error}") from None
            self.places |= dict.fromkeys(opened.keys(), opened)
        self.unread = set(self.places)

    def read(self, name: str, pattern: str, shape: tuple[int, ...], part: int, parts: int) -> np.ndarray:
        """The tensor in float32, or one of its equal parts, rearranged by `pattern` to `shape`."""
        tensor = self.take(name)
        if tensor.dtype == np.uint8:
            tensor = self.unpack(name, tensor)
        tensor = tensor.astype(np.float32)
        sizes = dict(zip(pattern.split(" -> ")[1].split(), shape, strict=True))
        try:
            return rearrange(np.split(tensor, parts)[part], pattern, sizes)
        except ValueError:
            raise UserError(
                f"{self.folder}: {name} is of shape {tensor.shape}, and by config.json its parts are {shape}"
            ) from None

    def weight(self, theirs: str, pattern: str, shape: tuple[int, ...]) -> np.ndarray:
        """A weight of ours, all layers of it, by what the table says of it."""
        name, *part = split_spec(theirs)
        lead = name.count("{")
        stack, shape_of_one = shape[:lead], shape[lead:]
        # The last of them before there is room for all: config.json may tell of sizes that no memory has.
        last = self.read(layer_name(name, [size - 1 for size in stack]), pattern, shape_of_one, *part)
        array = np.empty(shape, np.float32)
        array[(-1,) * lead] = last
        for place in list(np.ndindex(stack))[:-1]:
            array[place] = self.read(layer_name(name, place), pattern, shape_of_one, *part)
        return array

    def take(self, name: str) -> np.ndarray:
        """As it is stored."""
        if name not in self.places:
            raise UserError(f"{self.folder}: no tensor {name} in its .safetensors files")
        self.unread.discard(name)
        try:
            return np.asarray(self.places[name].get_tensor(name))
        except (SafetensorError, AttributeError, TypeError, ValueError) as error:  # of a type numpy has not
            raise UserError(f"{self.folder}: {name} cannot be read: {error}") from None

    def unpack(self, name: str, tensor: np.ndarray) -> np.ndarray:
        if self.stored not in ("multiplies", "divides"):
            raise UserError(f"{self.folder}: {name} is packed, and its config.json does not say how")
        scales = self.take(hf_ternary.scale_name(name))
        if scales.size != 1:
            raise UserError(
                f"{self.folder}: {hf_ternary.scale_name(name)} is of shape {scales.shape}, not one number"
            )
        scale = float(scales.reshape(()))
        return hf_ternary.unpacked(tensor, scale if self.stored == "multiplies" else 1 / scale)

    def pass_over(self, theirs: str) -> None:
        """A weight that nobody asks for is no tensor too many."""
        parts = re.split(r"{(?:\+\d+)?}", split_spec(theirs)[0])
        name = r"\d+".join(map(re.escape, parts))
        like = re.compile(f"{name}|{hf_ternary.scale_name(name)}")
        self.unread = {name for name in self.unread if not like.fullmatch(name)}

    def check_all_read(self) -> None:
        known = lambda name: name in TIED or "rotary_emb" in name or is_like(name, self.aside)
        left = sorted(name for name in self.unread if not known(name))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise UserError(f"{self.folder}: no place in this model for the tensor {left[0]}{more}")
