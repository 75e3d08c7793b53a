"""Weights in Hugging Face's layout: under its names, with its axes, one tensor for each layer."""

import fnmatch
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from headrace.errors import UserError
from headrace.model_formats import hf_ternary
from headrace.model_formats.hf_ternary import TernaryFormat
from headrace.nn import module
from headrace.nn.module import PyTree

TIED = ("lm_head.weight", "decoder.weight")  # often stored although they equal the embedding

# The path of a weight -> the name of its tensor, and the pattern from the tensor's axes to the weight's, e.g.
# "blocks.w_q": ("model.layers.{}.q_proj.weight", "(n h) d -> d n h"). In the name, {} is the layer, {+1} the
# layer plus one, and [0/3] the first of three equal parts of the tensor. A second {} is the index along the
# weight's next axis, such as the expert.
TensorTable = dict[str, tuple[str, str]]


class TensorFamily(Protocol):
    """A model family (`models.Family`), as far as its tensors are concerned."""

    @property
    def Model(self) -> module.ModelClass: ...

    def tensor_table(self, cfg: Any) -> TensorTable: ...


def to_tensors(table: TensorTable, params: PyTree, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a model with their names. In memory is one stacked weight at a time, or those that
    are parts of the same tensor."""
    weights = [
        (*split_spec(table[path][0]), table[path][1], leaf) for path, leaf in module.named_leaves(params)
    ]
    for hf_name in dict.fromkeys(name for name, *_ in weights):
        parts = [(part, pattern, leaf) for name, part, _, pattern, leaf in weights if name == hf_name]
        parts.sort(key=lambda entry: entry[0])
        arrays = [np.asarray(jax.device_get(leaf.astype(jnp.dtype(dtype)))) for *_, leaf in parts]
        for index in np.ndindex(arrays[0].shape[: hf_name.count("{")]):
            pieces = [
                to_hf_layout(array[index], pattern)
                for array, (_, pattern, _) in zip(arrays, parts, strict=True)
            ]
            tensor = np.concatenate(pieces) if pieces[1:] else pieces[0]  # a scalar cannot be concatenated
            yield layer_name(hf_name, index), np.asarray(tensor, order="C")


def to_hf_layout(array: np.ndarray, pattern: str) -> np.ndarray:
    """Rearrange one layer's weight to its tensor, by a pattern of the tensor table."""
    tensor_axes, weight_axes = pattern.split(" -> ")
    sizes = dict(zip(weight_axes.split(), array.shape, strict=True))
    return rearrange(array, f"{weight_axes} -> {tensor_axes}", sizes)


def split_spec(spec: str) -> tuple[str, int, int]:
    """Split a name of the tensor table, such as `a.{}.qkv.weight[0/3]`, into name, part and number of
    parts."""
    match = re.fullmatch(r"(.*)\[(\d+)/(\d+)\]", spec)
    return (match[1], int(match[2]), int(match[3])) if match else (spec, 0, 1)


def layer_name(name: str, indices: Iterable[int]) -> str:
    """Replace the placeholders in a name of the tensor table by a layer, and by an expert if it has two."""
    numbers = iter(indices)
    return re.sub(r"{(\+\d+)?}", lambda match: str(next(numbers) + int(match[1] or 0)), name)


def rearrange(array: np.ndarray, pattern: str, sizes: Mapping[str, int]) -> np.ndarray:
    """Reshape and transpose by the names of axes, e.g. "(n h) d -> d n h", as einops does.

    Raises ValueError if the array does not have the sizes."""
    sides = [re.findall(r"(?<=[(])[^)]+|[^ ()]+", side) for side in pattern.split(" -> ")]
    in_shape, out_shape = (
        [math.prod(sizes[name] for name in axis.split()) for axis in side] for side in sides
    )
    if array.shape != tuple(in_shape):
        raise ValueError(f"{array.shape} is not {in_shape}")
    in_axes, out_axes = (" ".join(side).split() for side in sides)
    order = [in_axes.index(name) for name in out_axes]
    return array.reshape([sizes[name] for name in in_axes]).transpose(order).reshape(out_shape)


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches one of the patterns, in which * stands for any characters."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


class SafetensorsFolder:
    """The tensors of a folder's safetensors files by name, and which of them were not read yet.

    Those that match a pattern in `ignored` may be left unread. `ternary_format` is that of packed tensors."""

    def __init__(
        self, folder: Path, ternary_format: TernaryFormat | None = None, ignored: Sequence[str] = ()
    ):
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise UserError(f"{folder}: no .safetensors file in it")
        self.folder, self.ternary_format, self.ignored = folder, ternary_format, tuple(ignored)
        self.files: dict[str, safe_open] = {}  # by the names of the tensors in them
        for path in paths:
            try:
                file = safe_open(path, framework="np")
            except SafetensorError as error:
                raise UserError(f"{path}: not a complete safetensors file: {error}") from None
            self.files |= dict.fromkeys(file.keys(), file)
        self.unread = set(self.files)

    def read_weight(self, spec: str, pattern: str, shape: Sequence[int]) -> np.ndarray:
        """Read all layers of a weight in float32, by its entry in the tensor table.

        Raises UserError if tensors are absent or have other shapes."""
        name, part, parts = split_spec(spec)
        num_stacked = name.count("{")
        stacked_shape, layer_shape = shape[:num_stacked], shape[num_stacked:]

        def read_layer(index: Sequence[int]) -> np.ndarray:
            return self._read_part(layer_name(name, index), pattern, layer_shape, part, parts)

        # The last layer is read before memory is allocated for all: sizes in config.json may be impossible.
        last = read_layer([size - 1 for size in stacked_shape])
        weight = np.empty(shape, np.float32)
        weight[(-1,) * num_stacked] = last
        for index in list(np.ndindex(*stacked_shape))[:-1]:
            weight[index] = read_layer(index)
        return weight

    def _read_part(self, name: str, pattern: str, shape: Sequence[int], part: int, parts: int) -> np.ndarray:
        """Read one of the equal parts of a tensor in float32, rearranged by `pattern` to `shape`."""
        tensor = self.read_stored(name)
        if tensor.dtype == np.uint8:
            tensor = self._unpack_ternary(name, tensor)
        tensor = tensor.astype(np.float32)
        sizes = dict(zip(pattern.split(" -> ")[1].split(), shape, strict=True))
        try:
            return rearrange(np.split(tensor, parts)[part], pattern, sizes)
        except ValueError:
            raise UserError(
                f"{self.folder}: {name} is of shape {tensor.shape}, and by config.json its parts are "
                f"{tuple(shape)}"
            ) from None

    def read_stored(self, name: str) -> np.ndarray:
        """Read a tensor as it is stored. Raises UserError if it is absent or of a type that numpy lacks."""
        if name not in self.files:
            raise UserError(f"{self.folder}: no tensor {name} in its .safetensors files")
        self.unread.discard(name)
        try:
            return np.asarray(self.files[name].get_tensor(name))
        except (SafetensorError, AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{self.folder}: {name} cannot be read: {error}") from None

    def _unpack_ternary(self, name: str, packed: np.ndarray) -> np.ndarray:
        if self.ternary_format not in ("multiplies", "divides"):
            raise UserError(f"{self.folder}: {name} is packed, and its config.json does not say how")
        scale_name = hf_ternary.scale_name(name)
        scales = self.read_stored(scale_name)
        if scales.size != 1:
            raise UserError(f"{self.folder}: {scale_name} is of shape {scales.shape}, not one number")
        scale = float(scales.reshape(()))
        return hf_ternary.unpack_matrix(packed, scale if self.ternary_format == "multiplies" else 1 / scale)

    def skip_weight(self, spec: str) -> None:
        """Allow that the tensors of a weight, by its name in the tensor table, are left unread."""
        parts = re.split(r"{(?:\+\d+)?}", split_spec(spec)[0])
        name = r"\d+".join(map(re.escape, parts))
        pattern = re.compile(f"{name}|{hf_ternary.scale_name(name)}")
        self.unread = {name for name in self.unread if not pattern.fullmatch(name)}

    def check_all_read(self) -> None:
        """Raise UserError if a tensor was not read that is not skipped, ignored, tied or computed."""
        is_optional = lambda name: name in TIED or "rotary_emb" in name or matches_any(name, self.ignored)
        unread = sorted(name for name in self.unread if not is_optional(name))
        if unread:
            more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
            raise UserError(f"{self.folder}: no place in this model for the tensor {unread[0]}{more}")
