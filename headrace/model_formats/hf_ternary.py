"""Ternary weights at Hugging Face: in full precision and rounded when they are used (`online`), or packed,
four of them in a byte, with a scale for each matrix."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace.errors import InvalidArgument, UserError
from headrace.nn import module

METHOD = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
ONLINE = METHOD | {"quantization_mode": "online"}
PACKED = METHOD | {"quantization_mode": "offline"}  # as microsoft/bitnet-b1.58-2B-4T has it

EACH = 4  # to a byte


def stored(settings: dict[str, Any]) -> str | None:
    """How config.json says the matrices are stored: None, as they are and so multiplied; `online`; or packed,
    with a scale that their class `multiplies` by or `divides` by."""
    found = settings.get("quantization_config")
    if not found:
        return None
    if not isinstance(found, dict):
        raise UserError("config.json: quantization_config: expected names and values in braces")
    known: dict[str, tuple[Any, ...]] = {
        "quant_method": ("bitnet",),
        "use_rms_norm": (None, False),
        "modules_to_not_convert": (None, []),
    }
    for name, values in known.items():
        if found.get(name) not in values:
            raise UserError(
                f"config.json: quantization_config: {name}: found {found.get(name)}, only {values[0]} can be "
                "imported"
            )
    kind = found.get("linear_class", "bitlinear")
    if kind not in ("bitlinear", "autobitlinear"):
        raise UserError(
            f"config.json: quantization_config: linear_class: found {kind}, expected bitlinear or "
            "autobitlinear"
        )
    if kind == "bitlinear":
        return "divides"
    return "online" if found.get("quantization_mode", "offline") == "online" else "multiplies"


def round_weight(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """-1, 0 and 1, and the scale, as low_precision/ternary.py has them."""
    scale = np.maximum(np.abs(w).mean(dtype=np.float32), np.float32(1e-5))
    return np.clip(np.round(w / scale), -1, 1).astype(np.int8), scale


def matrices(table: dict[str, tuple[str, str]], axes: Any, layers: int) -> set[str]:
    """Their names of the matrices that are ternary: those of the layers."""
    ours = [path for path, one in module.named_leaves(axes) if one.is_hidden_matrix]
    return {table[path][0].format(number) for path in ours for number in range(layers)}


def packed(
    tensors: Iterator[tuple[str, np.ndarray]], matrices: set[str], dtype: Any
) -> Iterator[tuple[str, np.ndarray]]:
    """Two tensors in the place of each of these matrices, the others in `dtype`."""
    for name, tensor in tensors:
        if name in matrices:
            yield from pack(name, tensor, dtype)
        else:
            yield name, tensor.astype(dtype)


def pack(name: str, w: np.ndarray, dtype: Any) -> Iterator[tuple[str, np.ndarray]]:
    """A matrix of theirs, [outputs inputs]: rows a quarter of all apart share a byte."""
    if w.shape[0] % EACH:
        raise InvalidArgument(
            "packed", f"{name} has {w.shape[0]} outputs, and transformers reads only multiples of {EACH}"
        )
    values, scale = round_weight(w)
    quarters = (values + 1).astype(np.uint8).reshape(EACH, -1, *w.shape[1:])
    yield name, np.bitwise_or.reduce([part << 2 * number for number, part in enumerate(quarters)])
    yield scale_name(name), scale.reshape(1).astype(dtype)


def unpacked(quarters: np.ndarray, scale: float) -> np.ndarray:
    """A matrix that is rounded to the same -1, 0 and 1 with the same scale, which is the mean of sizes: where
    some are 0, the others are larger than it."""
    values = np.concatenate([quarters >> shift & 3 for shift in range(0, 8, 2)]).astype(np.float32) - 1
    share = np.abs(values).mean()
    return values * np.float32(scale / max(share, 1e-9))


def scale_name(name: str) -> str:
    return name.removesuffix("weight") + "weight_scale"
