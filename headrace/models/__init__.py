"""Model families: plugins of `model.use`, one per file.

A family's file defines `Config`, the keys of the recipe's `model` section, `Model`, a module that is called
as `Model` below says, and `flops_per_token`. The other members that `Family.from_module` reads are optional.
Files whose names begin with an underscore are no plugins."""

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Protocol

import jax
from jax.typing import DTypeLike

from headrace.config.wrappers import ClassifierKeys, LoRAKeys, QATKeys, RecurrenceKeys
from headrace.model_formats.gguf_architecture import Architecture
from headrace.model_formats.hf_config import HFSettings
from headrace.model_formats.hf_heads import HeadLayout
from headrace.model_formats.hf_tensors import TensorTable
from headrace.nn.module import Array, ModelClass, PyTree
from headrace.nn.stack import Execution


class ModelConfig(Protocol):
    """The `model` section of a recipe: the keys that it has whatever the family.

    The first group are keys of the family. The others are those of `config.wrappers.ModelWrappers`: sections
    of the recipe that any family can be wrapped by (model_wrappers/)."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __hash__(self) -> int: ...

    @property
    def use(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def embed(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def causal(self) -> bool: ...
    @property
    def norm_eps(self) -> float: ...

    @property
    def lora(self) -> LoRAKeys | None: ...
    @property
    def qat(self) -> QATKeys | None: ...
    @property
    def recurrence(self) -> RecurrenceKeys | None: ...
    @property
    def classifier(self) -> ClassifierKeys | None: ...
    @property
    def frozen_copy(self) -> bool: ...
    @property
    def labels(self) -> int: ...


class Model(Protocol):
    """A model's weights, with the methods that run it."""

    @property
    def unembed(self) -> Array:
        """The matrix [v d] that maps hidden states to logits."""

    def __call__(
        self,
        cfg: ModelConfig,
        tokens: Array,
        *,
        exec_opts: Execution,
        segments: Array | None = None,
        positions: Array | None = None,
    ) -> Array:
        """Compute the last hidden states [b s d] of tokens [b s]."""

    def init_cache(self, cfg: ModelConfig, batch_size: int, max_length: int, dtype: DTypeLike) -> PyTree:
        """Make an empty cache with room for `max_length` tokens per row."""

    def decode(
        self, cfg: ModelConfig, tokens: Array, cache: PyTree, *, exec_opts: Execution
    ) -> tuple[Array, PyTree]:
        """Compute the hidden states of tokens that continue the cached ones. Returns the updated cache
        too."""


class DistanceKernels(Protocol):
    """The kernels of attention with relative distances, as far as `headrace plan` needs to know them."""

    def shape_unsupported_reason(
        self, device_kind: str, q: jax.ShapeDtypeStruct, k: jax.ShapeDtypeStruct
    ) -> str | None:
        """The reason why the kernels cannot run on this kind of TPU; None if they can."""

    def vliw_bundles(self, device_kind: str) -> tuple[int, int]:
        """Instruction bundles for 1,024 scores, forward and backward."""


@dataclass(frozen=True)
class HFNaming:
    """A family's counterpart in transformers: how its config.json and its tensors are named."""

    types: tuple[str, ...]  # values of `model_type` in config.json that are imported as this family
    tensors: Callable[[ModelConfig], TensorTable]
    to_config: Callable[[ModelConfig, int], HFSettings]  # (config, sequence length) -> config.json
    from_config: Callable[[HFSettings], dict[str, Any]]  # config.json -> the recipe's `model` section
    soft_cap: str | None  # config.json's name for the cap on logits; None if transformers has no such cap
    special_tokens: Mapping[str, str]  # roles of tokens only this family has -> the role with the same token
    ignored_tensors: tuple[str, ...]  # patterns of tensors that have no counterpart here
    load_arguments: str  # further arguments of `from_pretrained`, as Python code


@dataclass(frozen=True, eq=False)
class Family:
    """A model family, made from its plugin. Wrappers replace some of its members (model_wrappers/)."""

    name: str
    Config: type[Any]
    Model: ModelClass
    flops_per_token: Callable[[ModelConfig, int], float]  # (config, sequence length), forward and backward
    hf: HFNaming | None  # None if transformers has no such model
    classifier: HeadLayout | None  # transformers' classes with a head for labels; None if it has none
    to_gguf: Callable[[ModelConfig, float | None], Architecture] | None  # (config, loss.soft_cap)
    # The models that an export consists of, by subfolder, each with its config and weights.
    split_for_export: Callable[[ModelConfig, PyTree], dict[str, tuple[ModelConfig, PyTree]]]
    # Weights that are stored as the difference to another: its path -> the other's path.
    delta_weights: Callable[[ModelConfig], dict[str, str]]
    generator_config: Callable[[ModelConfig], ModelConfig] | None  # the generator of objective `rtd`
    init_on_host: Callable[[ModelConfig, Array], PyTree] | None  # for weights that no device can initialize
    distance_kernels: DistanceKernels | None  # the only kernels for this family's attention

    @classmethod
    def from_module(cls, plugin: ModuleType) -> "Family":
        """Make a family from the members of its plugin's module."""
        members = vars(plugin)
        return cls(
            name=plugin.__name__.rpartition(".")[2],
            Config=plugin.Config,
            Model=plugin.Model,
            flops_per_token=plugin.flops_per_token,
            hf=_hf_naming(members) if "HF_TENSORS" in members else None,
            classifier=members.get("HF_CLASSIFIER"),
            to_gguf=members.get("to_gguf"),
            split_for_export=members.get("split_for_export", lambda cfg, params: {"": (cfg, params)}),
            delta_weights=members.get("delta_weights", lambda cfg: {}),
            generator_config=members.get("generator_config"),
            init_on_host=members.get("init_on_host"),
            distance_kernels=members.get("DISTANCE_KERNELS"),
        )

    @property
    def hf_naming(self) -> HFNaming:
        """`hf`, for callers that only have families with a counterpart in transformers."""
        assert self.hf is not None, f"headrace/models/{self.name}.py has no HF_TENSORS"
        return self.hf

    def tensor_table(self, cfg: ModelConfig) -> TensorTable:
        """Our weights' paths -> transformers' tensors and their axes."""
        return self.hf_naming.tensors(cfg)


def _hf_naming(members: Mapping[str, Any]) -> HFNaming:
    tensors = members["HF_TENSORS"]
    return HFNaming(
        types=members["HF_TYPES"],
        tensors=tensors if callable(tensors) else lambda cfg: tensors,
        to_config=members["to_hf_config"],
        from_config=members["from_hf_config"],
        soft_cap=members.get("HF_SOFT_CAP"),
        special_tokens=members.get("HF_SPECIAL", {}),
        ignored_tensors=members.get("HF_IGNORED", ()),
        load_arguments=members.get("HF_LOAD", ""),
    )


@functools.cache
def load_base_family(name: str) -> Family:
    """Load a family by the value of `model.use`, without wrappers."""
    return Family.from_module(importlib.import_module(f"headrace.models.{name}"))


def fixed_matmul(cfg: ModelConfig) -> str:
    """The format in which a family multiplies if that is part of the model, as in BitNet; else `compute`."""
    return getattr(cfg, "products", "compute")
