"""Quantization methods: plugins of `method.use`, one per file."""

import importlib
from typing import Any, Protocol, cast

import jax

from headrace.model_formats.gptq import GPTQMatrix
from headrace.model_formats.vptq import VPTQMatrix


class MethodConfig(Protocol):
    """The settings of a method. Each method adds keys of its own."""

    @property
    def use(self) -> str: ...
    @property
    def bits(self) -> int: ...


class QuantizeMethod(Protocol):
    """A method's module."""

    CALIBRATED: bool  # needs the inputs of each matrix, i.e. a Hessian

    def quantize(
        self, cfg: Any, w: jax.Array, hessian: jax.Array | None, key: jax.Array
    ) -> GPTQMatrix | VPTQMatrix:
        """Quantize a matrix [inputs outputs]."""

    def settings(self, cfg: Any, layers: dict[str, Any]) -> dict[str, Any]:
        """The `quantization_config` of config.json."""

    def size(self, cfg: Any, inputs: int, outputs: int) -> int:
        """The number of bits that a matrix takes."""


def load_method(cfg: MethodConfig) -> QuantizeMethod:
    """Load the method that `method.use` names."""
    return cast(QuantizeMethod, importlib.import_module(f"headrace.quantize.methods.{cfg.use}"))
