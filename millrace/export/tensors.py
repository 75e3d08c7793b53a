"""Weights as Hugging Face has them: under its names, with its axes, one tensor for each layer."""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millrace import module

# Our weight -> their tensor, and its axes in terms of ours. In the name {} is the layer, {+1} the one after,
# and [0/3] the first of three equal parts of the tensor. A second {} is the number along the weight's next
# axis, such as the expert.
Table = dict[str, tuple[str, str]]


def table_of(family: Any, cfg: Any) -> Table:
    """A family's table; its `HF` is a function where names depend on settings."""
    return family.HF(cfg) if callable(family.HF) else family.HF


def to_tensors(table: Table, params: Any, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """Their names and tensors, one stacked weight in memory at a time, or those that are one tensor there."""
    weights = [(*part_of(table[path][0]), table[path][1], leaf) for path, leaf in module.named(params)]
    for theirs in dict.fromkeys(name for name, *_ in weights):
        same = [(part, pattern, leaf) for name, part, _, pattern, leaf in weights if name == theirs]
        parts = sorted(same, key=lambda one: one[0])
        arrays = [np.asarray(jax.device_get(leaf.astype(jnp.dtype(dtype)))) for *_, leaf in parts]
        for place in np.ndindex(arrays[0].shape[: theirs.count("{")]):
            made = [_theirs(array[place], part[1]) for array, part in zip(arrays, parts, strict=True)]
            whole = np.concatenate(made) if made[1:] else made[0]  # a number alone has no axis to join
            yield in_place(theirs, place), np.asarray(whole, order="C")


def _theirs(array: np.ndarray, pattern: str) -> np.ndarray:
    left, right = pattern.split(" -> ")
    return rearrange(array, f"{right} -> {left}", dict(zip(right.split(), array.shape, strict=True)))


def part_of(theirs: str) -> tuple[str, int, int]:
    """A name of the table without its part, which part it is and of how many."""
    found = re.fullmatch(r"(.*)\[(\d+)/(\d+)\]", theirs)
    return (found[1], int(found[2]), int(found[3])) if found else (theirs, 0, 1)


def in_place(theirs: str, place: Iterable[int]) -> str:
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
