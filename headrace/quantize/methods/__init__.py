"""Quantization methods: plugins of `method.use`, one per file.

A method's file defines `Config`, the keys of the method; `IS_CALIBRATED`; `quantize`; and
`quantization_config`. A method with codebooks may also define when these are finetuned."""

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, TypeAlias

from headrace.model_formats.hf_config import HFSettings
from headrace.model_formats.quantized_folder import QuantizedMatrix
from headrace.nn.module import Array

QuantizedLayer: TypeAlias = Mapping[str, QuantizedMatrix]  # by the names of linear layers


class MethodConfig(Protocol):
    """The settings of a method. Each method adds keys of its own."""

    def __hash__(self) -> int: ...

    @property
    def use(self) -> str: ...
    @property
    def bits(self) -> int: ...


@dataclass(frozen=True)
class Finetuning:
    """Steps of Adam, with a learning rate that falls to 0."""

    steps: int
    learning_rate: float


@dataclass(frozen=True, eq=False)
class QuantizeMethod:
    """A quantization method, made from its plugin."""

    is_calibrated: bool  # needs the Hessian of each matrix, from calibration data
    # (config, matrix [inputs outputs], its Hessian [inputs inputs], key) -> quantized matrix
    quantize: Callable[[Any, Array, Array | None, Array], QuantizedMatrix]
    # (config, matrices by the names of their linear layers) -> `quantization_config` of config.json
    quantization_config: Callable[[Any, QuantizedLayer], HFSettings]
    # Finetuning of codebooks to each layer's output, and of all codebooks to the training loss; None: none.
    layer_finetuning: Callable[[Any], Finetuning | None]
    end_to_end_finetuning: Callable[[Any], Finetuning | None]

    @classmethod
    def from_module(cls, plugin: ModuleType) -> "QuantizeMethod":
        """Make a method from the members of its plugin's module."""
        members = vars(plugin)
        return cls(
            is_calibrated=plugin.IS_CALIBRATED,
            quantize=plugin.quantize,
            quantization_config=plugin.quantization_config,
            layer_finetuning=members.get("layer_finetuning", lambda cfg: None),
            end_to_end_finetuning=members.get("end_to_end_finetuning", lambda cfg: None),
        )


def load_method(cfg: MethodConfig) -> QuantizeMethod:
    """Load the method that `method.use` names."""
    return _load_method(cfg.use)


@functools.cache
def _load_method(name: str) -> QuantizeMethod:
    return QuantizeMethod.from_module(importlib.import_module(f"headrace.quantize.methods.{name}"))
