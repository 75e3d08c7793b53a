"""Ternary weights in Hugging Face's formats.

They are stored in full precision, to be rounded when they are used (`online`), or packed: four of them in a
byte, with a scale for each matrix."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike

from headrace.errors import UserError
from headrace.nn import module
from headrace.nn.module import PyTree

METHOD = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
ONLINE = METHOD | {"quantization_mode": "online"}
PACKED = METHOD | {"quantization_mode": "offline"}  # as microsoft/bitnet-b1.58-2B-4T has it

VALUES_PER_BYTE = 4

# Not packed; or packed, with a scale that the layer's class in transformers multiplies or divides by.
TernaryFormat = Literal["online", "multiplies", "divides"]


def read_format(settings: Mapping[str, Any]) -> TernaryFormat | None:
    """Read from config.json how ternary matrices are stored. None if they are plain matrices.

    Raises UserError for what cannot be imported."""
    quantization = settings.get("quantization_config")
    if not quantization:
        return None
    if not isinstance(quantization, dict):
        raise UserError("config.json: quantization_config: expected names and values in braces")
    supported: dict[str, tuple[object, ...]] = {
        "quant_method": ("bitnet",),
        "use_rms_norm": (None, False),
        "modules_to_not_convert": (None, []),
    }
    for name, values in supported.items():
        if quantization.get(name) not in values:
            raise UserError(
                f"config.json: quantization_config: {name}: found {quantization.get(name)}, only {values[0]} "
                "can be imported"
            )
    layer_class = quantization.get("linear_class", "bitlinear")
    if layer_class not in ("bitlinear", "autobitlinear"):
        raise UserError(
            f"config.json: quantization_config: linear_class: found {layer_class}, expected bitlinear or "
            "autobitlinear"
        )
    if layer_class == "bitlinear":
        return "divides"
    return "online" if quantization.get("quantization_mode", "offline") == "online" else "multiplies"


def round_weight(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round a matrix to -1, 0 and 1, as low_precision/ternary.py does. Returns these and the scale."""
    scale = np.maximum(np.abs(w).mean(dtype=np.float32), np.float32(1e-5))
    return np.clip(np.round(w / scale), -1, 1).astype(np.int8), scale


def ternary_tensors(table: Mapping[str, tuple[str, str]], axes: PyTree, layers: int) -> set[str]:
    """The Hugging Face names of all ternary matrices: the matrices of the layers."""
    paths = [path for path, leaf in module.named_leaves(axes) if leaf.is_hidden_matrix]
    return {table[path][0].format(layer) for path in paths for layer in range(layers)}


def pack_tensors(
    tensors: Iterable[tuple[str, np.ndarray]], ternary_names: set[str], dtype: DTypeLike
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield two tensors in place of each ternary one, packed values and scale, and the others in `dtype`."""
    for name, tensor in tensors:
        if name in ternary_names:
            yield from pack_matrix(name, tensor, dtype)
        else:
            yield name, tensor.astype(dtype)


def pack_matrix(name: str, w: np.ndarray, dtype: DTypeLike) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the two tensors of a ternary matrix [outputs inputs]: packed values, and the scale in `dtype`.

    A byte has one value of each quarter of the rows. Raises UserError if rows cannot be divided by four."""
    if w.shape[0] % VALUES_PER_BYTE:
        raise UserError(
            f"--packed: {name} has {w.shape[0]} outputs, and transformers reads only multiples of "
            f"{VALUES_PER_BYTE}"
        )
    values, scale = round_weight(w)
    quarters = (values + 1).astype(np.uint8).reshape(VALUES_PER_BYTE, -1, *w.shape[1:])
    yield name, np.bitwise_or.reduce([quarter << 2 * index for index, quarter in enumerate(quarters)])
    yield scale_name(name), scale.reshape(1).astype(dtype)


def unpack_matrix(packed: np.ndarray, scale: float) -> np.ndarray:
    """Unpack a matrix, such that it is rounded to the same values and the same scale again.

    A scale is the mean of absolute values: the more values are 0, the larger the others must be."""
    values = np.concatenate([packed >> shift & 3 for shift in range(0, 8, 2)]).astype(np.float32) - 1
    share = np.abs(values).mean()
    return values * np.float32(scale / max(share, 1e-9))


def scale_name(name: str) -> str:
    """The name of the tensor that has a packed matrix's scale."""
    return name.removesuffix("weight") + "weight_scale"
